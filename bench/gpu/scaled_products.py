"""Time products of 8-bit floats with scales of 128 x 128 tiles on this GPU, and those with scales of rows.

    python -m bench.gpu.scaled_products [--tokens 1,16,64,256,2048] [--shapes qkv,o,up,down] [--ways 24] [--json FILE]

The shapes are those of Llama-3.1-8B; activations are rounded as `lower-quantized` rounds them. Schedules are timed as
`llmc tune` times them. tests/gpu/test_kernels.py checks results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmc.codegen.candidates import candidates as node_candidates
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import Tuning, schedule_text
from llmc.extension import Registry, load
from llmc.ir.text import parse
from llmc.measure.timing import Timer, Trial
from llmc.passes.analysis import weight_only
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.targets.target import Target

SILU = "mul(mul(a0, sigmoid(a0)), a1)"
SHAPES = {"qkv": (6144, 4096, 1), "o": (4096, 4096, 1), "up": (14336, 4096, 2), "down": (4096, 14336, 1)}
FORMS = {"bf16": (0, 0), "rows": (1, 0), "tiles": (128, 128)}  # the block of the weight's format
TOKENS = "1,16,64,256,2048"
MOST_TOKENS = 8192
OTHERS = 4  # schedules of the products for comparison


def module_text(form: str, shape: str) -> str:
    """One product of bf16[T, k] by a weight in this form."""
    n, k, parts = SHAPES[shape]
    (rows, columns), m = FORMS[form], n * parts
    call = f'linear_map(%x, %w) {{parts={parts}, body="{SILU if parts == 2 else "a0"}"}} : bf16[T, {n}]'
    if form == "bf16":
        return f"sym T in [1, {MOST_TOKENS}]\ngraph @main(%x: bf16[T, {k}], %w: weight bf16[{m}, {k}]) {{\n" + (
            f"  %y = {call}\n  return %y\n}}\n"
        )
    name, scales = f"f8e4m3_{rows}x{columns}_f32_af8e4m3", f"{m // rows}, {k // columns if columns else 1}"
    attrs = f'code="f8e4m3", block=[{rows}, {columns}], act="f8e4m3", dtype="bf16"'
    return f"""
sym T in [1, {MOST_TOKENS}]
format {name} = {{code=f8e4m3, block=[{rows}, {columns}], scale=f32, logical=bf16, act=f8e4m3}}
graph @main(%x: bf16[T, {k}], %c: weight f8e4m3[{m}, {k}], %s: weight f32[{scales}]) {{
  %w = assemble(%c, %s) {{{attrs}}} : {name}[{m}, {k}]
  %y = {call}
  return %y
}}
"""


def candidates(form: str, shape: str, tokens: int, ways: int, registry: Registry, target: Target) -> Iterator[Trial]:
    """Return the best schedules of a product's launches: `ways` if scales belong to tiles, otherwise a few."""
    module = parse(module_text(form, shape), registry.opset())
    run_pipeline(
        module,
        parse_pipeline("lower-quantized, dce", registry.passes),
        Ctx(registry.opset(), target, registry.kernels),
    )
    graph, env = module.graphs["main"], {"T": tokens}
    fixed = weight_only(graph)
    for node in graph.nodes:
        if node.results[0] not in fixed:
            options = node_candidates(node, registry.kernels, target, env, Tuning.shipped(target))
            for o in options[: ways if node.op.name == "block_scaled_linear" else OTHERS]:
                yield Trial(node, graph, env, o.kernel, o.schedule)


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description="time products with scales of tiles")
    ap.add_argument("--target", default="cuda:sm_90")
    ap.add_argument("--tokens", default=TOKENS)
    ap.add_argument("--shapes", default=",".join(SHAPES))
    ap.add_argument("--ways", type=int, default=24, help="schedules of each product with scales of tiles")
    ap.add_argument("--json", type=Path, help="write all rows there, one JSON object a line")
    ap.add_argument("--list", action="store_true", help="print what would be timed")
    args = ap.parse_args(argv)
    registry = load()
    target = registry.target(args.target)
    rows: list[dict[str, object]] = []
    with scratch() as folder:
        timer = Timer(target, registry, folder, jobs=None, context=1024, page=target.page_size)
        if not args.list:
            timer.check_device()
        for shape in args.shapes.split(","):
            for tokens in map(int, args.tokens.split(",")):
                size = (shape, tokens)
                each = {f: list(candidates(f, *size, args.ways, registry, target)) for f in FORMS}
                trials = [(form, c) for form, some in each.items() for c in some]
                times = (
                    [0.0] * len(trials)
                    if args.list
                    else timer.microseconds([c for _, c in trials], {"T": (1, MOST_TOKENS)})
                )
                rows += report(size, trials, times)
                if args.json:
                    args.json.write_text("".join(f"{json.dumps(r)}\n" for r in rows))


def report(
    size: tuple[str, int], trials: Sequence[tuple[str, Trial]], times: Sequence[float]
) -> list[dict[str, object]]:
    """Print and return a row per schedule, the fastest of each form and op first."""
    rows: list[dict[str, object]] = [
        {
            "shape": size[0], "tokens": size[1], "form": form, "op": c.node.op.name, "us": round(us, 2),
            "kernel": c.kernel.name, "schedule": schedule_text(c.schedule),
        }
        for us, (form, c) in sorted(zip(times, trials, strict=True), key=lambda t: t[0])
    ]  # fmt: skip
    rows.sort(key=lambda r: (list(FORMS).index(str(r["form"])), str(r["op"])))
    for r in rows:
        print(*r.values(), flush=True)
    return rows


if __name__ == "__main__":
    main()
