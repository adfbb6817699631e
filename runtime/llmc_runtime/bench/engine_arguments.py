"""Options and prompts shared by the benchmarks that open an artifact themselves."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmc_runtime.bench.request_bodies import usual_ids
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.option_type import options_of

_ENGINE = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "threads", "seed",
    "enable_prefix_caching", "target", "cache_dir",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser, changed: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the model, options of its engine, and those of the report.

    `changed` has fields of `Option` that differ from the declaration, by the name of the option.
    """
    add = parser.add_argument
    add("model", metavar="MODEL", help="an artifact, or a Hugging Face folder or id (compiled on first use)")
    for name in _ENGINE:
        replace(options_of(EngineOptions)[name], **changed.get(name, {})).add_to(parser)
    add("--output-json", type=Path, metavar="FILE", help="file for the report as JSON (default: none)")
    add("--json", action="store_true", help="print the report as JSON instead of a table")


def options(args: argparse.Namespace, err: IO[str]) -> dict[str, Any]:
    """Return the arguments of LLM and AsyncLLM."""
    engine = {name: options_of(EngineOptions)[name].value(args) for name in _ENGINE}
    return engine | {"say": lambda line: print(f"llmc: {line}", file=err, flush=True)}


def counts(args: argparse.Namespace, *names: str) -> None:
    """Raise LlmcError E670 if one of these options is not positive."""
    for name in names:
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise LlmcError("E670", f"{option} {getattr(args, name)} is out of range", "use an integer of at least 1")


def prompts(seed: int, lengths: Sequence[int], vocab_size: int, prefix_len: int = 0) -> list[list[int]]:
    """Return prompts of random ids (see `usual_ids`), each a list; the first `prefix_len` ids are shared."""
    rng, ids = np.random.default_rng(seed), usual_ids(vocab_size)
    shared = rng.integers(ids.start, ids.stop, prefix_len).tolist()
    return [shared + rng.integers(ids.start, ids.stop, length).tolist() for length in lengths]
