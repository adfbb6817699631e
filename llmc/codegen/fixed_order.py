"""The choice of kernels under --deterministic: all entry points sum the elements of a value in the same order.

A kernel names the order of its sums (`Kernel.reduction_order`). A node is the same computation in the graph of prompts,
in those of decoding and in those that verify drafts, if op, module and weights are the same; all of them use one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llmc.codegen.kernel import EXACT, Kernel, Schedule
from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Graph, Node
from llmc.targets.target import Target

Orders = dict[str, float]  # the order of sums -> time of the best candidate with it, relative to the best of all
Key = tuple[str, str, tuple[str, ...]]  # op, module, weights
Member = tuple[str, Node, Orders]  # the graph's name, the node, its orders
ATTENTION = ("paged_attention", "paged_attention_parts")  # one computation, whole or in parts
FAMILIES = ("step", "decode", "verify")  # prefixes of the names of the model's own entry points


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
        by_key.setdefault(key_of(g, n), []).append((g.name, n, orders))
    kinds = {g.name for g, _, _ in members if _kind(g.name)}
    agreed = {}
    for key, equal in by_key.items():
        agreed[key] = _fastest(equal)
        if agreed[key] != EXACT and _kind(equal[0][0]):
            _check_everywhere(equal, kinds)
    return agreed


def key_of(g: Graph, n: Node) -> Key:
    """Return the key that the nodes of one computation share in all entry points."""
    kind = "" if _kind(g.name) else f"{g.name} "  # drafts do not change tokens: a draft model's graphs need not agree
    if n.op.name in ATTENTION:  # a sink is an operand of attention_combine if there are parts
        return kind + ATTENTION[0], n.loc, ()
    return kind + n.op.name, n.loc, tuple(v.name for v in n.operands if v.weight)


def _kind(graph: str) -> bool:
    """Whether a graph is an entry point of the model itself."""
    return graph.startswith(FAMILIES)


def _fastest(members: Sequence[Member]) -> str:
    """Return the order with the smallest sum of relative times; raises Diagnostic E442 if none is common to all."""
    total = {o: sum(m[2][o] for m in members) for o in members[0][2] if all(o in m[2] for m in members)}
    if total:
        return min(total, key=lambda o: total[o])
    graph, node, orders = next(m for m in members if not set(m[2]) & set(members[0][2]))
    cause = (
        f"kernels of @{members[0][0]} add in the orders {_list(members[0][2])}, those of @{graph} in {_list(orders)}"
    )
    raise Diagnostic("E442", f"--deterministic: {cause}", "compile without --deterministic", node=node)


def _check_everywhere(members: Sequence[Member], graphs: Iterable[str]) -> None:
    """Raise Diagnostic E443 if a graph has no node of the computation."""
    have = {name for name, _, _ in members}
    if missing := sorted(set(graphs) - have):
        graph, node, _ = members[0]
        cause = f"--deterministic: @{graph} computes a {node.op.name} that @{missing[0]} computes by other ops"
        remedy = "leave passes out of --pipeline that depend on the number of tokens, such as split-kv"
        raise Diagnostic("E443", cause, remedy, node=node)


def _list(orders: Mapping[str, float]) -> str:
    return ", ".join(sorted(orders))
