"""The binding of `kernels/grouped_codes.cu`: products of experts over weights of 4 bits on Hopper's tensor cores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmc.codegen.backends.cuda.cuda_epilogue import PAIR, operand_macros
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, FLOATS, Binding, OptionalCudaKernel
from llmc.codegen.backends.cuda.grouped_wgmma import MAX_EXPERTS
from llmc.codegen.backends.cuda.wgmma import ALIGN, WARPGROUP, lacks_wgmma, multiply_registers
from llmc.codegen.expert_stack import CODE, STARTS, Stack, chosen_experts, overlapped, row_blocks
from llmc.codegen.kernel import READ_BEFORE_WAIT, Schedule
from llmc.codegen.print_expr import inline
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.moe import gate
from llmc.ir.ops.packed_codes import BLOCK
from llmc.ir.ops.quantized_moe import EIGHT, OF_CODES
from llmc.passes.analysis import Origin, origin
from llmc.targets.gpu_targets import REGISTERS
from llmc.targets.target import Target

PLAIN = ("quantized_moe_up", "quantized_moe_down")
PACKED = ("fragments_moe_up", "fragments_moe_down")
SCALES = ("bf16", "f16")
GROUP_SIZE_M = 16  # tiles of rows that are processed together, to share tiles of the weights in the L2 cache
MAX_STAGES, MIN_STAGES = 12, 4  # buffers of the ring
MAX_SCALED_TOKENS = 32  # up to so many tokens per tile, scales multiply the sums instead of the factors
OTHER_REGISTERS = 40  # registers of a consumer's thread besides factors and sums
# Fitted to measurements on an H200 (bench.gpu.experts). A unit is a block of 64 rows and 64 columns of codes.
_START_US = 1.5  # a launch
_STEP_US = 0.32  # latency of a step
_STEP_UNIT_US = 0.074  # latency of each unit of a step
_CONVERT_INTEGERS_US = 0.07  # converting a unit of integers
_CONVERT_FLOATS_US = 0.15  # converting a unit of floats
_COLUMN_US = 0.00133  # multiplying a unit by a row of x
_BYTE_US = 2.4e-5  # copying a byte
_TILE_US = 0.98  # the end of a tile
_SUMS_US = 0.009  # the end of a tile, for each 64 rows of the weight and row of x
_LAST_ROUND = 0.3  # share of a round that the last tiles take
_BANDWIDTH_SHARE = 0.81  # share of the bandwidth that is reached
# The means of ten equally likely parts of the standard normal distribution.
_QUANTILES = (-1.645, -1.036, -0.674, -0.385, -0.126, 0.126, 0.385, 0.674, 1.036, 1.645)
STATIC = 512  # bytes of shared memory for barriers and counts


class CodesTile(NamedTuple):
    """The tile of a block of threads; the fields are the entries of its schedule.

    tokens: maximum rows of x. consumers: consumer warpgroups. blocks: blocks of 64 rows of the weight per consumer.
    resident: thread blocks per multiprocessor.
    """

    tokens: int
    consumers: int
    blocks: int
    resident: int


FEW = tuple(
    CodesTile(tokens, *rest)
    for tokens in (8, 16, 32)
    for rest in ((4, 1, 1), (2, 1, 2), (2, 1, 1), (1, 1, 3), (2, 2, 1), (1, 2, 2), (1, 2, 3))
    if tokens < 32 or rest != (1, 2, 3)
)
MANY = (
    CodesTile(64, 2, 2, 1), CodesTile(64, 3, 1, 1), CodesTile(64, 1, 2, 2), CodesTile(64, 2, 1, 1),
    CodesTile(128, 2, 2, 1), CodesTile(128, 3, 1, 1), CodesTile(128, 2, 1, 1), CodesTile(256, 2, 1, 1),
    CodesTile(96, 2, 2, 1), CodesTile(96, 3, 1, 1), CodesTile(144, 2, 2, 1), CodesTile(144, 3, 1, 1),
    CodesTile(160, 3, 1, 1), CodesTile(192, 2, 1, 1), CodesTile(128, 1, 1, 3),
)  # fmt: skip


class CodesRing(NamedTuple):
    """A ring of buffers. chunks: blocks of 64 columns per buffer. nbytes: bytes per buffer."""

    chunks: int
    stages: int
    nbytes: int


class CodesProblem(Stack):
    """A grouped product over codes of 4 bits, packed or not."""

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return int(self.node.attrs["block"][1]) or self.k

    @property
    def zeros(self) -> bool:
        """Whether each group has a zero point."""
        return bool(self.node.attrs["zeros"])

    @property
    def weight_bytes(self) -> float:
        """The bytes of an expert's codes, scales and zero points."""
        entry = 2 + self.zeros
        return self.rows * (self.k / 2 + self.k // self.group * entry)

    def ring(self, s: Schedule, target: Target) -> CodesRing:
        """Return the ring that fits into shared memory. Buffers have two blocks of columns if enough of them fit."""
        places = 8 * s["consumers"] * s["tokens"]
        available = target.limits.shared // s["resident"] - ALIGN - STATIC - 8 * self.experts - places
        for chunks in (2, 1):
            columns = chunks * BLOCK
            codes = BLOCK * columns // 2 + max(1, columns // self.group) * BLOCK * (2 + self.zeros)
            nbytes = -(-(s["tokens"] * columns * 2 + s["consumers"] * s["blocks"] * codes) // ALIGN) * ALIGN
            stages = min(MAX_STAGES, available // nbytes)
            divides = self.k % columns == 0 and (columns % self.group == 0 or self.group % columns == 0)
            if divides and stages >= MIN_STAGES:
                break
        return CodesRing(chunks, stages, nbytes)


@dataclass(frozen=True)
class GroupedCodes(OptionalCudaKernel):
    """quantized_moe_up and quantized_moe_down over codes of 4 bits, which are packed at compile time, on sm_90."""

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        return lacks_wgmma(target) or _reject_types(node) or _reject_sizes(node)

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        if node.op.name not in PLAIN:
            return {}
        parts = Stack(node).parts
        return {CODE: f"pack_fragments, {parts} parts", **dict.fromkeys(_tables(node), f"transpose, {parts} parts")}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        p, new = Stack(node), list(node.operands)

        def add(name: str, i: int, **attrs: object) -> None:
            new[i] = g.add(ops[name], [new[i]], attrs, before=node, loc=node.loc).result

        for i in (CODE, *_tables(node)):
            e, rows, columns = (int(d) for d in new[i].type.shape)
            if p.parts == 2:
                add("reshape", i, shape=(e, p.parts, rows // p.parts // EIGHT, EIGHT, columns))
                add("transpose", i, perm=(0, 2, 1, 3, 4))
                add("reshape", i, shape=(e, rows, columns))
            if i == CODE:
                add("pack_fragments", i)
            else:
                add("transpose", i, perm=(0, 2, 1))
        attrs = {name: value for name, value in node.attrs.items() if name not in OF_CODES}
        g.replace_op(node, ops[PACKED[PLAIN.index(node.op.name)]], new, attrs)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [t._asdict() for t in _tiles(CodesProblem(node), target)]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: reading the chosen experts overlaps with rounds of tiles.

        A tile is bound by the latency of its steps, or by its conversions, products or copies, which the blocks of a
        multiprocessor share.
        """
        p, s, units = CodesProblem(node), schedule, target.limits.units
        pairs = int(node.operands[1].type.shape[0].subs(env))
        blocks = s["consumers"] * s["blocks"]  # blocks of 64 rows of the weight per tile
        floats = bool(node.attrs["values"])
        tiles = row_blocks(pairs, p.experts, s["tokens"]) * -(-p.rows // (BLOCK * blocks))
        columns = _mean_columns(pairs, p.experts, s["tokens"], _narrowest(s["tokens"], floats))
        resident = min(s["resident"], math.ceil(tiles / units))
        unit_us = max(_CONVERT_FLOATS_US if floats else _CONVERT_INTEGERS_US, _COLUMN_US * columns)
        copied = blocks * BLOCK * 33 + columns * BLOCK * 2  # bytes per 64 columns: 4-bit codes with scales, and bf16
        throughput_us = resident * p.k / BLOCK * max(blocks * unit_us, _BYTE_US * copied)
        chunks = p.ring(s, target).chunks
        latency_us = p.k // BLOCK // chunks * (_STEP_US + _STEP_UNIT_US * s["blocks"] * chunks)
        tile_us = max(throughput_us, latency_us) + _TILE_US + _SUMS_US * columns * blocks * resident
        rounds = max(1.0, tiles / (units * s["resident"]) + _LAST_ROUND)
        read_us = chosen_experts(pairs, p.experts) * p.weight_bytes / target.bandwidth / _BANDWIDTH_SHARE * 1e6
        return overlapped(read_us, rounds * tile_us) + _START_US + target.launch_us

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        return STARTS, CODE, *_tables(node)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = CodesProblem(node), schedule
        ring = p.ring(s, target)
        narrowest = _narrowest(s["tokens"], bool(node.attrs["values"]))
        threads = (s["consumers"] + 1) * WARPGROUP
        producer_registers, consumer_registers = _registers(s)
        widths = range(narrowest, s["tokens"] + 1, narrowest)
        scale = p.type("scale")
        assert scale is not None
        return Binding(
            grid=(target.limits.units * s["resident"],),
            threads=threads,
            constants={
                "WARPGROUP": WARPGROUP, "BLOCK": BLOCK, "CHUNKS": ring.chunks, "STEP": ring.chunks * BLOCK,
                "THREADS": threads, "EXPERTS": p.experts, "N": p.n, "K": p.k,
                "PARTS": p.parts, "GROUP": p.group, "ZERO_POINT": -1 if p.zeros else node.attrs["zero_point"],
                "E2M1": int(node.attrs["values"] == "e2m1"), "TILE_M": s["tokens"], "NARROWEST": narrowest,
                "CONSUMERS": s["consumers"], "BLOCKS": s["blocks"], "RESIDENT": s["resident"], "STAGES": ring.stages,
                "STAGE_BYTES": ring.nbytes, "OVERLAP": int(_overlaps(s)),
                "PRODUCER_REGISTERS": producer_registers, "CONSUMER_REGISTERS": consumer_registers,
                "READ_BEFORE_WAIT": int(READ_BEFORE_WAIT in s), "GROUP_SIZE_M": GROUP_SIZE_M,
                "CHOICES": node.attrs["k"] if p.up else 0, "SCATTER": int(not p.up),
                "SCALE": CTYPES[scale.dtype], "OUT": CTYPES[node.result.type.dtype],
            },
            shared=ring.stages * ring.nbytes + ALIGN,
            text="\n\n".join((
                "using Ring = BufferRing<STAGES, STAGE_BYTES>;", *map(multiply_registers, widths), epilogue(p),
            )),
        )  # fmt: skip


def _narrowest(tokens: int, floats: bool) -> int:
    """Return the number of columns by which the widths of the instructions differ, which is also the smallest width.

    NVCC 13.0 serialises the products of a kernel with more widths for lack of registers. floats: whether codes are
    floats, whose conversion needs more registers.
    """
    max_variants = 2 if tokens in (160, 192) or (floats and tokens >= 32) else 4
    return next(tokens // n for n in range(max_variants, 0, -1) if tokens % (8 * n) == 0)


def _mean_columns(pairs: int, experts: int, tokens: int, narrowest: int) -> float:
    """Return the mean number of columns of a tile's instructions, if pairs choose experts evenly."""
    mean, tiles, columns = pairs / experts, 0, 0
    for z in _QUANTILES:
        rows = max(1.0, mean + z * math.sqrt(mean) if mean > 1 else pairs / chosen_experts(pairs, experts))
        count = math.ceil(rows / tokens)
        tiles += count
        columns += count * math.ceil(rows / count / narrowest) * narrowest
    return columns / tiles


def _registers(s: Schedule) -> tuple[int, int]:
    """Return the registers per thread of the producer and of a consumer; their total is that of equal shares."""
    consumers = int(s["consumers"])
    equal = REGISTERS // (s["resident"] * (consumers + 1) * WARPGROUP) // 8 * 8
    given = 56 if equal >= 128 else 40
    return given, min(240, (equal * (consumers + 1) - given) // consumers // 8 * 8)


def _overlaps(s: Schedule) -> bool:
    """Whether a consumer has registers for the factors of two steps, so that it converts while it multiplies."""
    if s["tokens"] <= MAX_SCALED_TOKENS:
        factors, sums = 2 * 32 * s["blocks"], s["tokens"] * s["blocks"]
        return factors + sums + OTHER_REGISTERS <= _registers(s)[1]
    return s["consumers"] <= 2 and s["tokens"] <= 128


def _tiles(p: CodesProblem, target: Target) -> Iterator[CodesTile]:
    """Yield the tiles whose ring has enough buffers."""
    for tile in (*FEW, *MANY):
        if p.ring(tile._asdict(), target).stages >= MIN_STAGES:
            yield tile


def _tables(node: Node) -> list[int]:
    """Return the indices of the operands with an entry for each group of columns: scales and zero points."""
    stack = Stack(node)
    return [i for i in (stack.operand("scale"), stack.operand("zero")) if i is not None]


def _reject_types(node: Node) -> str | None:
    a, stack = node.attrs, Stack(node)
    x, scale, zero = node.operands[0].type, stack.type("scale"), stack.type("zero")
    assert scale is not None
    if a.get("act"):
        return f"activations rounded to {a['act']}"
    if x.dtype != "bf16" or scale.dtype not in SCALES:
        return f"rows of {x.dtype} and scales of {scale.dtype}; bf16, and {' or '.join(SCALES)}, are supported"
    if stack.code.dtype != "u8" or a.get("bits", 4) != 4:
        return f"codes of {stack.code.dtype} and {a.get('bits', 4)} bits; codes of 4 bits are supported"
    if a.get("half"):
        return "codes that are packed for other kernels"
    if a["values"] not in ("", "e2m1") or (a["values"] and (a["zeros"] or a["zero_point"])):
        return f"codes of the encoding {a['values']!r} with the zero point {'of groups' if zero else a['zero_point']}"
    if zero is not None and zero.dtype != "u8":
        return f"zero points of {zero.dtype}; u8 is supported"
    if not a["zeros"] and not 0 <= a["zero_point"] < 16:
        return f"the zero point {a['zero_point']}; 0 to 15 are supported"
    for v in (*(t for name in ("weights", "bias") if (t := stack.type(name)) is not None), node.result.type):
        if v.dtype not in FLOATS:
            return f"operand type {v} is not among {', '.join(FLOATS)}"
    if any(v.type.dtype != "i32" for v in node.operands[1:3]):
        return "the pairs and their starts are not i32"
    return None


def _reject_sizes(node: Node) -> str | None:
    p = CodesProblem(node)
    experts, rows, k = (d.const for d in (*p.code.shape[:2], node.operands[0].type.shape[1]))
    if not experts or not rows or not k or rows % BLOCK or k % BLOCK:
        return f"the experts' sizes {p.code} are not constant multiples of {BLOCK}"
    if p.up and p.parts == 1:
        return "experts without a gate"
    if experts > MAX_EXPERTS:
        return f"{experts} experts; the maximum is {MAX_EXPERTS}"
    aligned = p.k % p.group == 0 and p.group % 16 == 0 and (BLOCK % p.group == 0 or p.group % BLOCK == 0)
    if node.attrs["block"][0] != 1 or not aligned:
        return f"blocks of {list(node.attrs['block'])}; 16, 32 and multiples of {BLOCK} columns are supported"
    if any(origin(node.operands[i]) is Origin.INPUTS for i in (CODE, *_tables(node))):
        return "the codes, scales or zero points are not known at compile time"
    return None


def epilogue(p: Stack) -> str:
    """Generate OTHER_PARAMETERS, OTHER_ARGUMENTS, OTHERS, ZEROS and the functions of the epilogue (see the `.cu` file).

    `row_factor(pair OTHERS)` is the factor of a row, `load_bias(bias, expert, column OTHERS)` loads the biases of the
    two rows of w that a thread has, and `epilogue(a, b)` is the activation of a gate and an up value.
    """
    names = {"weights": "weights", "zero": "zeros", "bias": "bias"}
    types = {names[name]: t for name in names if (t := p.type(name)) is not None}
    macros, arguments = operand_macros(types)
    rows = ["column", "N + column" if p.up else "column + 8"]
    bias = ["0", "0"]
    if "bias" in types:
        bias = [f"to_float(bias[(long long)expert * {p.rows} + {row}])" for row in rows]
    value = inline(gate(p.node.attrs["body"]), ["a", "b"], PAIR) if p.up else "a"
    return (
        f"{macros}"
        f"#define ZEROS {'zeros' if 'zeros' in types else 'nullptr'}\n"
        f"__device__ inline float row_factor(int pair{arguments}) {{\n"
        f"  return {'1' if p.up else 'to_float(weights[pair])'};\n}}\n"
        f"__device__ inline void load_bias(float (&to)[2], int expert, int column{arguments}) {{\n"
        f"  to[0] = {bias[0]}, to[1] = {bias[1]};\n}}\n"
        f"__device__ inline float epilogue(float a, float b) {{ return {value}; }}"
    )


GROUPED_CODES = GroupedCodes(
    "cuda/grouped_codes",
    (*PLAIN, *PACKED),
    fills_multiprocessors=True,
    file="grouped_codes.cu",
    entry="llmc_expert_codes",
    headers=("hopper.cuh", "ring.cuh", "scalar_math.cuh", "pairs.cuh", "int4_to_bf16.cuh"),
    before=("expert_rows.cuh", "transposed_sums.cuh", "code_factors.cuh"),
)
