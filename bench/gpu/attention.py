"""Time attention over pages on this GPU: llmc's kernels as a compile chooses them, FlashAttention 4 and XQA.

    python -m bench.gpu.attention -o FOLDER [--compile-only] [--cases prompt-2048,decode-32x4096] [--heads 32,8,64]
                                  [--pool f8e4m3]

The heads are by default those of Llama-3.1-8B: 32 of queries, 8 of keys, of 128 elements in bf16. The results of all
ways are compared with those of the first. XQA, FlashInfer's kernel for decoding, is timed with several numbers of
parts. FOLDER gets `attention.jsonl`, a row for every way, and the binaries, so that
a machine without compilers can repeat the run. The floor is the larger of the time to read the keys and values once at
the bandwidth, and that of the products at the peak rate, both of a simple kernel or a library on an H200.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from bench.gpu.graph_time import graph_microseconds  # noqa: E402
from gpu.launcher import Card  # noqa: E402
from gpu.test_kernels import passed  # noqa: E402
from llmc.codegen.backends.cuda.decode_attention import DECODE_ATTENTION  # noqa: E402
from llmc.codegen.backends.cute.flash_attention import FLASH_ATTENTION  # noqa: E402
from llmc.codegen.backends.flashinfer.xqa import XQA  # noqa: E402
from llmc.codegen.candidates import candidates as node_candidates  # noqa: E402
from llmc.codegen.kernel import Source  # noqa: E402
from llmc.codegen.kernel_cache import entry_path, read_entry, write_entry  # noqa: E402
from llmc.codegen.toolchain import Compiled, Toolset  # noqa: E402
from llmc.codegen.tuning_records import Tuning  # noqa: E402
from llmc.extension import Registry, load  # noqa: E402
from llmc.ir.dtype import DTYPES  # noqa: E402
from llmc.ir.graph import Node  # noqa: E402
from llmc.ir.text import parse  # noqa: E402
from llmc.passes.split.split_kv import SplitKv  # noqa: E402
from llmc.targets.target import Target  # noqa: E402

PAGE, WIDTH, ROWS = 16, 2048, 512  # tokens of a page; pages of a row of the page table; its rows
# Bytes of keys and values that the repetitions of a launch read, so that none is in the L2 cache; most copies of them.
SPREAD, COPIES = 1 << 30, 16
PEAK, BANDWIDTH = 795e12, 4.65e12
SECONDS = 0.02
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


def compile_all(launches: Iterable[Launch], s: Setting, folder: Path) -> None:
    """Compile the binaries that the folder lacks, on all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [x for x in {x.key: x for x in launches}.values() if read_entry(entry_path(folder, x.key)) is None]
    tools = Toolset(s.target, s.registry.toolchains)
    compiled = tools.compile([(x.source, "") for x in missing], folder, os.cpu_count() or 1)
    for x in missing:
        write_entry(entry_path(folder, x.key), compiled[tools.key(x.source)])


