"""Two targets from an outside package, as records: a small CPU machine, and a GPU of compute capability 8.6."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from llmc.extend import Extension, Limits, Target, cpu_targets, gpu_targets


def small_box() -> Target:
    """Two cores of any CPU and little memory: two concurrent sequences, short steps, small pages."""
    return replace(
        cpu_targets.portable(),
        name="cpu:small-box",
        limits=Limits(threads=2, l2=512 << 10),
        bandwidth=10e9,
        rows=2,
        tokens=64,
        page_size=8,
        memory=512 << 20,
    )


def sm_86() -> Target:
    """RTX 3090: 82 multiprocessors, 99 KiB of shared memory per block, dense peak rates from NVIDIA."""
    return replace(
        gpu_targets.sm_80(),
        name="cuda:sm_86",
        arch="sm_86",
        limits=Limits(units=82, shared=99 << 10, l2=6 << 20),
        peaks=MappingProxyType({"f32": 35.6e12, "bf16": 71e12, "f16": 71e12, "i8": 284e12}),
        bandwidth=0.936e12,
        memory=24 << 30,
    )


EXTENSION = Extension(
    "more-targets",
    targets={"cpu:small-box": "more_targets:small_box", "cuda:sm_86": "more_targets:sm_86"},
)
