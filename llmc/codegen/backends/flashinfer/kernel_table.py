"""The kernels of FlashInfer by name. A kernel's module is imported when its name is first looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KERNELS: Mapping[str, str] = MappingProxyType({"flashinfer/xqa": "llmc.codegen.backends.flashinfer.xqa:XQA"})
