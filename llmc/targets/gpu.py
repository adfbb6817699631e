"""The GPU targets: NVIDIA's Ampere, Hopper and Blackwell, AMD's CDNA 3; nothing here detects or compiles.

Peaks and bandwidth price nodes for the cost rule alone. For sm_90 they are what simple kernels and libraries reached
on an H200 (read 4.65 TB/s, bf16 products 795 TFLOP/s); for the others they are the makers' figures, dense.
"""

from __future__ import annotations

from types import MappingProxyType

from llmc.targets.target import Limits, Target

_FRONT = (
    "canonicalize, fuse-norm, fuse-rope, page-attention, fuse-linear, fold, fuse-pointwise, fuse-qkv, "
    "specialize{decode=[1, 4, 8, 16, 32, 64, 128], step=[128, 512, 2048]}, fuse-norm-linear{rows=1}"
)
_BACK = "split-kv, split-moe, fuse-rows, split-sample, select, pack, lift-weights, cse, dce, memory"
_TERA = 1e12


def _record(
    name: str, family: str, features: tuple[str, ...], limits: Limits, bf16: float, f32: float, bandwidth: float,
    gib: int,
) -> Target:  # fmt: skip
    dependent = "pdl" in features  # rows that decode beside prompts are worth a launch that begins early
    peaks = {"f32": f32 * _TERA, "bf16": bf16 * _TERA, "f16": bf16 * _TERA, "i8": 2 * bf16 * _TERA}
    return Target(
        name=name,
        family=family,
        arch=name.partition(":")[2],
        features=frozenset(features),
        limits=limits,
        peaks=MappingProxyType(peaks),
        bandwidth=bandwidth * _TERA,
        languages=("triton", "cuda") if family == "cuda" else ("triton",),
        pipeline=f"{_FRONT}, {'split-single, ' * dependent}{_BACK}",
        launch_us=1.3 if dependent else 1.6,
        rows=256,
        tokens=8192,
        memory=gib << 30,
    )


def sm_80() -> Target:
    """A100: 108 multiprocessors, 163 KiB of shared memory a block."""
    return _record("cuda:sm_80", "cuda", (), Limits(units=108, shared=163 << 10, l2=40 << 20), 312, 19.5, 1.9, 40)


def sm_90() -> Target:
    """H100, H200: 132 multiprocessors, 227 KiB of shared memory a block, dependent launches."""
    return _record("cuda:sm_90", "cuda", ("pdl",), Limits(units=132, shared=227 << 10, l2=50 << 20), 795, 60, 4.65, 80)


def sm_100() -> Target:
    """B200: 148 multiprocessors, 227 KiB of shared memory a block, dependent launches."""
    return _record(
        "cuda:sm_100", "cuda", ("pdl",), Limits(units=148, shared=227 << 10, l2=126 << 20), 2250, 75, 7.7, 180
    )


def gfx942() -> Target:
    """MI300X: 304 compute units of 64-thread waves, 64 KiB of shared memory a block."""
    limits = Limits(units=304, shared=64 << 10, l2=4 << 20, warp=64)
    return _record("hip:gfx942", "hip", (), limits, 1307, 163, 5.3, 192)
