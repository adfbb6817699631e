"""Entry points: one graph per kind of call, each with the symbol ranges that distinguish its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc_runtime.format.pooling import POOLED
from llmc_runtime.format.program import DRAFT_PREFIX, FILL, FIRST, NEXT, PLAIN, PLAIN_STEP

from llmc.ir.dim import Dim, DimLike
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.passes.analysis import made_by, same_type
from llmc.passes.base import Ctx, Pass
from llmc.passes.lower.page_attention import DRAFT, HIDDEN_POOL
from llmc.passes.rewrite import substitute


@dataclass(frozen=True)
class Specialize(Pass):
    """Make @step (any number of tokens per row) and @decode (one token per row: T equals R) from @main.

    If @main accepts drafted tokens, it also becomes @verify: every entry has one token, and adjacent entries of a row
    verify its drafts; @decode verifies none. If @main pools, there is only @step.

    A draft model, @draft, becomes @draft_fill (any number of tokens per row, whose KV it computes), @draft_first (the
    last two tokens of each row, one per entry) and @draft_next (one token per row). A head needs no @draft_fill, since
    the steps of @main compute its KV, and its @draft_first has only the last token of each row. For steps after which
    no row drafts, @decode_plain is @decode with zeros as the head's entries.

    decode: upper bounds of row ranges that get a graph of their own; [1, 16] gives the ranges 1, 2 to 16, and 17 or
      more. A range of a single number replaces the symbol by that number.
    step, verify: the same for ranges of tokens, and of entries.
    plain_step: whether to make @step_plain, which is @step with zeros as the head's entries, for prompts of rows that
      will not draft soon.
    """

    decode: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    verify: tuple[int, ...] = ()
    plain_step: bool = False
    name: ClassVar[str] = "specialize"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Replace @main and @draft, if they exist, by their entry points.

        Returns the number of graphs and of changes in them.
        """
        steps = [m.graphs[name] for name in ("main", DRAFT) if name in m.graphs]
        if not steps or "rows" not in {v.name for v in steps[0].inputs} or not ctx.spend():
            return 0
        main = m.graphs.pop("main", None)
        count = self._draft(m, ctx) if DRAFT in m.graphs else 0
        return count if main is None else count + self._main(m, main, ctx)

    def _main(self, m: Module, main: Graph, ctx: Ctx) -> int:
        """Make the entry points of a model; return the number of graphs and of changes in them."""
        count = 0
        for name, bounds in ranges("step", m.symbols["T"], self.step):
            _entry(m, main, name, "T", bounds, {})
            count += 1
        if self.plain_step and any(v.name == HIDDEN_POOL for v in main.inputs):
            _drop_head(_entry(m, main, PLAIN_STEP, "T", m.symbols["T"], {}), ctx)
            count += 1
        for kind, limits, ends in self._kinds(main, m.symbols["R"]):
            for name, bounds in ranges(kind, limits, ends):
                entry = _one_token_entry(m, main, name, bounds)
                count += 1 + _drop_row_last(entry)
                if kind in ("decode", PLAIN):
                    _drop_drafts(entry, ctx)
                if kind == PLAIN:
                    _drop_head(entry, ctx)
        return count

    def _kinds(self, main: Graph, entries: tuple[int, int]) -> list[tuple[str, tuple[int, int], tuple[int, ...]]]:
        """Return (name, bounds of R, upper bounds of ranges) of the entry points that have one token per entry."""
        decode = (_device_rows(main, entries), self.decode)
        kinds = [] if any(v.name == POOLED for v in main.outputs) else [("decode", *decode)]
        if any(n.op.name == "row_accept" for n in main.nodes):
            kinds.append(("verify", entries, self.verify))
        if any(v.name == HIDDEN_POOL for v in main.inputs):
            kinds.append((PLAIN, *decode))
        return kinds

    def _draft(self, m: Module, ctx: Ctx) -> int:
        """Make the entry points of a draft model; return the number of graphs."""
        draft = m.graphs.pop(DRAFT)
        is_head = any(v.name == HIDDEN_POOL for v in draft.inputs)
        count = 0
        for role, limits, ends in self._draft_kinds(m, draft, is_head):
            for name, bounds in ranges(role, limits, ends):
                entry = _draft_entry(m, draft, role, name, bounds)
                if role == FIRST and is_head:
                    _begin_last(entry)
                elif role == FIRST:
                    _rewind(entry, ctx)
                entry.inputs = [v for v in entry.inputs if v.uses]
                count += 1
        return count

    def _draft_kinds(
        self, m: Module, draft: Graph, is_head: bool
    ) -> list[tuple[str, tuple[int, int], tuple[int, ...]]]:
        """Return (role, bounds of the symbol, upper bounds of ranges) of a draft model's entry points."""
        tokens, entries = m.symbols["T"], m.symbols["R"]
        one_per_row = (_device_rows(draft, entries), self.decode)
        if is_head:
            return [(FIRST, *one_per_row), (NEXT, *one_per_row)]
        return [(FILL, tokens, self.step), (FIRST, entries, self.verify), (NEXT, *one_per_row)]


def _entry(m: Module, g: Graph, name: str, symbol: str, bounds: tuple[int, int], sizes: Mapping[str, Dim]) -> Graph:
    """Add a copy of `g`, with these sizes in place of symbols, for the calls in which `symbol` is within `bounds`."""
    entry = m.graphs[name] = substituted(g, name, sizes)
    entry.ranges = {} if bounds == m.symbols[symbol] else {symbol: bounds}
    return entry


