"""The compiler: translates a Hugging Face model into an artifact, a folder of kernels, programs and packed weights.

Each of the names below is imported on first access, so that `import llmc` stays fast. The public interface for
extension authors is `llmc.extend`. To run an artifact, see `llmc_runtime`.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

from llmc_runtime import __version__

_EXPORTS = MappingProxyType(
    {
        "compile": "llmc.driver:compile_model",
        "Options": "llmc.options:Options",
        "Pass": "llmc.passes.base:Pass",
        "Rewrite": "llmc.passes.rewrite:Rewrite",
        "op": "llmc.ir.opdef:op",
        "pointwise": "llmc.ir.ops.pointwise:pointwise",
        "Kernel": "llmc.codegen.kernel:Kernel",
        "Target": "llmc.targets.target:Target",
        "Extension": "llmc.extension:Extension",
    }
)

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
