"""Time latent attention (MLA) over pages on this GPU, in absorbed form beside the expanded one, and products of heads.

    python -m bench.gpu.latent_attention -o FOLDER [--compile-only] [--cases decode-32x4096,prompt-2048]
                                         [--heads 128,16]

The heads are those of DeepSeek-V3 (128) and V2-Lite (16), with a latent of 512 elements and a rotary part of 64, in
bf16. The expanded form has one KV head of 192 elements for each head. Every schedule is timed with the number of parts
that split-kv chooses; the schedule that the cost rule prefers is also timed with half and twice as many.

The results of the rows' last tokens are compared with those of torch in float32. The command writes to FOLDER
`latent.jsonl`, with one record for each timed way, and the binaries, so that a machine without compilers can repeat the
run. The floor is the larger of two times: of reading the latents once, and of the products. It follows from the
bandwidth of a simple copy kernel and the rate of a library's matrix product on an H200.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from bench.gpu.attention import BANDWIDTH, PEAK, compile_all  # noqa: E402
from bench.gpu.attention_ways import PAGE, WIDTH, Heads, Launch, Setting, ours  # noqa: E402
from bench.gpu.graph_time import graph_microseconds  # noqa: E402
from gpu.launcher import Card  # noqa: E402
from llmc.codegen.backends.triton.latent_attention import LATENT_DECODE, LATENT_PREFILL  # noqa: E402
from llmc.codegen.backends.triton.matmul import HEAD_MATMUL  # noqa: E402
from llmc.codegen.kernel import Kernel, Schedule  # noqa: E402
from llmc.codegen.toolchain import Compiled, entry_path, read_entry  # noqa: E402
from llmc.extension import Registry, load  # noqa: E402
from llmc.ir.graph import Graph, Node  # noqa: E402
from llmc.ir.text import parse  # noqa: E402
from llmc.passes.split.split_kv import LATENT_HEADS, SplitKv  # noqa: E402
from llmc.targets.target import Target  # noqa: E402

LATENT = 512  # elements of a latent
ROTARY = 64  # elements of the rotary part of a query or key
HEAD_DIM = 128  # elements of a head without its rotary part
EXPANDED = HEAD_DIM + ROTARY  # elements of a head of the expanded form
SCALE = EXPANDED**-0.5
MAX_PAGES = 8192  # bound of the symbol P
SECONDS = 0.01  # minimum duration of a timed graph
# (new tokens, all tokens) of each row
CASES: dict[str, list[tuple[int, int]]] = {
    "decode-32x4096": [(1, 4096)] * 32,
    "decode-8x15000": [(1, 15000)] * 8,
    "decode-128x1024": [(1, 1024)] * 128,
    "prompt-2048": [(2048, 2048)],
    "chunk-512-of-4096": [(512, 4096)],
}
DECODE_BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256)  # maximum numbers of rows of the decode programs of a compile
TYPES = (
    "%q: bf16[{t}, {h}, 512], %rotary: bf16[{t}, {h}, 64], %pool: state bf16[P, 16, 576], "
    "%pages: state i32[256, {width}], %rows: i32[R], %positions: i32[{t}]"
)


@dataclass(frozen=True)
class Way:
    """One of the compared ways to compute a case; `launches` run in this order."""

    case: str
    heads: int
    name: str
    launches: tuple[Launch, ...]


def node_of(text: str, registry: Registry) -> Node:
    """Return the node of the text "INPUTS | CALL | TYPES OF THE RESULTS", in the syntax of `.air` files."""
    inputs, call, results = text.split(" | ")
    names = ", ".join(f"%y{i}" for i in range(results.count("[")))
    syms = f"sym T in [1, 8192]\nsym R in [1, 256]\nsym P in [1, {MAX_PAGES}]\n"
    graph: Graph = parse(
        f"{syms}graph @main({inputs}) {{\n  {names} = {call} : {results}\n  return {names}\n}}\n", registry.opset()
    ).graphs["main"]
    (node,) = graph.nodes
    return node


def latent_node(heads: int, parts: int, registry: Registry) -> Node:
    """Return paged_latent_attention_split for one token per row or, with parts = 0, paged_latent_attention."""
    types = TYPES.format(t="R" if parts else "T", h=heads, width=WIDTH)
    names = "%q, %rotary, %pool, %pages, %rows"
    if parts:
        call = f"paged_latent_attention_split({names}, %positions) {{scale={SCALE!r}, splits={parts}}}"
        return node_of(f"{types} | {call} | f32[R, {heads}, {parts}, 512], f32[R, {heads}, {parts}]", registry)
    call = f"paged_latent_attention({names}, %starts, %positions) {{scale={SCALE!r}}}"
    return node_of(f"{types}, %starts: i32[R+1] | {call} | bf16[T, {heads}, 512]", registry)


def launch_of(kernel: Kernel, node: Node, schedule: Schedule, buffers: str, target: Target) -> Launch:
    """Return the launch of a node; `buffers` has the names of its buffers (see Bench)."""
    return Launch(node, kernel.emit(node, schedule, target), tuple(buffers.split()))


def ways(case: str, heads: int, s: Setting) -> Iterator[Way]:
    """Yield the ways of a case: the schedules of latent attention, the products of heads, the expanded form.

    The products of heads multiply each head by its own matrix: queries before the attention, results after it.
    """
    spans, env = CASES[case], {"T": sum(n for n, _ in CASES[case]), "R": len(CASES[case]), "P": 256}
    decode = all(new == 1 for new, _ in spans)
    if decode:
        yield from decode_ways(case, heads, s, env)
    else:
        node = latent_node(heads, 0, s.registry)
        for schedule in ranked(LATENT_PREFILL, node, s.target, env):
            buffers = "q rotary pool pages rows starts positions y"
            yield Way(case, heads, f"{schedule}", (launch_of(LATENT_PREFILL, node, schedule, buffers, s.target),))
    for k, n, read, written in ((HEAD_DIM, LATENT, "head_q", "q"), (LATENT, HEAD_DIM, "y", "out")):
        node = node_of(
            f"%x: bf16[T, {heads}, {k}], %w: weight bf16[{heads}, {k}, {n}] | head_matmul(%x, %w)"
            f" | bf16[T, {heads}, {n}]",
            s.registry,
        )
        for schedule in ranked(HEAD_MATMUL, node, s.target, env)[:2]:
            launch = launch_of(HEAD_MATMUL, node, schedule, f"{read} w {written}", s.target)
            yield Way(case, heads, f"products {k} x {n} {schedule}", (launch,))
    expanded = Setting(Heads(heads, heads, EXPANDED), s.registry, s.target)
    attention = ours("paged_attention", "R" if decode else "T", f"{{scale={SCALE!r}}}", env, expanded)
    yield Way(case, heads, "expanded", (attention,))


def decode_ways(case: str, heads: int, s: Setting, env: dict[str, int]) -> Iterator[Way]:
    """Yield the ways of latent attention for one token per row: in parts with a combine kernel, and in one kernel."""
    chosen = chosen_parts(case, heads, s)
    for parts in dict.fromkeys((chosen, max(2, chosen // 2), 2 * chosen)):
        node = latent_node(heads, parts, s.registry)
        schedules = ranked(LATENT_DECODE, node, s.target, env)
        setting = Setting(Heads(heads, heads, LATENT), s.registry, s.target)
        combine = ours("attention_combine", "R", f"{{splits={parts}}}", env, setting)
        for schedule in schedules if parts == chosen else schedules[:1]:
            split = launch_of(LATENT_DECODE, node, schedule, "q rotary pool pages rows positions partial lse", s.target)
            yield Way(case, heads, f"{parts} parts {schedule}", (split, combine))
    node = latent_node(heads, 0, s.registry)
    for schedule in ranked(LATENT_PREFILL, node, s.target, env)[:1]:
        buffers = "q rotary pool pages rows starts positions y"
        yield Way(case, heads, f"whole {schedule}", (launch_of(LATENT_PREFILL, node, schedule, buffers, s.target),))


def chosen_parts(case: str, heads: int, s: Setting) -> int:
    """Return the number of parts that split-kv chooses in the decode program that runs the rows of a case."""
    rows, rule = len(CASES[case]), SplitKv()
    max_rows = next(bound for bound in DECODE_BOUNDS if bound >= rows)
    min_rows = 1 if max_rows == 1 else DECODE_BOUNDS[DECODE_BOUNDS.index(max_rows) - 1] + 1
    node = latent_node(heads, 0, s.registry)

    class Context:
        target = s.target

    fill = 1.0 if heads > LATENT_HEADS // 2 else rule.fill
    blocks = -(-heads // LATENT_HEADS)
    return max(2, rule.parts(node, (min_rows, max_rows), blocks, node.operands[3], fill, Context()))  # type: ignore[arg-type]


def ranked(kernel: Kernel, node: Node, target: Target, env: dict[str, int]) -> list[Schedule]:
    """Return the schedules of a node, the one that the cost rule prefers first."""
    return sorted(kernel.schedules(node, target), key=lambda s: kernel.cost_us(node, s, target, env))


class Bench:
    """The buffers of a case on the device, by name in `buffers`, and the launches that use them.

    q, rotary: the two parts of the queries. pool: the latents with the rotary parts of the keys. y: the result.
    head_q, w, out: the operands and the result of the products of heads. partial, lse: the results of parts. kv: the
    pool of the expanded form.
    """

    def __init__(self, case: str, heads: int, card: Card) -> None:
        import torch

        self.torch, self.card, spans = torch, card, CASES[case]
        generator = torch.Generator(device="cuda").manual_seed(1)
        pages = sum(-(-total // PAGE) for _, total in spans)
        order = torch.randperm(pages, generator=generator, device="cuda").to(torch.int32)
        table = torch.full((256, WIDTH), -1, dtype=torch.int32, device="cuda")
        first = 0
        for i, (_, total) in enumerate(spans):
            count = -(-total // PAGE)
            table[i, :count] = order[first : first + count]
            first += count
        new_tokens = torch.tensor([new for new, _ in spans])
        tokens = int(new_tokens.sum())
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), new_tokens.cumsum(0)])
        positions = torch.cat([torch.arange(total - new, total) for new, total in spans])

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

        self.buffers: dict[str, Any] = {
            "q": drawn(tokens, heads, LATENT), "rotary": drawn(tokens, heads, ROTARY),
            "head_q": drawn(tokens, heads, HEAD_DIM),
            "pool": drawn(pages, PAGE, LATENT + ROTARY), "w": drawn(heads, HEAD_DIM * LATENT),
            "pages": table, "rows": torch.arange(len(spans), dtype=torch.int32, device="cuda"),
            "starts": starts.to(torch.int32).cuda(), "positions": positions.to(torch.int32).cuda(),
            "y": drawn(tokens, heads, LATENT), "out": drawn(tokens, heads, HEAD_DIM),
            "partial": torch.empty(len(spans) * heads * 64 * LATENT if tokens < 256 else 1, device="cuda"),
            "lse": torch.empty(len(spans) * heads * 64, device="cuda"),
        }  # fmt: skip
        self.generator, self.heads, self.pages = generator, heads, pages
        self.sizes = {"T": tokens, "R": len(spans), "P": pages}
        torch.cuda.synchronize()

    def expand(self) -> None:
        """Allocate the pool of the expanded form."""
        shape = (self.pages, 2, self.heads, PAGE, EXPANDED)
        self.buffers["kv"] = self.torch.empty(shape, device="cuda", dtype=self.torch.bfloat16)
        self.buffers["kv"].normal_(generator=self.generator)
        self.torch.cuda.synchronize()

    def reference(self) -> Any:
        """Return the attention of each row's last token in float32, of shape [rows, heads, LATENT]."""
        outputs, keys = [], self.buffers["pool"].float()
        for i, last in enumerate(self.buffers["starts"][1:].tolist()):
            total = int(self.buffers["positions"][last - 1]) + 1
            pages = self.buffers["pages"][i, : -(-total // PAGE)].long()
            key = keys[pages].reshape(-1, LATENT + ROTARY)[:total]
            query = self.torch.cat([self.buffers["q"][last - 1], self.buffers["rotary"][last - 1]], 1).float()
            outputs.append(self.torch.softmax(query @ key.T * SCALE, 1) @ key[:, :LATENT])
        return self.torch.stack(outputs)

    def error(self, result: Any, reference: Any) -> float:
        """Return the relative error of a result at the rows' last tokens."""
        last_tokens = result[self.buffers["starts"][1:].long() - 1]
        return float((last_tokens - reference).norm() / reference.norm())

    def launch(self, launch: Launch, binary: Compiled) -> None:
        """Start a launch with the case's sizes and buffers."""
        source = launch.source
        grid, sizes = ([int(d.subs(self.sizes).const or 0) for d in dims] for dims in (source.grid, source.sizes))
        pointers = [self.buffers[name].data_ptr() for name in launch.buffers]
        function = self.card.function(binary, source.entry)
        self.card.launch(function, binary, grid, pointers, sizes, source.pdl)

    def run(self, way: Way, binaries: dict[str, Compiled]) -> tuple[Any, float]:
        """Return the result and the median microseconds, from a graph of several repetitions."""
        if way.name == "expanded":
            self.expand()
        result = self.buffers[way.launches[-1].buffers[-1]]
        result.fill_(float("nan"))
        self.torch.cuda.synchronize()

        def launch_all(_: int = 0) -> None:
            for launch in way.launches:
                self.launch(launch, binaries[launch.key])

        launch_all()
        self.card.wait()
        return result.float(), graph_microseconds(self.card, launch_all, 5, SECONDS)


def floor_us(way: Way) -> float:
    """Return the floor of a way (see the top of this file) in microseconds."""
    spans, heads = CASES[way.case], way.heads
    tokens, context = sum(new for new, _ in spans), sum(total for _, total in spans)
    pairs = sum(new * (total - new) + new * (new + 1) / 2 for new, total in spans)  # of a query and a key
    if way.name.startswith("products"):
        weights = heads * HEAD_DIM * LATENT
        nbytes, flops = 2 * weights + 2 * tokens * heads * (HEAD_DIM + LATENT), 2 * tokens * weights
    elif way.name == "expanded":
        nbytes, flops = context * 4 * heads * EXPANDED, int(4 * pairs * heads * EXPANDED)
    else:
        nbytes, flops = context * 2 * (LATENT + ROTARY), int(2 * pairs * heads * (2 * LATENT + ROTARY))
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
    launches = (launch for case_ways in ways_of.values() for way in case_ways for launch in way.launches)
    compile_all(launches, s, args.out / "binaries")
    if args.compile_only:
        return
    card = Card(nbytes=1 << 20)
    with (args.out / "latent.jsonl").open("w") as out:
        for (case, heads), case_ways in ways_of.items():
            bench = Bench(case, heads, card)
            reference = bench.reference()
            for way in case_ways:
                measure(bench, way, reference, args.out / "binaries", out)


def measure(bench: Bench, way: Way, reference: Any, binaries: Path, out: TextIO) -> None:
    """Time a way, compare its result, and write and print both."""
    compiled = {launch.key: read_entry(entry_path(binaries, launch.key)) for launch in way.launches}
    result, us = bench.run(way, compiled)  # type: ignore[arg-type]
    is_latent = not way.name.startswith(("products", "expanded"))
    error = bench.error(result, reference) if is_latent else 0.0
    row = {"case": way.case, "heads": way.heads, "way": way.name, "us": round(us, 1), "error": error}
    floor = floor_us(way)
    print(json.dumps({**row, "floor": round(floor, 1)}), file=out, flush=True)
    text = f"{way.case:18} {way.heads:4} {way.name:72} {us:8.1f} us, floor {floor:7.1f}"
    print(f"{text}, error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
