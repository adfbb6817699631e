"""Collects the cases of the tests of single Triton kernels, to run them on a GPU instead of in the interpreter.

The tests in tests/kernels/test_triton_*.py call `run_case` for every case. Here their test functions run while
`run_case` is replaced by a function that appends to a list, and `some`, which draws a sample, by one that returns all.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from kernels import triton_harness
from kernels.harness import Case

KERNEL_TESTS = Path(__file__).resolve().parents[1] / "kernels"
RUNNER = "run_case"


def borrowed_cases() -> Iterator[Case]:
    """Yield every case that the tests run in the interpreter, with newly drawn inputs, named after its test."""
    for path in sorted(KERNEL_TESTS.glob("test_triton_*.py")):
        module = importlib.import_module(f"kernels.{path.stem}")
        yield from _of(module)


def _of(module: ModuleType) -> Iterator[Case]:
    kept: list[Case] = []

    def keep(case: Case, *args: Any, **options: Any) -> None:
        kept.append(case)

    patches = {RUNNER: keep, "some": lambda items, share=1.0: items}
    originals = [(p, name, getattr(p, name)) for p in (module, triton_harness) for name in patches if hasattr(p, name)]
    for patched, name, _ in originals:
        setattr(patched, name, patches[name])
    try:
        for name, function in list(vars(module).items()):
            if name.startswith("test_") and RUNNER in names_used(function, module):
                for arguments in variants(function):
                    kept.clear()
                    with suppress(AssertionError):  # assertions beyond run_case are checked where the test itself runs
                        function(**arguments)
                    for case in kept:
                        case.name = f"{module.__name__.rpartition('.')[2]}.{name}.{case.name}"
                        yield case
    finally:
        for patched, name, original in originals:
            setattr(patched, name, original)


def names_used(function: Any, module: ModuleType) -> set[str]:
    """Return the global names and attributes that a function uses, directly or through functions of its module."""
    found: set[str] = set()
    todo = [function]
    while todo:
        code = getattr(todo.pop(), "__code__", None)
        new = set(code.co_names) - found if code else set()
        found |= new
        todo += [f for n in new if inspect.isfunction(f := vars(module).get(n)) and f.__module__ == module.__name__]
    return found


def variants(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call that pytest would make; nothing for a test with fixtures."""
    axes: list[list[dict[str, Any]]] = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            split = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
            axes.append([_bind(split, v) for v in values])
    calls = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes)]
    wanted = set(inspect.signature(function).parameters)
    return (c for c in calls if wanted == set(c))


def _bind(names: list[str], value: Any) -> dict[str, Any]:
    values = getattr(value, "values", None)  # of pytest.param
    if isinstance(values, tuple):
        return dict(zip(names, values, strict=True))
    return dict(zip(names, value, strict=True)) if len(names) > 1 else {names[0]: value}
