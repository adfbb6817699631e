"""Conversions of experts that a checkpoint stores one by one under the names of modules: `experts.N.gate_proj.weight`.

Tools that quantise expert by expert replace a stack of experts by a list of modules with Linear layers, and write these
names, whatever the model's publisher named its tensors. Unsloth makes a list of each stack, `gate_up_projs.N.weight`,
with the rows of the stack, and a module of the router, `router.linear.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter, WeightRenaming

FIRST, SECOND = "gate_up_proj", "down_proj"  # the stacks of a module of experts


class Alternate:
    """The operation that joins stacks of gates and ups so that their rows alternate, starting with a gate."""


def converters(model: torch.nn.Module, tensors: Iterable[str], transforms: Iterable[Any]) -> Iterator[Any]:
    """Yield the converters for the experts of a checkpoint with these tensor names.

    transforms: those that the model has anyway; patterns of theirs are left to them.
    """
    names = list(tensors)
    known = {p for t in transforms for p in t.source_patterns}
    tails: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        if all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in (FIRST, SECOND)):
            tails.setdefault(_tail(path), module)
    for tail, module in tails.items():
        if any(f"{tail}.{FIRST}s." in name for name in names):
            yield from _of_lists(tail, module)
        if any(f"{tail}." in name and ".gate_proj." in name for name in names):
            yield from (c for c in _of_module(tail, module) if not known & set(c.source_patterns))


def _tail(path: str) -> str:
    """Return the end of a module's path that is the same in all layers: what follows the last number."""
    parts = path.split(".")
    after = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1) + 1
    return ".".join(parts[after:])


def _of_module(tail: str, module: Any) -> Iterator[Any]:
    """Yield the converters to the stacks, and to the biases, of modules with this tail."""
    join = Concatenate(dim=1) if getattr(module, "is_concatenated", True) else Alternate()
    for kind, suffix, last in _kinds(module):
        pair = [f"{tail}.*.{name}_proj.{kind}" for name in ("gate", "up")]
        yield WeightConverter(pair, f"{tail}.{FIRST}{suffix}", [MergeModulelist(dim=0), join, *last])
        yield WeightConverter(f"{tail}.*.{SECOND}.{kind}", f"{tail}.{SECOND}{suffix}", [MergeModulelist(dim=0), *last])


def _of_lists(tail: str, module: Any) -> Iterator[Any]:
    """Yield the renaming of the router, and the converters of a list of modules for each stack of a module."""
    router = f"{tail.rpartition('.')[0]}.router.".lstrip(".")
    yield WeightRenaming(f"{router}linear.", router)
    for kind, suffix, last in _kinds(module):
        for stack in (FIRST, SECOND):
            yield WeightConverter(
                f"{tail}.{stack}s.*.{kind}", f"{tail}.{stack}{suffix}", [MergeModulelist(dim=0), *last]
            )


def _kinds(module: Any) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield the name of a tensor of an expert, the suffix of its stack's name, and the last operations of the stack."""
    yield "weight", "", [Transpose(dim0=1, dim1=2)] if _is_transposed(module) else []
    if hasattr(module, f"{FIRST}_bias"):
        yield "bias", "_bias", []


def _is_transposed(module: Any) -> bool:
    """Whether the stacks are [experts, in, out] instead of [experts, out, in]."""
    (_, rows, columns), (_, inner, outer) = getattr(module, FIRST).shape, getattr(module, SECOND).shape
    return bool(rows == outer and columns == 2 * inner)
