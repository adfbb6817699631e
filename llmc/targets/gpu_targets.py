"""The GPU targets: NVIDIA Ampere, Hopper and Blackwell, and AMD CDNA 2, 3 and 4.

Peaks and bandwidth are used only to predict times. Those of sm_90 were reached by simple kernels and libraries on an
H200 (4.65 TB/s read, 795 TFLOP/s in bf16 products, 375 GB/s sent to another GPU); the others are the vendors' dense
figures, with the same share of a link's rate. Nothing has been measured on AMD GPUs: their limits and rates are those
of AMD's data sheets and white papers, and the overhead of a launch is that of NVIDIA GPUs. `near` is the peak of the L2
cache for CDNA 2, and of the memory-side cache for CDNA 3 (17.2 TB/s); CDNA 4 is assumed to have the latter as well.
"""

from __future__ import annotations

from types import MappingProxyType

from llmc.targets.target import PDL, Limits, Target

_FRONT = (
    "canonicalize, fuse-norm, fuse-rope, absorb-latent, page-attention, fuse-linear, fold, quantize, fuse-pointwise, "
    "fuse-qkv, specialize{decode=[1, 4, 8, 16, 32, 64, 128, 256], step=[128, 512, 640, 768, 2048], "
    "verify=[8, 32, 128]}, narrow-tokens{above=128}, fuse-norm-linear{rows=1}"
)
_BACK = (
    "split-recurrence, split-kv, gather-experts, split-moe, fuse-experts, fuse-rows, split-sample, lower-quantized, "
    "fuse-norm-quantized, select, pack, lift-weights, cse, dce, memory"
)
_TERA = 1e12
REGISTERS = 1 << 16  # registers of 32 bits of a multiprocessor of NVIDIA's


def _record(
    name: str, family: str, features: tuple[str, ...], limits: Limits, bf16: float, f32: float, bandwidth: float,
    gib: int, int8: float = 2, float8: str = "f8e4m3", link: float = 0,
) -> Target:  # fmt: skip
    """Return a GPU target; peaks are in TFLOP/s, bandwidth and link in TB/s, memory in GiB. `int8` is the rate of
    products of i8, divided by that of bf16. `float8` is the dtype of the 8-bit floats that it multiplies, twice as fast
    as bf16; "" if there are none.
    """
    dependent = PDL in features  # dependent launches make a separate attention launch for decoding rows worthwhile
    peaks = {
        "f32": f32 * _TERA,
        "bf16": bf16 * _TERA,
        "f16": bf16 * _TERA,
        "i8": int8 * bf16 * _TERA,
        **({float8: 2 * bf16 * _TERA} if float8 else {}),
    }
    pipeline = [_FRONT]
    if dependent:
        pipeline.append("split-single")
    if float8.endswith("fnuz"):
        pipeline.append("to-fnuz")
    pipeline.append(_BACK)
    return Target(
        name=name,
        family=family,
        arch=name.partition(":")[2],
        features=frozenset(features),
        limits=limits,
        peaks=MappingProxyType(peaks),
        bandwidth=bandwidth * _TERA,
        languages=("triton", "cuda", "cute", "flashinfer") if family == "cuda" else ("triton",),
        pipeline=", ".join(pipeline),
        launch_us=1.3 if dependent else 1.6,
        rows=512,
        tokens=8192,
        memory=gib << 30,
        link=link * _TERA,
    )


def sm_80() -> Target:
    """A100: 108 multiprocessors, 163 KiB of shared memory per block."""
    limits = Limits(units=108, shared=163 << 10, l2=40 << 20)
    return _record("cuda:sm_80", "cuda", (), limits, 312, 19.5, 1.9, 40, float8="", link=0.25)


def sm_90() -> Target:
    """H100 and H200: 132 multiprocessors, 227 KiB of shared memory per block, programmatic dependent launch."""
    limits = Limits(units=132, shared=227 << 10, l2=50 << 20)
    return _record("cuda:sm_90", "cuda", (PDL,), limits, 795, 60, 4.65, 80, link=0.375)


def sm_100() -> Target:
    """B200: 148 multiprocessors, 227 KiB of shared memory per block, programmatic dependent launch."""
    limits = Limits(units=148, shared=227 << 10, l2=126 << 20)
    return _record("cuda:sm_100", "cuda", (PDL,), limits, 2250, 75, 7.7, 180, link=0.75)


def gfx90a() -> Target:
    """MI210, and one of the two dies of an MI250, each of which is a device: 104 compute units with wavefronts of 64
    threads, 64 KiB of shared memory per block.

    It has no 8-bit floats. Products of i8 are as fast as those of bf16.
    """
    limits = Limits(units=104, shared=64 << 10, l2=8 << 20, warp=64)
    return _record("hip:gfx90a", "hip", (), limits, 181, 22.6, 1.6, 64, int8=1, float8="")


def gfx942() -> Target:
    """MI300X and MI325X: 304 compute units with wavefronts of 64 threads, 64 KiB of shared memory per block.

    Its 8-bit floats are fnuz (bias 8, no negative zero). Those of checkpoints are OCP's (e4m3fn), which the pass
    `to-fnuz` converts.
    """
    limits = Limits(units=304, shared=64 << 10, l2=4 << 20, warp=64, near=3.2)
    return _record("hip:gfx942", "hip", (), limits, 1307, 163, 5.3, 192, float8="f8e4m3fnuz")


def gfx950() -> Target:
    """MI350X and MI355X: 256 compute units with wavefronts of 64 threads, 160 KiB of shared memory per block, and 8-bit
    floats of OCP's kind.
    """
    limits = Limits(units=256, shared=160 << 10, l2=4 << 20, warp=64, near=2.15)
    return _record("hip:gfx950", "hip", (), limits, 2307, 144, 8, 288)
