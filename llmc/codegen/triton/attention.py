"""Attention of single tokens over KV pages in Triton, whole or in parts, and the sum of the parts; not of prompts.

A program has one token and one key head: the query heads that share it are the rows of a tensor-core product (padded to
16). The softmax is online, in float32 and in powers of two (Milakov and Gimelshein 2018, arXiv 1805.02867); parts are
combined as in flash decoding (Dao et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.codegen.kernel import Schedule, roofline_us
from llmc.codegen.triton.base import FLOATS, Code, TritonKernel, Unit, element, unsupported
from llmc.codegen.triton.rope import joined
from llmc.codegen.triton.tiles import power
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.targets.target import Target

MAX_HEAD = 512
ROWS = 128  # rows whose starts are looked at together
CONTEXT = 1024  # tokens that a row is taken to have when schedules are compared
# keys, warps, stages
TILES = (
    (32, 2, 4), (64, 4, 3), (32, 4, 4), (64, 4, 4), (128, 4, 3), (16, 1, 3), (32, 2, 3), (32, 4, 3), (32, 1, 3),
    (16, 2, 3), (64, 4, 2), (128, 8, 2), (128, 8, 3),
)  # fmt: skip
LOG2E = math.log2(math.e)
LN2 = math.log(2)


@dataclass(frozen=True)
class Problem:
    """What attention over pages has in numbers. item: bytes of an element of the pool."""

    h: int
    g: int
    page: int
    d: int
    item: int
    scale: float
    window: int
    softcap: float
    dot: str  # the dtype that products are taken in

    @staticmethod
    def of(node: Node) -> Problem:
        q, kv, a = node.operands[0].type, node.operands[1].type, node.attrs
        g, page, d = (int(s) for s in kv.shape[2:])
        dot = element(kv) if q.dtype == kv.dtype else "tl.float32"
        item = DTYPES[kv.dtype].bits // 8
        return Problem(int(q.shape[1]), g, page, d, item, a["scale"], a["window"], a["softcap"], dot)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.h // self.g

    @property
    def width(self) -> int:
        """Columns of a head in a product."""
        return max(16, power(self.d))

    @property
    def token(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.g * self.d * self.item

    def columns(self) -> str:
        mask = "tl.full([1, 1], 1, tl.int1)" if self.width == self.d else f"(d < {self.d})[None, :]"
        return f"d = tl.arange(0, {self.width})\ndm = {mask}"

    def load(self, name: str, first: int, inside: str) -> str:
        """A tile of keys (first 0) or values of the tokens n, whose pages start at `base`; zeros where not `inside`."""
        mask = f"{inside}[:, None] & dm" if inside else "dm"
        return f"{name} = tl.load(kv + (base + {first})[:, None] + d[None, :], mask={mask}, other=0.0)"

    def pages(self, keys: int, start: str) -> str:
        """Before a loop over tiles of keys from `start` to `end`: the pages of its first. Pages are read a tile ahead,
        so that loads of keys depend on no other load of their turn, and the compiler can keep several in flight."""
        return f"n = {start} + tl.arange(0, {keys})\nahead = tl.load(table + n // {self.page}, mask=n < end, other=0)"

    def tile(self, u: Unit, keys: int, inside: str, visible: str) -> str:
        """One step over the keys from t on: it loads those `inside`, and queries see those that are `visible` (texts;
        nothing: all of them)."""
        stride = 2 * self.g * self.page * self.d
        return joined(
            f"n = t + tl.arange(0, {keys})",
            f"base = ahead.to(tl.int64) * {stride} + n % {self.page} * {self.d}",
            f"ahead = tl.load(table + (n + {keys}) // {self.page}, mask=n + {keys} < end, other=0)",
            f"inside = {inside}" if inside else "",
            self.load("k", 0, "inside" if inside else ""),
            self.load("v", self.g * self.page * self.d, "inside" if inside else ""),
            step(u, self.dot, self.scale, self.softcap, visible),
        )


def step(u: Unit, dot: str, scale: float, softcap: float, visible: str) -> str:
    """The online softmax over a tile k, v for the queries q: m (largest logit, as a power of two), l (sum), acc."""
    product, k, v = precision(dot), u.dot_operand(f"k.to({dot})"), u.dot_operand(f"v.to({dot})")
    lines = [f"s = tl.dot({u.dot_operand('q')}, tl.trans({k}){product})"]
    if softcap:
        lines += [f"s = tl.sigmoid(s * {2 * scale / softcap!r})", f"s = (2 * s - 1) * {softcap * LOG2E!r}"]
    else:
        lines.append(f"s = s * {scale * LOG2E!r}")
    if visible:
        lines.append(f's = tl.where({visible}, s, float("-inf"))')
    p = u.dot_operand(f"p.to({dot})")
    lines += [
        "top = tl.maximum(m, tl.max(s, 1))",
        "p = tl.exp2(s - top[:, None])",
        "old = tl.exp2(m - top)",
        "l = l * old + tl.sum(p, 1)",
        f"acc = tl.dot({p}, {v}, acc * old[:, None]{product})",
        "m = top",
    ]
    return "\n".join(lines)


def precision(dot: str) -> str:
    """An argument of tl.dot: float32 is multiplied as such."""
    return ', input_precision="ieee"' if dot == "tl.float32" else ""


def begin(rows: int, width: int) -> str:
    """Nothing seen yet; -1e30 is below every logit, and differences with it are finite."""
    return (
        f"m = tl.full([{rows}], -1e30, tl.float32)\nl = tl.zeros([{rows}], tl.float32)\n"
        f"acc = tl.zeros([{rows}, {width}], tl.float32)"
    )


def finish(sinks: str) -> str:
    """acc becomes the result. `sinks`: the pointers to the rows' sinks, or nothing."""
    end = "acc = acc / tl.maximum(l, 1e-30)[:, None]"
    if not sinks:
        return end
    return joined(
        f"sink = tl.load({sinks}).to(tl.float32) * {LOG2E!r}",
        "top = tl.maximum(m, sink)",
        "old = tl.exp2(m - top)",
        "l = l * old + tl.exp2(sink - top)",
        "acc = acc * old[:, None]",
        end,
    )


