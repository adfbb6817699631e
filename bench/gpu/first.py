"""Open an artifact, generate one token, print a line and exit; bench.gpu.start measures this process.

python -m bench.gpu.first ARTIFACT      prints {"token": id, "seconds": {"imports": s, "open": s, "first": s}}
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402

from llmc_runtime import LLM, SamplingParams  # noqa: E402


def main(artifact: str) -> None:
    """Open the artifact with the default checks of hashes."""
    imported = time.perf_counter()
    llm = LLM(artifact, say=lambda line: print(line, file=sys.stderr))
    opened = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (out,) = llm.generate([list(range(3, 131))], params, use_tqdm=False)
    end = time.perf_counter()
    times = {"imports": imported - BEGIN, "open": opened - imported, "first": end - opened}
    print(json.dumps({"token": out.outputs[0].token_ids[0], "seconds": times}), flush=True)
    llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
