"""The NCCL collectives by name. A kernel's module is imported when its name is first looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_HERE = "llmc.codegen.backends.nccl.collectives"
KERNELS: Mapping[str, str] = MappingProxyType(
    {"nccl/all_reduce": f"{_HERE}:ALL_REDUCE", "nccl/all_gather": f"{_HERE}:ALL_GATHER"}
)