def loop(over: str, body: str) -> str:
    """A loop over t; n are the tile's keys."""
    return f"for t in range({over}):\n" + "\n".join(f"    {line}" for line in body.split("\n"))


def unfit(node: Node, floats: tuple[int, ...]) -> str | None:
    """Why none of these kernels can run the node: dtypes, or sizes that are not constant, or too large."""
    if why := unsupported(node):
        return why
    types = [node.operands[i].type for i in floats if i < len(node.operands)]
    if bad := next((t for t in types if t.dtype not in FLOATS), None):
        return f"{bad} is not one of {', '.join(FLOATS)}"
    q, k = types[0], types[1]
    sizes = [q.shape[1].const, q.shape[2].const, *(s.const for s in k.shape[1:])]
    if None in sizes:
        return "heads, page and head size must be constant"
    h, g = int(q.shape[1]), int(k.shape[2] if k.rank == 5 else k.shape[1])
    if h % g:
        return f"{h} query heads do not share {g} key heads evenly"
    widest = max(int(t.shape[-1]) for t in types[: len(floats) - 1])
    return f"head size {widest} is above {MAX_HEAD}" if widest > MAX_HEAD else None


class Decode(TritonKernel):
    """Tokens one by one, each over the pages of its row, or over its part of them; right for any mixture of rows."""

    def reject(self, node: Node, target: Target) -> str | None:
        return "it leaves no rows out" if node.attrs.get("least", 1) > 1 else unfit(node, (0, 1, 6))

    def early(self, node: Node) -> tuple[int, ...]:
        """The tables: where the row's keys are is then known before the queries are."""
        return (2, 3, 4) if node.op.name == "paged_attention_split" else (2, 3, 4, 5)

    def rows(self, p: Problem) -> int:
        """Rows of the product: query heads of a key head."""
        return max(16, power(p.group))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p, least = Problem.of(node), {"keys": 16, "warps": 4, "stages": 1}
        if p.dot == "tl.float32":
            return [least]  # its products take a thread's registers
        found: list[Schedule] = []
        for keys, warps, stages in TILES:
            shared = (2 * keys * (stages - 1) + self.rows(p)) * p.width * p.item
            if shared <= target.limits.shared * 7 // 8 and keys * p.width <= 1 << 14:
                found.append({"keys": keys, "warps": warps, "stages": stages})
        return [*found, least]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Blocks run in rounds; a block's tiles cost a latency and their bytes at a multiprocessor's bandwidth."""
        p, splits = Problem.of(node), node.attrs.get("splits", 1)
        tokens = node.operands[0].type.shape[0].subs(env).const or 1
        seen = min(CONTEXT, p.window or CONTEXT)
        tile = 2 * schedule["keys"] * p.width * p.item
        shared = max(1, schedule["stages"] - 1) * tile
        resident = max(1, min(target.limits.shared // shared, 32 // schedule["warps"]))
        rounds = math.ceil(tokens * p.g * splits / (target.limits.units * resident))
        tiles = math.ceil(seen / splits / schedule["keys"])
        hidden = max(1.0, min(schedule["stages"] - 1, tiles))
        one = 1.5 + tiles * (0.04 * schedule["warps"] + 0.6 / hidden + tile / 1e5)
        read = tokens * seen * p.token / target.bandwidth * 1e6
        return max(read, rounds * one) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, keys, rows = Problem.of(u.node), u.schedule["keys"], self.rows(Problem.of(u.node))
        splits = u.node.attrs.get("splits", 0)
        first = f"tl.maximum(count - {p.window}, 0) // {p.page}" if p.window else "0"
        inside = f"(n < end) & (n >= count - {p.window})" if p.window else "(n < end)"
        place = [
            "i, g = tl.program_id(0), tl.program_id(1)",
            "row = tl.load(x3 + i)\npos = tl.load(x4 + i)" if splits else find_row(u),
            "count = tl.where(row >= 0, pos + 1, 0)",
            f"first = {first}",
            *part(p, splits),
            f"table = x2 + tl.maximum(row, 0).to(tl.int64) * {u.sizes(u.node.operands[2].type.shape[1])}",
            p.pages(keys, f"first * {p.page}"),
        ]
        lines = [
            *([*place, u.wait] if u.settled else [u.wait, *place]),
            f"kv = x1 + g * {p.page * p.d}",
            p.columns(),
            f"r = tl.arange(0, {rows})",
            f"head = i.to(tl.int64) * {p.h} + g * {p.group} + r",
            f"ok = (r < {p.group})[:, None] & dm",
            f"q = tl.load(x0 + (head * {p.d})[:, None] + d[None, :], mask=ok, other=0.0).to({p.dot})",
            begin(rows, p.width),
            loop(f"first * {p.page}, end, {keys}", p.tile(u, keys, inside, "inside[None, :]")),
            self.store_part(p, splits) if splits else self.store(u, p),
        ]
        grid = (u.node.operands[0].type.shape[0], p.g, max(1, splits))
        return Code(joined(*lines), grid, warps=u.schedule["warps"], stages=u.schedule["stages"])

    def store(self, u: Unit, p: Problem) -> str:
        out = element(u.node.results[0].type)
        sinks = f"x6 + g * {p.group} + tl.minimum(r, {p.group - 1})" if len(u.node.operands) > 6 else ""
        return f"{finish(sinks)}\ntl.store(y0 + (head * {p.d})[:, None] + d[None, :], acc.to({out}), mask=ok)"

    def store_part(self, p: Problem, splits: int) -> str:
        return joined(
            finish(""),
            f"at = head * {splits} + z",
            f"tl.store(y0 + (at * {p.d})[:, None] + d[None, :], acc, mask=ok)",
            f'lse = tl.where(l > 0, (m + tl.log2(tl.maximum(l, 1e-30))) * {LN2!r}, float("-inf"))',
            f"tl.store(y1 + at, lse, mask=r < {p.group})",
        )


def part(p: Problem, splits: int) -> list[str]:
    """first and end of a program's keys: its share of the pages from `first` on, or all of them."""
    if not splits:
        return ["end = count"]
    return [
        "z = tl.program_id(2)",
        f"per = ((count + {p.page - 1}) // {p.page} - first + {splits - 1}) // {splits}",
        "first = first + z * per",
        f"end = tl.minimum(count, (first + per) * {p.page})",
    ]


