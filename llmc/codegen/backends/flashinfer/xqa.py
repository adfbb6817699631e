"""The binding of FlashInfer's XQA: paged attention of one token per row, whole or in parts.

The kernel is that of the package flashinfer-python, called by `kernels/xqa.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

from llmc.codegen.backends.flashinfer.flashinfer_toolchain import missing, remedy
from llmc.codegen.backends.flashinfer.xqa_source import DISTRIBUTION
from llmc.codegen.emit import Sizes, describe
from llmc.codegen.kernel import READ_BEFORE_WAIT, Kernel, Param, Schedule, Source
from llmc.codegen.paged_problem import F8, PagedProblem, reject_types
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.targets.target import PDL, Target

FILE, ENTRY = "xqa.cu", "llmc_xqa"
WHOLE, SPLIT = "paged_attention", "paged_attention_split"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
PAGES = (16, 32, 64, 128)  # tokens of a page
MAX_HEAD = 256  # maximum elements per head
HEAD_STEP = 16  # the elements of a head are a multiple of it
MAX_QUERY_BYTES = 16 << 10  # bytes of the queries of a key head, in padded heads
THREADS = 256  # threads per block
WARPS = 4  # warps of each of two kinds: for keys and for values
TOKENS = 64  # tokens per tile of a warp
BUFFERS = 2  # buffers of keys, and of values
ROWS = 16  # query heads are padded to a multiple of it
ROW_BYTES = 128  # bytes of a warp's maxima of 32 rows
CHUNK = 128  # maximum bytes of a key in a buffer
RESERVED_BYTES = 1024  # bytes of shared memory that CUDA reserves for each block
CTYPES: Mapping[str, str] = MappingProxyType({"f32": "float", "bf16": "__nv_bfloat16", "f16": "__half"})
ASSUMED_CONTEXT = 1024  # tokens per row that the cost rule assumes
_READS = 0.75  # share of the bandwidth that is reached
_TILE_US = 1.9  # time of a tile of 256 tokens
_START_US = 3.0  # the rest of a block's time


class Problem(PagedProblem):
    """The sizes of a node of paged attention, and of the kernel's tiles in shared memory."""

    @property
    def padded(self) -> int:
        """Elements of a head in shared memory."""
        return max(64, 1 << (self.size - 1).bit_length())

    @property
    def rows(self) -> int:
        """Rows of a tile: the query heads of a key head, padded."""
        return -(-self.group // ROWS) * ROWS

    @property
    def shared(self) -> int:
        """Bytes of shared memory: queries, keys, probabilities, values, maxima and sums, barriers."""
        queries = self.rows * self.padded * 2
        keys = WARPS * BUFFERS * TOKENS * min(CHUNK, self.padded * self.item)
        groups = WARPS * 64 // min(256, self.padded)  # groups of warps; each computes all elements of the values
        slices = 1 if self.item == 1 else WARPS // groups
        values = groups * slices * BUFFERS * TOKENS * (self.padded if self.item == 1 else 64 * self.item)
        maxima = 3 * WARPS * -(-self.rows // 32) * ROW_BYTES
        barriers = 8 * (1 + 2 * WARPS + (groups * (BUFFERS + 1) if self.item == 1 else 0))
        used = queries + keys + WARPS * self.rows * 2 * TOKENS + values + maxima + barriers
        return -(-used // 128) * 128

    def resident(self, target: Target) -> int:
        """Blocks of a multiprocessor: two if their shared memory allows it, since they need many registers."""
        return max(1, min(2, target.limits.shared // (self.shared + RESERVED_BYTES)))


class Xqa(Kernel):
    """Paged attention by XQA. Its probabilities, and the results of a part, are rounded to the dtype of the queries."""

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        if target.arch not in ARCHITECTURES or target.has("interpret"):
            return f"{target.name} is not one of the architectures {', '.join(ARCHITECTURES)}"
        return reject_types(node) or _reject_sizes(node, target)

    def missing(self) -> str:
        return f"{why}; {remedy()}" if (why := missing()) else ""

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        """Return the tables of pages, rows, starts and positions."""
        return (2, 3, 4) if node.op.name == SPLIT else (2, 3, 4, 5)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: waves of blocks, whose tiles take the time of their copies, or the bytes of keys."""
        p, parts = Problem.of(node), node.attrs.get("splits", 1)
        tokens = node.operands[0].type.shape[0].subs(env).const or 1
        seen = min(ASSUMED_CONTEXT, node.attrs["window"] or ASSUMED_CONTEXT)
        waves = math.ceil(tokens * p.kv_heads * parts / (target.limits.units * p.resident(target)))
        block = _START_US + math.ceil(seen / parts / (WARPS * TOKENS)) * _TILE_US * p.resident(target)
        read = 2 * tokens * seen * p.kv_heads * p.size * p.item / target.bandwidth / _READS * 1e6
        return max(read, waves * block) + target.launch_us

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        p, parts = Problem.of(node), node.attrs.get("splits", 0)
        q, rows = node.operands[0].type, node.operands[3].type.shape[0]
        values = len(node.operands) + len(node.results)
        head = describe(self.name, node, schedule, Sizes("s{}", [q.shape[0], rows]))
        lines = [f"// {head}", *(f"#define {k} {v}" for k, v in constants(node, schedule, target).items())]
        text = resources.files("llmc.codegen.backends.flashinfer.kernels").joinpath(FILE).read_text()
        passes = [Param("arg", i) for i in range(values)]
        if not parts:
            passes.append(Param("size", size=rows, type="i32"))
        return Source(
            ENTRY, self.language, "\n".join(lines) + "\n\n" + text, threads=THREADS, shared=p.shared,
            grid=(D(max(1, parts)), D(p.kv_heads), q.shape[0]), passes=tuple(passes), pdl=target.has(PDL),
            license=DISTRIBUTION,
        )  # fmt: skip


def _reject_sizes(node: Node, target: Target) -> str | None:
    a, (q, kv, pages, rows) = node.attrs, (node.operands[i].type for i in range(4))
    if node.operand("scales") and kv.dtype != F8:
        return f"scales of a pool of {kv.dtype}; only those of {F8} are supported"
    if a.get("least", 1) > 1 or q.shape[0] != rows.shape[0]:
        return "rows of several tokens; one token per row is supported"
    if a["softcap"]:
        return "soft caps"
    if any(d.const is None for d in (*q.shape[1:], *kv.shape[1:], *pages.shape)):
        return "heads, page, head size and page table must be constant"
    p = Problem.of(node)
    if p.page not in PAGES or p.size % HEAD_STEP or p.size > MAX_HEAD:
        sizes = f"pages of {', '.join(map(str, PAGES))} and heads of multiples of {HEAD_STEP} up to {MAX_HEAD}"
        return f"pages of {p.page} tokens, heads of {p.size}; {sizes} are supported"
    if p.heads % p.kv_heads or p.rows * p.padded * 2 > MAX_QUERY_BYTES:
        return f"{p.heads} query heads of {p.size} for {p.kv_heads} key heads"
    if p.shared > target.limits.shared:
        return f"it needs {p.shared} bytes of shared memory, and {target.name} has {target.limits.shared}"
    return None


def constants(node: Node, schedule: Schedule, target: Target) -> Mapping[str, str | int]:
    """Return the macros of `kernels/xqa.cu` and of FlashInfer's files."""
    p, a = Problem.of(node), node.attrs
    q, kv, sinks = node.operands[0].type, node.operands[1].type, node.operand("sinks")
    return {
        # FlashInfer's: builds for NVRTC, without assertions, beams, drafts and its own division into parts.
        "GENERATE_CUBIN": 1, "NDEBUG": 1, "BEAM_WIDTH": 1, "USE_INPUT_KV": 0, "USE_CUSTOM_BARRIER": 1,
        "ALLOW_MULTI_BLOCK_MODE": 0, "ENABLE_PDL": 0, "SPEC_DEC": 0, "LOW_PREC_OUTPUT": 0,
        "INPUT_FP16": int(q.dtype == "f16"), "CACHE_ELEM_ENUM": 2 if kv.dtype == F8 else 0, "TOKENS_PER_PAGE": p.page,
        "HEAD_ELEMS": p.size, "HEAD_GRP_SIZE": p.group, "SLIDING_WINDOW": int(a["window"] > 0),
        # llmc's. XQA divides the scale of the queries by the square root of the elements of a head.
        "HEADS": p.heads, "KV_HEADS": p.kv_heads, "TABLE_WIDTH": int(node.operands[2].type.shape[1]),
        "WINDOW": a["window"], "SCALE": f"{a['scale'] * math.sqrt(p.size)!r}f", "PARTS": a.get("splits", 0),
        "SHARED": p.shared, "RESIDENT": p.resident(target), "HAS_SCALES": int(node.operand("scales") is not None),
        "HAS_SINKS": int(sinks is not None), "SINK": CTYPES[sinks.type.dtype] if sinks else "float",
        "READ_BEFORE_WAIT": int(bool(schedule.get(READ_BEFORE_WAIT))), "PDL": int(target.has(PDL)),
    }  # fmt: skip


XQA = Xqa("flashinfer/xqa", (WHOLE, SPLIT), language="flashinfer", opt_in=True)
