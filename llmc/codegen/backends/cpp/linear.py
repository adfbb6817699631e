"""Matrix products with generated epilogues over packed weights. The loops are in llmc_linear.h."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from llmc.codegen.backends.cpp.cpp_kernel import CTYPES, CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes, indent
from llmc.codegen.kernel import Schedule
from llmc.codegen.print_expr import Dag, Names, convert, statements
from llmc.codegen.product import ProductNode
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.scalar import parse_expr
from llmc.ir.types import Type
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

MAX_PARTS = 4
PANEL_BYTES = 256 << 10  # bytes of a panel that stay in the L2 cache while it is applied to rows of x
COPY_BYTES = 512 << 10  # maximum bytes of converted or rounded rows of x


class Problem(ProductNode):
    """The computation of a product node, whether or not its weight is packed yet."""

    @cached_property
    def n(self) -> Dim:
        """The number of weight rows per part, without padding."""
        rows = self.w.shape[0]
        return self.node.attrs.get("n") or rows.divide(self.parts) or rows

    @property
    def k(self) -> Dim:
        """The number of columns of x."""
        return self.x.shape[-1]

    @property
    def pair(self) -> int:
        """Adjacent columns stored side by side in a panel: 2 for bf16, to match the dot-product instruction."""
        return 2 if self.w.dtype == "bf16" else 1

    def dp(self, target: Target) -> bool:
        """Whether the target multiplies and adds pairs of bf16 in one instruction."""
        return self.x.dtype == self.w.dtype == "bf16" and target.vector == 64 and target.has("avx512_bf16")


def extra_strides(extra: Type, out: Type) -> tuple[int, int] | None:
    """Return whether (0 or 1) an extra has rows and columns of out [*b, n]; None if it broadcasts over some rows."""
    if not extra.rank:
        return 0, 0
    lead = [D(1)] * (out.rank - extra.rank) + list(extra.shape[:-1])
    columns = int(extra.shape[-1] == out.shape[-1] and out.shape[-1].const != 1)
    if all(d.const == 1 for d in lead):
        return 0, columns
    return (1, columns) if lead == list(out.shape[:-1]) else None


class PackedProduct(CppKernel):
    """The base class of products over packed weights. `ops[-1]` is the op whose weight is packed already."""

    def problem(self, node: Node) -> Problem:
        """Read the problem from a node."""
        return Problem(node)

    def reject_sizes(self, p: Problem) -> str | None:
        """Return why the sizes or the operands of the epilogue are not supported, or None."""
        if p.n.const is None or p.k.const is None:
            return f"the weight's sizes {p.n} x {p.k} are not constant"
        if not 1 <= p.parts <= MAX_PARTS:
            return f"{p.parts} parts; the maximum is {MAX_PARTS}"
        if any(extra_strides(e, p.out) is None for e in p.extras):
            return "an epilogue operand broadcasts over only some of the leading axes"
        return None

    def reject_weight(self, p: Problem, target: Target, pair: int) -> str | None:
        """Return why the weight cannot be packed, or is not packed in panels with this `pair` for the target."""
        if p.node.op.name != self.ops[-1]:
            constant = all(origin(v) is not Origin.INPUTS for v in p.node.operands[1 : p.first_extra])
            return None if constant else "the weight is not known at compile time"
        rows, packed_pair = (d.const or 0 for d in p.w.shape[2:])
        lanes = target.vector // 4 * p.parts
        if rows % lanes or rows > 4 * lanes or packed_pair != pair:
            return f"the weight is packed for another target (panels of {rows} rows, pairs of {packed_pair})"
        return None

    def panel_rows(self, p: Problem, target: Target) -> int:
        """Return the rows of a panel: those of the packed weight, or those to pack it with."""
        if p.node.op.name == self.ops[-1]:
            return p.w.shape[2].const or 0
        return target.vector // 4 * p.parts * (1 if p.parts > 1 else 2)

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        p = self.problem(node)
        same = [e.dtype == p.out.dtype and e.shape == p.out.shape for e in p.extras]
        return tuple((i + p.first_extra, 0) for i, fits in enumerate(same) if fits)

    def call(self, node: Node, sizes: Sizes, function: str, weight: str) -> str:
        """Return the call of `function` with x, its number of rows, the operands `weight` and the epilogue."""
        p = self.problem(node)
        members = ", ".join(["y0", *(f"x{i + p.first_extra}" for i in range(len(p.extras)))])
        call = f"{function}<Shape>(ctx, x0, (int64_t){sizes(p.m)}, {weight}, e);"
        return f"{pointers(node)}\nconst Epilogue e = {{{members}}};\n{call}"

    def checked_epilogue(self, node: Node, schedule: Schedule, target: Target, function: str) -> str:
        """Return the epilogue, and the check that the scratch memory is large enough for `function`."""
        p, size = self.problem(node), self.scratch(node, schedule, target)
        check = f'static_assert({function}<Shape, Epilogue>::SCRATCH <= {size}, "scratch");\n'
        return epilogue(p, schedule["rows"] // p.parts) + check


class Linear(PackedProduct):
    """linear, linear_map and packed_linear for any number of rows, from one (memory-bound) to a prompt."""

    constant_reduction_order = "one column after another"
    headers = ("llmc_linear.h", "llmc_math.h", "llmc_store.h")

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, FLOATS):
            return why
        p = Problem(node)
        return self.reject_sizes(p) or self.reject_weight(p, target, p.pair)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """Return the tile sizes to use, derived from the target's registers and caches."""
        p = Problem(node)
        rows = self.panel_rows(p, target)
        registers = {64: 24, 32: 12}.get(target.vector, 8)  # accumulators, by the bytes of a vector
        mr = max(1, registers // (rows // (target.vector // 4)))
        size = DTYPES[p.w.dtype].bits // 8
        kc = max(512, PANEL_BYTES // (rows * size)) // 2 * 2
        k = -(-(p.k.const or 1) // p.pair) * p.pair
        mb = 8 if p.dp(target) else max(4, min(8, COPY_BYTES // (4 * k * mr)))
        return [{"rows": rows, "mr": mr, "mb": mb, "kc": kc}]

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        """Return the packed layout of the weight, unless it is packed already."""
        if node.op.name == "packed_linear":
            return {}
        p = Problem(node)
        return {1: f"pack_panel{{rows={schedule['rows']}, pair={p.pair}, parts={p.parts}}}"}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        p = Problem(node)
        layout = {"rows": schedule["rows"], "pair": p.pair, "parts": p.parts}
        packed = g.add(ops["pack_panel"], [node.operands[1]], layout, before=node, loc=node.loc).result
        attrs = {"n": p.n, "parts": p.parts, "body": p.body, "dtype": node.attrs.get("dtype", "")}
        g.replace_op(node, ops["packed_linear"], [node.operands[0], packed, *node.operands[2:]], attrs)

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        p, s = Problem(node), schedule
        k = p.k.const or 1
        padded = -(-k // p.pair) * p.pair
        sums = (s["mb"] if k > s["kc"] else 1) * s["mr"] * s["rows"] * 4
        item = 2 if p.dp(target) else 4
        direct = k == padded and item == DTYPES[p.x.dtype].bits // 8
        return D(sums + (0 if direct else s["mb"] * s["mr"] * padded * item))

    def helpers(self, node: Node, schedule: Schedule, target: Target) -> str:
        p, s = Problem(node), schedule
        config = (
            f"struct Shape {{\n  typedef {CTYPES[p.x.dtype]} X;\n  typedef {CTYPES[p.w.dtype]} W;\n"
            f"  static constexpr int64_t K = {p.k}, N = {p.n}, MB = {s['mb']}, KC = {s['kc']};\n"
            f"  static constexpr int NV = {s['rows']} / VN, PAIR = {p.pair}, PARTS = {p.parts}, MR = {s['mr']};\n"
            f'  static_assert({s["rows"]} % (VN * PARTS) == 0, "panels fit the vectors");\n}};\n'
        )
        return config + self.checked_epilogue(node, s, target, "product")

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        return self.call(node, sizes, "linear", "x1")


def epilogue(p: Problem, stride: int) -> str:
    """Return the C++ struct whose `put` computes outputs from accumulators, `stride` floats apart, and extras."""
    dag, lines = Dag(), []
    names: Names = {}
    root = dag.add(parse_expr(p.body))
    order = dag.below([root])
    for i in order:
        if dag.nodes[i].fn != "arg":
            continue
        lines.append(f"const vf t{i} = {_argument(p, dag.argument(i), stride)};")
        names[i] = (f"t{i}", "f")
    lines += statements(dag, order, names)
    lines.append(f"set(y + m * {p.n} + n, {convert(*names[root], 'f')}, mask);")
    members = [f"{CTYPES[p.out.dtype]}* y;", *(f"const {CTYPES[e.dtype]}* e{i};" for i, e in enumerate(p.extras))]
    return (
        f"struct Epilogue {{\n{indent(chr(10).join(members))}\n"
        f"  template <class M> LLMC_METHOD void at(int64_t m, int64_t n, M mask, const float* c) const {{\n"
        f"{indent(chr(10).join(lines), 4)}\n  }}\n"
        "  LLMC_METHOD void put(int64_t m, int64_t n, int count, const float* c) const {\n"
        "    if (count == VN) at(m, n, Full{}, c);\n    else at(m, n, Part{count}, c);\n  }\n};\n"
    )


def _argument(p: Problem, j: int, stride: int) -> str:
    """Return operand j of the body: accumulators first, then extras."""
    if j < p.parts:
        return f"vload(c + {j * stride})" if j else "vload(c)"
    rows, columns = extra_strides(p.extras[j - p.parts], p.out) or (0, 0)
    pointer = f"e{j - p.parts}"
    if rows:
        pointer += f" + m * {p.n if columns else 1}"
    return f"get({pointer} + n, mask)" if columns else f"splat(widen(*({pointer})))"


LINEAR = Linear("cpu/linear", ("linear", "linear_map", "packed_linear"))
