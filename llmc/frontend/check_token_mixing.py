"""Checks that tokens of a traced graph interact only in attention, because prompts are packed into one axis."""

from __future__ import annotations

from llmc.diagnostics import Diagnostic
from llmc.ir.dim import product
from llmc.ir.graph import Graph, Node
from llmc.ir.types import Type

TOKENS = "T"


def check_tokens(g: Graph, architecture: str) -> None:
    """Raise Diagnostic E305 for the first node of @main whose result for a token depends on other tokens.

    Depending on the token's index among the packed tokens is an error, too. The attention op and the selection of the
    `last` tokens are exempt.
    """
    for n in g.nodes:
        if why := _mixes(n):
            raise Diagnostic(
                "E305",
                f"{architecture} joins tokens outside of transformers' AttentionInterface: {n.op.name} {why}",
                "only causal attention through that interface, with or without a sliding window, is supported",
                loc=n.loc,
            )


def _mixes(n: Node) -> str:
    """Describe how a node combines tokens; "" if it does not."""
    name = n.op.name
    for v in (*n.operands, *n.results):
        if len(_axes(v.type)) > 1:
            return f"handles {v.type}, a value for each pair of tokens"
    if name == "iota" and _axes(n.result.type):
        return f"counts the {n.result.type.shape[0]} packed tokens"
    if axes := n.op.axes(n.attrs):
        x = n.operands[0].type
        if any(axis % x.rank in _axes(x) for axis in axes):
            return f"works along the tokens of {x}"
    if name == "take" and 0 in _axes(n.operands[0].type) and TOKENS in _symbols(n.operands[1].type):
        return f"looks tokens of {n.operands[0].type} up by number"
    if name == "reshape" and not _in_order(n.operands[0].type, n.result.type):
        return f"makes {n.result.type} of {n.operands[0].type}"
    return ""


def _symbols(t: Type) -> set[str]:
    return {s for d in t.shape for s in d.symbols}


def _axes(t: Type) -> list[int]:
    """Return the axes whose size depends on the number of tokens."""
    return [i for i, d in enumerate(t.shape) if TOKENS in d.symbols]


def _in_order(a: Type, b: Type) -> bool:
    """Whether a reshape keeps each token's elements contiguous and in the same place."""
    i, j = _axes(a), _axes(b)
    return not i or product(a.shape[: i[0]]) == product(b.shape[: j[0]])
