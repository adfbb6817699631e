"""Time the CUDA C++ product and Triton's best schedules on this GPU.

    python -m bench.gpu.products [--tokens 512,2048,8192] [--weights 6144x4096,...] [--ways 4] [--json FILE]

The candidates are Triton's best schedules for the size, by measurement or cost rule, and all of the CUDA kernel. Each
is timed as by `llmc tune`: many copies over distinct memory, medians. tests/gpu/test_cuda_kernels.py checks results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from llmc.codegen import select
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import Tuning, schedule_text
from llmc.extension import Registry, load
from llmc.ir.graph import Graph, Node
from llmc.ir.text import parse
from llmc.measure.timing import Candidate, Timer
from llmc.targets.target import Target

OURS = "cuda/gemm_wgmma"
MOST_TOKENS = 8192
TOKENS = "512,2048,8192"
WEIGHTS = "6144x4096,4096x4096,4096x14336,2048x2048"  # rows x columns: of an 8B model's layers, and of a 1B model's


def product(n: int, k: int, registry: Registry) -> tuple[Graph, Node]:
    """Return a graph of one linear: bf16[T, k] times a weight [n, k]."""
    text = f"""
sym T in [1, {MOST_TOKENS}]
graph @main(%x: bf16[T, {k}], %w: weight bf16[{n}, {k}]) {{
  %y = linear(%x, %w) : bf16[T, {n}]
  return %y
}}
"""
    graph = parse(text, registry.opset()).graphs["main"]
    return graph, next(iter(graph.nodes))


def candidates(n: int, k: int, tokens: int, ways: int, registry: Registry, target: Target) -> list[Candidate]:
    """Return the best `ways` Triton schedules and every schedule of the CUDA kernel for a size."""
    graph, node = product(n, k, registry)
    env = {"T": tokens}
    found = select.candidates(node, registry.kernels, target, env, Tuning.shipped(target), prefer=(OURS,))
    ours = [o for o in found if o.kernel.name == OURS]
    theirs = [o for o in found if o.kernel.name != OURS][:ways]
    return [Candidate(node, graph, env, o.kernel, o.schedule) for o in (*theirs, *ours)]


def measure(n: int, k: int, tokens: int, ways: int, timer: Timer) -> list[dict[str, object]]:
    """Return a row per schedule, fastest first: microseconds of one launch, and TFLOP/s."""
    found = candidates(n, k, tokens, ways, timer.registry, timer.target)
    times = timer.microseconds(found, {"T": (1, MOST_TOKENS)})
    rows = [
        {
            "tokens": tokens, "weight": f"{n}x{k}", "kernel": c.kernel.name, "schedule": schedule_text(c.schedule),
            "us": round(us, 2), "tflops": round(2e-6 * tokens * n * k / us, 1),
        }
        for c, us in zip(found, times, strict=True)
    ]  # fmt: skip
    return sorted(rows, key=lambda r: float(str(r["us"])))


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description="time the CUDA C++ product beside Triton's")
    ap.add_argument("--target", default="cuda:sm_90")
    ap.add_argument("--tokens", default=TOKENS)
    ap.add_argument("--weights", default=WEIGHTS, help="rows x columns, separated by commas")
    ap.add_argument("--ways", type=int, default=4, help="number of Triton schedules")
    ap.add_argument("--json", type=Path, help="file for all rows, one JSON object per line")
    args = ap.parse_args(argv)
    registry = load()
    target = registry.target(args.target)
    rows: list[dict[str, object]] = []
    with scratch() as folder:
        timer = Timer(target, registry, folder, jobs=None, context=1024, page=target.page_size)
        timer.reach()
        for weight in args.weights.split(","):
            n, k = map(int, weight.split("x"))
            for tokens in map(int, args.tokens.split(",")):
                found = measure(n, k, tokens, args.ways, timer)
                rows += found
                report(found)
                if args.json:
                    args.json.write_text("".join(f"{json.dumps(r)}\n" for r in rows))


def report(found: Sequence[dict[str, object]]) -> None:
    """Print the best schedule of each side for one size, then all schedules."""
    best = {mine: next(r for r in found if (r["kernel"] == OURS) is mine) for mine in (True, False)}
    ratio = float(str(best[False]["us"])) / float(str(best[True]["us"]))
    print(f"{found[0]['tokens']} tokens x {found[0]['weight']}: CUDA C++ has {ratio:.2f} of the speed of Triton's best")
    for r in found:
        print(f"  {r['us']:>9} us  {r['tflops']:>6} TFLOP/s  {r['kernel']} {r['schedule']}", flush=True)


if __name__ == "__main__":
    main()
