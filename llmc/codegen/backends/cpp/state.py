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
        numbers = self._numbers(node, sizes)
        ctypes = ["float" if v.type.dtype == "f32" else "int32_t" for v in node.operands]
        operands = [f"({ctype}*)args[{i}]" for i, ctype in enumerate(ctypes)]
        results = [  # the next version of a state has the memory of its operand
            f"(int32_t*)args[{len(operands) + i}]" for i, r in enumerate(node.results) if not r.type.state
        ]
        return f"{node.op.name}(ctx, {', '.join([*results, *operands, *numbers])});"

    @staticmethod
    def _numbers(node: Node, sizes: Sizes) -> list[str]:
        """The sizes and attributes that the op's C++ function takes after its pointers."""
        shape = [[sizes(d) for d in v.type.shape] for v in node.operands]
        match node.op.name:
            case "row_spans":
                return [shape[0][0], sizes(node.results[1].type.shape[0])]
            case "row_ids":
                return [shape[1][0], shape[0][1]]
            case "row_slots":
                return [shape[1][0], shape[0][1], str(node.attrs["page"])]
            case "row_last":
                return [sizes(node.result.type.shape[0])]
            case "row_propose":
                return [shape[3][0], shape[0][1]]
            case "row_rewind":
                return [shape[2][0]]
            case "row_extend":
                return [shape[2][0], shape[0][1]]
            case "row_accept":
                return [shape[3][0], shape[0][1], shape[2][1], str(node.attrs["limit"])]
            case _:  # row_commit
                return [shape[3][0], shape[0][1], shape[2][1]]


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

        def width(operand: int) -> str:
            return sizes(node.operands[operand].type.shape[1])

        numbers = [sizes(size) for size in node.operands[0].type.shape]  # rows, vocabulary
        operands = [f"x{i}" for i in range(len(node.operands))]
        match node.op.name:
            case "row_penalize":
                numbers += [width(4), width(6)]
                drafted = [*operands[8:], width(10)] if len(operands) > 8 else []
                operands = [*operands[:8], f"Drafted{{{', '.join(drafted)}}}"]
            case "row_mask":
                numbers += [width(5), width(6)]
            case "row_sample":
                numbers.append(width(4))
            case "row_logprobs":
                numbers.append(str(node.attrs["k"]))
                if len(operands) == 2:  # without the ids whose log-probabilities are requested
                    operands += ["nullptr", "nullptr"]
        results = [f"y{i}" for i in range(len(node.results))]
        return f"{pointers(node)}\n{node.op.name}(ctx, {', '.join([*results, *operands, *numbers])});"


ROPE = Rope("cpu/rope", ("rope",))
ROPE_TABLES = RopeTables("cpu/rope_tables", ("rope_tables",))
KV_APPEND = KvAppend("cpu/kv_append", ("kv_append",))
STATES = States("cpu/state", ("row_spans", "row_ids", "row_slots", "row_last", "row_commit"))
DRAFTS = Drafts("cpu/draft", ("row_accept", "row_propose", "row_rewind", "row_extend"))
SAMPLING = Sampling("cpu/sample", ("row_penalize", "row_mask", "row_sample", "row_logprobs"))
