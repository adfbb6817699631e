"""Which axes of values count the packed tokens of a step or prompt, and which ops combine tokens."""

from __future__ import annotations

from llmc.ir.dim import product
from llmc.ir.graph import Node
from llmc.ir.types import Type

TOKENS = "T"  # the symbol of the number of packed tokens


def token_axes(t: Type) -> list[int]:
    """Return the axes whose size depends on the number of tokens."""
    return [i for i, d in enumerate(t.shape) if TOKENS in d.symbols]


def mixing_of(n: Node) -> str:
    """Describe how a node other than attention combines tokens; "" if each token's result depends only on that token.

    Depending on the token's index among the packed tokens counts as combining them.
    """
    name = n.op.name
    for v in (*n.operands, *n.results):
        if len(token_axes(v.type)) > 1:
            return f"handles {v.type}, a value for each pair of tokens"
    if name == "iota" and token_axes(n.result.type):
        return f"counts the {n.result.type.shape[0]} packed tokens"
    if axes := n.op.axes(n.attrs):
        x = n.operands[0].type
        if any(axis % x.rank in token_axes(x) for axis in axes):
            return f"works along the tokens of {x}"
    if name == "take" and 0 in token_axes(n.operands[0].type) and TOKENS in _symbols(n.operands[1].type):
        return f"looks tokens of {n.operands[0].type} up by number"
    if name == "reshape" and not _in_order(n.operands[0].type, n.result.type):
        return f"makes {n.result.type} of {n.operands[0].type}"
    return ""


def _symbols(t: Type) -> set[str]:
    return {s for d in t.shape for s in d.symbols}


def _in_order(a: Type, b: Type) -> bool:
    """Whether a reshape keeps each token's elements contiguous and in the same place."""
    i, j = token_axes(a), token_axes(b)
    return not i or product(a.shape[: i[0]]) == product(b.shape[: j[0]])
