"""Time the recurrence of Qwen3-Next's layers on this GPU: every schedule of its launches, with and without chunks.

    python -m bench.gpu.recurrences [--tokens 1x2048,33x544,32x32] [--json FILE]

A step of RxT has R rows and T tokens: a prompt in the last row, one token in each of the others. Schedules are timed
alone, as `llmc tune` times them. tests/gpu/test_kernels.py checks results.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.gpu.schedules import candidates, parser, save_rows, timer_of
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import Tuning, schedule_text
from llmc.extension import Registry
from llmc.ir.text import parse
from llmc.measure.timing import Trial
from llmc.targets.target import Target

STEPS = "1x512,1x2048,33x544,256x768,32x32"
GROUPS, HEADS, SIZE, ROWS, TOKENS = 16, 32, 128, 256, 8192
_TOKEN = f"%k: bf16[T, {GROUPS}, {SIZE}], %v: bf16[T, {HEADS}, {SIZE}], %decay: f32[T, {HEADS}]"
_MEMORY = f"state f32[{ROWS}, {HEADS}, {SIZE}, {SIZE}]"
_FACTORS = f"f32[T, {HEADS}, 2, 32]"
_STEP = "%rows: i32[R], %starts: i32[R+1], %positions: i32[T]"
_INPUTS = f"%q: bf16[T, {GROUPS}, {SIZE}], {_TOKEN}, %beta: f32[T, {HEADS}], %memory: {_MEMORY}, {_STEP}"
_OUT = f"bf16[T, {HEADS}, {SIZE}], {_MEMORY}"
_CALLS = {
    "chunk_factors": (
        f"%y = chunk_factors(%q, %k, %decay, %rows, %starts, %beta) {{chunk=32, least=16}} : {_FACTORS}", "",
    ),
    "chunk_recurrence": (
        "%y, %m = chunk_recurrence(%q, %k, %v, %decay, %f, %memory, %rows, %starts, %positions, %beta) {least=16} : "
        + _OUT,
        f", %f: {_FACTORS}",
    ),
    "row_recurrence": (
        f"%y, %m = row_recurrence(%q, %k, %v, %decay, %memory, %rows, %starts, %positions, %beta) : {_OUT}", "",
    ),
}  # fmt: skip


def trials(op: str, env: Mapping[str, int], ways: int, registry: Registry, target: Target) -> Iterator[Trial]:
    """Yield the schedules of one op at the sizes `env`."""
    call, more = _CALLS[op]
    result = "%y" if op == "chunk_factors" else "%y, %m"
    text = (
        f"sym T in [1, {TOKENS}]\nsym R in [1, {ROWS}]\n"
        f"graph @main({_INPUTS}{more}) {{\n  {call}\n  return {result}\n}}\n"
    )
    graph = parse(text, registry.opset()).graphs["main"]
    (node,) = graph.nodes
    yield from candidates(graph, node, env, "", ways, Tuning.shipped(target), registry, target)


def measure(args: argparse.Namespace, cache: Path) -> None:
    """Print a row per step, op and schedule."""
    timer, registry, target = timer_of(args, cache)
    symbols = {"T": (1, TOKENS), "R": (1, ROWS)}
    for step in args.tokens.split(","):
        rows, tokens = map(int, step.split("x"))
        ops = [op for op in _CALLS if tokens <= 768 or op != "row_recurrence"]
        candidates = [t for op in ops for t in trials(op, {"T": tokens, "R": rows}, args.ways, registry, target)]
        if args.compile_only:
            timer.compile(candidates, symbols)
            continue
        times = timer.microseconds(candidates, symbols)
        table: list[dict[str, object]] = [
            {"step": step, "op": t.node.op.name, "us": round(us, 2), "schedule": schedule_text(t.schedule)}
            for us, t in zip(times, candidates, strict=True)
        ]
        for row in table:
            print(*row.values(), flush=True)
        save_rows(args, table)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser("time the launches of a recurrence", STEPS, 24).parse_args(argv)
    if args.cache:
        measure(args, args.cache)
        return
    with scratch() as folder:
        measure(args, folder)


if __name__ == "__main__":
    main()
