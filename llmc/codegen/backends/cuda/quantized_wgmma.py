"""The binding of `kernels/quantized_wgmma.cu`: bf16 activations times weights of 4 bits on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_epilogue import epilogue, reject_operands
from llmc.codegen.backends.cuda.cuda_kernel import (
    CTYPES,
    FLOATS,
    HOPPER,
    SCALAR_MATH,
    WGMMA_REGISTERS,
    Binding,
    CudaKernel,
)
from llmc.codegen.kernel import Map, Schedule, Source
from llmc.diagnostics import Diagnostic
from llmc.ir.dim import D, Dim, product
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.packed_fragments import BLOCK
from llmc.ir.types import Type
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

PACKED = "packed_fragments_linear"
MAX_PARTS = 2
TOKENS = (8, 16, 32, 64, 128, 256)  # of a tile
WARPGROUP, PRODUCER = 128, 32  # threads
SWIZZLE = 3  # 128 bytes
ALIGN = 1024  # of buffers in shared memory, in bytes
STAGES = (12, 8, 6, 4, 3, 2)
RESIDENT = (2, 3, 4, 1, 6, 8)  # blocks per multiprocessor that a schedule leaves room for, best guess first
THREADS, FILE = 2048, 65536  # threads and registers of a multiprocessor
REGISTERS = ((32, 96), (128, 136), (256, 168))  # of a thread, by the largest number of tokens
# Fitted to 950 measurements on an H200 (bench.gpu.quantized_products), in microseconds: a block's start; the latency of
# a step and of its copies; the instructions of a warpgroup in a step, with scaled sums and with scaled factors; the end
# of a block, for 4096 sums; a cluster, and each of its blocks.
_START, _STEP, _COPY, _SUMS, _FACTORS, _END, _CLUSTER, _PEER = 2.68, 0.419, 1.246, 0.041, 0.177, 0.92, 1.13, 0.17
_READ, _CACHE = 0.72, 9.9e12  # share of the bandwidth that is reached; bytes/s of copies from the L2 cache


@dataclass(frozen=True)
class FragmentProduct:
    """The computation of quantized_linear or packed_fragments_linear over a weight of n rows a part and k columns."""

    node: Node
    parts: int
    n: int
    k: int

    @staticmethod
    def of(node: Node) -> FragmentProduct:
        """Read the problem from a node with constant sizes."""
        x, code, parts = node.operands[0].type, node.operands[1].type, node.attrs["parts"]
        return FragmentProduct(node, parts, int(code.shape[0]) // parts, int(x.shape[-1]))

    @property
    def first(self) -> int:
        """The index of the first operand of the epilogue."""
        return 3 + self.node.attrs["zeros"]

    @property
    def m(self) -> Dim:
        """The number of tokens."""
        return product(self.node.operands[0].type.shape[:-1])

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.node.attrs["block"][1] or self.k

    @property
    def step(self) -> int:
        """Columns of a step."""
        return 2 * BLOCK if self.k % (2 * BLOCK) == 0 else BLOCK

    @property
    def others(self) -> list[Type]:
        """The types of the operands of the epilogue."""
        return [v.type for v in self.node.operands[self.first :]]

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        entries = sum(int(v.type.nbytes) for v in self.node.operands[2 : self.first])
        return self.parts * self.n * self.k // 2 + entries

    def consumers(self, s: Schedule) -> int:
        """Consumer warpgroups of a block."""
        return self.parts * int(s["rows"]) // BLOCK

    def producer(self, s: Schedule) -> int:
        """Threads of the producer: a warpgroup where it gives its registers to the consumers."""
        return WARPGROUP if s["tokens"] > 128 and self.consumers(s) > 1 else PRODUCER

    def resident(self, s: Schedule, target: Target) -> int:
        """Blocks that a multiprocessor runs at once."""
        threads = self.consumers(s) * WARPGROUP + self.producer(s)
        registers = next(count for tokens, count in REGISTERS if s["tokens"] <= tokens)
        return max(
            1, min(target.limits.shared // (self.shared(s) + ALIGN), 2048 // threads, 65536 // (threads * registers))
        )

    def shared(self, s: Schedule) -> int:
        """Bytes of shared memory: the ring of buffers, or later the sums."""
        scales = max(1, self.step // self.group)
        entry = 2 * BLOCK + BLOCK * bool(self.node.attrs["zeros"])
        stage = s["tokens"] * self.step * 2 + self.consumers(s) * (BLOCK * self.step // 2 + scales * entry)
        ring = s["stages"] * (-(-stage // ALIGN) * ALIGN)
        sums = s["tokens"] * (self.parts * s["rows"] + 4) * 4
        return int(max(ring, sums)) + ALIGN


@dataclass(frozen=True)
class QuantizedWgmma(CudaKernel):
    """quantized_linear over codes of 4 bits with scales of bf16, on sm_90; the codes are packed at compile time."""

    def reject(self, node: Node, target: Target) -> str | None:
        if target.family != "cuda" or target.arch != "sm_90" or target.has("interpret"):
            return f"{target.name} does not have wgmma, the matrix instructions of sm_90"
        return _reject_types(node) or _reject_sizes(node) or _reject_weights(node)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = FragmentProduct.of(node)
        return list(_schedules(p, target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: rounds of resident blocks, whose steps cost a latency or what limits them together."""
        p, s, units = FragmentProduct.of(node), schedule, target.limits.units
        blocks = -(-int(p.m.subs(env)) // s["tokens"]) * (p.n // s["rows"]) * s["split"]
        waiting, most, us = -(-blocks // units), p.resident(s, target), 0.0
        while waiting > 0:
            resident = min(most, waiting)
            waiting -= resident
            us += _START + p.k // p.step // s["split"] * _step_us(p, s, resident, min(1.0, blocks / units), target)
        us += _END * s["tokens"] * s["rows"] * p.parts / 4096
        return us + (s["split"] > 1) * (_CLUSTER + _PEER * s["split"]) + target.launch_us

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        if node.op.name == PACKED:
            return {}
        turned = dict.fromkeys(range(2, FragmentProduct.of(node).first), "transpose{perm=[1, 0]}")
        return {1: "pack_fragments", **turned}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        x, code, *rest = node.operands
        packed = g.add(ops["pack_fragments"], [code], {}, before=node, loc=node.loc).result
        for i in range(FragmentProduct.of(node).first - 2):
            rest[i] = g.add(ops["transpose"], [rest[i]], {"perm": (1, 0)}, before=node, loc=node.loc).result
        attrs = {k: v for k, v in node.attrs.items() if k not in ("act", "act_block", "bits")}
        new = g.add(ops[PACKED], [x, packed, *rest], attrs, before=node, loc=node.loc, names=(node.result.name,))
        new.choice = dict(node.choice)
        g.replace(node.result, new.result)
        g.erase(node)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = FragmentProduct.of(node), schedule
        zeros = bool(node.attrs["zeros"])
        before = ("const unsigned char* zeros",) if zeros else ()
        return Binding(
            grid=(p.m.ceildiv(s["tokens"]) * (p.n // s["rows"] * s["split"]),),
            threads=p.consumers(s) * WARPGROUP + p.producer(s),
            constants={
                "N": p.n, "PARTS": p.parts, "K": p.k, "GROUP": p.group,
                "ZERO_POINT": -1 if zeros else node.attrs["zero_point"], "TOKENS": s["tokens"], "ROWS": s["rows"],
                "STAGES": s["stages"], "SPLIT": s["split"], "LATE": int(bool(s.get("late"))),
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=p.shared(s),
            sizes=(p.m,),
            maps=(Map(0, (p.m, D(p.k)), (s["tokens"], BLOCK), SWIZZLE),),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=f"#define ZEROS {'zeros' if zeros else 'nullptr'}\n"
            + epilogue(node.attrs["body"], p.parts, p.others, node.result.type, before),
        )  # fmt: skip

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        if self.layouts(node, schedule, target):
            cause = f"{node.op.name} reached code generation with codes that are not packed"
            raise Diagnostic("E430", cause, "run the pass `pack` after `select`", loc=node.loc)
        return super().emit(node, schedule, target)


def _step_us(p: FragmentProduct, s: Schedule, resident: int, busy: float, target: Target) -> float:
    """Microseconds of a step of `resident` blocks on each multiprocessor; busy: share of these that have blocks."""
    units, consumers = target.limits.units, p.consumers(s)
    codes, tokens = consumers * BLOCK * p.step / 2, s["tokens"] * p.step * 2  # bytes
    instructions = _SUMS if s["tokens"] <= 32 and p.group >= p.step else _FACTORS
    flops = 2.0 * consumers * BLOCK * p.step * s["tokens"]
    shared = (
        consumers * instructions,
        codes * busy * units / (target.bandwidth * _READ) * 1e6,
        (codes + tokens) * units / _CACHE * 1e6,
        flops * units / target.peaks["bf16"] * 1e6,
    )
    return max(_STEP, _COPY / (s["stages"] - 1), resident * max(shared))


def _schedules(p: FragmentProduct, target: Target) -> Iterator[Schedule]:
    """Tiles of the smallest fitting number of tokens and of half of it, with the deepest rings that fit."""
    m, most = p.m.const, TOKENS[-1]
    nearest = next((t for t in TOKENS if t >= (m or most)), most)
    for tokens in TOKENS if m is None else sorted({nearest, max(TOKENS[0], nearest // 2)}, reverse=True):
        for rows in (64, 128) if p.parts == 1 else (64,):
            for split in (1, 2, 4, 8):
                steps = p.k // p.step
                if p.n % rows or (split > 1 and (steps % split or steps < 4 * split)) or (split > 2 and tokens > 64):
                    continue
                yield from _rings(p, tokens, rows, split, target)


def _rings(p: FragmentProduct, tokens: int, rows: int, split: int, target: Target) -> Iterator[Schedule]:
    """The deepest ring for each number of blocks that a multiprocessor runs at once."""
    seen = set()
    for resident in RESIDENT:
        for stages in STAGES:
            s = {"tokens": tokens, "rows": rows, "split": split, "stages": stages}
            if p.shared(s) <= target.limits.shared // resident - ALIGN:
                if stages not in seen:
                    seen.add(stages)
                    yield s
                break


def _reject_types(node: Node) -> str | None:
    a, operands = node.attrs, node.operands
    x, code, scale = (v.type for v in operands[:3])
    if a.get("act"):
        return f"activations rounded to {a['act']}"
    if x.dtype != "bf16" or scale.dtype != "bf16":
        return f"activations of {x.dtype} and scales of {scale.dtype}; bf16 is supported"
    if code.dtype != "u8" or (node.op.name != PACKED and a["bits"] != 4):
        return f"codes of {code.dtype}; codes of 4 bits are supported"
    if a["zeros"] and operands[3].type.dtype != "u8":
        return f"zero points of {operands[3].type.dtype}; u8 is supported"
    if not a["zeros"] and not 0 <= a["zero_point"] < 16:
        return f"the zero point {a['zero_point']}; 0 to 15 are supported"
    return None if node.result.type.dtype in FLOATS else f"a result of {node.result.type.dtype}"


def _reject_sizes(node: Node) -> str | None:
    x, code, parts = node.operands[0].type, node.operands[1].type, node.attrs["parts"]
    rows, k = code.shape[0].const, x.shape[-1].const
    if not rows or not k or rows % (parts * BLOCK) or k % BLOCK:
        return f"{parts} parts of {code.shape[0]} x {x.shape[-1]}; sizes must be constant multiples of {BLOCK}"
    if not 1 <= parts <= MAX_PARTS:
        return f"{parts} parts; the maximum is {MAX_PARTS}"
    p = FragmentProduct.of(node)
    if node.attrs["block"][0] != 1 or p.k % p.group or p.group % 16 or (p.step % p.group and p.group % p.step):
        return f"blocks of {list(node.attrs['block'])}; 16 to 128 columns that divide a step, or multiples of {p.step}"
    return reject_operands(p.others, node.result.type)


def _reject_weights(node: Node) -> str | None:
    inputs = [v for v in node.operands[1 : FragmentProduct.of(node).first] if origin(v) is Origin.INPUTS]
    return "the codes, scales or zero points are not known at compile time" if inputs else None


QUANTIZED_WGMMA = QuantizedWgmma(
    "cuda/quantized_wgmma",
    ("quantized_linear", PACKED),
    crowds=True,
    yields=True,
    file="llmc.codegen.backends.cuda.kernels:quantized_wgmma.cu",
    entry="llmc_quantized_linear",
    headers=(HOPPER, WGMMA_REGISTERS, SCALAR_MATH),
)
