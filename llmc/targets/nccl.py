"""Targets for --collectives nccl: the same GPUs, whose ranks exchange results through NCCL."""

from __future__ import annotations

from dataclasses import replace

from llmc_runtime.format.nccl_call import LANGUAGE

from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target


def with_nccl(target: Target, ranks: int) -> Target:
    """Return the target with the collectives of NCCL.

    Raises Diagnostic E439 if it is not an NVIDIA GPU, or for a single rank, and E512 if it is deterministic.
    """
    if target.family != "cuda":
        cause = f"--collectives nccl for {target.name}: NCCL is for NVIDIA GPUs"
        raise Diagnostic("E439", cause, "leave out --collectives, or compile for an NVIDIA GPU")
    if ranks == 1:
        cause = "--collectives nccl without --tensor-parallel-size: one rank exchanges nothing"
        raise Diagnostic("E439", cause, "leave out --collectives, or add --tensor-parallel-size 2")
    if target.deterministic:
        cause = "--deterministic with --collectives nccl: the order of NCCL's sums depends on the number of elements"
        raise Diagnostic("E512", cause, "leave out one of them")
    return replace(target, languages=(*target.languages, LANGUAGE))
