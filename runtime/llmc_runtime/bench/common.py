"""Options and prompts shared by the benchmarks that open an artifact themselves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmc_runtime.format.errors import LlmcError

_LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "threads", "seed")
_LOWEST = 16  # lower ids are special tokens in most vocabularies


def arguments(add: Any, sizes: Any) -> None:
    """Declare the options of the model and its limits; `sizes` parses amounts of memory."""
    add("model", metavar="MODEL", help="an artifact, or a Hugging Face folder (compiled on first use)")
    add("--max-model-len", type=int, metavar="N", help="maximum sequence length in tokens")
    add("--max-num-seqs", type=int, metavar="N", help="maximum number of sequences that run at a time")
    add("--max-num-batched-tokens", type=int, metavar="N", help="maximum number of tokens in a step")
    add("--kv-cache-memory-bytes", type=sizes, metavar="BYTES", help="size of the KV cache, for example 2GiB")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the physical cores)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the prompts (0)")
    add("--no-enable-prefix-caching", action="store_false", dest="enable_prefix_caching", help="disable prefix caching")
    add("--target", default="cpu:native", help="target for which a Hugging Face folder is compiled (cpu:native)")
    add("--cache", type=Path, metavar="DIR", help="folder of compiled models")
    add("--output-json", type=Path, metavar="FILE", help="also write the JSON report to this file")
    add("--json", action="store_true", help="print JSON instead of a table")


def options(args: argparse.Namespace, err: IO[str]) -> dict[str, Any]:
    """Return the arguments of LLM and AsyncLLM."""
    named = {name: getattr(args, name) for name in _LIMITS}
    named |= {"enable_prefix_caching": args.enable_prefix_caching, "target": args.target, "cache_dir": args.cache}
    return named | {"say": lambda line: print(f"llmc: {line}", file=err, flush=True)}


def counts(args: argparse.Namespace, *names: str) -> None:
    """Raise LlmcError E670 if one of these options is not positive."""
    for name in names:
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise LlmcError("E670", f"{option} {getattr(args, name)} is not possible", "a whole number of 1 or more")


def prompts(seed: int, lengths: Sequence[int], vocab_size: int, prefix_len: int = 0) -> list[list[int]]:
    """Return prompts of random ids below 90 % of the vocabulary, where special ids are rare.

    The first `prefix_len` ids are shared.
    """
    rng = np.random.default_rng(seed)
    high = max(vocab_size * 9 // 10, 2)
    low = min(_LOWEST, high - 1)
    shared = rng.integers(low, high, prefix_len).tolist()
    return [shared + rng.integers(low, high, length).tolist() for length in lengths]
