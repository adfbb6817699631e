"""The toy artifact of libcuda for HIP's runtime without a GPU: the same model, with HIP's calling convention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmc_runtime.format.manifest import TargetInfo

from llmc.artifact.write import Parts
from tests.runtime.libcuda import toy


def parts(folder: Path, weights: object = ..., target: str = "hip:gfx942") -> Parts:
    """Return the artifact's parts, without dependent launches."""
    made = toy.parts(folder, weights)
    plain = [replace(p, launches=tuple(replace(x, pdl=False) for x in p.launches)) for p in made.programs]
    return replace(
        made,
        target=TargetInfo(target, target.partition(":")[2], ()),
        kernels=tuple(replace(k, suffix="hsaco", abi="hip-1") for k in made.kernels),
        programs=tuple(plain),
    )
