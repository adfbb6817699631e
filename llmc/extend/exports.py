"""Modules whose names are imported on first access."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def importer(module: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module.

    `exports` maps its names to "module:object" texts, or to names of modules.
    """

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, attribute = exports[name].partition(":")
        value = importlib.import_module(place)
        return getattr(value, attribute) if attribute else value

    return get, lambda: sorted(exports)