class Bench:
    """The buffers of a case on the device."""

    def __init__(self, case: str, s: Setting, card: Card) -> None:
        import torch

        self.torch, self.card, heads = torch, card, s.heads
        spans = CASES[case]
        make = torch.Generator(device="cuda").manual_seed(1)
        need = [-(-total // PAGE) for _, total in spans]
        page_bytes = 2 * heads.kv * PAGE * heads.size * DTYPES[s.pool].bits // 8
        self.copies = max(1, min(COPIES, SPREAD // (sum(need) * page_bytes)))
        pages = sum(need) * self.copies
        order = torch.randperm(pages, generator=make, device="cuda").to(torch.int32)
        table = torch.full((self.copies, ROWS, WIDTH), -1, dtype=torch.int32, device="cuda")
        at = 0
        for copy in table:
            for i, count in enumerate(need):
                copy[i, :count] = order[at : at + count]
                at += count
        news = torch.tensor([new for new, _ in spans])
        tokens = int(news.sum())
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), news.cumsum(0)])
        positions = torch.cat([torch.arange(total - new, total) for new, total in spans])
        shape, pool = (tokens, heads.q, heads.size), (2, heads.kv, PAGE, heads.size)
        self.of: dict[str, Any] = {
            "q": torch.randn(shape, device="cuda", generator=make).to(torch.bfloat16),
            "kv": torch.randn((pages, *pool), device="cuda", generator=make, dtype=torch.bfloat16),
            "scales": torch.rand(2 * heads.kv, device="cuda", generator=make) + 0.5,
            "pages": table, "rows": torch.arange(len(spans), dtype=torch.int32, device="cuda"),
            "starts": starts.to(torch.int32).cuda(), "positions": positions.to(torch.int32).cuda(),
            "y": torch.empty(shape, device="cuda", dtype=torch.bfloat16),
            "partial": torch.empty((len(spans) * heads.q * 64 * heads.size,), device="cuda") if tokens < 256 else None,
            "lse": torch.empty((len(spans) * heads.q * 64,), device="cuda"),
        }  # fmt: skip
        if s.pool == F8:
            self.of["kv"] = self.of["kv"].to(torch.float8_e4m3fn)
        self.sizes = {"T": tokens, "R": len(spans), "P": pages}
        torch.cuda.synchronize()

    def launch(self, x: Launch, binary: Compiled, copy: int = 0) -> None:
        """Launch a kernel over one of the `copies` of the keys and values, which have page tables of their own."""
        card, source = self.card, x.source
        fn = card.function(binary, source.entry)
        grid, sizes = ([int(d.subs(self.sizes).const or 0) for d in y] for y in (source.grid, source.sizes))
        pointers: list[Any] = [self.of[name].data_ptr() for name in x.buffers]
        if "pages" in x.buffers:
            pointers[x.buffers.index("pages")] += copy * ROWS * WIDTH * self.of["pages"].element_size()
        maps = []
        for m, (box, swizzle) in zip(source.maps, binary.boxes, strict=True):
            shape, strides = ([int(d.subs(self.sizes).const or 0) for d in y] for y in (m.shape, m.strides))
            address = pointers[m.param] + int(m.offset.subs(self.sizes).const or 0)
            maps.append(card.mapped(address, x.node.operands[m.param].type.dtype, shape, box, swizzle, strides))
        if source.passes:
            card.launch_params(fn, binary, grid, passed(source, pointers, maps, self.sizes), source.pdl)
        else:
            card.launch(fn, binary, grid, pointers, sizes, source.pdl)

    def result(self, way: Way, binaries: dict[str, Compiled]) -> Any:
        self.of["y"].fill_(float("nan"))
        self.torch.cuda.synchronize()
        for x in way.launches:
            self.launch(x, binaries[x.key])
        self.card.wait()
        return self.of["y"].float()

    def microseconds(self, way: Way, binaries: dict[str, Compiled]) -> float:
        """Return the median microseconds, from a graph of several repetitions."""

        def launch(i: int) -> None:
            for x in way.launches:
                self.launch(x, binaries[x.key], i % self.copies)

        return graph_microseconds(self.card, launch, max(10, self.copies), SECONDS)


def floor_us(case: str, s: Setting) -> float:
    spans, heads = CASES[case], s.heads
    read = sum(total for _, total in spans) * DTYPES[s.pool].bits / 4 * heads.kv * heads.size / BANDWIDTH
    pairs = sum(new * (total - new) + new * (new + 1) / 2 for new, total in spans)
    return max(read, 4 * pairs * heads.q * heads.size / PEAK) * 1e6


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ap.add_argument("-o", "--out", type=Path, required=True, help="folder of the results and binaries")
    ap.add_argument("--cases", default=",".join(CASES), help="names of cases, default all")
    ap.add_argument("--heads", default="32,8,128", help="heads of queries, of keys, elements; default 32,8,128")
    ap.add_argument("--pool", default="bf16", choices=("bf16", F8), help="dtype of keys and values; default bf16")
    ap.add_argument("--compile-only", action="store_true", help="compile and measure nothing")
    args = ap.parse_args()
    registry = load()
    target, heads = registry.target("cuda:sm_90"), Heads(*(int(x) for x in args.heads.split(",")))
    setting = Setting(heads, registry, target, args.pool)
    ways_of = {case: list(ways(case, setting)) for case in args.cases.split(",")}
    compile_all((x for some in ways_of.values() for way in some for x in way.launches), setting, args.out / "binaries")
    if args.compile_only:
        return
    card = Card(nbytes=1 << 20)
    with (args.out / "attention.jsonl").open("w") as out:
        for case, some in ways_of.items():
            bench = Bench(case, setting, card)
            want: Any = None
            for way in some:
                binaries = {x.key: read_entry(entry_path(args.out / "binaries", x.key)) for x in way.launches}
                got = bench.result(way, binaries)  # type: ignore[arg-type]
                want = got if want is None else want
                error = float((got - want).norm() / want.norm())
                us = bench.microseconds(way, binaries)  # type: ignore[arg-type]
                row = {
                    "case": case,
                    "way": way.name,
                    "us": round(us, 1),
                    "floor": round(floor_us(case, setting), 1),
                    "heads": args.heads,
                    "pool": args.pool,
                }
                print(json.dumps({**row, "error": error}), file=out, flush=True)
                print(
                    f"{case:26} {way.name:50} {us:8.1f} us, floor {floor_us(case, setting):7.1f}, error {error:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
