"""Maps checkpoint tensors to the model's weights with the renaming and conversion rules of transformers.

The conversions (stacks of experts, joins, splits, transposes) become nodes of a graph over the stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import WeightConverter, WeightRenaming

from llmc.diagnostics import Diagnostic
from llmc.frontend import separate_experts
from llmc.frontend.legacy_experts import spare_stacks
from llmc.frontend.safetensors_reader import shortened
from llmc.frontend.weight_place import Place
from llmc.ir.dtype import promote
from llmc.ir.graph import Builder, Value

Group = dict[str, list[Value]]


def resolve(model: Any, tensors: Mapping[str, Value], build: Builder, needed: Container[str] = ()) -> dict[str, Value]:
    """Return the value of each state-dict name, for every stored tensor, known to the model or not.

    `tensors` are values of a graph by their names in the checkpoint; `build` adds nodes to that graph. `needed` are
    the weights that will be read; the result lacks others, such as a vision tower's, whose conversion is not supported.
    Raises Diagnostic E323 or E325 if parts are missing or have different shapes, E324 if several tensors are stored for
    one weight, E326 for an unsupported conversion of a needed one.
    """
    known = model.state_dict()
    renamings, converters = _transforms(model, tensors)
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    out: dict[str, Value] = {}
    origin: dict[str, str] = {}
    groups: dict[str, Group] = {}
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):
        target, pattern = _rename(model, name, renamings, converters, known)
        if pattern is None:
            if target in out and target in known:
                raise _twice(target, origin[target], name)
            out[target], origin[target] = tensors[name], name
        else:
            groups.setdefault(target, {}).setdefault(pattern, []).append(tensors[name])
    for target, group in groups.items():
        converter = by_pattern[next(iter(group))]
        targets = (_placed(converter, target, key) for key in converter.target_patterns)
        if _unsupported(converter) and not any(name in needed for name in targets):
            continue
        converted = _convert(build, converter, target, group, known)
        if repeated := sorted(converted.keys() & out.keys() & known.keys()):
            raise _twice(repeated[0], origin[repeated[0]], f"parts named {next(iter(group))}")
        out |= converted
    for name, count in spare_stacks(model):
        if name in out and out[name].type.shape[0].const == count:
            out[name] = build.slice(out[name], axis=0, start=0, stop=int(known[name].shape[0]))
    return out


def places_of(model: Any) -> Callable[[str], Place]:
    """Return a function from a weight's name in the checkpoint to its place in the model.

    A weight that is one part of a larger one, such as an expert of a stack, counts as a Linear's.
    """
    known = model.state_dict()
    renamings, converters = _transforms(model, ())
    modules = dict(model.named_modules())

    def place(weight: str) -> Place:
        target, pattern = _rename(model, weight, renamings, converters, known)
        module = modules.get(target.removesuffix(".weight")) if pattern is None else None
        if module is None:
            return Place()
        shape = tuple(known[target].shape) if target in known else ()
        return Place(tuple(c.__name__ for c in type(module).__mro__), shape)

    return place


def _transforms(model: Any, tensors: Iterable[str]) -> tuple[list[Any], list[Any]]:
    """Return the renamings and converters of a model's checkpoints."""
    method = getattr(model, "checkpoint_transforms", None)
    transforms = method() if method else conversion_mapping.get_model_conversion_mapping(model)
    transforms = [*transforms, *separate_experts.converters(model, tensors, transforms)]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    return renamings, [t for t in transforms if isinstance(t, WeightConverter)]


def _rename(model: Any, name: str, renamings: Any, converters: Any, known: Any) -> tuple[str, str | None]:
    prefix = model.base_model_prefix
    target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, known)
    if target not in known and name in known:
        return name, None
    return target, pattern


def _convert(build: Builder, converter: Any, target: str, group: Group, known: Any) -> dict[str, Value]:
    """Apply a converter's operations; as in transformers, groups are keyed by pattern."""
    missing = [p for p in converter.source_patterns if p not in group]
    if missing:
        raise Diagnostic(
            "E323", f"{target} is assembled from {shortened(converter.source_patterns)}; {missing[0]} is missing",
            "fetch the checkpoint again",
        )  # fmt: skip
    if unknown := _unsupported(converter):
        raise Diagnostic(
            "E326",
            f"{target}: the checkpoint needs the conversion {unknown}, which is not supported",
            "save the model again with transformers 5, or add the operation to llmc/frontend/weight_mapping.py",
        )
    for operation in converter.operations:
        emit = _OPERATIONS[type(operation).__name__]
        group = emit(build, operation, converter, group, known.get(target), target)
    return {_placed(converter, target, key): values[0] for key, values in group.items()}


def _placed(converter: Any, target: str, key: str) -> str:
    """Return the state-dict name of one target pattern of a converter, whose first one has the name `target`."""
    head, _, tail = target.partition(converter.target_patterns[0])
    return head + key + tail if key != target else key


def _unsupported(converter: Any) -> str:
    """Return the name of a converter's first operation that is not supported, or ""."""
    names = (type(operation).__name__ for operation in converter.operations)
    return next((name for name in names if name not in _OPERATIONS), "")


def _stack(b: Builder, op: Any, c: Any, group: Group, parameter: Any, target: str) -> Group:
    if op.dim != 0:
        raise Diagnostic("E326", f"{target}: experts merged along axis {op.dim} are not supported", _SAVE_AGAIN)
    return {
        c.target_patterns[0] if len(group) == 1 else pattern: [_stacked(b, values, target)]
        for pattern, values in group.items()
    }


