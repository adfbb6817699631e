"""Recognizes latent attention (MLA), and absorbs the up-projection of keys and values into queries and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from llmc.ir.dim import D
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.ops.quantize import ENCODINGS
from llmc.passes.analysis import drop_ones, made_by, weight_only
from llmc.passes.base import Ctx, NodePass, NoMatch
from llmc.passes.rewrite import substitute

SWAP = (1, 0, 2)  # the permutation that exchanges tokens and heads


class Latent(NamedTuple):
    """The parts of latent attention.

    latent: [T, L], the input of the up-projection `weight` [heads * (plain + value), L]. rotary: [T, R], the part of
    the key that all heads share. plain, value: columns of a head's own part of the key, and of its value.
    """

    latent: Value
    weight: Value
    rotary: Value
    heads: int
    plain: int
    value: int


class Columns(NamedTuple):
    """The value source[:, :, start:stop], whose first two axes are exchanged if `swapped`."""

    source: Value
    start: int
    stop: int
    swapped: bool


@dataclass(frozen=True)
class AbsorbLatent(NodePass):
    """Replace attention whose keys and values are projections of a latent by latent_attention, over the latent itself.

    A head's key is a slice of the product of the latent and a weight, followed by a part that all heads share; its
    value is another slice of the product. Queries are multiplied by the keys' part of the weight instead, and results
    by the values' part (DeepSeek-AI 2024, arXiv 2405.04434), so that a KV pool holds a latent and one shared key per
    token. Applies to causal attention without a window, soft cap and sinks, if the pool becomes smaller. A quantised
    weight is dequantised at compile time. The pass runs after fuse-rope and before page-attention.
    """

    name: ClassVar[str] = "absorb-latent"

    ops: ClassVar[tuple[str, ...]] = ("attention",)

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite one node; return whether it was rewritten. It is a near miss only if its keys have a shared part."""
        if (parts := _key_parts(n.operands[1])) is None:
            return False
        problem = _latent(g, n, *parts)
        if not ctx.spend():
            return False
        ctx.hit(self.name, n)
        substitute(g, n, [_absorbed(Builder(g, ctx.opset, before=n, loc=n.loc), n, problem)], self.name)
        return True


def _untransposed(v: Value) -> tuple[Value, bool]:
    """Return `v` without transposes of tokens and heads, and whether these transposes swap the two axes."""
    swapped = False
    while (n := made_by(v, "transpose")) and tuple(n.attrs["perm"]) == SWAP:
        v, swapped = n.operands[0], not swapped
    return v, swapped


def _columns(v: Value) -> Columns | None:
    """Return the columns that `v` takes from another value of rank 3; None if it is not such a slice."""
    v, part_swapped = _untransposed(v)
    n = made_by(v, "slice")
    if n is None or n.attrs["axis"] % v.type.rank != 2 or v.type.rank != 3 or n.attrs["step"] != 1:
        return None
    start, stop = n.attrs["start"].const, n.attrs["stop"].const
    if start is None or stop is None:
        return None
    source, swapped = _untransposed(n.operands[0])
    return Columns(source, start, stop, part_swapped != swapped)


def _key_parts(k: Value) -> tuple[Value, Value] | None:
    """Return (a head's own part, the part that all heads share) of keys [T, heads, size]; None if no part is shared.

    The shared part has the shape [T, R], up to axes of size 1.
    """
    joined, swapped = _untransposed(k)
    n = made_by(joined, "concat")
    if n is None or len(n.operands) != 2 or n.attrs["axis"] % 3 != 2:
        return None
    plain, shared = n.operands
    tokens, heads = (joined.type.shape[i] for i in ((1, 0) if swapped else (0, 1)))
    while m := made_by(shared, "broadcast", "transpose", "reshape"):
        if drop_ones(shared.type.shape) == (tokens, shared.type.shape[-1]):
            break
        shared = m.operands[0]
    if drop_ones(shared.type.shape) != (tokens, k.type.shape[2] - plain.type.shape[2]) or heads.const in (None, 1):
        return None
    sizes = (tokens, heads) if not swapped else (heads, tokens)
    return (plain, shared) if plain.type.shape[:2] == sizes else None


