"""Kernels for device rows, KV pages, sampling, rotary embedding and pooling. Each one calls a C++ template."""

from __future__ import annotations

from types import MappingProxyType

from llmc.codegen.backends.cpp.cpp_kernel import Call
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import FLOATS, INTS
from llmc.ir.graph import Node
from llmc.targets.target import Target


class Rope(Call):
    """Rotation of heads; in place if the unrotated heads are not read again."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_rope.h")
    dtypes = FLOATS
    numbers = "t n d h interleaved"

    def reject(self, node: Node, target: Target) -> str | None:
        if node.operands[1].type.dtype != node.operands[2].type.dtype:
            return "cos and sin have different dtypes"
        return super().reject(node, target)

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)


class RopeTables(Call):
    """cos and sin of position times frequency."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_rope.h")
    dtypes = (*FLOATS, *INTS)
    numbers = "t h scaling"


class KvAppend(Call):
    """Write keys and values to pages; threads divide the (token, head) pairs."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_kv.h")
    dtypes = (*FLOATS, "i32")
    numbers = "t g page d"


class Pooling(Call):
    """First tokens, last positions, means and new lengths of prompts."""

    headers = ("llmc_abi.h", "llmc_pooling.h")
    dtypes = (*FLOATS, "i32")
    numbers = MappingProxyType({"row_first": "r-1", "row_reach": "r-1 t", "row_mean": "r-1 d", "row_advance": "r"})


class States(Call):
    """The small row_* ops, computed by a single thread."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_state.h")
    dtypes = (*FLOATS, "i32")
    numbers = MappingProxyType(
        {
            "row_spans": "r tokens", "row_ids": "t l", "row_slots": "t l page", "row_last": "r-1",
            "row_commit": "r l v",
        }
    )  # fmt: skip

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        for v in node.operands:
            sizes.text(v.type)  # operand sizes have the first places in the kernel's size array
        ctypes = ["float" if v.type.dtype == "f32" else "int32_t" for v in node.operands]
        operands = [f"({ctype}*)args[{i}]" for i, ctype in enumerate(ctypes)]
        results = [  # the next version of a state has the memory of its operand
            f"(int32_t*)args[{len(operands) + i}]" for i, r in enumerate(node.results) if not r.type.state
        ]
        return f"{node.op.name}(ctx, {', '.join([*results, *operands, *self.number_texts(node, sizes)])});"


class Drafts(States):
    """Accepting and drafting tokens, computed by a single thread."""

    headers = ("llmc_abi.h", "llmc_draft.h")
    numbers = MappingProxyType(
        {"row_accept": "r l v limit", "row_propose": "r l", "row_rewind": "r", "row_extend": "r l"}
    )


class Sampling(Call):
    """Penalties, masks, the random draw and log-probabilities."""

    constant_reduction_order = "one id after another"
    headers = ("llmc_abi.h", "llmc_sample.h")
    dtypes = (*FLOATS, "i32")
    numbers = MappingProxyType(
        {"row_penalize": "r v w b", "row_mask": "r v s a", "row_sample": "r v l", "row_logprobs": "r v k"}
    )

    def reject(self, node: Node, target: Target) -> str | None:
        if node.op.name == "row_logprobs" and len(node.operands) == 3:
            return "the operand iparams is missing"
        return super().reject(node, target)

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        writes = node.op.name in ("row_penalize", "row_mask") and node.operands[0].type.dtype == "f32"
        return ((0, 0),) if writes else ()

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        v = node.operands[0].type.shape[1]
        return v * 12 + (2048 * 16 + 256) if node.op.name == "row_sample" else D(0)

    def operands(self, node: Node, sizes: Sizes) -> list[str]:
        """Return the arguments for the op's operands; an operand that the node lacks is null."""
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
POOLING = Pooling("cpu/pooling", ("row_first", "row_reach", "row_mean", "row_advance"))
STATE = States("cpu/state", ("row_spans", "row_ids", "row_slots", "row_last", "row_commit"))
DRAFT = Drafts("cpu/draft", ("row_accept", "row_propose", "row_rewind", "row_extend"))
SAMPLE = Sampling("cpu/sample", ("row_penalize", "row_mask", "row_sample", "row_logprobs"))
