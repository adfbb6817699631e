"""The record that describes a machine to compile for, and its variants: deterministic kernels, collectives of NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmc_runtime.format.names import NCCL

from llmc.diagnostics import Diagnostic

PDL = "pdl"  # feature: programmatic dependent launch
FAMILIES = ("cpu", "cuda", "hip")  # kinds of devices
# Architectures for whose matrix instructions Triton kernels declare an order of sums.
_ORDERED_GPUS = ("sm_80", "sm_90")
_DETERMINISTIC_ROWS = (
    256  # default maximum of sequences in a step: kernels have one order of sums, measured up to this batch size
)
# Passes that compute a value by other ops in graphs of few tokens than in those of prompts.
_BY_TOKENS = (
    "narrow-tokens", "fuse-norm-linear", "split-single", "gather-experts", "fuse-norm-quantized", "split-recurrence",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Sizes that kernels may rely on.

    threads: of the thread pool. l2: bytes of the second-level cache of one core. units: multiprocessors of a GPU.
    shared: bytes of shared memory available to one block. warp: threads per warp. near: bandwidth of the cache that all
    multiprocessors share, relative to memory's.
    """

    threads: int = 1
    l2: int = 1 << 20
    units: int = 0
    shared: int = 0
    warp: int = 32
    near: float = 2.2


@dataclass(frozen=True)
class Target:
    """One machine to compile for.

    features: the instruction-set features that binaries may use (for CPUs by their names in /proc/cpuinfo); the
    loader checks them. peaks: flop/s by dtype, and bandwidth: byte/s, both only for cost estimates. pipeline: text
    of the pass pipeline. languages: those of kernels that the device can run, the usual one first. page_size: tokens
    per page. vector: bytes of a vector register. flags: the C++ compiler's flags for the machine. launch_us: overhead
    of a launch. rows, tokens: default limits of an artifact. memory: bytes of the smallest common device of the kind,
    for plans; 0 if unknown. deterministic: kernels must add in one order for all batches
    (`Kernel.reduction_order`), and compilers must not fuse products into sums. link: byte/s that a rank sends to the
    other ranks, for cost estimates; 0 if ranks exchange results through memory, at `bandwidth`.
    """

    name: str
    family: str
    arch: str
    features: frozenset[str]
    limits: Limits
    peaks: Mapping[str, float]
    bandwidth: float
    languages: tuple[str, ...]
    pipeline: str
    page_size: int = 16
    vector: int = 16
    flags: tuple[str, ...] = ()
    launch_us: float = 1.0
    rows: int = 16
    tokens: int = 512
    memory: int = 0
    deterministic: bool = False
    link: float = 0

    def has(self, *features: str) -> bool:
        """Whether binaries for this target may use all of the named features."""
        return self.features.issuperset(features)


def check_record(t: Target, name: str) -> None:
    """Raise ValueError if a record is not registered under its own name, or has an invalid value."""
    if t.name != name:
        raise ValueError(f"the record has the name {t.name!r}, but is registered as {name!r}")
    if t.family not in FAMILIES or not t.name.startswith(f"{t.family}:"):
        raise ValueError(f"family={t.family!r}: the name begins with its family, one of {', '.join(FAMILIES)}")
    for field in ("bandwidth", "launch_us", "rows", "tokens", "page_size", "vector"):
        if not getattr(t, field) > 0:
            raise ValueError(f"{field}={getattr(t, field)!r} is not positive")
    if "f32" not in t.peaks or not all(peak > 0 for peak in t.peaks.values()):
        raise ValueError(f"peaks={dict(t.peaks)!r}: positive rates are needed, one of them of f32")
    if not t.languages or not t.pipeline.strip():
        raise ValueError("languages and pipeline must not be empty")


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
    return replace(target, languages=(*target.languages, NCCL))


def deterministic(target: Target, speculate: int) -> Target:
    """Return the target with deterministic kernels, for steps that verify up to `speculate` drafts per row.

    Raises Diagnostic E512 if it has none.
    """
    without = "".join(f", without {name}" for name in _BY_TOKENS if name in target.pipeline)
    if target.family == "cpu":
        flags = (*target.flags, "-ffp-contract=off")
        return replace(target, deterministic=True, flags=flags, pipeline=target.pipeline + without)
    if target.arch not in _ORDERED_GPUS:
        cause = f"--deterministic is not supported for {target.name}: the order in which it adds is not known"
        raise Diagnostic("E512", cause, f"use a CPU target, or --target cuda:{_ORDERED_GPUS[-1]}")
    if speculate:
        cause = f"--deterministic with --speculate is not supported for {target.name}: drafts change the order of sums"
        raise Diagnostic("E512", cause, "leave out --speculate and --draft, or use a CPU target")
    pipeline = target.pipeline.replace("split-kv", "split-kv{fixed=true}")
    pipeline = pipeline.replace("fuse-experts", "fuse-experts{route=false}")  # other ops for a single token
    return replace(target, deterministic=True, rows=min(target.rows, _DETERMINISTIC_ROWS), pipeline=pipeline + without)