def _stacked(b: Builder, values: list[Value], target: str) -> Value:
    """Return the values, of equal shapes, along a new first axis."""
    if len({v.type.shape for v in values}) > 1:
        raise _unequal(target, values)
    rows = [b.reshape(v, shape=(1, *v.type.shape)) for v in _one_dtype(b, values)]
    return b.concat(*rows, axis=0)


def _stack_in_parts(b: Builder, op: Any, c: Any, group: Group, parameter: Any, target: str) -> Group:
    """Divide the experts among the targets, such as those of text and of images; each stacks and joins its own."""
    if op.stack_dim != 0:
        raise Diagnostic("E326", f"{target}: experts stacked along axis {op.stack_dim} are not supported", _SAVE_AGAIN)
    counts = {len(values) for values in group.values()}
    size, rest = divmod(max(counts), len(c.target_patterns))
    if rest or len(counts) > 1:
        cause = (
            f"{target} is one of {len(c.target_patterns)} equal parts of {', '.join(map(str, sorted(counts)))} experts"
        )
        raise Diagnostic("E325", cause, "fetch the checkpoint again")
    out: Group = {}
    for i, name in enumerate(c.target_patterns):
        stacks = [_stacked(b, group[p][i * size : (i + 1) * size], target) for p in c.source_patterns]
        out[name] = [_joined(b, stacks, op.concat_dim, target)]
    return out


def _concatenate(b: Builder, op: Any, c: Any, group: Group, parameter: Any, target: str) -> Group:
    values = [v for pattern in c.source_patterns for v in group.get(pattern, ())]
    return {c.target_patterns[0]: [_joined(b, values, op.dim, target)]}


def _alternate(b: Builder, op: Any, c: Any, group: Group, parameter: Any, target: str) -> Group:
    """Join stacks [experts, rows, ..] of gates and ups so that their rows alternate."""
    stacks = [v for pattern in c.source_patterns for v in group.get(pattern, ())]
    if len({v.type.shape for v in stacks}) > 1:
        raise _unequal(target, stacks)
    experts, rows, *rest = stacks[0].type.shape
    pairs = b.concat(*(b.reshape(v, shape=(experts, rows, 1, *rest)) for v in _one_dtype(b, stacks)), axis=2)
    return {c.target_patterns[0]: [b.reshape(pairs, shape=(experts, rows * 2, *rest))]}


def _joined(b: Builder, values: list[Value], dim: int, target: str) -> Value:
    """Return the values joined along an axis; their other axes are equal."""
    axis = dim % values[0].type.rank
    if len({(*v.type.shape[:axis], *v.type.shape[axis + 1 :]) for v in values}) > 1:
        raise _unequal(target, values)
    return b.concat(*_one_dtype(b, values), axis=axis)


def _chunk(b: Builder, op: Any, c: Any, group: Group, parameter: Any, target: str) -> Group:
    """Split into pieces of equal size as torch.chunk does; the last may be shorter."""
    if op.num_shards_attribute is not None:
        raise Diagnostic(
            "E326", f"{target}: pieces counted by {op.num_shards_attribute} are not supported", _SAVE_AGAIN
        )
    ((value, *_),) = group.values()
    axis = op.dim % value.type.rank
    whole = value.type.shape[axis].const or 0
    size = -(-whole // len(c.target_patterns))
    bounds = [(i, min(i + size, whole)) for i in range(0, whole, size)]
    pieces = [b.slice(value, axis=axis, start=start, stop=stop) for start, stop in bounds]
    return {name: [piece] for name, piece in zip(c.target_patterns, pieces, strict=True)}


def _transpose(b: Builder, op: Any, c: Any, group: Group, parameter: Any, target: str) -> Group:
    ((value, *_),) = group.values()
    if op.check_dims and parameter is not None and tuple(d.const for d in value.type.shape) == tuple(parameter.shape):
        return {c.target_patterns[0]: [value]}
    perm = list(range(value.type.rank))
    perm[op.dim0], perm[op.dim1] = perm[op.dim1], perm[op.dim0]
    return {c.target_patterns[0]: [b.transpose(value, perm=perm)]}


def _one_dtype(b: Builder, values: list[Value]) -> list[Value]:
    """Return the values in the dtype that holds all of theirs."""
    dtype = reduce(promote, (v.type.dtype for v in values))
    return [v if v.type.dtype == dtype else b.cast(v, dtype=dtype) for v in values]


def _twice(target: str, first: str, second: str) -> Diagnostic:
    cause = f"{target} is stored twice, as {first[:120]} and as {second[:120]}"
    return Diagnostic("E324", cause, "save the model again with transformers 5, which stores each weight once")


def _unequal(target: str, values: list[Value]) -> Diagnostic:
    shapes = sorted({f"[{', '.join(map(str, v.type.shape))}]" for v in values})
    cause = f"{target} is assembled from parts of shapes {shortened(shapes)}"
    return Diagnostic("E325", cause, "fetch the checkpoint again")


_SAVE_AGAIN = "save the model again with transformers 5"
_OPERATIONS: Mapping[str, Any] = MappingProxyType(
    {
        "MergeModulelist": _stack,
        "Concatenate": _concatenate,
        "Alternate": _alternate,
        "Chunk": _chunk,
        "Transpose": _transpose,
        "ErnieFuseAndSplitTextVisionExperts": _stack_in_parts,
    }
)
