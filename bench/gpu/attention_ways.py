"""The cases of attention over pages that `bench.gpu.attention` times, and the ways to compute them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmc.codegen.backends.cuda.decode_attention import DECODE_ATTENTION
from llmc.codegen.backends.cute.flash_attention import FLASH_ATTENTION
from llmc.codegen.backends.flashinfer.xqa import XQA
from llmc.codegen.candidates import candidates as node_candidates
from llmc.codegen.kernel import Source
from llmc.codegen.tuning_records import Tuning
from llmc.extension import Registry
from llmc.ir.graph import Node
from llmc.ir.text import parse
from llmc.passes.split.split_kv import SplitKv
from llmc.targets.target import Target

PAGE, WIDTH, ROWS = 16, 2048, 512  # tokens of a page; pages of a row of the page table; its rows
# (new tokens, tokens in all) of each row
CASES: dict[str, list[tuple[int, int]]] = {
    "prompt-128": [(128, 128)],
    "prompt-512": [(512, 512)],
    "prompt-2048": [(2048, 2048)],
    "prompt-8192": [(8192, 8192)],
    "chunk-1024-of-8192": [(1024, 8192)],
    "prompt-2048-and-31x4096": [(2048, 2048), *[(1, 4096)] * 31],
    "chunk-256-of-4096": [(256, 4096)],
    "prompt-128-and-64x1024": [(128, 128), *[(1, 1024)] * 64],
    "prompt-512-and-63x2048": [(512, 512), *[(1, 2048)] * 63],
    "decode-1x256": [(1, 256)],
    "decode-1x1024": [(1, 1024)],
    "decode-1x8192": [(1, 8192)],
    "decode-4x1024": [(1, 1024)] * 4,
    "decode-4x8192": [(1, 8192)] * 4,
    "decode-8x512": [(1, 512)] * 8,
    "decode-8x2048": [(1, 2048)] * 8,
    "decode-8x16384": [(1, 16384)] * 8,
    "decode-32x4096": [(1, 4096)] * 32,
    "decode-64x2048": [(1, 2048)] * 64,
    "decode-64x1024": [(1, 1024)] * 64,
    "decode-128x512": [(1, 512)] * 128,
    "decode-256x192": [(1, 192)] * 256,
    "decode-256x640": [(1, 640)] * 256,
    "decode-512x192": [(1, 192)] * 512,
    "decode-512x640": [(1, 640)] * 512,
    "decode-512-of-512-to-768": [(1, 512 + i * 37 % 257) for i in range(512)],
    "decode-256-of-16-to-1024": [(1, 16 + i * 29 % 1009) for i in range(256)],
    "decode-64-of-16-to-32768": [(1, 1 << (4 + i % 12)) for i in range(64)],
}
OPERANDS = {
    "paged_attention": ("q", "kv", "pages", "rows", "starts", "positions"),
    "paged_attention_single": ("q", "kv", "pages", "rows", "starts", "positions", "y"),
    "paged_attention_split": ("q", "kv", "pages", "rows", "positions"),
    "attention_combine": ("partial", "lse"),
}
F8 = "f8e4m3"
PARTS = (1, 2, 4, 8, 16, 32)  # of XQA
BLOCKS = (100, 600)  # least and most blocks of XQA, where more parts are an alternative
UNEVEN = 8  # parts of rows of several lengths, as another alternative


@dataclass(frozen=True)
class Heads:
    """Heads of queries, heads of keys, and their elements."""

    q: int = 32
    kv: int = 8
    size: int = 128


@dataclass(frozen=True)
class Setting:
    """The settings of all cases."""

    heads: Heads
    registry: Registry
    target: Target
    pool: str = "bf16"

    def operands(self, op: str) -> tuple[str, ...]:
        """The names of an op's operands."""
        reads = op != "attention_combine" and self.pool == F8
        return (*OPERANDS[op], *(("scales",) if reads else ()))


@dataclass(frozen=True)
class Launch:
    """One kernel of a way: the source, and the names of its operands and results."""

    node: Node
    source: Source
    buffers: tuple[str, ...]

    @property
    def key(self) -> str:
        """The name of the binary, which depends on the text but not on the compiler's version."""
        s = self.source
        fields = [s.text, s.entry, s.params, s.options, s.pdl, s.threads, s.shared]
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Way:
    """A way to compute a case: launches in order."""

    case: str
    name: str
    launches: tuple[Launch, ...]


