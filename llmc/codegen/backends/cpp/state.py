"""Kernels for device rows, KV pages, sampling and rotary embedding. Each one calls a C++ template."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import FLOATS, INTS, CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.targets.target import Target


class Rope(CppKernel):
    """Rotation of heads; in place if the unrotated heads are not read again."""

    sums = EXACT
    headers = ("llmc_abi.h", "llmc_rope.h")

    def reject(self, node: Node, target: Target) -> str | None:
        if node.operands[1].type.dtype != node.operands[2].type.dtype:
            return "cos and sin have different dtypes"
        return unsupported(node, FLOATS)

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        t, heads, d = (sizes(s) for s in node.operands[0].type.shape)
        h = sizes(node.operands[1].type.shape[1])
        flag = "true" if node.attrs["interleaved"] else "false"
        return f"{pointers(node)}\nrope(ctx, y0, x0, x1, x2, {t}, {heads}, {d}, {h}, {flag});"


class RopeTables(CppKernel):
    """cos and sin of position times frequency."""

    sums = EXACT
    headers = ("llmc_abi.h", "llmc_rope.h")

    def reject(self, node: Node, target: Target) -> str | None:
        freq, pos = (v.type.dtype for v in node.operands)
        if freq not in FLOATS or pos not in INTS or node.attrs["dtype"] not in FLOATS:
            return f"dtypes {freq}, {pos}, {node.attrs['dtype']} are not float, integer, float"
        return None

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        t, h = (sizes(s) for s in node.results[0].type.shape)
        return f"{pointers(node)}\nrope_tables(ctx, y0, y1, x0, x1, {t}, {h}, {node.attrs['scaling']!r}f);"


class KvAppend(CppKernel):
    """Write keys and values to pages; threads divide the (token, head) pairs."""

    sums = EXACT
    headers = ("llmc_abi.h", "llmc_kv.h")

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, (*FLOATS, "i32"))

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        _, _, _, page, d = (sizes(s) for s in node.operands[0].type.shape)
        t, g, _ = (sizes(s) for s in node.operands[1].type.shape)
        return f"{pointers(node)}\nkv_append(ctx, y0, x1, x2, x3, {t}, {g}, {page}, {d});"


class States(CppKernel):
    """The small row_* ops, computed by a single thread."""

    sums = EXACT
    headers = ("llmc_abi.h", "llmc_state.h")

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, (*FLOATS, "i32"))

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        shape = [[sizes(d) for d in v.type.shape] for v in node.operands]
        p = [f"({'float' if v.type.dtype == 'f32' else 'int32_t'}*)args[{i}]" for i, v in enumerate(node.operands)]
        n = len(p)
        y = [f"(int32_t*)args[{n + i}]" for i in range(len(node.results))]
        name = node.op.name
        if name == "row_spans":
            t = sizes(node.results[1].type.shape[0])
            return f"row_spans(ctx, {y[0]}, {y[1]}, {y[2]}, {p[0]}, {p[1]}, {p[2]}, {shape[0][0]}, {t});"
        if name == "row_ids":
            return f"row_ids(ctx, {y[0]}, {p[0]}, {p[1]}, {p[2]}, {shape[1][0]}, {shape[0][1]});"
        if name == "row_slots":
            sizes_text = f"{shape[1][0]}, {shape[0][1]}, {node.attrs['page']}"
            return f"row_slots(ctx, {y[0]}, {p[0]}, {p[1]}, {p[2]}, {sizes_text});"
        if name == "row_last":
            return f"row_last(ctx, {y[0]}, {p[0]}, {sizes(node.result.type.shape[0])});"
        if name == "row_propose":
            return f"row_propose(ctx, {y[0]}, {', '.join(p)}, {shape[3][0]}, {shape[0][1]});"
        if name == "row_rewind":
            return f"row_rewind(ctx, {', '.join(p)}, {shape[2][0]});"
        if name == "row_extend":
            return f"row_extend(ctx, {', '.join(p)}, {shape[2][0]}, {shape[0][1]});"
        sizes_text = f"{shape[3][0]}, {shape[0][1]}, {shape[2][1]}"
        if name == "row_accept":
            return f"row_accept(ctx, {y[0]}, {', '.join(p)}, {sizes_text}, {node.attrs['limit']});"
        return f"row_commit(ctx, {', '.join(p)}, {sizes_text});"


class Drafts(States):
    """Accepting and drafting tokens, computed by a single thread."""

    headers = ("llmc_abi.h", "llmc_draft.h")


class Sampling(CppKernel):
    """Penalties, masks, the random draw and log-probabilities."""

    sums = "one id after another"
    headers = ("llmc_abi.h", "llmc_sample.h")

    def reject(self, node: Node, target: Target) -> str | None:
        if node.op.name == "row_logprobs" and len(node.operands) == 3:
            return "the operand iparams is missing"
        return unsupported(node, (*FLOATS, "i32"))

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        writes = node.op.name in ("row_penalize", "row_mask") and node.operands[0].type.dtype == "f32"
        return ((0, 0),) if writes else ()

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        v = node.operands[0].type.shape[1]
        return v * 12 + (2048 * 16 + 256) if node.op.name == "row_sample" else D(0)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:

        def widths(*operands: int) -> str:
            return "".join(f", {sizes(node.operands[i].type.shape[1])}" for i in operands)

        r, v = (sizes(s) for s in node.operands[0].type.shape)
        arguments = {
            "row_penalize": lambda: widths(4, 6),
            "row_mask": lambda: widths(5, 6),
            "row_logprobs": lambda: f", {node.attrs['k']}",
            "row_sample": lambda: widths(4),
        }[node.op.name]()
        ins = ", ".join(f"x{i}" for i in range(len(node.operands)))
        if node.op.name == "row_penalize":
            ins = ", ".join(f"x{i}" for i in range(8))
            drafted = f"x8, x9, x10, {sizes(node.operands[10].type.shape[1])}" if len(node.operands) > 8 else ""
            ins += f", Drafted{{{drafted}}}"
        if node.op.name == "row_logprobs" and len(node.operands) == 2:
            ins += ", nullptr, nullptr"
        outs = ", ".join(f"y{i}" for i in range(len(node.results)))
        return f"{pointers(node)}\n{node.op.name}(ctx, {outs}, {ins}, {r}, {v}{arguments});"


ROPE = Rope("cpu/rope", ("rope",))
ROPE_TABLES = RopeTables("cpu/rope_tables", ("rope_tables",))
KV_APPEND = KvAppend("cpu/kv_append", ("kv_append",))
STATES = States("cpu/state", ("row_spans", "row_ids", "row_slots", "row_last", "row_commit"))
DRAFTS = Drafts("cpu/draft", ("row_accept", "row_propose", "row_rewind", "row_extend"))
SAMPLING = Sampling("cpu/sample", ("row_penalize", "row_mask", "row_sample", "row_logprobs"))
