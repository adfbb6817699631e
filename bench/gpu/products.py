"""Time products with their epilogues on this GPU: Triton's best schedules, all of the CUDA C++ kernels, and cuBLAS.

    python -m bench.gpu.products [--tokens 64,128,256,512,2048,8192] [--weights 6144x4096,14336x4096:gated,...]
                                 [--ways 3] [--seconds 0.003] [--sustained 0.3] [--best 6] [--cache DIR]
                                 [--compile-only] [--json FILE] [--record FILE]

The products are by default those of a layer of Llama-3.1-8B. Every way is timed as by `llmc tune`: many copies over
distinct memory, medians of five rounds of `--seconds`. cuBLAS is torch's product of the same factors, in a CUDA graph,
without the epilogue. FILE of --record gets the times as a tuning file. tests/gpu/test_cuda_kernels.py checks results.

--sustained then runs the --best fastest ways of a size one after the other without pauses, each for so many seconds,
and times its second half, beside the clock and power of that half: long prompts keep a GPU at its power limit, where
another way may be the fastest. There are two rounds in opposite order; the second begins with a hot GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu import schedules
from bench.gpu.nvml import Sample, Sampler
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import Tuning, record, save, schedule_text
from llmc.extension import Registry
from llmc.ir.graph import Graph, Node
from llmc.ir.text import parse
from llmc.measure.timing import Sustained, Timer, Trial, copies_of
from llmc.targets.target import Target

OURS, CUBLAS = ("cuda/gemm_wgmma", "cuda/gemm_tiles"), "cublas"
MOST_TOKENS = 8192
TOKENS = "64,128,256,512,2048,8192"
WEIGHTS = "6144x4096,4096x4096:residual,14336x4096:gated,4096x14336:residual"
# Epilogue -> the op, the parts of its weight, other inputs.
EPILOGUES = {
    "": ("linear(%x, %w)", 1, ""),
    "residual": ('linear_map(%x, %w, %r) {parts=1, body="add(a0, a1)"}', 1, ", %r: bf16[T, {n}]"),
    "gated": ('linear_map(%x, %w) {parts=2, body="mul(mul(a0, sigmoid(a0)), a1)"}', 2, ""),
}
ROUNDS = 5


@dataclass(frozen=True)
class Product:
    """A product of k columns with n columns of results. kind: one of EPILOGUES."""

    n: int
    k: int
    kind: str = ""

    @staticmethod
    def read(text: str) -> Product:
        """Read "4096x14336:residual": columns of results, columns, epilogue."""
        sizes, _, kind = text.partition(":")
        n, k = map(int, sizes.split("x"))
        return Product(n, k, kind)

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k}{':' * bool(self.kind)}{self.kind}"

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.n * EPILOGUES[self.kind][1]

    def node(self, registry: Registry) -> tuple[Graph, Node]:
        """Return a graph of the product with any number of tokens, and its node."""
        op, _, others = EPILOGUES[self.kind]
        inputs = f"%x: bf16[T, {self.k}], %w: weight bf16[{self.rows}, {self.k}]{others.format(n=self.n)}"
        text = f"""
