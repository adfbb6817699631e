"""Compile the artifacts that the GPU benches run, if they are missing. Needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench import shapes
from bench.gpu.plan import MAX_LEN, MAX_SEQS, MAX_TOKENS, MODELS, Plan
from bench.shapes import Shape

SEED = 1


def artifact(plan: Plan, shape: Shape) -> Path:
    """Return a model's artifact without weight files, which the runtime fills with random values: a few MB."""
    path = plan.artifact(shape)
    if not (path / "manifest.json").is_file():
        with_weights(plan, shapes.folder(shape, plan.artifacts), path, f"random:{SEED}", shape)
    return path


def artifacts(plan: Plan) -> None:
    """Return the artifacts of all models of a plan, compiling several at once if there are enough cores."""
    workers = max(1, min(len(plan.models), (os.cpu_count() or 1) // 4))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_one, [(replace(plan, models=()), s.name) for s in plan.models]))


def _one(work: tuple[Plan, str]) -> Path:
    plan, name = work
    return artifact(plan, MODELS[name])


def packed(plan: Plan, shape: Shape) -> Path:
    """Return a model's artifact with weight files, made from a random checkpoint that is then removed."""
    path = plan.packed(shape)
    if not (path / "manifest.json").is_file():
        checkpoint = shapes.checkpoint(shape, plan.artifacts)
        with_weights(plan, checkpoint, path, "packed", shape)
        shutil.rmtree(checkpoint)
    return path


def with_weights(
    plan: Plan, model: Path, path: Path, weights: str, shape: Shape, tuning: Path | None = None,
    deterministic: bool = False, ranks: int = 1,
) -> None:  # fmt: skip
    """Compile as `llmc compile` does, with a kernel cache beside the artifacts."""
    from llmc.console import Console
    from llmc.driver import compile_model
    from llmc.options import Options
    from llmc.quant.make.recipes import NONE

    options = Options(
        target=plan.target, dtype="bfloat16", max_model_len=MAX_LEN, max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS, cache=plan.artifacts / "cache", reuse=False, weights=weights,
        tuning=tuning, pipeline=plan.pipeline, quant=shape.quant or NONE,
        kv_cache_dtype=shape.kv_cache, deterministic=deterministic, tensor_parallel_size=ranks,
    )  # fmt: skip
    longest = _longest(model)
    if longest < MAX_LEN:
        options = type(options)(**{**vars(options), "max_model_len": longest})
    compile_model(model, path, options, console=Console(sys.stderr))


def _longest(model: Path) -> int:
    import json

    return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])
