"""The CPU targets: the present machine, two x86-64 levels, and a portable one."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from llmc.diagnostics import Diagnostic
from llmc.targets.target import Limits, Target

PIPELINE = (
    "canonicalize, fuse-norm, fuse-rope, absorb-latent, page-attention, fuse-linear{siblings=false}, fold, quantize, "
    "fuse-pointwise, specialize{plain_step=true}, narrow-tokens, split-moe{quantized=true}, "
    "lower-quantized{act=i8, act_block=64}, select, pack, lift-weights, cse, dce, memory"
)

# The x86-64 psABI levels, in the flag names of /proc/cpuinfo (abm is LZCNT, pni is SSE3).
V2 = frozenset(("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"))
V3 = V2 | frozenset(("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
V4 = V3 | frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
# Optional features that kernels use: the level each one requires, and the C++ compiler's flag.
EXTRAS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "avx512_bf16": ("x86-64-v4", "-mavx512bf16"),
        "avx512_vnni": ("x86-64-v4", "-mavx512vnni"),
        "avx_vnni": ("x86-64-v3", "-mavxvnni"),
    }
)
_GIGA = 1e9


def _record(
    name: str, arch: str, features: frozenset[str], vector: int, flags: tuple[str, ...], threads: int
) -> Target:
    """Return a CPU target with estimated peaks for that vector width (bytes) and number of threads."""
    f32 = threads * vector / 4 * 2 * 2 * 2.5 * _GIGA  # lanes, two pipes, multiply and add, 2.5 GHz
    bf16 = f32 * (2 if "avx512_bf16" in features else 0.5)
    peaks = {"f32": f32, "bf16": bf16, "f16": f32 / 2, "i8": f32 * 2}
    return Target(
        name=name,
        family="cpu",
        arch=arch,
        features=features,
        limits=Limits(threads=threads, l2=1 << 20),
        peaks=MappingProxyType(peaks),
        bandwidth=min(threads, 8) * 20 * _GIGA,
        languages=("cpp",),
        pipeline=PIPELINE,
        vector=vector,
        flags=flags,
    )


def portable() -> Target:
    """Return the target of any machine of this architecture: plain C++ without vector flags."""
    machine = platform.machine() or "unknown"
    return _record("cpu:portable", machine, frozenset(), 16, (), 4)


def x86_64_v3() -> Target:
    """AVX2 and FMA: Haswell, Zen and later."""
    return _record("cpu:x86-64-v3", "x86-64-v3", V3, 32, ("-march=x86-64-v3",), 8)


def x86_64_v4() -> Target:
    """AVX-512 (F, BW, CD, DQ, VL). Further features are added by name: `cpu:x86-64-v4+avx512_bf16+avx512_vnni`."""
    return _record("cpu:x86-64-v4", "x86-64-v4", V4, 64, ("-march=x86-64-v4", "-mprefer-vector-width=512"), 8)


def native() -> Target:
    """Return the present machine according to /proc/cpuinfo: its level, and the optional features that kernels use."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    target = detect(text, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    return replace(target, memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def detect(cpuinfo: str, threads: int) -> Target:
    """Return the native target for the text of /proc/cpuinfo; the portable one if the level is unknown."""
    line = next((s for s in cpuinfo.splitlines() if s.startswith("flags")), ":")
    have = frozenset(line.partition(":")[2].split())
    if have >= V4:
        base = x86_64_v4()
    elif have >= V3:
        base = x86_64_v3()
    else:
        base = portable()
    extras = [f for f, (level, _) in EXTRAS.items() if f in have and _includes(base.arch, level)]
    t = _extend(base, extras)
    return _record("cpu:native", t.arch, t.features, t.vector, t.flags, max(1, threads))


def _includes(arch: str, level: str) -> bool:
    levels = ("x86-64-v3", "x86-64-v4")
    return arch in levels and levels.index(arch) >= levels.index(level)


def _extend(base: Target, extras: Sequence[str]) -> Target:
    flags = (*base.flags, *(EXTRAS[f][1] for f in extras))
    t = _record(base.name, base.arch, base.features | frozenset(extras), base.vector, flags, base.limits.threads)
    return replace(t, name="+".join([base.name, *extras]))


def with_features(target: Target, extras: Sequence[str]) -> Target:
    """Return `target` with optional features, such as "avx512_bf16"; raises Diagnostic E510 if it cannot have one."""
    possible = [f for f, (level, _) in EXTRAS.items() if _includes(target.arch, level)]
    if unknown := next((f for f in extras if f not in possible), None):
        known = f"it takes {', '.join('+' + f for f in possible)}" if possible else "it takes no extra features"
        cause = f"target {target.name} has no extra feature {unknown!r}; {known}"
        raise Diagnostic("E510", cause, f"use --target {target.name}")
    added = [f for f in EXTRAS if f in extras and f not in target.features]
    return _extend(target, added) if extras else target
