"""Compare the times of an artifact compiled with --deterministic and of the ordinary one of the same model, on the CPU.

    python -m bench.deterministic ORDINARY DETERMINISTIC [--rounds N]

The two take turns on one thread. CPU time is compared, of the fastest rounds, because other jobs only add to it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from llmc_runtime import LLM, SamplingParams

BATCHES, STEPS, PROMPT = (1, 8, 16), 64, 500


def quiet(text: str) -> None:
    return


def seconds(llm: LLM, batch: int, length: int, new: int, rng: np.random.Generator) -> float:
    """Return the CPU seconds of one greedy generate call of `batch` random prompts."""
    vocab = llm.config.vocab_size
    prompts = [{"prompt_token_ids": rng.integers(3, vocab, length).tolist()} for _ in range(batch)]
    begin = time.process_time()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False),
                 use_tqdm=False)  # fmt: skip
    return time.process_time() - begin


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("ordinary", type=Path)
    ap.add_argument("deterministic", type=Path)
    ap.add_argument("--rounds", type=int, default=15, metavar="N")
    args = ap.parse_args()
    llms = [LLM(p, say=quiet, threads=1, enable_prefix_caching=False) for p in (args.ordinary, args.deterministic)]
    rng = np.random.default_rng(0)
    cases = [(f"decode, batch {b}", b, 8, STEPS) for b in BATCHES] + [(f"prompt of {PROMPT}", 1, PROMPT, 1)]
    print("CPU ms, fastest round  ordinary  deterministic  ratio")
    for name, batch, length, new in cases:
        best = [float("inf")] * 2
        for i in range(args.rounds):
            for k in (0, 1) if i % 2 else (1, 0):
                best[k] = min(best[k], seconds(llms[k], batch, length, new, rng))
        print(f"{name:>21}  {best[0] * 1e3:8.2f}  {best[1] * 1e3:13.2f}  {best[1] / best[0]:5.3f}", flush=True)


if __name__ == "__main__":
    main()
