"""Kernels for device rows, KV pages, sampling and rotary embedding. Each one calls a C++ template."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llmc.codegen.backends.cpp.cpp_kernel import FLOATS, INTS, CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.targets.target import Target


class Rope(CppKernel):
    """Rotation of heads; in place if the unrotated heads are not read again."""

    constant_reduction_order = EXACT
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

    constant_reduction_order = EXACT
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

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_kv.h")

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, (*FLOATS, "i32"))

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        _, _, _, page, d = (sizes(s) for s in node.operands[0].type.shape)
        t, g, _ = (sizes(s) for s in node.operands[1].type.shape)
        return f"{pointers(node)}\nkv_append(ctx, y0, x1, x2, x3, {t}, {g}, {page}, {d});"


# The numbers that the C++ function of an op takes after its pointers: sizes of the op's signature, and attributes.
NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "row_spans": "r tokens", "row_ids": "t l", "row_slots": "t l page", "row_last": "r-1", "row_commit": "r l v",
        "row_accept": "r l v limit", "row_propose": "r l", "row_rewind": "r", "row_extend": "r l",
        "row_penalize": "r v w b", "row_mask": "r v s a", "row_sample": "r v l", "row_logprobs": "r v k",
    }
)  # fmt: skip


def numbers(node: Node, sizes: Sizes) -> list[str]:
    """Return the NUMBERS of a node's op as C++ expressions."""
    known = node.op.sizes([v.type for v in node.operands], node.attrs)
    return [sizes(Dim.of(size).subs(known)) for size in NUMBERS[node.op.name].split()]


class States(CppKernel):
    """The small row_* ops, computed by a single thread."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_state.h")

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, (*FLOATS, "i32"))

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        for v in node.operands:
            sizes.text(v.type)  # operand sizes have the first places in the kernel's size array
        ctypes = ["float" if v.type.dtype == "f32" else "int32_t" for v in node.operands]
        operands = [f"({ctype}*)args[{i}]" for i, ctype in enumerate(ctypes)]
        results = [  # the next version of a state has the memory of its operand
            f"(int32_t*)args[{len(operands) + i}]" for i, r in enumerate(node.results) if not r.type.state
        ]
        return f"{node.op.name}(ctx, {', '.join([*results, *operands, *numbers(node, sizes)])});"


class Drafts(States):
    """Accepting and drafting tokens, computed by a single thread."""

    headers = ("llmc_abi.h", "llmc_draft.h")


class Sampling(CppKernel):
    """Penalties, masks, the random draw and log-probabilities."""

    constant_reduction_order = "one id after another"
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
        results = [f"y{i}" for i in range(len(node.results))]
        values = [*results, *self._operands(node, sizes), *numbers(node, sizes)]
        return f"{pointers(node)}\n{node.op.name}(ctx, {', '.join(values)});"

    @staticmethod
    def _operands(node: Node, sizes: Sizes) -> list[str]:
        """The arguments of the C++ function for the op's operands; an operand that the node lacks is null."""
        operands = [f"x{i}" for i in range(len(node.operands))]
        if node.op.name == "row_logprobs" and len(operands) == 2:  # without the rows that request log-probabilities
            return [*operands, "nullptr", "nullptr"]
        if node.op.name != "row_penalize":
            return operands
        drafted = operands[8:]
        if drafted:
            drafted.append(sizes(node.operands[10].type.shape[1]))
        return [*operands[:8], f"Drafted{{{', '.join(drafted)}}}"]


ROPE = Rope("cpu/rope", ("rope",))
ROPE_TABLES = RopeTables("cpu/rope_tables", ("rope_tables",))
KV_APPEND = KvAppend("cpu/kv_append", ("kv_append",))
STATES = States("cpu/state", ("row_spans", "row_ids", "row_slots", "row_last", "row_commit"))
DRAFTS = Drafts("cpu/draft", ("row_accept", "row_propose", "row_rewind", "row_extend"))
SAMPLING = Sampling("cpu/sample", ("row_penalize", "row_mask", "row_sample", "row_logprobs"))
