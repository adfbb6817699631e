"""Attention of many tokens in Triton: chunks of prompts and single tokens mixed over KV pages, and packed prompts.

A program has a tile of queries: tokens of one row and the query heads that share a key head, packed as rows of
tensor-core products; keys pass by with an online softmax (Dao et al. 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.attention import (
    CONTEXT,
    ROWS,
    Problem,
    begin,
    finish,
    loop,
    step,
    unfit,
)
from llmc.codegen.triton.base import PDL, Code, TritonKernel, Unit, element
from llmc.codegen.triton.rope import joined
from llmc.codegen.triton.tiles import power
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.targets.target import Target

FAR = 1 << 30
# (rows, keys, warps, stages): what is tried where it fits; the last one always does.
TILES = (
    (128, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 8, 3), (64, 32, 4, 3), (32, 32, 4, 2),
    (16, 16, 4, 1),
)  # fmt: skip


def shared(rows: int, keys: int, stages: int, width: int, item: int, target: Target) -> int:
    """Bytes of shared memory: queries, and keys and values in flight; later tensor cores read theirs from there."""
    tiles = stages if target.has(PDL) else stages - 1
    return (rows + 2 * keys * max(1, tiles)) * width * item + 2048


def tiles(width: int, item: int, wide: bool, least: int, target: Target) -> Iterator[Schedule]:
    """Schedules that fit: `rows` of queries (at least `least`), `keys` a step; the least where float32 is multiplied.

    width, item: elements of a head as padded, and bytes of one.
    """
    room = 128 if target.has(PDL) else 80  # later tensor cores read the second operand from shared memory
    for rows, keys, warps, stages in TILES:
        registers = rows * (width + keys) // (warps * target.limits.warp)  # of a thread, for logits and sums alone
        fits = shared(rows, keys, stages, width, item, target) <= target.limits.shared and registers <= room
        if rows == 16 or (fits and not wide):
            yield {"rows": max(rows, least), "keys": keys, "warps": warps, "stages": stages}


class Prefill(TritonKernel):
    """Any mixture of rows and tokens; a tile belongs to one row."""

    def reject(self, node: Node, target: Target) -> str | None:
        return unfit(node, (0, 1, 6))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Problem.of(node)
        return list(tiles(p.width, p.item, p.dot == "tl.float32", power(p.group), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Blocks run in rounds; a block's steps cost their products at half the peak, and at least a latency."""
        p, rows, keys = Problem.of(node), schedule["rows"], schedule["keys"]
        tokens, count = (node.operands[i].type.shape[0].subs(env).const or 1 for i in (0, 3))
        blocks = (tokens // (rows // p.group) + count) * p.g
        held = shared(rows, keys, schedule["stages"], p.width, p.item, target)
        resident = max(1, min(target.limits.shared // held, 16 // schedule["warps"]))
        peak = target.peaks.get(node.operands[1].type.dtype, target.peaks["f32"]) / target.limits.units / 2e6
        seen = min(max(CONTEXT, tokens // count // 2), p.window or FAR)
        share = min(resident, blocks / target.limits.units + 1)  # blocks on a multiprocessor take turns
        wait = 0.3 if schedule["stages"] > 2 else 1.0
        one = math.ceil(seen / keys) * (wait + 4 * rows * keys * p.width / peak * share)
        return math.ceil(blocks / (target.limits.units * resident)) * (2 + one) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, rows, keys = Problem.of(u.node), u.schedule["rows"], u.schedule["keys"]
        tokens = rows // p.group
        q, _, pages, count = (v.type.shape for v in u.node.operands[:4])
        lines = [
            u.wait,
            "g = tl.program_id(1)",
            self.find(u, tokens),
            f"table = x2 + tl.maximum(row, 0).to(tl.int64) * {u.sizes(pages[1])}",
            f"kv = x1 + g * {p.page * p.d}",
            p.columns(),
            f"r = tl.arange(0, {rows})",
            f"at, own = begin + r // {p.group}, g * {p.group} + r % {p.group}",
            f"real = (r < {tokens * p.group}) & (at < stop)",
            "pos = tl.where(row >= 0, tl.load(x5 + at, mask=real, other=-1), -1)",
            f"head = at.to(tl.int64) * {p.h} + own",
            "ok = real[:, None] & dm",
            f"q = tl.load(x0 + (head * {p.d})[:, None] + d[None, :], mask=ok, other=0.0).to({p.dot})",
            begin(rows, p.width),
            self.keys(u, p, keys),
            finish("x6 + own" if len(u.node.operands) > 6 else ""),
            f"tl.store(y0 + (head * {p.d})[:, None] + d[None, :], acc.to({element(u.node.result.type)}), mask=ok)",
        ]
        grid = (q[0].ceildiv(tokens) + count[0] + 1, p.g)
        return Code(joined(*lines), grid, warps=u.schedule["warps"], stages=u.schedule["stages"])

    def find(self, u: Unit, tokens: int) -> str:
        """begin .. stop: the program's tokens, all of one row. Row j's tiles begin at tile starts[j] // tokens + j,
        which leaves enough for any starts. What is behind the last row is a row, too: one of padding. The last tiles,
        whose queries see most keys, begin first."""
        count, total = u.sizes(u.node.operands[3].type.shape[0]), u.sizes(u.node.operands[0].type.shape[0])
        least = u.node.attrs["least"]
        search = (
            f"j = t + tl.arange(0, {ROWS})\n"
            f"starts = tl.load(x4 + j, mask=j <= {count}, other={FAR})\n"
            f"i += tl.sum(((starts // {tokens} + j <= tile) & (j <= {count})).to(tl.int32))"
        )
        return joined(
            "tile = tl.num_programs(0) - 1 - tl.program_id(0)",
            "i = tile * 0 - 1",
            loop(f"0, {count} + 1, {ROWS}", search),
            "start = tl.load(x4 + i)",
            f"row = tl.load(x3 + i, mask=i < {count}, other=-1)",
            f"stop = tl.load(x4 + 1 + i, mask=i < {count}, other=0)",
            f"row = tl.where(stop - start < {least}, -1, row)" if least > 1 else "",
            f"stop = tl.where(i < {count}, stop, {total})",
            f"begin = start + (tile - start // {tokens} - i) * {tokens}",
            "if begin >= stop:\n    return",
        )

    def keys(self, u: Unit, p: Problem, keys: int) -> str:
        """Steps over the keys: first those that all queries see, without masks, then those that some see."""
        visible, end = "n[None, :] <= pos[:, None]", "end = tl.max(pos, 0) + 1"
        if p.window:
            visible = f"({visible}) & (n[None, :] > pos[:, None] - {p.window})"
            return joined(
                end,
                f"low = tl.maximum(tl.min(tl.where(pos >= 0, pos, {FAR}), 0) - {p.window - 1}, 0)",
                p.pages(keys, f"low // {keys} * {keys}"),
                loop(f"low // {keys} * {keys}, end, {keys}", p.tile(u, keys, "(n < end) & (n >= low)", visible)),
            )
        return joined(
            end,
            f"whole = (tl.min(tl.where(real, pos, {FAR}), 0) + 1) // {keys} * {keys}",
            p.pages(keys, "0"),
            loop(f"0, whole, {keys}", p.tile(u, keys, "", "")),
            loop(f"whole, end, {keys}", p.tile(u, keys, "n < end", visible)),
        )


class Prompt(TritonKernel):
    """Packed prompts without pages: a tile of tokens and one head. It looks for the sequences' ends by itself."""

    def reject(self, node: Node, target: Target) -> str | None:
        return unfit(node, (0, 1, 2, 4))

    def widths(self, node: Node) -> tuple[int, int]:
        """Columns of keys and of values in a product."""
        d, e = (max(16, power(int(v.type.shape[2]))) for v in node.operands[1:3])
        return d, e

    def dot(self, node: Node) -> str:
        q, k, v = (v.type for v in node.operands[:3])
        return element(k) if q.dtype == k.dtype == v.dtype else "tl.float32"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        item = DTYPES[node.operands[1].type.dtype].bits // 8
        return list(tiles(max(self.widths(node)), item, self.dot(node) == "tl.float32", 16, target))

    def code(self, u: Unit) -> Code:
        n, rows, keys = u.node, u.schedule["rows"], u.schedule["keys"]
        q, k, v = (x.type.shape for x in n.operands[:3])
        h, d, g, e = int(q[1]), int(q[2]), int(k[1]), int(v[2])
        dot, (wide, deep) = self.dot(n), self.widths(n)
        load = "tl.load({x} + ((n * {g} + g) * {d}).to(tl.int64)[:, None] + {c}[None, :], mask={m}, other=0.0)"
        body = joined(
            f"n = t + tl.arange(0, {keys})",
            f"some = (n < {u.sizes(q[0])})[:, None]",
            "k = " + load.format(x="x1", g=g, d=d, c="d", m=f"some & (d < {d})[None, :]"),
            "v = " + load.format(x="x2", g=g, d=e, c="e", m=f"some & (e < {e})[None, :]"),
            step(u, dot, n.attrs["scale"], n.attrs["softcap"], self.visible(u)),
        )
        lines = [
            u.wait,
            f"head = tl.program_id(1)\ng = head // {h // g}",
            f"i = tl.program_id(0) * {rows} + tl.arange(0, {rows})",
            f"real = i < {u.sizes(q[0])}",
            self.ends(u),
            f"d, e = tl.arange(0, {wide}), tl.arange(0, {deep})",
            f"at = i.to(tl.int64) * {h} + head",
            f"mask = real[:, None] & (d < {d})[None, :]",
            f"q = tl.load(x0 + (at * {d})[:, None] + d[None, :], mask=mask, other=0.0).to({dot})",
            begin(rows, deep),
            loop(f"low // {keys} * {keys}, end, {keys}", body),
            finish("x4 + head + i * 0" if len(n.operands) > 4 else ""),
            f"mask = real[:, None] & (e < {e})[None, :]",
            f"tl.store(y0 + (at * {e})[:, None] + e[None, :], acc.to({element(n.result.type)}), mask=mask)",
        ]
        grid: tuple[Dim | int, ...] = (q[0].ceildiv(rows), h)
        return Code(joined(*lines), grid, warps=u.schedule["warps"], stages=u.schedule["stages"])

    def visible(self, u: Unit) -> str:
        """Which keys n a query i sees: of its sequence (`origin` .. `stop`), in its window, not after it."""
        last = "n[None, :] <= i[:, None]" if u.node.attrs["causal"] else "n[None, :] < stop[:, None]"
        window = u.node.attrs["window"]
        near = f" & (n[None, :] > i[:, None] - {window})" if window else ""
        return f"({last}) & (n[None, :] >= origin[:, None]){near}"

    def ends(self, u: Unit) -> str:
        """origin, stop: where each query's sequence begins and ends; low, end: the keys that the tile needs."""
        total, rows, causal = u.sizes(u.node.operands[0].type.shape[0]), u.schedule["rows"], u.node.attrs["causal"]
        behind = f"tl.min(tl.where(new[None, :] & (n[None, :] > i[:, None]), n[None, :], {total}), 1)"
        body = joined(
            f"n = t + tl.arange(0, {ROWS})",
            f"here = tl.load(x3 + n, mask=n < {total}, other=0)",
            f"before = tl.load(x3 + n - 1, mask=(n > 0) & (n < {total}), other=0)",
            f"new = (n < {total}) & ((n == 0) | (here - before != 1))",
            "first = tl.max(tl.where(new[None, :] & (n[None, :] <= i[:, None]), n[None, :], 0), 1)",
            "origin = tl.maximum(origin, first)",
            "" if causal else f"stop = tl.minimum(stop, {behind})",
        )
        window = u.node.attrs["window"]
        return joined(
            "origin = i * 0",
            "" if causal else f"stop = i * 0 + {total}",
            loop(f"0, {total}, {ROWS}", body),
            f"low = tl.min(tl.where(real, origin, {FAR}), 0)",
            f"low = tl.maximum(low, tl.program_id(0) * {rows} - {window - 1})" if window else "",
            f"end = {f'tl.minimum(tl.program_id(0) * {rows} + {rows}, {total})' if causal else 'tl.max(stop, 0)'}",
        )


PREFILL = Prefill("triton/prefill", ("paged_attention",))
PROMPT = Prompt("triton/prompt", ("attention",))
