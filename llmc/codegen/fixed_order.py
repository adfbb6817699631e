"""The choice of kernels under --deterministic: all entry points sum the elements of a value in the same order.

A kernel names the order of its sums (`Kernel.reduction_order`). A node is the same computation in the graph of prompts,
in those of decoding and in those that verify drafts, if op, module and weights (or, without any, the size of a row) are
the same; all of them use one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from llmc.codegen.kernel import EXACT, Kernel, Schedule
from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Graph, Node
from llmc.targets.target import Target

Orders = dict[str, float]  # the order of sums -> time of the best candidate with it, relative to the best of all
Key = tuple[str, str, tuple[str, ...]]  # op, module, and weights or the size of a row
ATTENTION = ("paged_attention", "paged_attention_parts")  # one computation, whole or in parts
FAMILIES = ("step", "decode", "verify")  # prefixes of the names of the model's own entry points


class Member(NamedTuple):
    """A node of a computation, the name of its graph, and the orders that its kernels offer."""

    graph: str
    node: Node
    orders: Orders


def order_of(kernel: Kernel, node: Node, schedule: Schedule, target: Target) -> str | None:
    """Return `Kernel.reduction_order`; raises Diagnostic E427 for an error in the code of an extension."""
    with extension_code(f"kernel {kernel.name!r}", type(kernel), node):
        order = kernel.reduction_order(node, schedule, target)
        if not isinstance(order, str | None):
            raise TypeError(f"order returned {order!r}, not a text or None")
        return order


def agreed_orders(members: Sequence[tuple[Graph, Node, Orders]]) -> dict[Key, str]:
    """Return the order of every computation: of those that all of its nodes support, the fastest.

    Raises Diagnostic E442 if there is none, and E443 if an entry point lacks a computation that another one has.
    """
    by_key: dict[Key, list[Member]] = {}
    for g, n, orders in members:
        by_key.setdefault(key_of(g, n), []).append(Member(g.name, n, orders))
    entry_points = {g.name for g, _, _ in members if _is_own(g.name)}
    agreed = {}
    for key, equal in by_key.items():
        agreed[key] = _fastest(equal)
        if agreed[key] != EXACT and _is_own(equal[0].graph):
            _check_everywhere(equal, entry_points)
    return agreed


def key_of(g: Graph, n: Node) -> Key:
    """Return the key that the nodes of one computation share in all entry points."""
    # A draft model does not change tokens, so its graphs may differ.
    prefix = "" if _is_own(g.name) else f"{g.name} "
    if n.op.name in ATTENTION:  # a sink is an operand of attention_combine if there are parts
        return prefix + ATTENTION[0], n.loc, ()
    weights = tuple(v.name for v in n.operands if v.weight)
    return prefix + n.op.name, n.loc, weights or tuple(str(v.type.shape[-1]) for v in n.operands[:1] if v.type.rank)


def _is_own(graph: str) -> bool:
    """Whether a graph is an entry point of the model itself."""
    return graph.startswith(FAMILIES)


def _fastest(members: Sequence[Member]) -> str:
    """Return the order with the smallest sum of relative times; raises Diagnostic E442 if none is common to all."""
    first = members[0]
    common = [order for order in first.orders if all(order in m.orders for m in members)]
    if common:
        return min(common, key=lambda order: sum(m.orders[order] for m in members))
    other = next(m for m in members if not set(m.orders) & set(first.orders))
    cause = (
        f"kernels of @{first.graph} add in the orders {_list(first.orders)}, "
        f"those of @{other.graph} in {_list(other.orders)}"
    )
    raise Diagnostic("E442", f"--deterministic: {cause}", "compile without --deterministic", node=other.node)


def _check_everywhere(members: Sequence[Member], graphs: Iterable[str]) -> None:
    """Raise Diagnostic E443 if a graph has no node of the computation."""
    if missing := sorted(set(graphs) - {m.graph for m in members}):
        graph, node, _ = members[0]
        cause = f"--deterministic: @{graph} computes a {node.op.name} that @{missing[0]} computes by other ops"
        remedy = "leave passes out of --pipeline that depend on the number of tokens, such as split-kv"
        raise Diagnostic("E443", cause, remedy, node=node)


def _list(orders: Mapping[str, float]) -> str:
    return ", ".join(sorted(orders))
