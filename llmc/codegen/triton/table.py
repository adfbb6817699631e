"""The names of the Triton kernels and where they live; nothing is imported until a name is read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_HERE = "llmc.codegen.triton"
KERNELS: Mapping[str, str] = MappingProxyType({})
