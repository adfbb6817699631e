"""Code generation: from a graph whose kernels are chosen to source, binaries and programs; not the choice of passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.codegen.driver import Binary, Built, build

__all__ = ["Binary", "Built", "build"]


def __getattr__(name: str) -> Any:
    """`build` and its results, imported when asked for: naming a kernel needs no toolchain."""
    if name in __all__:
        from llmc.codegen import driver

        return getattr(driver, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
