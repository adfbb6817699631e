"""Time latent attention (MLA) over pages on this GPU, in absorbed form beside the expanded one, and products of heads.

    python -m bench.gpu.latent_attention -o FOLDER [--compile-only] [--cases decode-32x4096,prompt-2048]
                                         [--heads 128,16]

The heads are those of DeepSeek-V3 (128) and V2-Lite (16), with a latent of 512 elements and a rotary part of 64, in
bf16. Every schedule is timed with the number of parts that a compile chooses, the best one also with half and twice as
many. The results of the rows' last tokens are compared with torch's in float32. FOLDER gets `latent.jsonl`, a row for
every way, and the binaries, so that a machine without compilers can repeat the run. The floor is the larger of the time
to read the latents once at the bandwidth, and that of the products at the peak rate, both of a simple kernel or a
library on an H200. The expanded form is one KV head of 192 elements for each head.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from bench.gpu.attention import BANDWIDTH, PEAK, compile_all  # noqa: E402
from bench.gpu.attention_ways import PAGE, WIDTH, Heads, Launch, Setting, ours  # noqa: E402
from bench.gpu.graph_time import graph_microseconds  # noqa: E402
from gpu.launcher import Card  # noqa: E402
from llmc.codegen.backends.triton.latent_attention import LATENT_DECODE, LATENT_PREFILL  # noqa: E402
from llmc.codegen.backends.triton.matmul import HEAD_MATMUL  # noqa: E402
from llmc.codegen.kernel import Kernel, Schedule  # noqa: E402
from llmc.codegen.toolchain import (  # noqa: E402
    Compiled,
    entry_path,
    read_entry,
)
from llmc.extension import Registry, load  # noqa: E402
from llmc.ir.graph import Graph, Node  # noqa: E402
from llmc.ir.text import parse  # noqa: E402
from llmc.passes.split.split_kv import LATENT_HEADS, SplitKv  # noqa: E402
from llmc.targets.target import Target  # noqa: E402

LATENT, ROTARY, OWN, EXPANDED, SECONDS, POOL = 512, 64, 128, 192, 0.01, 8192
SCALE = EXPANDED**-0.5
# (new tokens, tokens in all) of each row
CASES: dict[str, list[tuple[int, int]]] = {
    "decode-32x4096": [(1, 4096)] * 32,
    "decode-8x15000": [(1, 15000)] * 8,
    "decode-128x1024": [(1, 1024)] * 128,
    "prompt-2048": [(2048, 2048)],
    "chunk-512-of-4096": [(512, 4096)],
}
TYPES = (
    "%q: bf16[{t}, {h}, 512], %rotary: bf16[{t}, {h}, 64], %pool: state bf16[P, 16, 576], "
    "%pages: state i32[256, {width}], %rows: i32[R], %positions: i32[{t}]"
)


@dataclass(frozen=True)
class Way:
    """A way to compute a case: launches in order."""

    case: str
    heads: int
    name: str
    launches: tuple[Launch, ...]


def node_of(text: str, registry: Registry) -> Node:
    """Return the only node of a graph that is written as its inputs, the node and its results."""
    inputs, call, results = text.split(" | ")
    names = ", ".join(f"%y{i}" for i in range(results.count("[")))
    syms = f"sym T in [1, 8192]\nsym R in [1, 256]\nsym P in [1, {POOL}]\n"
    graph: Graph = parse(
        f"{syms}graph @main({inputs}) {{\n  {names} = {call} : {results}\n  return {names}\n}}\n", registry.opset()
    ).graphs["main"]
    (node,) = graph.nodes
    return node


def latent_node(heads: int, parts: int, registry: Registry) -> Node:
    """The split op for one token per row; without parts, the op for any mixture."""
    types = TYPES.format(t="R" if parts else "T", h=heads, width=WIDTH)
    names = "%q, %rotary, %pool, %pages, %rows"
    if parts:
        call = f"paged_latent_attention_split({names}, %positions) {{scale={SCALE!r}, splits={parts}}}"
        return node_of(f"{types} | {call} | f32[R, {heads}, {parts}, 512], f32[R, {heads}, {parts}]", registry)
    call = f"paged_latent_attention({names}, %starts, %positions) {{scale={SCALE!r}}}"
    return node_of(f"{types}, %starts: i32[R+1] | {call} | bf16[T, {heads}, 512]", registry)


def launch_of(kernel: Kernel, node: Node, schedule: Schedule, buffers: str, target: Target) -> Launch:
    return Launch(node, kernel.emit(node, schedule, target), tuple(buffers.split()))


def ways(case: str, heads: int, s: Setting) -> Iterator[Way]:
    """Yield the ways of a case: the schedules of latent attention, the products of heads, the expanded form."""
    spans, env = CASES[case], {"T": sum(n for n, _ in CASES[case]), "R": len(CASES[case]), "P": 256}
    decode = all(new == 1 for new, _ in spans)
    if decode:
        yield from decode_ways(case, heads, s, env)
    else:
        node = latent_node(heads, 0, s.registry)
        for schedule in ranked(LATENT_PREFILL, node, s.target, env):
            buffers = "q rotary pool pages rows starts positions y"
            yield Way(case, heads, f"{schedule}", (launch_of(LATENT_PREFILL, node, schedule, buffers, s.target),))
    for k, n, read, written in ((OWN, LATENT, "own", "q"), (LATENT, OWN, "y", "out")):
        node = node_of(
            f"%x: bf16[T, {heads}, {k}], %w: weight bf16[{heads}, {k}, {n}] | head_matmul(%x, %w)"
            f" | bf16[T, {heads}, {n}]",
            s.registry,
        )
        for schedule in ranked(HEAD_MATMUL, node, s.target, env)[:2]:
            launch = launch_of(HEAD_MATMUL, node, schedule, f"{read} w {written}", s.target)
            yield Way(case, heads, f"products {k} x {n} {schedule}", (launch,))
    wide = Setting(Heads(heads, heads, EXPANDED), s.registry, s.target)
    if decode:
        yield Way(case, heads, "expanded", (ours("paged_attention", "R", f"{{scale={SCALE!r}}}", env, wide),))
    else:
        yield Way(case, heads, "expanded", (ours("paged_attention", "T", f"{{scale={SCALE!r}}}", env, wide),))


def decode_ways(case: str, heads: int, s: Setting, env: dict[str, int]) -> Iterator[Way]:
    rows, rule = len(CASES[case]), SplitKv()
    tops = [1, 4, 8, 16, 32, 64, 128, 256]
    top = next(t for t in tops if t >= rows)
    low = 1 if top == 1 else tops[tops.index(top) - 1] + 1
    whole = latent_node(heads, 0, s.registry)

    class Context:
        target = s.target

    fill = 1.0 if heads > LATENT_HEADS // 2 else rule.fill
    chosen = max(2, rule.parts(whole, (low, top), -(-heads // LATENT_HEADS), whole.operands[3], fill, Context()))  # type: ignore[arg-type]
    for parts in (chosen, max(2, chosen // 2), 2 * chosen):
        if parts == chosen // 2 == chosen:
            continue
        node = latent_node(heads, parts, s.registry)
        plans = ranked(LATENT_DECODE, node, s.target, env)
        wide = Setting(Heads(heads, heads, LATENT), s.registry, s.target)
        combine = ours("attention_combine", "R", f"{{splits={parts}}}", env, wide)
        for schedule in plans if parts == chosen else plans[:1]:
            split = launch_of(LATENT_DECODE, node, schedule, "q rotary pool pages rows positions partial lse", s.target)
            yield Way(case, heads, f"{parts} parts {schedule}", (split, combine))
    for schedule in ranked(LATENT_PREFILL, whole, s.target, env)[:1]:
        buffers = "q rotary pool pages rows starts positions y"
        yield Way(case, heads, f"whole {schedule}", (launch_of(LATENT_PREFILL, whole, schedule, buffers, s.target),))


def ranked(kernel: Kernel, node: Node, target: Target, env: dict[str, int]) -> list[Schedule]:
    """The schedules of a node, the one that the cost rule prefers first."""
    return sorted(kernel.schedules(node, target), key=lambda s: kernel.cost_us(node, s, target, env))


class Bench:
    """The buffers of a case on the device."""

    def __init__(self, case: str, heads: int, card: Card) -> None:
        import torch

        self.torch, self.card, spans = torch, card, CASES[case]
        make = torch.Generator(device="cuda").manual_seed(1)
        pages = sum(-(-total // PAGE) for _, total in spans)
        order = torch.randperm(pages, generator=make, device="cuda").to(torch.int32)
        table = torch.full((256, WIDTH), -1, dtype=torch.int32, device="cuda")
        at = 0
        for i, (_, total) in enumerate(spans):
            count = -(-total // PAGE)
            table[i, :count] = order[at : at + count]
            at += count
        news = torch.tensor([new for new, _ in spans])
        tokens = int(news.sum())
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), news.cumsum(0)])
        positions = torch.cat([torch.arange(total - new, total) for new, total in spans])

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", generator=make, dtype=torch.bfloat16)

        self.of: dict[str, Any] = {
            "q": drawn(tokens, heads, LATENT), "rotary": drawn(tokens, heads, ROTARY), "own": drawn(tokens, heads, OWN),
            "pool": drawn(pages, PAGE, LATENT + ROTARY), "w": drawn(heads, OWN * LATENT),
            "pages": table, "rows": torch.arange(len(spans), dtype=torch.int32, device="cuda"),
            "starts": starts.to(torch.int32).cuda(), "positions": positions.to(torch.int32).cuda(),
            "y": drawn(tokens, heads, LATENT), "out": drawn(tokens, heads, OWN),
            "partial": torch.empty(len(spans) * heads * 64 * LATENT if tokens < 256 else 1, device="cuda"),
            "lse": torch.empty(len(spans) * heads * 64, device="cuda"),
        }  # fmt: skip
        self.make, self.heads, self.pages = make, heads, pages
        self.sizes = {"T": tokens, "R": len(spans), "P": pages}
        torch.cuda.synchronize()

    def expand(self) -> None:
        """Make the pool of the expanded form."""
        shape = (self.pages, 2, self.heads, PAGE, EXPANDED)
        self.of["kv"] = self.torch.empty(shape, device="cuda", dtype=self.torch.bfloat16)
        self.of["kv"].normal_(generator=self.make)
        self.torch.cuda.synchronize()

    def reference(self) -> Any:
        """The attention of each row's last token in float32: [rows, heads, LATENT]."""
        outputs, keys = [], self.of["pool"].float()
        for i, last in enumerate(self.of["starts"][1:].tolist()):
            total = int(self.of["positions"][last - 1]) + 1
            pages = self.of["pages"][i, : -(-total // PAGE)].long()
            key = keys[pages].reshape(-1, LATENT + ROTARY)[:total]
            query = self.torch.cat([self.of["q"][last - 1], self.of["rotary"][last - 1]], 1).float()
            outputs.append(self.torch.softmax(query @ key.T * SCALE, 1) @ key[:, :LATENT])
        return self.torch.stack(outputs)

    def error(self, got: Any, want: Any) -> float:
        """The relative error of a result at the rows' last tokens."""
        result = got[self.of["starts"][1:].long() - 1]
        return float((result - want).norm() / want.norm())

    def launch(self, x: Launch, binary: Compiled) -> None:
        fn = self.card.function(binary, x.source.entry)
        grid, sizes = ([int(d.subs(self.sizes).const or 0) for d in y] for y in (x.source.grid, x.source.sizes))
        pointers = [self.of[name].data_ptr() for name in x.buffers]
        self.card.launch(fn, binary, grid, pointers, sizes, x.source.pdl)

    def run(self, way: Way, binaries: dict[str, Compiled]) -> tuple[Any, float]:
        """Return the result and the median microseconds, from a graph of several repetitions."""
        if way.name == "expanded":
            self.expand()
        result = way.launches[-1].buffers[-1]
        self.of[result].fill_(float("nan"))
        self.torch.cuda.synchronize()
        for x in way.launches:
            self.launch(x, binaries[x.key])
        self.card.wait()
        got = self.of[result].float()

        def launch(_: int) -> None:
            for x in way.launches:
                self.launch(x, binaries[x.key])

        return got, graph_microseconds(self.card, launch, 5, SECONDS)


def floor_us(way: Way) -> float:
    """The larger of the times of memory and of arithmetic of a way."""
    spans, h = CASES[way.case], way.heads
    tokens, seen = sum(n for n, _ in spans), sum(total for _, total in spans)
    pairs = sum(new * (total - new) + new * (new + 1) / 2 for new, total in spans)
    if way.name.startswith("products"):
        nbytes, flops = 2 * h * OWN * LATENT + 2 * tokens * h * (OWN + LATENT), 2 * tokens * h * OWN * LATENT
    elif way.name == "expanded":
        nbytes, flops = seen * 4 * h * EXPANDED, int(4 * pairs * h * EXPANDED)
    else:
        nbytes, flops = seen * 2 * (LATENT + ROTARY), int(2 * pairs * h * (2 * LATENT + ROTARY))
    return max(nbytes / BANDWIDTH, flops / PEAK) * 1e6


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ap.add_argument("-o", "--out", type=Path, required=True, help="folder of the results and binaries")
    ap.add_argument("--cases", default=",".join(CASES), help="names of cases, default all")
    ap.add_argument("--heads", default="128,16", help="numbers of heads, default 128,16")
    ap.add_argument("--compile-only", action="store_true", help="compile and measure nothing")
    args = ap.parse_args()
    registry = load()
    s = Setting(Heads(), registry, registry.target("cuda:sm_90"))
    pairs = [(case, int(h)) for h in args.heads.split(",") for case in args.cases.split(",")]
    ways_of = {pair: list(ways(*pair, s)) for pair in pairs}
    compile_all((x for some in ways_of.values() for way in some for x in way.launches), s, args.out / "binaries")
    if args.compile_only:
        return
    card = Card(nbytes=1 << 20)
    with (args.out / "latent.jsonl").open("w") as out:
        for (case, heads), some in ways_of.items():
            bench = Bench(case, heads, card)
            want = bench.reference()
            for way in some:
                binaries = {x.key: read_entry(entry_path(args.out / "binaries", x.key)) for x in way.launches}
                got, us = bench.run(way, binaries)  # type: ignore[arg-type]
                latent = not way.name.startswith(("products", "expanded"))
                error = bench.error(got, want) if latent else 0.0
                row = {"case": case, "heads": heads, "way": way.name, "us": round(us, 1), "error": error}
                print(json.dumps({**row, "floor": round(floor_us(way), 1)}), file=out, flush=True)
                text = f"{case:18} {heads:4} {way.name:72} {us:8.1f} us, floor {floor_us(way):7.1f}"
                print(f"{text}, error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