def node_of(op: str, tokens: str, attrs: str, s: Setting) -> Node:
    """Return a node of one of the OPERANDS. tokens: the number of tokens, T, or R if every row has one."""
    h = s.heads
    types = {
        "q": f"bf16[{tokens}, {h.q}, {h.size}]", "kv": f"state {s.pool}[P, 2, {h.kv}, {PAGE}, {h.size}]",
        "scales": f"f32[{2 * h.kv}]", "pages": f"state i32[{ROWS}, {WIDTH}]", "rows": "i32[R]",
        "starts": "i32[R+1]", "positions": f"i32[{tokens}]", "y": f"bf16[{tokens}, {h.q}, {h.size}]",
    }  # fmt: skip
    if op == "attention_combine":
        parts = int(attrs.split("=")[1].rstrip("}"))
        types |= {"partial": f"f32[R, {h.q}, {parts}, {h.size}]", "lse": f"f32[R, {h.q}, {parts}]"}
        attrs = '{dtype="bf16"}'
    result = types["q"]
    if op == "paged_attention_split":
        parts = int(attrs.split("splits=")[1].rstrip("}"))
        result = f"f32[R, {h.q}, {parts}, {h.size}], f32[R, {h.q}, {parts}]"
    names = s.operands(op)
    inputs = ", ".join(f"%{x}: {types[x]}" for x in names)
    results = "%y0" if op != "paged_attention_split" else "%y0, %y1"
    text = f"""
sym T in [1, 8192]
sym R in [1, {ROWS}]
sym P in [1, 131072]
graph @main({inputs}) {{
  {results} = {op}({", ".join(f"%{x}" for x in names)}) {attrs} : {result}
  return {results}
}}
"""
    (node,) = parse(text, s.registry.opset()).graphs["main"].nodes
    return node


def ours(op: str, tokens: str, attrs: str, env: Mapping[str, int], s: Setting) -> Launch:
    """Return the launch of the kernel that `select` chooses among those of llmc."""
    node = node_of(op, tokens, attrs, s)
    options = node_candidates(node, s.registry.kernels, s.target, env, Tuning.shipped(s.target))
    best = next(o for o in options if o.kernel.language == "triton")
    results = {"paged_attention_split": ("partial", "lse"), "paged_attention_single": ("y",)}.get(op, ("y",))
    source = best.kernel.emit(node, best.schedule, s.target)
    return Launch(node, source, (*s.operands(op), *results))


def mixed(case: str) -> bool:
    """Whether the rows of a case have several lengths."""
    return len({total for _, total in CASES[case]}) > 1


def xqa(case: str, s: Setting) -> Iterator[Way]:
    """Yield the ways of XQA: the parts of llmc's way, and those that give the multiprocessors enough blocks."""
    env = {"T": len(CASES[case]), "R": len(CASES[case]), "P": 256}
    scale, blocks = f"scale={s.heads.size**-0.5!r}", len(CASES[case]) * s.heads.kv
    chosen = parts_of(node_of("paged_attention", "R", f"{{{scale}}}", s), len(CASES[case]), s.target)
    fit = [n for n in PARTS if n in (1, chosen) or BLOCKS[0] <= n * blocks <= BLOCKS[1]]
    for parts in (*fit, *((UNEVEN,) if mixed(case) else ())):
        op = "paged_attention_split" if parts > 1 else "paged_attention"
        attrs = f"{scale}, splits={parts}" if parts > 1 else scale
        node = node_of(op, "R", f"{{{attrs}}}", s)
        results = ("partial", "lse") if parts > 1 else ("y",)
        launch = Launch(node, XQA.emit(node, {}, s.target), (*s.operands(op), *results))
        combine = [ours("attention_combine", "R", f"{{splits={parts}}}", env, s)] if parts > 1 else []
        yield Way(case, f"xqa, {parts} parts", (launch, *combine))


