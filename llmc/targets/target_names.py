"""The built-in targets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from llmc.targets import cpu_targets, gpu_targets
from llmc.targets.target import Target

TARGETS: Mapping[str, Callable[[], Target]] = MappingProxyType(
    {
        **cpu_targets.TARGETS,
        "cuda:sm_80": gpu_targets.sm_80,
        "cuda:sm_90": gpu_targets.sm_90,
        "cuda:sm_100": gpu_targets.sm_100,
        "hip:gfx942": gpu_targets.gfx942,
    }
)


def parse(name: str, targets: Mapping[str, Callable[[], Target]] = TARGETS) -> Target:
    """Return the target of a name such as "cuda:sm_90" or "cpu:x86-64-v4+avx512_bf16"; raises Diagnostic E510."""
    return cpu_targets.parse(name, targets)
