"""Show where greedy tokens of artifacts of one model part, and whether rounding explains it.

    python -m bench.gpu.parting PLAIN SPECULATING [--prompts 16] [--longest 300] [--tokens 64]

PLAIN and SPECULATING are compiled from equal weights, the latter with --speculate. Every prompt is computed by PLAIN,
by PLAIN in the company of other prompts, by SPECULATING without drafts, and by SPECULATING with drafts by lookup. For
each pair with the first, the table has the number of prompts whose tokens part, the differences of log-probabilities in
equal contexts (quantiles), and the largest lead, where tokens part, of the token that the first one chose, in nats by
the first one's own log-probabilities. A lead far above the differences is an error; one of their size is a tie.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LOGPROBS = 20


def outputs(path: Path, prompts: Sequence[list[int]], tokens: int, together: bool, **options: Any) -> list[Any]:
    """Return the completion of every prompt, computed alone or with the others."""
    from llmc_runtime import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=LOGPROBS)
    groups = [list(prompts)] if together else [[p] for p in prompts]
    with LLM(path, say=lambda text: None, **options) as llm:
        texts = [
            out.outputs[0]
            for g in groups
            for out in llm.generate([{"prompt_token_ids": p} for p in g], params, use_tqdm=False)
        ]
        print({k: v for k, v in llm.stats().items() if "draft" in k or "accepted" in k}, flush=True)
    return texts


def equal_contexts(a: Any, b: Any) -> int:
    """Return the number of tokens up to the first that differs, which is included."""
    differs = (i + 1 for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y)
    return next(differs, len(a.token_ids))


def compare(name: str, base: Sequence[Any], other: Sequence[Any]) -> None:
    """Print one row of the table, and the place of each parting."""
    gaps, leads, parted = [], [], 0
    for i, (a, b) in enumerate(zip(base, other, strict=True)):
        n = equal_contexts(a, b)
        differences = [
            abs(a.logprobs[j][t].logprob - b.logprobs[j][t].logprob)
            for j in range(n)
            for t in a.logprobs[j].keys() & b.logprobs[j].keys()
        ]
        gaps += differences
        first, second = a.token_ids[n - 1], b.token_ids[n - 1]
        if first == second:
            continue
        parted += 1
        known = a.logprobs[n - 1]
        lowest = min(x.logprob for x in known.values())
        lead = known[first].logprob - (known[second].logprob if second in known else lowest)
        leads.append(lead)
        print(f"  {name}: prompt {i} parts at token {n - 1}, lead {lead:.4f}, differences there up to "
              f"{max(differences):.4f}")  # fmt: skip
    shown = ", ".join(f"{np.quantile(gaps, q):.4f}" for q in (0.5, 0.9, 0.99, 1))
    print(f"{name}: {parted} of {len(base)} part; differences p50, p90, p99, max {shown}; "
          f"largest lead {max(leads, default=0):.4f}", flush=True)  # fmt: skip


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("plain", type=Path)
    ap.add_argument("speculating", type=Path)
    ap.add_argument("--prompts", type=int, default=16, metavar="N")
    ap.add_argument("--longest", type=int, default=300, metavar="TOKENS")
    ap.add_argument("--tokens", type=int, default=64, metavar="N", help="generated tokens of each prompt (64)")
    ap.add_argument("--vocabulary", type=int, default=4096, metavar="IDS")
    args = ap.parse_args()
    rng = np.random.default_rng(0)
    parts = [rng.integers(3, args.vocabulary, rng.integers(4, 20)).tolist() for _ in range(args.prompts)]
    prompts = [(part * args.longest)[: rng.integers(len(part), args.longest)] for part in parts]
    run = (prompts, args.tokens)
    base = outputs(args.plain, *run, together=False)
    compare("in company", base, outputs(args.plain, *run, together=True))
    compare("speculating, no drafts", base, outputs(args.speculating, *run, together=False))
    compare("speculating, lookup", base, outputs(args.speculating, *run, together=False, speculate="ngram:3"))


if __name__ == "__main__":
    main()