def ways(case: str, s: Setting) -> Iterator[Way]:
    """Yield llmc's way first, then those of FlashAttention and XQA."""
    spans = CASES[case]
    decode = all(new == 1 for new, _ in spans)
    env = {"T": sum(new for new, _ in spans), "R": len(spans), "P": 256}
    scale = f"scale={s.heads.size**-0.5!r}"
    if decode:
        yield from _decode_ways(case, env, scale, s)
        yield from _cuda_ways(case, env, scale, s)
        yield from xqa(case, s)
        if s.pool != F8:
            yield from _flash_ways(case, "R", scale, s)
        return
    several = len(spans) > 1
    single = (ours("paged_attention_single", "T", f"{{{scale}}}", env, s),) if several else ()
    rows = ours("paged_attention", "T", f"{{{scale}{', least=2' if several else ''}}}", env, s)
    yield Way(case, "llmc", (rows, *single))
    if s.pool != F8:
        yield from _flash_ways(case, "T", scale, s, single)


def _decode_ways(case: str, env: Mapping[str, int], scale: str, s: Setting) -> Iterator[Way]:
    """Yield llmc's kernels for decoding: with the number of parts that a compile chooses, and with others."""
    chosen = parts_of(node_of("paged_attention", "R", f"{{{scale}}}", s), len(CASES[case]), s.target)
    for parts in dict.fromkeys((chosen, 2 * chosen, 4 * chosen, *((UNEVEN,) if mixed(case) else ()))):
        if parts > 1:
            split = ours("paged_attention_split", "R", f"{{{scale}, splits={parts}}}", env, s)
            combine = ours("attention_combine", "R", f"{{splits={parts}}}", env, s)
            yield Way(case, f"llmc, {parts} parts", (split, combine))
        else:
            yield Way(case, "llmc", (ours("paged_attention", "R", f"{{{scale}}}", env, s),))


def _cuda_ways(case: str, env: Mapping[str, int], scale: str, s: Setting) -> Iterator[Way]:
    """Yield the schedules of cuda/decode_attention, with the number of parts that a compile chooses."""
    parts = parts_of(node_of("paged_attention", "R", f"{{{scale}}}", s), len(CASES[case]), s.target)
    op, attrs = ("paged_attention", "") if parts == 1 else ("paged_attention_split", f", splits={parts}")
    node = node_of(op, "R", f"{{{scale}{attrs}}}", s)
    if DECODE_ATTENTION.reject(node, s.target):
        return
    results = ("y",) if parts == 1 else ("partial", "lse")
    combine = (ours("attention_combine", "R", f"{{splits={parts}}}", env, s),) if parts > 1 else ()
    for schedule in DECODE_ATTENTION.schedules(node, s.target):
        launch = Launch(node, DECODE_ATTENTION.emit(node, schedule, s.target), (*s.operands(op), *results))
        yield Way(
            case, f"cuda, {schedule['warps']} warps, {schedule['stages']} stages, {parts} parts", (launch, *combine)
        )


def _flash_ways(case: str, tokens: str, scale: str, s: Setting, single: Sequence[Launch] = ()) -> Iterator[Way]:
    """Yield FlashAttention's kernels for all rows, and with `single`, for the others than those of a single token."""
    for min_rows in (1, 2) if single else (1,):
        node = node_of("paged_attention", tokens, f"{{{scale}, least={min_rows}}}", s)
        for schedule in FLASH_ATTENTION.schedules(node, s.target)[: 2 if tokens == "T" else 1]:
            source = FLASH_ATTENTION.emit(node, schedule, s.target)
            flash = Launch(node, source, (*s.operands("paged_attention"), "y"))
            name = f"flash_attention {schedule['rows']}{' packed' if schedule['packed'] else ''}"
            if min_rows == 1:
                yield Way(case, name, (flash,))
            else:
                yield Way(case, f"{name}, single rows by llmc", (flash, *single))


def parts_of(node: Node, rows: int, target: Target) -> int:
    """The number of parts of the range of rows that the pipeline makes."""
    tops = [1, 4, 8, 16, 32, 64, 128, 256, 512]
    top = next(t for t in tops if t >= rows)
    low = 1 if top == 1 else tops[tops.index(top) - 1] + 1
    split = SplitKv()
    bounds = {"R": (low, top), "T": (1, 8192), "P": (1, 65536)}

    class Context:
        target: Target

    context = Context()
    context.target = target
    return split.choose(node, bounds, context)  # type: ignore[arg-type]
