"""Rotary embeddings in Triton: tables, the rotation, appends to the KV pool, and all of it in one launch; no attention.

Heads are rows: a program takes `rows` of them, whichever tokens they belong to, and a warp has its heads whole, so that
their norms need no barrier. Every load is issued before the first result is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.codegen.kernel import Schedule, roofline_us
from llmc.codegen.triton.base import ELEMENTS, FLOATS, Code, TritonKernel, Unit, element, unsupported
from llmc.codegen.triton.tiles import power
from llmc.ir.dim import Dim
from llmc.ir.graph import Node
from llmc.ir.types import Type
from llmc.targets.target import Target

TILE = 256  # elements of the tables that a program makes
WARP = 256  # elements that a warp holds of each block: 16 bytes a thread of 16-bit floats


def at(columns: str) -> str:
    """Columns along the second axis."""
    return f"({columns})[None, :]" if " " in columns else f"{columns}[None, :]"


def joined(*lines: str) -> str:
    """The lines that are not empty."""
    return "\n".join(x.rstrip("\n") for x in lines if x)


@dataclass(frozen=True)
class Head:
    """A head of `d` elements of which pairs of the first `2 * r` are rotated, as blocks of a program's rows."""

    d: int
    r: int
    interleaved: bool = False

    @property
    def parts(self) -> list[tuple[str, str]]:
        """(name of a block, columns of the head): first and second of each pair, and what is not rotated."""
        pairs = [("a", "2 * j"), ("b", "2 * j + 1")] if self.interleaved else [("a", "j"), ("b", f"j + {self.r}")]
        return [*(pairs if self.r else []), *([("e", f"{2 * self.r} + k")] if self.d > 2 * self.r else [])]

    @property
    def columns(self) -> str:
        """j, k and their masks jm, km; rest is what is not rotated."""
        rest = self.d - 2 * self.r
        j = f"j = tl.arange(0, {power(self.r)})\njm = (j < {self.r})[None, :]\n" if self.r else ""
        return j + (f"k = tl.arange(0, {power(rest)})\nkm = (k < {rest})[None, :]\n" if rest else "")

    def mask(self, part: str, rows: str) -> str:
        return f"{rows}[:, None] & {'km' if part == 'e' else 'jm'}"

    def load(self, pointers: str, rows: str) -> str:
        """Blocks a, b, e in float32 from the heads at `pointers`."""
        return "\n".join(
            f"{p} = tl.load({pointers}[:, None] + {at(c)}, mask={self.mask(p, rows)}, other=0.0).to(tl.float32)"
            for p, c in self.parts
        )

    def store(self, pointers: str, rows: str, dtype: str) -> str:
        return "\n".join(
            f"tl.store({pointers}[:, None] + {at(c)}, {p}.to({dtype}), mask={self.mask(p, rows)})"
            for p, c in self.parts
        )

    def gains(self, pointers: str, rows: str) -> str:
        """Blocks wa, wb, we in float32: each row's gain [d], at `pointers`."""
        return "\n".join(
            f"w{p} = tl.load({pointers}[:, None] + {at(c)}, mask={self.mask(p, rows)}, other=0.0).to(tl.float32)"
            for p, c in self.parts
        )

    def tables(self, cos: str, sin: str, tokens: str, rows: str) -> str:
        """co and si: the tables' rows of the tokens, in float32."""
        at = f"({tokens} * {self.r})[:, None] + j[None, :], mask={self.mask('a', rows)}, other=0.0"
        return "\n".join(f"{n} = tl.load({x} + {at}).to(tl.float32)" for n, x in (("co", cos), ("si", sin)))

    def rotate(self, rows: str) -> str:
        """Turn the pairs of the rows where `rows` is true."""
        return (
            f"ra, rb = a * co - b * si, b * co + a * si\n"
            f"a, b = tl.where({rows}[:, None], ra, a), tl.where({rows}[:, None], rb, b)"
        )

    def norm(self, eps: float, rows: str, dtype: str) -> str:
        """RMS norm with the gains w of the rows where `rows` is true; rounded to `dtype`."""
        squares = " + ".join(f"tl.sum({p} * {p}, 1)" for p, _ in self.parts)
        lines = [f"scale = tl.rsqrt(({squares}) * {1 / self.d!r} + {eps!r})[:, None]"]
        lines += [
            f"{p} = tl.where({rows}[:, None], ({p} * scale * w{p}).to({dtype}).to(tl.float32), {p})"
            for p, _ in self.parts
        ]
        return "\n".join(lines)


