"""The compiler: a Hugging Face model becomes text, then better text, then kernels, then a folder. It runs no model.

The face for extension authors: `compile`, `Pass`, `Rewrite`, `op`, `pointwise`, `Kernel`, `Target`, `Extension`; each
is imported when it is named.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"

_FACE = MappingProxyType(
    {
        "compile": "llmc.driver:compile_model",
        "Options": "llmc.driver:Options",
        "Pass": "llmc.passes.base:Pass",
        "Rewrite": "llmc.passes.rewrite:Rewrite",
        "op": "llmc.ir.opdef:op",
        "pointwise": "llmc.ir.ops.pointwise:pointwise",
        "Kernel": "llmc.codegen.kernel:Kernel",
        "Target": "llmc.targets.target:Target",
        "Extension": "llmc.extension:Extension",
    }
)

__all__ = ["__version__", *_FACE]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    module, _, attribute = _FACE[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
