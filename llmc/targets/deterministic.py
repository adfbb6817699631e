"""Targets for --deterministic: the same machines, with kernels that add in one order for all batches."""

from __future__ import annotations

from dataclasses import replace

from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

GPUS = ("sm_80", "sm_90")  # for whose matrix instructions Triton kernels declare an order of sums
ROWS = 256  # default maximum of sequences in a step: kernels have one order of sums, measured up to this batch size
# Passes that compute a value by other ops in graphs of few tokens than in those of prompts.
BY_TOKENS = ("fuse-norm-linear", "split-single", "gather-experts", "fuse-norm-quantized", "split-recurrence")


def deterministic(target: Target, speculate: int) -> Target:
    """Return the target with deterministic kernels, for steps that verify up to `speculate` drafts per row.

    Raises Diagnostic E512 if it has none.
    """
    if target.family == "cpu":
        return replace(target, deterministic=True, flags=(*target.flags, "-ffp-contract=off"))
    if target.arch not in GPUS:
        cause = f"--deterministic is not supported for {target.name}: the sums of its matrix instructions are not known"
        raise Diagnostic("E512", cause, f"use a CPU target, or --target cuda:{GPUS[-1]}")
    if speculate:
        cause = f"--deterministic with --speculate is not supported for {target.name}: sampling there has other sums"
        raise Diagnostic("E512", cause, "leave out --speculate and --draft, or use a CPU target")
    without = "".join(f", without {name}" for name in BY_TOKENS if name in target.pipeline)
    pipeline = target.pipeline.replace("split-kv", "split-kv{fixed=true}")
    pipeline = pipeline.replace("fuse-experts", "fuse-experts{route=false}")  # other ops for a single token
    return replace(target, deterministic=True, rows=min(target.rows, ROWS), pipeline=pipeline + without)
