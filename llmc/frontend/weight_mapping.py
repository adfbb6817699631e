"""Maps checkpoint tensors to the model's weights with the renaming and conversion rules of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import WeightConverter, WeightRenaming

from llmc.diagnostics import Diagnostic
from llmc.frontend.safetensors_reader import Stored, some
from llmc.frontend.weight_parts import Join, Leaf, Part, Stack, Swap, cuts


def resolve(model: Any, tensors: Mapping[str, Stored]) -> dict[str, Part]:
    """Return for each state-dict name how it is assembled, for every stored tensor, known to the model or not.

    Raises Diagnostic E323 or E325 if parts are missing or have different shapes, E326 for an unsupported conversion.
    """
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    known = model.state_dict()
    out: dict[str, Part] = {}
    groups: dict[str, dict[str, list[Stored]]] = {}
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):
        target, pattern = _rename(model, name, renamings, converters, known)
        if pattern is None:
            out[target] = Leaf(tensors[name])
        else:
            groups.setdefault(target, {}).setdefault(pattern, []).append(tensors[name])
    for target, group in groups.items():
        converter = by_pattern[next(iter(group))]
        out |= _convert(converter, target, {p: [Leaf(t) for t in ts] for p, ts in group.items()}, known)
    return out


def _rename(model: Any, name: str, renamings: Any, converters: Any, known: Any) -> tuple[str, str | None]:
    prefix = model.base_model_prefix
    target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, known)
    if target not in known and name in known:
        return name, None
    return target, pattern


def _convert(converter: Any, target: str, group: dict[str, list[Part]], known: Any) -> dict[str, Part]:
    """Apply a converter's operations to parts instead of tensors; as in transformers, groups are keyed by pattern."""
    missing = [p for p in converter.source_patterns if p not in group]
    if missing:
        raise Diagnostic(
            "E323", f"{target} is put together from {some(converter.source_patterns)}; {missing[0]} is missing",
            "fetch the checkpoint again",
        )  # fmt: skip
    for operation in converter.operations:
        row = _OPERATIONS.get(type(operation).__name__)
        if row is None:
            raise Diagnostic(
                "E326",
                f"{target}: the checkpoint needs the conversion {type(operation).__name__}, which is not supported",
                "save the model again with transformers 5, or add the operation to llmc/frontend/weight_mapping.py",
            )
        group = row(operation, converter, group, known.get(target), target)
    first = converter.target_patterns[0]
    head, _, tail = target.partition(first)
    return {head + key + tail if key != target else key: parts[0] for key, parts in group.items()}


def _merge(op: Any, c: Any, group: Any, want: Any, target: str) -> dict[str, list[Part]]:
    if op.dim != 0:
        raise Diagnostic("E326", f"{target}: experts merged along axis {op.dim} are not supported", _AGAIN)
    out: dict[str, list[Part]] = {}
    for pattern, parts in group.items():
        if len({p.shape for p in parts}) > 1:
            raise _unequal(target, parts)
        out[c.target_patterns[0] if len(group) == 1 else pattern] = [Stack(tuple(parts))]
    return out


def _join(op: Any, c: Any, group: Any, want: Any, target: str) -> dict[str, list[Part]]:
    parts = [p for pattern in c.source_patterns for p in group.get(pattern, ())]
    if len({(*p.shape[: op.dim], *p.shape[op.dim + 1 :]) for p in parts}) > 1:
        raise _unequal(target, parts)
    return {c.target_patterns[0]: [Join(tuple(parts), op.dim)]}


def _cut(op: Any, c: Any, group: Any, want: Any, target: str) -> dict[str, list[Part]]:
    if op.num_shards_attribute is not None:
        raise Diagnostic("E326", f"{target}: pieces counted by {op.num_shards_attribute} are not supported", _AGAIN)
    (parts,) = group.values()
    pieces = cuts(parts[0], len(c.target_patterns), op.dim)
    return {name: [piece] for name, piece in zip(c.target_patterns, pieces, strict=True)}


def _swap(op: Any, c: Any, group: Any, want: Any, target: str) -> dict[str, list[Part]]:
    (parts,) = group.values()
    if op.check_dims and want is not None and parts[0].shape == tuple(want.shape):
        return {c.target_patterns[0]: parts}
    rank = len(parts[0].shape)
    return {c.target_patterns[0]: [Swap(parts[0], op.dim0 % rank, op.dim1 % rank)]}


def _unequal(target: str, parts: list[Part]) -> Diagnostic:
    shapes = sorted({str(list(p.shape)) for p in parts})
    cause = f"{target} is put together from parts of shapes {some(shapes)}"
    return Diagnostic("E325", cause, "fetch the checkpoint again")


_AGAIN = "save the model again with transformers 5"
_OPERATIONS: Mapping[str, Any] = MappingProxyType(
    {"MergeModulelist": _merge, "Concatenate": _join, "Chunk": _cut, "Transpose": _swap}
)