class HeadKernel(TritonKernel):
    """A kernel whose programs take some heads each."""

    def heads(self, node: Node) -> tuple[Dim, int]:
        """Tokens, and heads of each."""
        raise NotImplementedError

    def dtypes(self, node: Node) -> list[Type]:
        """Types that must be floats of ours."""
        return [v.type for v in [*node.operands, *node.results] if v.type.dtype not in ("i32", "i64")]

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node):
            return why
        if node.op.name == "rope_append" and len({v.type.dtype for v in node.operands[5:]}) > 1:
            return "the gains of queries and keys have two dtypes"
        if bad := next((t for t in self.dtypes(node) if t.dtype not in FLOATS), None):
            return f"{bad} is not one of {', '.join(FLOATS)}"
        return None

    def head(self, node: Node) -> Head:
        """How a head of the node is cut into blocks."""
        raise NotImplementedError

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        head = self.head(node)
        rows = max(1, WARP // power(max(head.r, head.d - 2 * head.r)))
        return [{"rows": rows * warps, "warps": warps} for warps in (1, 4)]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """The traffic, the starts of blocks (about 2 ns each over the whole GPU), and the time that one block takes."""
        tokens, heads = self.heads(node)
        blocks = (tokens.subs(env).const or 1) * heads / schedule["rows"]
        return roofline_us(node, target, env) + blocks * 2e-3 + schedule["rows"] * 2e-3

    def grid(self, u: Unit) -> tuple[Dim, ...]:
        tokens, heads = self.heads(u.node)
        return ((tokens * heads).ceildiv(u.schedule["rows"]),)

    def rows(self, u: Unit) -> str:
        """f: the program's heads; t: their tokens, c: which of a token's heads they are; live: which of them exist."""
        rows, (tokens, heads) = u.schedule["rows"], self.heads(u.node)
        return (
            f"f = tl.program_id(0) * {rows} + tl.arange(0, {rows})\n"
            f"t, c = f // {heads}, f % {heads}\nlive = t < {u.sizes(tokens)}"
        )


class RopeAppend(HeadKernel):
    """Head norms, rotation and the append to the pool: each head is read once and written once."""

    def heads(self, node: Node) -> tuple[Dim, int]:
        return node.operands[0].type.shape[0], int(node.attrs["heads"]) + 2 * int(node.operands[1].type.shape[2])

    def head(self, node: Node) -> Head:
        r = int(node.operands[3].type.shape[1]) if len(node.operands) > 3 else 0
        return Head(int(node.operands[1].type.shape[4]), r, node.attrs["interleaved"])

    def code(self, u: Unit) -> Code:
        n, h, head = u.node, u.node.attrs["heads"], self.head(u.node)
        kv = n.operands[1].type
        g, page, d = (int(s) for s in kv.shape[2:])
        rope, norm = len(n.operands) > 3, len(n.operands) > 5
        gains = head.gains(f"tl.where(c < {h}, x5, x6)", "(live & normal)") if norm else ""
        early = norm and n.operands[5].weight and n.operands[6].weight
        rounded = ELEMENTS[n.attrs["dtype"]][0]
        lines = [
            head.columns, self.rows(u), f"normal = c < {h + g}",
            gains if early else "", u.wait, "" if early else gains,
            "slot = tl.load(x2 + t, mask=live, other=-1)",
            head.load(f"(x0 + f.to(tl.int64) * {d})", "live"),
            head.tables("x3", "x4", "t", "(live & normal)") if rope else "",
            head.norm(n.attrs["eps"], "normal", rounded) if norm else "",
            head.rotate("normal") if rope else "",
            *([f"{p} = {p}.to({rounded}).to(tl.float32)" for p, _ in head.parts] if rounded != "tl.float32" else []),
            head.store(f"(y0 + (t.to(tl.int64) * {h} + c) * {d})", f"(live & (c < {h}))", element(n.results[0].type)),
            f"page, at = (slot // {page}).to(tl.int64), slot % {page}",
            f"row = (page * {2 * g} + (c - {h})) * {page} + at",
            head.store(f"(y1 + row * {d})", f"(live & (c >= {h}) & (slot >= 0))", element(kv)),
        ]  # fmt: skip
        return Code(joined(*lines), self.grid(u), warps=u.schedule["warps"])


class Rope(HeadKernel):
    """The rotation alone."""

    def heads(self, node: Node) -> tuple[Dim, int]:
        return node.operands[0].type.shape[0], int(node.operands[0].type.shape[1])

    def head(self, node: Node) -> Head:
        return Head(int(node.result.type.shape[2]), int(node.operands[1].type.shape[1]), node.attrs["interleaved"])

    def code(self, u: Unit) -> Code:
        n, head = u.node, self.head(u.node)
        offset = f"f.to(tl.int64) * {head.d}"
        lines = [
            u.wait, head.columns, self.rows(u),
            head.load(f"(x0 + {offset})", "live"), head.tables("x1", "x2", "t", "live"), head.rotate("live"),
            head.store(f"(y0 + {offset})", "live", element(n.result.type)),
        ]  # fmt: skip
        return Code(joined(*lines), self.grid(u), warps=u.schedule["warps"])

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        """A program has read its heads before it writes them."""
        return ((0, 0),)


class KvAppend(HeadKernel):
    """Keys and values to their slots of the pool."""

    def heads(self, node: Node) -> tuple[Dim, int]:
        return node.operands[1].type.shape[0], int(node.operands[1].type.shape[1])

    def head(self, node: Node) -> Head:
        return Head(int(node.operands[1].type.shape[2]), 0)

    def code(self, u: Unit) -> Code:
        kv, head = u.node.operands[0].type, self.head(u.node)
        g, page, d = (int(s) for s in kv.shape[2:])
        lines = [
            u.wait, head.columns, self.rows(u),
            "slot = tl.load(x3 + t, mask=live, other=-1)",
            f"row = (slot // {page}).to(tl.int64) * {2 * g * page} + c * {page} + slot % {page}",
        ]  # fmt: skip
        for x, first in (("x1", 0), ("x2", g * page)):
            lines += [
                head.load(f"({x} + f.to(tl.int64) * {d})", "live"),
                head.store(f"(y0 + (row + {first}) * {d})", "(live & (slot >= 0))", element(kv)),
            ]
        return Code(joined(*lines), self.grid(u), warps=u.schedule["warps"])


class RopeTables(TritonKernel):
    """cos and sin of positions times frequencies, with the full reduction of the angle."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"warps": 4}]

    def code(self, u: Unit) -> Code:
        cos = u.node.results[0].type
        total = cos.shape[0] * cos.shape[1]
        h = u.sizes(cos.shape[1])
        lines = [
            u.wait,
            f"i = tl.program_id(0) * {TILE} + tl.arange(0, {TILE})",
            f"m = i < {u.sizes(total)}",
            f"angle = tl.load(x1 + i // {h}, mask=m, other=0).to(tl.float32) * "
            f"tl.load(x0 + i % {h}, mask=m, other=0.0).to(tl.float32)",
        ]
        for y, f in (("y0", "cos"), ("y1", "sin")):
            lines.append(f"tl.store({y} + i, (tl.{f}(angle) * {u.node.attrs['scaling']!r}).to({element(cos)}), mask=m)")
        return Code(joined(*lines), (total.ceildiv(TILE),), warps=u.schedule["warps"])


ROPE_APPEND = RopeAppend("triton/rope_append", ("rope_append",))
ROPE = Rope("triton/rope", ("rope",))
ROPE_TABLES = RopeTables("triton/rope_tables", ("rope_tables",))
KV_APPEND = KvAppend("triton/kv_append", ("kv_append",))
