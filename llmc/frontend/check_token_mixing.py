"""Checks that tokens of a traced graph interact only in attention, because prompts are packed into one axis."""

from __future__ import annotations

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph
from llmc.ir.token_axes import mixing_of


def check_tokens(g: Graph, architecture: str) -> None:
    """Raise Diagnostic E305 for the first node of @main whose result for a token depends on other tokens.

    Depending on the token's index among the packed tokens is an error, too. The attention op and the selection of the
    `last` tokens are exempt.
    """
    for n in g.nodes:
        if why := mixing_of(n):
            raise Diagnostic(
                "E305",
                f"{architecture} joins tokens outside of transformers' AttentionInterface: {n.op.name} {why}",
                "only causal attention through that interface, with or without a sliding window, is supported",
                loc=n.loc,
            )