def _one_token_entry(m: Module, g: Graph, name: str, bounds: tuple[int, int]) -> Graph:
    """Add a copy of `g` for calls with one token per entry: T is R, and a number if `bounds` has a single one."""
    rows = Dim.of(bounds[0] if bounds[0] == bounds[1] else "R")
    return _entry(m, g, name, "R", bounds, {"T": rows, "R": rows})


def _draft_entry(m: Module, draft: Graph, role: str, name: str, bounds: tuple[int, int]) -> Graph:
    """Add a copy of a draft model's graph for the calls of one role."""
    if role == FILL:
        entry = _entry(m, draft, name, "T", bounds, {})
        _only_pools(entry)
    else:
        entry = _one_token_entry(m, draft, name, bounds)
        _drop_row_last(entry)
    _name_inputs(entry, role)
    return entry


def _name_inputs(g: Graph, role: str) -> None:
    """Give the inputs of a step the names of a role, since every role has its own."""
    for v in g.inputs:
        if not v.type.state and not v.weight:
            v.name = f"{role}.{v.name}"


def _only_pools(g: Graph) -> None:
    """Reduce a graph to the KV that it writes."""
    g.outputs = [v for v in g.outputs if not made_by(v, "row_extend", "row_logprobs")]
    g.erase_unused()


def _spans(g: Graph) -> tuple[Node, Value]:
    """Return the row_spans of a draft model's graph, and the input row.length, which is added if it is missing."""
    spans = next(n for n in g.nodes if n.op.name == "row_spans")
    length = next((v for v in g.inputs if v.name == "row.length"), None)
    return spans, length or g.input("row.length", spans.operands[2].type)


def _rewind(g: Graph, ctx: Ctx) -> None:
    """Begin one token before the last computed one of each row."""
    spans, length = _spans(g)
    reach = spans.operands[2]
    users = dict.fromkeys(reach.uses)
    start = Builder(g, ctx.opset, before=spans, loc=spans.loc).row_rewind(reach, length, spans.operands[0])
    for n in users:
        g.set_operands(n, [start if v is reach else v for v in n.operands])


def _begin_last(g: Graph) -> None:
    """Begin at the last token of each row, the first one that is not computed."""
    spans, length = _spans(g)
    g.set_operands(spans, [*spans.operands[:2], length])


def _device_rows(g: Graph, entries: tuple[int, int]) -> tuple[int, int]:
    """Return the range of the number of device rows in a step, which may be smaller than that of entries."""
    rows = [v.type.shape[0].const for v in g.inputs if v.name == "row.length"]
    return entries[0], min([entries[1], *(n for n in rows if n is not None)])


def _drop_drafts(g: Graph, ctx: Ctx) -> None:
    """Replace row_accept by row_commit, and draft-aware penalties by plain ones, if every row has one token."""
    for n in list(g.nodes):
        if n.op.name == "row_penalize" and len(n.operands) > 8:
            b = Builder(g, ctx.opset, before=n, loc=n.loc)
            substitute(g, n, [b.row_penalize(*n.operands[:8])], "one-token-a-row")
        elif n.op.name == "row_accept":
            b = Builder(g, ctx.opset, before=n, loc=n.loc)
            n.operands[7].name = n.results[0].name
            substitute(g, n, [n.operands[7], *b.row_commit(*n.operands)], "one-token-a-row")


def _drop_head(g: Graph, ctx: Ctx) -> None:
    """Store zeros as the keys, values and hidden states of a head, whose drafts are not needed."""
    for n in list(g.nodes):
        if n.op.name not in ("kv_append", "page_put") or not n.operands[0].name.startswith(DRAFT_PREFIX):
            continue
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        last = 3 if n.op.name == "kv_append" else 2
        zeros = [b.broadcast(b.constant(0.0, v.type.dtype), shape=v.type.shape) for v in n.operands[1:last]]
        g.set_operands(n, [n.operands[0], *zeros, *n.operands[last:]])
    g.erase_unused()
    g.inputs = [v for v in g.inputs if v.uses]


def ranges(name: str, bounds: tuple[int, int], ends: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (graph name, bounds) for the parts of a symbol's range that end at `ends`; the last has the plain name."""
    low, high = bounds
    for end in sorted(e for e in set(ends) if low <= e < high):
        yield f"{name}_{end}", (low, end)
        low = end + 1
    yield name, (low, high)


def _drop_row_last(g: Graph) -> int:
    """Remove the selection of each row's last token from a graph in which every row has exactly one."""
    done = 0
    for n in g.nodes:
        if n.op.name != "take" or not made_by(n.operands[1], "row_last"):
            continue
        if same_type(n.operands[0].type, n.result.type):
            substitute(g, n, [n.operands[0]], "one-token-a-row")
            done += 1
    return done


def substituted(g: Graph, name: str, env: Mapping[str, Dim]) -> Graph:
    """Copy a graph with symbols replaced by sizes in types and attributes; result types are inferred again."""
    out = Graph(name)
    values: dict[Value, Value] = {v: out.input(v.name, v.type.subs(env), v.weight) for v in g.inputs}
    for n in g.nodes:
        attrs = {k: with_sizes(v, env) for k, v in n.attrs.items()}
        new = out.add(n.op, [values[v] for v in n.operands], attrs, loc=n.loc, names=[r.name for r in n.results])
        new.choice = dict(n.choice)
        values |= dict(zip(n.results, new.results, strict=True))
    out.outputs = [values[v] for v in g.outputs]
    return out


def with_sizes(value: Any, env: Mapping[str, DimLike]) -> Any:
    """Return an attribute with sizes in place of symbols."""
    if isinstance(value, tuple):
        return tuple(with_sizes(v, env) for v in value)
    return value.subs(env) if isinstance(value, Dim) else value