def _latent(g: Graph, n: Node, plain: Value, rotary: Value) -> Latent:
    """Return the parts of an attention node whose keys are `plain` and `rotary`; raises NoMatch."""
    _check_attributes(n)
    key, value = _columns(plain), _columns(n.operands[2])
    _, swapped = _untransposed(n.operands[1])
    if key is None or value is None or key.source is not value.source or key.swapped != swapped or value.swapped:
        raise NoMatch("keys and values are not slices of the heads of one product")
    if key.start != 0 or key.stop != value.start or value.stop != key.source.type.shape[2]:
        raise NoMatch(f"columns {key.start}..{key.stop} of a head are its key, {value.start}..{value.stop} its value")
    heads = made_by(key.source, "reshape")
    product = made_by(heads.operands[0], "linear") if heads else None
    if product is None or product.result.type.rank != 2 or product.operands[1] not in weight_only(g):
        raise NoMatch("keys and values are not the heads of a product with a weight")
    latent, weight = product.operands
    if any(v.type.dtype != latent.type.dtype for v in (weight, rotary, *n.operands[:3])):
        raise NoMatch("queries, latent, shared key and weight have different dtypes")
    if weight.type.format is not None and made_by(weight, "assemble") is None:
        raise NoMatch(f"the quantised weight {weight.type} is computed from others")
    num_heads = int(n.operands[0].type.shape[1])
    problem = Latent(latent, weight, rotary, num_heads, plain=key.stop, value=value.stop - value.start)
    stored = int(latent.type.shape[1] + rotary.type.shape[-1])
    expanded = int(n.operands[1].type.shape[2])
    if key.source.type.shape[1] != problem.heads or stored >= 2 * problem.heads * expanded:
        raise NoMatch(f"{stored} numbers per token are not fewer than keys and values of {problem.heads} heads")
    return problem


def _check_attributes(n: Node) -> None:
    """Raise NoMatch for attention that latent_attention does not define."""
    if len(n.operands) > 4 or n.attrs["softcap"] or n.attrs["window"] or not n.attrs["causal"]:
        raise NoMatch("it has sinks, a soft cap or a window, or attends to later tokens")


def _absorbed(b: Any, n: Node, x: Latent) -> Value:
    """Build latent_attention and the products before and after it."""
    tokens, size = x.latent.type.shape[0], n.operands[0].type.shape[2]
    weight = _dequantized(b, x.weight)
    stack = b.reshape(weight, shape=[x.heads, x.plain + x.value, x.latent.type.shape[1]])
    keys = b.slice(stack, axis=1, start=D(0), stop=D(x.plain))
    values = b.slice(stack, axis=1, start=D(x.plain), stop=D(x.plain + x.value))
    latents = b.head_matmul(_cut(b, n.operands[0], 0, x.plain), keys)
    rotary = x.rotary
    if rotary.type.rank != 2:
        rotary = b.reshape(rotary, shape=[tokens, rotary.type.shape[-1]])
    key = b.concat(x.latent, rotary, axis=1)
    queries = _cut(b, n.operands[0], x.plain, int(size))
    mixed = b.latent_attention(latents, queries, key, n.operands[3], layer=n.attrs["layer"], scale=n.attrs["scale"])
    return b.head_matmul(mixed, b.transpose(values, perm=(0, 2, 1)))


def _dequantized(b: Any, weight: Value) -> Value:
    """Return the numbers of a weight in its logical dtype."""
    if weight.type.format is None:
        return weight
    n = made_by(weight, "assemble")
    assert n is not None
    a = n.attrs
    point = 0 if len(n.operands) > 2 else int(a["zero"] or 0)
    values = ENCODINGS.get(a["code"], "")
    return b.dequantize(*n.operands, block=a["block"], dtype=a["dtype"], zero_point=point, values=values)


def _cut(b: Any, q: Value, start: int, stop: int) -> Value:
    """Return the columns start .. stop of queries [T, heads, size].

    If the queries are a concatenation that has operands with exactly these columns, they are returned without a slice.
    """
    joined, swapped = _untransposed(q)
    n, at = made_by(joined, "concat"), 0
    if n is not None and n.attrs["axis"] % 3 == 2:
        parts = []
        for v in n.operands:
            width = int(v.type.shape[2])
            if start <= at and at + width <= stop:
                parts.append(v)
            at += width
        if sum(int(v.type.shape[2]) for v in parts) == stop - start:
            whole = parts[0] if len(parts) == 1 else b.concat(*parts, axis=2)
            inner, whole_swapped = _untransposed(whole)
            return b.transpose(inner, perm=SWAP) if whole_swapped != swapped else inner
    return b.slice(q, axis=2, start=D(start), stop=D(stop))
