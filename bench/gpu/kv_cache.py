"""Time decode attention and the append with KV caches in bf16 and in 8-bit floats, compared with the floor.

    python -m bench.gpu.kv_cache [--every] [--cache DIR]      on a GPU; --every prints all schedules

The shapes are a layer of Llama-3.1-8B; the floor is the bytes of keys and values over the target's bandwidth.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llmc.codegen.kernel import Kernel
from llmc.codegen.scratch_dir import scratch
from llmc.extension import Registry, load
from llmc.ir.graph import Graph
from llmc.ir.text import parse
from llmc.measure.timing import Timer, Trial
from llmc.targets.target import Target

HEADS, KV_HEADS, HEAD = 32, 8, 128
STEPS = ((256, 512, 0), (64, 512, 0), (32, 4096, 0), (8, 15000, 8), (1, 2048, 16))  # rows, context, splits
POOLS = ("bf16", "f8e4m3")
SYMBOLS = {"R": (1, 256), "P": (1, 1 << 20)}


def graph(pool: str, op: str, splits: int, registry: Registry) -> Graph:
    """Return a graph of one node over a layer's pool."""
    scales, scale = (f", %s: f32[{2 * KV_HEADS}]", ", %s") if pool == "f8e4m3" else ("", "")
    kv = f"state {pool}[P, 2, {KV_HEADS}, 16, {HEAD}]"
    if op == "rope_append":
        inputs = f"%x: bf16[R, {(HEADS + 2 * KV_HEADS) * HEAD}], %kv: {kv}, %slots: i32[R]{scales}, "
        inputs += f"%c: f32[R, {HEAD // 2}], %d: f32[R, {HEAD // 2}]"
        call = f'rope_append(%x, %kv, %slots{scale}, %c, %d) {{heads={HEADS}, dtype="bf16"}}'
        results = (f"bf16[R, {HEADS}, {HEAD}]", kv)
    else:
        starts, start = ("", "") if splits else ("%starts: i32[R+1], ", "%starts, ")
        inputs = f"%q: bf16[R, {HEADS}, {HEAD}], %kv: {kv}, %pages: state i32[256, 1024], %rows: i32[R], {starts}"
        inputs += f"%positions: i32[R]{scales}"
        name = "paged_attention_split" if splits else "paged_attention"
        options = f"scale=0.0883, splits={splits}" if splits else "scale=0.0883"
        call = f"{name}(%q, %kv, %pages, %rows, {start}%positions{scale}) {{{options}}}"
        split = (f"f32[R, {HEADS}, {splits}, {HEAD}]", f"f32[R, {HEADS}, {splits}]")
        results = split if splits else (f"bf16[R, {HEADS}, {HEAD}]",)
    names = ", ".join(f"%y{i}" for i in range(len(results)))
    symbols = "".join(f"sym {s} in [{low}, {high}]\n" for s, (low, high) in SYMBOLS.items())
    text = f"{symbols}graph @g({inputs}) {{\n  {names} = {call} : {', '.join(results)}\n  return {names}\n}}\n"
    return parse(text, registry.opset()).graphs["g"]


def times(g: Graph, rows: int, kernel: Kernel, timer: Timer) -> list[tuple[float, str]]:
    """Return the microseconds of each schedule, fastest first."""
    (node,) = g.nodes
    schedules = kernel.schedules(node, timer.target)
    candidates = [Trial(node, g, {"R": rows}, kernel, schedule) for schedule in schedules]
    return sorted(zip(timer.microseconds(candidates, SYMBOLS), map(str, schedules), strict=True))


def measure(cache: Path, every: bool, registry: Registry, target: Target) -> None:
    """Print the table."""
    print(f"{'rows x context':>16} {'op':>24} {'pool':>7} {'us':>8} {'floor':>8}  schedule")
    for rows, context, splits in STEPS:
        timer = Timer(target, registry, cache, jobs=None, context=context, page=16)
        for op in ("attention", "rope_append"):
            kernel = registry.kernels["triton/rope_append" if op == "rope_append" else "triton/decode_attention"]
            for pool in POOLS:
                tokens = rows * (context if op == "attention" else 1)
                nbytes = 2 * tokens * KV_HEADS * HEAD * (1 if pool == "f8e4m3" else 2)
                floor = nbytes / target.bandwidth * 1e6
                timed = times(graph(pool, op, splits, registry), rows, kernel, timer)
                for us, schedule in timed if every else timed[:1]:
                    name = f"{op} in {splits}" if splits and op == "attention" else op
                    step = f"{rows} x {context}"
                    print(f"{step:>16} {name:>24} {pool:>7} {us:8.2f} {floor:8.2f}  {schedule}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="print all schedules")
    parser.add_argument("--target", default="cuda:sm_90", help="target (cuda:sm_90)")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels (a temporary one)")
    args = parser.parse_args()
    registry = load()
    with scratch() as folder:
        measure(args.cache or folder, args.every, registry, registry.target(args.target))


if __name__ == "__main__":
    main()
