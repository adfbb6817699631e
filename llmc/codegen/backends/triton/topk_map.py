"""topk_map and topk_route in Triton (generated): a program selects the largest elements of one row."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.reduce import key_function
from llmc.codegen.backends.triton.row_kernels import START
from llmc.codegen.backends.triton.tiling import cost_us, max_block_warps, next_power_of_2
from llmc.codegen.backends.triton.triton_expr import fold, helpers, inline, loaded
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, element, unsupported
from llmc.codegen.emit import indent
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.ir.dim import product
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.ir.ops.reduce import row_expr
from llmc.ir.scalar import E, walk
from llmc.targets.target import Target

MAX_COLUMNS = 4096  # maximum columns of a row, which is kept in registers
MAX_K = 64
MIN_KEY = -(2**31)  # a key below those of all numbers
VALUE = '''
@triton.jit
def value_of(key):
    """The float of which `ordered` made a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
'''


class TopkMap(TritonKernel):
    """The k largest elements, one after the other: the lowest column of the largest key; a program per row."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        n, k = node.operands[0].type.shape[-1], node.attrs["k"]
        if n.const is None or n.const > MAX_COLUMNS:
            return f"rows of {n} elements; the maximum is {MAX_COLUMNS}, and the number must be constant"
        if k > MAX_K:
            return f"k is {k}; the maximum is {MAX_K}"
        return unsupported(node, (*FLOATS, "i32"))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        n = next_power_of_2(int(node.operands[0].type.shape[-1]))
        warp = target.limits.warp
        warps = max(1, min(max_block_warps(target), n // (warp * 8)))
        return [{"warps": w} for w in dict.fromkeys((warps, max(1, warps // 2)))]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        rows, warps = product(node.operands[0].type.shape[:-1]), schedule["warps"]
        return cost_us(node, target, env, rows, warps) + 0.1 * int(node.attrs["k"]) * warps**0.5

    def code(self, u: Unit) -> Code:
        k = u.node.attrs["k"]
        return self.selection(u, [f"tl.store(y1 + row * {k} + slot, which, mask=some)"])

    def selection(self, u: Unit, stores: list[str], counted: tuple[str, str] | None = None) -> Code:
        """Return the code that stores the values, and whose statements `stores` store the rest.

        These have `slot` (numbers of the selected elements), `some` (which of those exist) and `which` (their columns).
        counted: a statement before the loop over them, and one for each, whose column is `at`.
        """
        x, k = u.node.operands[0].type, u.node.attrs["k"]
        n = int(x.shape[-1])
        before, after = (fold(row_expr(u.node.attrs[name])) for name in ("before", "after"))
        read, keyed = row_statements(before, "x", "inside", n, "b")
        statements, value = row_statements(after, "best", "some", k, "c")
        loop = [
            "last = tl.max(keys, 0)",
            f"at = tl.min(tl.where(keys == last, col, {next_power_of_2(n)}), 0)",
            f"keys = tl.where(col == at, {MIN_KEY}, keys)",
            "best = tl.where(slot == j, value_of(last), best)",
            "which = tl.where(slot == j, at, which)",
            *(counted or ())[1:],
        ]
        lines = [
            "row = tl.program_id(0).to(tl.int64)",
            f"col = tl.arange(0, {next_power_of_2(n)})",
            f"inside = col < {n}",
            u.wait,
            f"x = {loaded(f'tl.load(x0 + row * {n} + col, mask=inside, other=0)', x.dtype)}",
            *read,
            f"keys = tl.where(inside, key({keyed}), {MIN_KEY})",
            f"slot = tl.arange(0, {next_power_of_2(k)})",
            f"some = slot < {k}",
            f"best = tl.zeros(({next_power_of_2(k)},), tl.float32)",
            f"which = tl.zeros(({next_power_of_2(k)},), tl.int32)",
            *(counted or ())[:1],
            f"for j in range({k}):\n{indent(chr(10).join(loop), 4)}",
            *statements,
            f"tl.store(y0 + row * {k} + slot, {value}.to({element(u.node.results[0].type)}), mask=some)",
            *stores,
        ]
        rows = product(x.shape[:-1])
        used = [e.fn for whole in (before, after) for e in walk(whole)]
        text = "\n\n\n".join(t.strip() for t in (key_function("-0x7FFFFFFF"), VALUE, helpers(used, u.interpret)) if t)
        return Code("\n".join(x for x in lines if x), (rows,), text, u.schedule["warps"])


class TopkRoute(TopkMap):
    """topk_route: the selection of one row, and its pairs sorted by expert."""

    def code(self, u: Unit) -> Code:
        n = int(u.node.operands[0].type.shape[-1])
        k = u.node.attrs["k"]
        stores = [
            "before = (which[None, :] < which[:, None]) & some[None, :]",
            "tl.store(y1 + tl.sum(before.to(tl.int32), 1), slot, mask=some)",
            "tl.store(y2 + col, starts, mask=inside)",
            f"tl.store(y2 + {n}, {k})",
        ]
        counted = ("starts = tl.zeros_like(col)", "starts += (col > at).to(tl.int32)")
        return self.selection(u, stores, counted)


def row_statements(e: E, operand: str, mask: str, width: int, prefix: str) -> tuple[list[str], str]:
    """Print an expression of the vector `operand`: statements, and its value, which is a vector.

    mask: the name of a vector of whether elements belong to the row of `width` elements. prefix: of names.
    """

    def reduction(fn: str, value: str) -> str:
        inner = f"tl.where({mask}, {value}, {START[fn]})"
        if fn == "row_max":
            return f"largest({inner}, 0, False)"
        return f"tl.sum({inner}, 0) / {width}" if fn == "row_mean" else f"tl.sum({inner}, 0)"

    lines, value = inline(e, [operand], prefix, reduction)
    return lines, f"tl.where({mask}, {value}, 0.0)"


TOPK_MAP = TopkMap("triton/topk_map", ("topk_map",), can_trigger_before_wait=True)
TOPK_ROUTE = TopkRoute("triton/topk_route", ("topk_route",))
