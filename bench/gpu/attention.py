"""Time attention over pages on this GPU: llmc's kernels, FlashAttention 4 and XQA.

    python -m bench.gpu.attention -o FOLDER [--compile-only] [--cases prompt-2048,decode-32x4096] [--heads 32,8,64]
                                  [--pool f8e4m3]

The heads are by default those of Llama-3.1-8B: 32 of queries, 8 of keys, of 128 elements in bf16. The results of all
ways are compared with those of the first. Of Triton's kernels, those are timed that a compile would choose among them;
of cuda/decode_attention, all schedules; XQA, FlashInfer's kernel for decoding, with several numbers of parts. FOLDER
gets `attention.jsonl`, a row for every way, and the binaries, so that a machine without compilers can repeat the run.
The floor is the larger of the time to read the keys and values once at the bandwidth, and that of the products at the
peak rate, both of a simple kernel or a library on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from bench.gpu.attention_ways import CASES, F8, PAGE, ROWS, WIDTH, Heads, Launch, Setting, Way, ways  # noqa: E402
from bench.gpu.graph_time import graph_microseconds  # noqa: E402
from gpu.launcher import Card  # noqa: E402
from gpu.test_kernels import passed  # noqa: E402
from llmc.codegen.toolchain import Compiled, Toolset, entry_path, read_entry, write_entry  # noqa: E402  # noqa: E402
from llmc.extension import load  # noqa: E402
from llmc.ir.dtype import DTYPES  # noqa: E402

# Bytes of keys and values that the repetitions of a launch read, so that none is in the L2 cache; most copies of them.
SPREAD, COPIES = 1 << 30, 16
MAX_PARTS = 128  # of a row
PEAK, BANDWIDTH = 795e12, 4.65e12
SECONDS = 0.02


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
        parts = len(spans) * heads.q * MAX_PARTS
        self.of: dict[str, Any] = {
            "q": torch.randn(shape, device="cuda", generator=make).to(torch.bfloat16),
            "kv": torch.randn((pages, *pool), device="cuda", generator=make, dtype=torch.bfloat16),
            "scales": torch.rand(2 * heads.kv, device="cuda", generator=make) + 0.5,
            "pages": table, "rows": torch.arange(len(spans), dtype=torch.int32, device="cuda"),
            "starts": starts.to(torch.int32).cuda(), "positions": positions.to(torch.int32).cuda(),
            "y": torch.empty(shape, device="cuda", dtype=torch.bfloat16),
            "partial": torch.empty(parts * heads.size, device="cuda"), "lse": torch.empty(parts, device="cuda"),
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
