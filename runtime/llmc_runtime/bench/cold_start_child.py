"""The child process of `llmc bench start`: opens an artifact, generates one token, and reports the times.

After importing its modules it reads a line of JSON from standard input: the arguments of LLM.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

_START = time.perf_counter()


def main(argv: Sequence[str]) -> int:
    """Print {"token": id, "seconds": {stage: seconds}}. Returns the exit status."""
    import json
    import sys

    from llmc_runtime.api.llm import LLM
    from llmc_runtime.format.errors import as_llmc_error
    from llmc_runtime.sched.sampling_params import SamplingParams

    imported = time.perf_counter()
    options = json.loads(sys.stdin.readline())
    length = options.pop("input_len")
    try:
        with LLM(options.pop("model"), **options, say=lambda line: None) as llm:
            opened = time.perf_counter()
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            prompt = [i % llm.config.vocab_size for i in range(length)]
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            end = time.perf_counter()
            times = {"modules": imported - _START, "opening": opened - imported, "first token": end - opened}
            print(json.dumps({"token": output.outputs[0].token_ids[0], "seconds": times}), flush=True)
    except Exception as e:
        error = as_llmc_error(e)
        print(json.dumps({"error": [error.code, error.cause, error.remedy]}), flush=True)
        return 1
    return 0
