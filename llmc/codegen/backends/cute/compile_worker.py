"""Compiles one CuTe kernel: `python -m llmc.codegen.backends.cute.compile_worker TEXT OUT NAME`.

TEXT is a Python file whose `build(name)` returns a compiled kernel of that name; its cubin is written to OUT. The
architecture is in the environment (CUTE_DSL_ARCH), where the DSL reads it.

The packages of the kernels import torch and, in their `__init__`, much that uses it. Compiling needs neither: torch is
replaced by a module of empty classes, and the packages by ones without an `__init__`. Both stay in this process.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_TORCH = "torch"
_PARTS = ("_subclasses", "_subclasses.fake_tensor", "library", "cuda")  # submodules of torch that the packages import
_PACKAGES = ("flash_attn", "flash_attn.cute", "quack")


class _Empty(ModuleType):
    """A module in which every name is a class without members."""

    __path__: Any = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def install_stubs() -> None:
    """Put the stubs of torch and of the packages into `sys.modules`; raises ModuleNotFoundError for a missing one."""
    for name in (_TORCH, *(f"{_TORCH}.{part}" for part in _PARTS)):
        sys.modules[name] = module = _Empty(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules[f"{_TORCH}.cuda"].is_available = lambda: False  # type: ignore[attr-defined]
    for name in _PACKAGES:
        parent, _, _ = name.rpartition(".")
        spec = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)


def load(path: Path) -> ModuleType:
    """Import a text from its file: the DSL reads the source of its functions."""
    spec = importlib.util.spec_from_file_location("llmc_cute_kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    text, out, name = sys.argv[1:]
    warnings.simplefilter("ignore")  # the DSL warns about arguments that have their default value
    install_stubs()
    binary = load(Path(text)).build(name).__cubin__
    if not binary:
        print("error: the DSL returned no binary", file=sys.stderr)
        return 1
    Path(out).write_bytes(binary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
