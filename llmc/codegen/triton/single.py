"""Attention of rows that have one token, among rows of any lengths, put into what the others' attention has left."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.attention import Decode, Problem, begin, finish, loop, unfit
from llmc.codegen.triton.base import Code, Unit, element
from llmc.codegen.triton.rope import joined
from llmc.ir.graph import Node
from llmc.targets.target import Target


class Single(Decode):
    """A program has one row and one key head. It reads and multiplies while the launch in front, which made y, may
    still run, and waits before it writes. Where the result is not y's own memory it copies the other tokens."""

    def reject(self, node: Node, target: Target) -> str | None:
        return unfit(node, (0, 1, 6, 7))

    def early(self, node: Node) -> tuple[int, ...]:
        return (0, 1, 2, 3, 4, 5)

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((6, 0),)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """That of as many tokens as there are rows."""
        rows = node.operands[3].type.shape[0].subs(env).const or 1
        tokens = node.operands[0].type.shape[0]
        return super().cost_us(node, schedule, target, {**env, **({str(tokens): rows} if tokens.const is None else {})})

    def code(self, u: Unit) -> Code:
        p, keys, size = Problem.of(u.node), u.schedule["keys"], self.rows(Problem.of(u.node))
        count = u.node.operands[3].type.shape[0]
        place = [
            "i, g = tl.program_id(0), tl.program_id(1)",
            "start, stop = tl.load(x4 + i), tl.load(x4 + i + 1)",
            "row = tl.load(x3 + i)",
            "one = (stop - start == 1) & (row >= 0)",
            "pos = tl.load(x5 + start, mask=one, other=-1)",
            "end = pos + 1",
            f"first = tl.maximum(end - {p.window}, 0) // {p.page}" if p.window else "first = 0",
            f"table = x2 + tl.maximum(row, 0).to(tl.int64) * {u.sizes(u.node.operands[2].type.shape[1])}",
            p.pages(keys, f"first * {p.page}"),
            f"kv = x1 + g * {p.page * p.d}",
            p.columns(),
            f"r = tl.arange(0, {size})",
            f"ok = (r < {p.group})[:, None] & dm",
            f"at = g * {p.group * p.d} + r[:, None] * {p.d} + d[None, :]",
            f"q = tl.load(x0 + start.to(tl.int64) * {p.h * p.d} + at, mask=ok & one, other=0.0).to({p.dot})",
            begin(size, p.width),
            loop(f"first * {p.page}, end, {keys}", p.tile(u, keys, self.inside(p), "inside[None, :]")),
        ]
        lines = [*([*place, u.wait] if u.settled else [u.wait, *place]), self.store(u, p)]
        return Code(joined(*lines), (count, p.g), warps=u.schedule["warps"], stages=u.schedule["stages"])

    def inside(self, p: Problem) -> str:
        return f"(n < end) & (n >= end - {p.window})" if p.window else "(n < end)"

    def store(self, u: Unit, p: Problem) -> str:
        n, out = u.node, element(u.node.result.type)
        sinks = f"x7 + g * {p.group} + tl.minimum(r, {p.group - 1})" if len(n.operands) > 7 else ""
        rows, tokens = u.sizes(n.operands[3].type.shape[0]), u.sizes(n.operands[0].type.shape[0])
        return joined(
            finish(sinks),
            f"tl.store(y0 + start.to(tl.int64) * {p.h * p.d} + at, acc.to({out}), mask=ok & one)",
            "if x6.to(tl.int64) != y0.to(tl.int64):",
            f"    for t in range(tl.where(one, stop, start), tl.where(i == {rows} - 1, {tokens}, stop)):",
            f"        place = tl.cast(t, tl.int64) * {p.h * p.d} + at",
            "        tl.store(y0 + place, tl.load(x6 + place, mask=ok, other=0.0), mask=ok)",
        )


SINGLE = Single("triton/single", ("paged_attention_single",))
