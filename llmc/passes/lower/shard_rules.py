"""The propagation of a sharded axis through an op: the sharded axis of every operand and result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from llmc.ir.dim import Dim, product
from llmc.ir.graph import Node, Value
from llmc.ir.ops.moe import parts
from llmc.passes.analysis import is_pointwise


class Split(NamedTuple):
    """A value of which each rank holds one of `parts` equal parts along `axis`.

    Rank r of W holds part floor(r * parts / W), so that ranks share a part if there are fewer parts than ranks. The
    size of a part is a multiple of `unit`. A state that a rank fills by itself may have parts of another size, `width`.
    """

    axis: int
    parts: int
    unit: int = 1
    width: Dim | None = None

    def local(self, size: Dim) -> Dim:
        """Return the size of a part. If the size does not divide, the last parts end in zeros."""
        return size.ceildiv(self.parts * self.unit) * self.unit if self.width is None else self.width

    def divides(self, size: Dim) -> bool:
        """Whether no part ends in zeros."""
        return self.width is not None or size.divide(self.parts * self.unit) is not None


Splits = tuple[Split | None, ...]


@dataclass(frozen=True)
class Relation:
    """The splits of a node's operands and results; None: whole on every rank.

    partial: the result of each rank is a term of a sum, which all_reduce completes. halves: operands of which both
    halves of the axis are split, as are gate and up. bias: the operand that the sum must count once, not once per rank.
    """

    operands: Splits
    results: Splits
    partial: bool = False
    halves: tuple[int, ...] = ()
    bias: int | None = None


def relate(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    """Return the splits of a node that reads or makes `v` with the split `s`; None if the op cannot carry it."""
    rule = RULES.get(n.op.name)
    if rule is not None:
        return rule(n, v, s, ranks)
    if "axis" in n.op.attrs:
        return _along(n, v, s)
    if n.op.row_wise:
        return _rows(n, v, s)
    return _pointwise(n, v, s)


def splits_of(n: Node, r: Relation) -> list[tuple[Value, Split | None]]:
    """Return every operand and result with its split."""
    return [*zip(n.operands, r.operands, strict=True), *zip(n.results, r.results, strict=True)]


def is_elementwise(n: Node) -> bool:
    """Whether elements at different places do not interact."""
    return n.op.elementwise or is_pointwise(n)


def _pointwise(n: Node, v: Value, s: Split) -> Relation | None:
    """Split all values along the same axis: axes correspond from the last one; axes of size 1 are repeated."""
    if not is_elementwise(n):
        return None
    rank = n.results[0].type.rank
    at = s.axis + rank - v.type.rank
    if v.type.shape[s.axis] != n.results[0].type.shape[at]:
        return None
    operands = tuple(_aligned(x, at - rank, s) for x in n.operands)
    return Relation(operands, (s._replace(axis=at),) * len(n.results))


def _aligned(x: Value, from_end: int, s: Split) -> Split | None:
    axis = x.type.rank + from_end
    return s._replace(axis=axis) if axis >= 0 and x.type.shape[axis] != 1 else None


def _rows(n: Node, v: Value, s: Split) -> Relation | None:
    """Split a row-wise op along one of the leading axes `*b`, which some operands and all results have."""
    slots = n.op.slots([x.type for x in n.operands])
    last = len(slots) - 1  # the slot of all further operands, if it is variadic
    has_rows = [n.op.leading(slots[min(i, last)]) is not None for i in range(len(n.operands))]
    rank_of_rows = n.operands[0].type.rank - len(n.op.operands[0].dims) + 1
    if s.axis >= rank_of_rows:
        return None
    if v not in n.results and not has_rows[n.operands.index(v)]:
        return None
    return Relation(tuple(s if rows else None for rows in has_rows), (s,) * len(n.results))


def _along(n: Node, v: Value, s: Split) -> Relation | None:
    """Split an op along any axis but its attribute `axis`."""
    ranks = {x.type.rank for x in [*n.operands, *n.results]}
    if len(ranks) != 1 or n.attrs["axis"] % v.type.rank == s.axis:
        return None
    return Relation((s,) * len(n.operands), (s,) * len(n.results))


def _linear(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    """Split by columns if the last axis of the result is split, by rows if that of x is."""
    x, w = n.operands
    last = x.type.rank - 1
    if v is n.result and s.axis == last:
        return Relation((None, s._replace(axis=0)), (s,))
    if v is x and (s.axis, s.parts) == (last, ranks):
        return Relation((s, s._replace(axis=w.type.rank - 1)), (None,), partial=True)
    return _rows(n, v, s)


def _reshape(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    """Return the axis of the other value with the same number of elements before it, if the ranks divide its size."""
    (x,), y = n.operands, n.result
    other = y if v is x else x
    before = product(v.type.shape[: s.axis])
    for axis, size in enumerate(other.type.shape):
        if product(other.type.shape[:axis]) == before and size != 1:
            if size.divide(s.parts) is None or not s.divides(v.type.shape[s.axis]):
                return None
            t = Split(axis, s.parts)
            return Relation((s,), (t,)) if v is x else Relation((t,), (s,))
    return None


def _transpose(n: Node, v: Value, s: Split, ranks: int) -> Relation:
    perm = n.attrs["perm"]
    if v is n.result:
        return Relation((s._replace(axis=perm[s.axis]),), (s,))
    return Relation((s,), (s._replace(axis=perm.index(s.axis)),))


def _broadcast(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    (x,), y = n.operands, n.result
    at = s.axis + y.type.rank - v.type.rank
    if v.type.shape[s.axis] != y.type.shape[at]:
        return None
    return Relation((_aligned(x, at - y.type.rank, s),), (s._replace(axis=at),))


def _rope(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    if s.axis != 1 or not (v is n.operands[0] or v is n.result):
        return None
    return Relation((s, *(None,) * (len(n.operands) - 1)), (s,))


# The axis of the heads of each operand and result of attention: those of the query, or those of the keys and values.
QUERY_HEADS = MappingProxyType({"q": 1, "rotary": 1, "sinks": 0, "slopes": 0})
KV_HEADS = MappingProxyType({"k": 1, "v": 1, "kv": 2, "scales": 0})
EXPANDED = ("attention", "paged_attention", "alibi_attention", "paged_alibi_attention")  # keys of each head or group
LATENT = ("latent_attention", "paged_latent_attention")  # all heads share one key: every rank has the whole pool


def kv_parts(n: Node, ranks: int) -> int | None:
    """Return into how many parts the heads of keys and values are split; None if neither number divides the other."""
    if n.op.name in LATENT:
        return 1
    name, k = next((name, v) for name in ("k", "kv") if (v := n.operand(name)) is not None)
    heads = int(k.type.shape[KV_HEADS[name]])
    if heads % ranks == 0:
        return ranks
    return heads if ranks % heads == 0 else None


def heads_of(n: Node, ranks: int) -> Relation | None:
    """Return the relation of attention that is split by heads; None if the heads do not divide."""
    parts = kv_parts(n, ranks)
    if parts is None or n.operands[0].type.shape[1].divide(ranks) is None:
        return None
    splits: dict[str, Split | None] = {name: Split(axis, ranks) for name, axis in QUERY_HEADS.items()}
    splits |= {name: Split(axis, parts) if parts > 1 else None for name, axis in KV_HEADS.items()}
    at = n.op.places([x.type for x in n.operands])
    scaled = parts > 1 and n.operand("scales") is not None
    halves = (at["scales"],) if scaled else ()  # scales of the keys, then of the values
    return Relation(tuple(splits.get(name) for name in at), (Split(1, ranks),), halves=halves)


def _head_matmul(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    """Split by heads, of which a rank has its own weights."""
    heads = Split(1, s.parts)
    if s.axis != (0 if v is n.operands[1] else 1):
        return None
    return Relation((heads, Split(0, s.parts)), (heads,))


def _kv_append(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    if s.axis != (2 if v.type.state else 1):
        return None
    pool, heads = Split(2, s.parts), Split(1, s.parts)
    scales = (Split(0, s.parts),) * (len(n.operands) - 4)
    return Relation((pool, heads, heads, None, *scales), (pool,), halves=tuple(range(4, len(n.operands))))


def experts_of(n: Node, ranks: int, unit: int = 1) -> Relation | None:
    """Return the relation of a mixture whose experts are split by columns, in multiples of `unit`; None if they are
    quantised and do not divide."""
    down, bias = n.operand("down"), n.operand("down_bias")
    assert down is not None
    if down.type.shape[2].divide(ranks) is None and down.type.format is not None:
        return None
    at = n.op.places([x.type for x in n.operands])
    split = {at["gate_up"]: Split(1, ranks, unit), at["down"]: Split(2, ranks, unit)}
    ups = [at["gate_up"]]
    if bias is not None:
        split[at["gate_bias"]] = Split(1, ranks, unit)
        ups.append(at["gate_bias"])
    operands = tuple(split.get(i) for i in range(len(n.operands)))
    halves = tuple(ups) if parts(n.attrs["body"]) == 2 else ()
    return Relation(operands, (None,), True, halves, at.get("down_bias"))


CONVS = ("causal_conv", "row_conv")
CHANNELS = MappingProxyType({"x": 1, "weight": 0, "bias": 0, "recent": 2})  # the axis of the channels of each operand
RECURRENCES = ("linear_recurrence", "row_recurrence", "row_recurrence_draft")


def recurrence_of(n: Node, ranks: int) -> Relation | None:
    """Return the relation of a recurrence, or of its log, that is split by heads; None if the heads do not divide.

    If there are fewer heads of keys than ranks, ranks share them.
    """
    k, v, decay = (x for name in ("k", "v", "decay") if (x := n.operand(name)) is not None)
    (_, keys, d), (_, values, e) = k.type.shape, v.type.shape
    parts = ranks if keys.divide(ranks) is not None else int(keys)
    if values.divide(ranks) is None or ranks % parts:
        return None
    heads = Split(1, ranks)
    width = heads.local(values) * (e + 1) + heads.local(decay.type.shape[1]) + keys.ceildiv(parts) * d
    log = Split(2, ranks, width=width)
    splits: dict[str, Split | None] = dict.fromkeys(("v", "decay", "beta", "memory"), heads)
    splits |= dict.fromkeys(("q", "k"), Split(1, parts) if parts > 1 else None) | {"log": log}
    operands = tuple(splits.get(name) for name in n.op.places([x.type for x in n.operands]))
    return Relation(operands, (None, log) if n.op.name == "row_log" else (heads,) * len(n.results))


def _conv(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    """Split by channels."""
    of_operands = [CHANNELS.get(name) for name in n.op.places([x.type for x in n.operands])]
    of_results = [1, 2][: len(n.results)]  # the result, and the next version of `recent`
    axis = of_results[n.results.index(v)] if v in n.results else of_operands[n.operands.index(v)]
    if axis != s.axis:
        return None
    operands = tuple(None if axis is None else s._replace(axis=axis) for axis in of_operands)
    return Relation(operands, tuple(s._replace(axis=axis) for axis in of_results))


def _sum(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
    """Split a sum: along the split axis, the sum of a rank is a term of the result."""
    if v is n.operands[0] and (s.axis, s.parts) == (n.attrs["axis"] % v.type.rank, ranks):
        return Relation((s,), (None,), partial=True)
    return _along(n, v, s)


Rule = Callable[[Node, Value, Split, int], Relation | None]


def _by_heads(relation_of: Callable[[Node, int], Relation | None]) -> Rule:
    """Return the rule of an op that has one relation for a number of ranks."""

    def rule(n: Node, v: Value, s: Split, ranks: int) -> Relation | None:
        r = relation_of(n, ranks)
        return r if r and (v, s) in splits_of(n, r) else None

    return rule


RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        "linear": _linear,
        "reshape": _reshape,
        "transpose": _transpose,
        "broadcast": _broadcast,
        "rope": _rope,
        **dict.fromkeys((*EXPANDED, *LATENT), _by_heads(heads_of)),
        "head_matmul": _head_matmul,
        "kv_append": _kv_append,
        **dict.fromkeys((*RECURRENCES, "row_log"), _by_heads(recurrence_of)),
        **dict.fromkeys(CONVS, _conv),
        "sum": _sum,
        "moe": lambda n, v, s, ranks: None,
    }
)
