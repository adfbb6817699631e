"""The IR verifier. Checks definition order, use lists, type rules, symbol bounds and uses of overwritten states."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.ir.signature import Mismatch

REMEDY = "correct the text or the pass that produced it (llmc opt FILE -p PASSES --print-after all)"


def verify(m: Module) -> None:
    """Raise Diagnostic E402 for the first broken invariant, naming the graph, op and module path."""
    for g in m.graphs.values():
        verify_graph(g, m)


def verify_graph(g: Graph, m: Module) -> None:
    """Verify one graph of module `m`; raises Diagnostic E402."""
    _check_symbols(g, m)
    seen = set(g.inputs)
    overwritten_by: dict[Value, Node] = {}
    if len(seen) != len(g.inputs) or len({v.name for v in g.inputs}) != len(g.inputs):
        raise Diagnostic("E402", f"@{g.name}: two inputs share a name", "give every input a different name")
    for n in g.nodes:
        for v in n.operands:
            _check_operand(g, n, v, seen, overwritten_by)
        _check_types(g, n)
        for slot, v in zip(n.op.operands, n.operands, strict=False):
            if slot.name in n.op.writes:
                overwritten_by[v] = n
        seen |= set(n.results)
    _check_outputs(g, seen, overwritten_by)
    _check_uses(g)


def _described(v: Value) -> str:
    """Return a value's name, or the op that computes it: new values are named when the module is printed."""
    if v.name or v.node is None:
        return f"%{v.name}"
    return f"the result of {v.node.op.name} ({v.node.loc or 'no loc'})"


def _broken(g: Graph, n: Node, why: str) -> Diagnostic:
    return Diagnostic("E402", f"@{g.name}: {n.op.name} ({n.loc or 'no loc'}): {why}", REMEDY)


def _check_symbols(g: Graph, m: Module) -> None:
    """Raise Diagnostic E402 if a type has an undeclared symbol, or if a range of the graph exceeds the symbol's."""
    for symbol, (low, high) in g.ranges.items():
        minimum, maximum = m.symbols.get(symbol, (1, 0))
        if not minimum <= low <= high <= maximum:
            cause = f"@{g.name}: {symbol} in [{low}, {high}] is not inside the symbol's bounds"
            raise Diagnostic("E402", cause, f"declare it with these bounds: sym {symbol} in [{low}, {high}]")
    for v in g.values:
        used = {symbol for size in v.type.shape for symbol in size.symbols}
        if undeclared := sorted(used - m.symbols.keys()):
            cause = f"@{g.name}: {_described(v)} has the undeclared symbol {undeclared[0]}"
            raise Diagnostic("E402", cause, f"declare it: sym {undeclared[0]} in [LOW, HIGH]")


def _check_operand(g: Graph, n: Node, v: Value, seen: set[Value], overwritten_by: dict[Value, Node]) -> None:
    if v not in seen:
        raise _broken(g, n, f"{_described(v)} is used before it is computed")
    if v in overwritten_by:
        raise _broken(g, n, f"{_described(v)} was overwritten by {overwritten_by[v].op.name}; read its new version")


def _check_types(g: Graph, n: Node) -> None:
    try:
        inferred = n.op.infer_types([v.type for v in n.operands], n.op.normal_attrs(n.attrs))
    except Mismatch as e:
        raise _broken(g, n, str(e)) from None
    if inferred != [r.type for r in n.results]:
        rule = ", ".join(map(str, inferred))
        raise _broken(g, n, f"the type rule gives {rule}, the results are {', '.join(str(r.type) for r in n.results)}")


def _check_outputs(g: Graph, defined: Collection[Value], overwritten_by: Mapping[Value, Node]) -> None:
    """Raise Diagnostic E402 for an output that is not defined, or a state of which a node makes the next version."""
    for v in g.outputs:
        if v not in defined:
            raise Diagnostic("E402", f"@{g.name}: output {_described(v)} is never computed", REMEDY)
        if (writer := overwritten_by.get(v)) is not None:
            raise Diagnostic("E402", f"@{g.name}: output {_described(v)} was overwritten by {writer.op.name}", REMEDY)


def _check_uses(g: Graph) -> None:
    """Check that every use list has exactly one entry per operand position that reads the value."""
    readers: dict[Value, list[Node]] = {}
    for n in g.nodes:
        for v in n.operands:
            readers.setdefault(v, []).append(n)
    for v in g.values:
        if sorted(map(id, v.uses)) != sorted(map(id, readers.get(v, []))):
            raise Diagnostic("E402", f"@{g.name}: the use list of {_described(v)} does not match its readers", REMEDY)
        if v.node is not None and v not in v.node.results:
            raise Diagnostic("E402", f"@{g.name}: {_described(v)} does not belong to its node", REMEDY)
