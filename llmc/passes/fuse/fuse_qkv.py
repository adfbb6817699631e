"""Fuses everything between a layer's QKV product and its attention into one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.passes.analysis import made_by, only_reader
from llmc.passes.base import Ctx, NodePass
from llmc.passes.rewrite import NoMatch, sweep

RULE = "rope-append"


@dataclass(frozen=True)
class Part:
    """Heads sliced from a product, then normalized, then rotated. A missing step is None; `last` is the final value."""

    cut: Node
    norm: Node | None
    rope: Node | None
    last: Value

    @property
    def product(self) -> Value:
        """The product from which the heads are sliced."""
        return self.cut.operands[0]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the steps that exist, in order."""
        return [n for n in (self.cut, self.norm, self.rope) if n is not None]


@dataclass(frozen=True)
class FuseQkv(NodePass):
    """Fuse head norms, rotation and the append to the KV pool into rope_append.

    Applies if queries, keys and values are slices of one product. Runs after fuse-linear and fuse-norm; layers that do
    not match keep their ops.
    """

    name: ClassVar[str] = "fuse-qkv"
    ops: ClassVar[tuple[str, ...]] = ("kv_append",)

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite one kv_append, or record why the pattern does not match."""
        try:
            q, k, v = _parts(g, n)
            operands, attrs = _operands(n, q, k)
            before = _place(g, n, q, operands)
        except NoMatch as why:
            ctx.miss(RULE, n, str(why))
            return False
        if not ctx.spend():
            return False
        queries, appended = Builder(g, ctx.opset, before=before, loc=n.loc).rope_append(*operands, **attrs)
        for old, new in ((q.last, queries), (n.result, appended)):
            new.name = old.name
            g.replace(old, new)
        for end in (n, q.last.node, k.last.node, v.last.node):
            if end is not None:
                sweep(g, end)
        return True


def _trace_back(v: Value, subject: str) -> Part:
    """Follow keys or values from the append back to the slice they come from."""
    last = v
    rope = made_by(v, "rope")
    v = rope.operands[0] if rope else v
    norm = made_by(v, "rms_norm")
    v = norm.operands[0] if norm else v
    shaped = made_by(v, "reshape")
    cut = made_by(shaped.operands[0], "slice") if shaped else None
    if shaped is None or cut is None:
        producer = (shaped.operands[0] if shaped else v).node
        raise NoMatch(
            f"{subject} are computed by {producer.op.name if producer else 'the caller'}, not sliced from a product"
        )
    if cut.attrs["axis"] % 2 != 1 or cut.result.type.rank != 2 or cut.attrs["step"] != 1:
        raise NoMatch(f"{subject} are not consecutive columns")
    return Part(cut, norm, rope, last)


def _trace_forward(g: Graph, cut: Node) -> Part:
    """Follow the slice of the queries through reshape, norm and rotation."""
    v, norm, rope = _reader(g, cut.result, "reshape"), None, None
    if v is None or v.type.rank != 3:
        raise NoMatch("queries are not reshaped into heads")
    if (result := _reader(g, v, "rms_norm")) is not None:
        v, norm = result, result.node
    if (result := _reader(g, v, "rope")) is not None:
        v, rope = result, result.node
    return Part(cut, norm, rope, v)


def _reader(g: Graph, v: Value, op: str) -> Value | None:
    """Return the result of the only reader of `v`, if it is `op` with `v` as its first operand, else None."""
    n = only_reader(g, v)
    return n.result if n is not None and n.op.name == op and n.operands[0] is v else None


def _parts(g: Graph, n: Node) -> tuple[Part, Part, Part]:
    """Return the queries, keys and values of a kv_append; raises NoMatch if they do not match rope_append."""
    kv, keys, values, *_ = n.operands
    k, v = _trace_back(keys, "keys"), _trace_back(values, "values")
    if v.norm or v.rope:
        raise NoMatch(f"values pass through {(v.rope or v.norm or n).op.name}")
    if v.product is not k.product:
        raise NoMatch("keys and values are slices of two different products")
    columns = [u for u in k.product.uses if u.op.name == "slice" and u.attrs["axis"] % 2 == 1]
    first = [cut for cut in columns if cut.attrs["start"] == 0]
    if len(first) != 1 or first[0] in (k.cut, v.cut):
        raise NoMatch("the product has no slice of queries before those of keys and values")
    q = _trace_forward(g, first[0])
    _check_adjacent([part.cut for part in (q, k, v)], k.product)
    if q.last.type.shape[2] != kv.type.shape[4]:
        raise NoMatch(f"heads of queries have {q.last.type.shape[2]} elements, those of the pool {kv.type.shape[4]}")
    _same(q, k)
    _only_here(g, n, [*k.nodes, *v.nodes])
    return q, k, v


def _check_adjacent(cuts: Sequence[Node], product: Value) -> None:
    """Raise NoMatch unless the slices, in this order, are all columns of the product."""
    starts = [cut.attrs["start"] for cut in cuts]
    stops = [cut.attrs["stop"] for cut in cuts]
    width = product.type.shape[1]
    if [*starts, width] != [0, *stops]:
        spans = ", ".join(f"{start}..{stop}" for start, stop in zip(starts, stops, strict=True))
        raise NoMatch(f"the slices {spans} do not cover all {width} columns")


def _same(q: Part, k: Part) -> None:
    """Raise NoMatch unless queries and keys are normalized and rotated in the same way."""
    for state, a, b in (("normalized", q.norm, k.norm), ("rotated", q.rope, k.rope)):
        if (a is None) != (b is None):
            raise NoMatch(f"only {'keys' if a is None else 'queries'} are {state}")
        if a is not None and b is not None and a.attrs != b.attrs:
            raise NoMatch(f"queries and keys are {state} with different attributes")
    if q.rope and k.rope and q.rope.operands[1:] != k.rope.operands[1:]:
        raise NoMatch("queries and keys are rotated by different tables")
    if q.norm and not q.rope:
        raise NoMatch("heads are normalized but not rotated")


def _only_here(g: Graph, n: Node, nodes: list[Node]) -> None:
    """Raise NoMatch if a node to be replaced has other readers than the replaced nodes."""
    for part in nodes:
        v = part.result
        while v.uses and v.uses[0].op.name == "reshape" and len(v.uses) == 1:
            v = v.uses[0].result
        if only_reader(g, v) not in (n, *nodes):
            raise NoMatch(f"the result of {part.op.name} has other readers, too")


def _place(g: Graph, n: Node, q: Part, operands: Sequence[Value]) -> Node:
    """Return the first of the append and the queries' readers; raises NoMatch if an operand is computed only later."""
    ends = {n, *q.last.uses}
    producers = {o.node for o in operands if o.node is not None}
    for other in g.nodes:
        if other in ends:
            break
        producers.discard(other)
    if producers:
        raise NoMatch(f"queries are read before {producers.pop().op.name} is computed")
    return other


def _operands(n: Node, q: Part, k: Part) -> tuple[list[Value], dict[str, Any]]:
    """Return the operands and attributes of the rope_append."""
    kv, _, _, *rest = n.operands  # slots and, of 8-bit pools, scales
    operands = [k.product, kv, *rest]
    attrs = {"heads": int(q.last.type.shape[1]), "dtype": k.product.type.dtype}
    if q.rope and k.rope:
        operands += q.rope.operands[1:]
        attrs["interleaved"] = q.rope.attrs["interleaved"]
    if q.norm and k.norm:
        operands += [q.norm.operands[1], k.norm.operands[1]]
        attrs["eps"] = q.norm.attrs["eps"]
    return operands, attrs