sym T in [1, {MOST_TOKENS}]
graph @main({inputs}) {{
  %y = {op} : bf16[T, {self.n}]
  return %y
}}
"""
        graph = parse(text, registry.opset()).graphs["main"]
        return graph, next(iter(graph.nodes))


def candidates(p: Product, tokens: int, ways: int, registry: Registry, target: Target) -> list[Trial]:
    """Return the best `ways` Triton schedules and every schedule of the CUDA kernels for a size."""
    graph, node = p.node(registry)
    return schedules.candidates(graph, node, {"T": tokens}, OURS, ways, Tuning.shipped(target), registry, target)


def cublas_us(p: Product, tokens: int, copies: int, seconds: float) -> float:
    """Return the microseconds of torch's product, of `copies` over distinct memory in one CUDA graph."""
    import torch

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    factors = [(drawn(tokens, p.k), drawn(p.rows, p.k)) for _ in range(copies)]
    results = [torch.empty(tokens, p.rows, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]

    def run() -> None:
        for (x, w), y in zip(factors, results, strict=True):
            torch.matmul(x, w.T, out=y)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def timed(times: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    timed(1)
    times = max(1, min(200, round(seconds / max(timed(1), 1e-6))))
    return statistics.median(timed(times) for _ in range(ROUNDS)) / times / copies * 1e6


def sustained(
    timer: Timer, trials: Sequence[Trial], seconds: float, bounds: Mapping[str, tuple[int, int]]
) -> list[list[dict[str, float]]]:
    """Return us, MHz and watts of each way in both rounds."""
    with Sampler() as sampler:
        first = timer.sustained(trials, bounds, seconds)
        second = timer.sustained(trials[::-1], bounds, seconds)[::-1]
    return [[_with_power(r, sampler.samples) for r in both] for both in zip(first, second, strict=True)]


def _with_power(r: Sustained, samples: Sequence[Sample]) -> dict[str, float]:
    during = [s for s in samples if s.gpu == 0 and r.begin <= s.ns <= r.end]
    mhz, watts = (
        round(statistics.fmean(x)) if x else 0 for x in ([s.mhz for s in during], [s.milliwatts / 1e3 for s in during])
    )
    return {"us": round(r.us, 2), "mhz": mhz, "watts": watts}


def main(argv: Sequence[str] | None = None) -> None:
    ap = schedules.parser("time products in CUDA C++ beside Triton's and cuBLAS", TOKENS, 3)
    ap.add_argument("--weights", default=WEIGHTS, help="columns of results x columns[:residual|:gated]")
    ap.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS", help="also time ways without pauses")
    ap.add_argument("--best", type=int, default=6, help="number of ways that --sustained times (6)")
    ap.add_argument("--no-cublas", action="store_true", help="torch is not needed then")
    args = ap.parse_args(argv)
    with scratch() as folder:
        run(args, args.cache or folder)


def run(args: argparse.Namespace, cache: Path) -> None:
    """Compile or measure the cases of the arguments."""
    timer, registry, target = schedules.timer_of(args, cache)
    bounds = {"T": (1, MOST_TOKENS)}
    for p in map(Product.read, args.weights.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            trials = candidates(p, tokens, args.ways, registry, target)
            if args.compile_only:
                timer.compile(trials, bounds)
                continue
            times = timer.microseconds(trials, bounds)
            named = [(c.kernel.name, schedule_text(c.schedule), us) for c, us in zip(trials, times, strict=True)]
            if not args.no_cublas:
                copies = copies_of(trials[0].node, trials[0].env, target)
                named.append((CUBLAS, "without epilogue", cublas_us(p, tokens, copies, args.seconds)))
            rows = [row(p, tokens, *x) for x in sorted(named, key=lambda x: x[2])]
            report(p, tokens, rows)
            if args.sustained:
                rows += report_sustained(timer, p, tokens, trials, times, args, bounds)
            schedules.save_rows(args, rows)
            if args.record:
                lines = zip(trials, times, strict=True)
                save(args.record, [record(c.node, c.kernel.name, c.schedule, target, us, c.env) for c, us in lines])


def report_sustained(
    timer: Timer, p: Product, tokens: int, trials: Sequence[Trial], times: Sequence[float], args: argparse.Namespace,
    bounds: Mapping[str, tuple[int, int]],
) -> list[dict[str, object]]:  # fmt: skip
    """Print the sustained times of the ways that are the fastest in bursts; return their rows."""
    best = [c for c, _ in sorted(zip(trials, times, strict=True), key=lambda x: x[1])[: args.best]]
    rows = []
    for c, rounds in zip(best, sustained(timer, best, args.sustained, bounds), strict=True):
        us = statistics.fmean(r["us"] for r in rounds)
        rows.append({**row(p, tokens, c.kernel.name, schedule_text(c.schedule), us), "rounds": rounds})
    for r in sorted(rows, key=lambda r: r["us"]):
        shown = ", ".join(f"{x['us']} us at {x['mhz']} MHz, {x['watts']} W" for x in r["rounds"])
        print(f"  sustained {r['us']:>9} us ({shown})  {r['kernel']} {r['schedule']}", flush=True)
    return rows


def row(p: Product, tokens: int, kernel: str, schedule: str, us: float) -> dict[str, object]:
    """Return the row of one way: microseconds of one launch, and TFLOP/s."""
    return {
        "tokens": tokens, "weight": p.name, "kernel": kernel, "schedule": schedule,
        "us": round(us, 2), "tflops": round(2e-6 * tokens * p.rows * p.k / us, 1),
    }  # fmt: skip


def report(p: Product, tokens: int, rows: Sequence[schedules.Row]) -> None:
    """Print the best of Triton, of each kernel in CUDA C++ and of cuBLAS for one size, then all rows."""
    schedules.report(f"{tokens} tokens x {p.name}", {name: name for name in (*OURS, CUBLAS)}, rows, "tflops")


if __name__ == "__main__":
    main()