def find_row(u: Unit) -> str:
    """row and pos of token i: how many rows end at or before it is which row it is in; -1 behind the last."""
    rows = u.sizes(u.node.operands[3].type.shape[0])
    search = (
        f"j = t + tl.arange(0, {ROWS})\n"
        f"ends = tl.load(x4 + 1 + j, mask=j < {rows}, other={2**31 - 1})\n"
        "at += tl.sum((ends <= i).to(tl.int32))"
    )
    return joined(
        "pos = tl.load(x5 + i)",
        "at = i * 0",
        loop(f"0, {rows}, {ROWS}", search),
        f"row = tl.load(x3 + at, mask=at < {rows}, other=-1)",
    )


class Combine(TritonKernel):
    """The parts of one head of one token, weighed by their sums."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, FLOATS):
            return why
        if any(s.const is None for s in node.operands[0].type.shape[1:]):
            return "heads, parts and head size must be constant"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        parts, d = (power(int(s)) for s in node.operands[0].type.shape[2:])
        best = max(1, min(4, parts * d // 1024))
        return [{"warps": best}, *({"warps": w} for w in (1, 2, 4) if w != best)]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """The traffic, and what a block waits for: its threads' loads in turn, its warps for one another."""
        parts, d = (power(int(s)) for s in node.operands[0].type.shape[2:])
        loads = parts * d / (128 * schedule["warps"])
        return roofline_us(node, target, env) + 0.02 * loads + 0.05 * schedule["warps"]

    def code(self, u: Unit) -> Code:
        shape = u.node.operands[0].type.shape
        h, parts, d = (int(s) for s in shape[1:])
        sinks = len(u.node.operands) > 2
        lines = [
            u.wait,
            f"head = tl.program_id(0).to(tl.int64) * {h} + tl.program_id(1)",
            f"z, d = tl.arange(0, {power(parts)}), tl.arange(0, {power(d)})",
            f'lse = tl.load(x1 + head * {parts} + z, mask=z < {parts}, other=float("-inf")) * {LOG2E!r}',
            f"mask = (z < {parts})[:, None] & (d < {d})[None, :]",
            f"x = tl.load(x0 + (head * {parts} + z)[:, None] * {d} + d[None, :], mask=mask, other=0.0)",
            f"sink = tl.load(x2 + tl.program_id(1)).to(tl.float32) * {LOG2E!r}" if sinks else "",
            f"top = tl.maximum(tl.max(lse, 0), {'sink' if sinks else '-1e30'})",
            "w = tl.exp2(lse - top)",
            f"total = tl.sum(w, 0){' + tl.exp2(sink - top)' if sinks else ''}",
            "y = tl.sum(x * w[:, None], 0) / tl.maximum(total, 1e-30)",
            f"tl.store(y0 + head * {d} + d, y.to({element(u.node.result.type)}), mask=d < {d})",
        ]
        return Code(joined(*lines), (shape[0], h), warps=u.schedule["warps"])


DECODE = Decode("triton/decode", ("paged_attention", "paged_attention_split"))
COMBINE = Combine("triton/combine", ("attention_combine",))
