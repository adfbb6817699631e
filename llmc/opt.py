"""`llmc opt`: run passes over a file of IR text and print the result."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from llmc.check.compare_modules import compare
from llmc.diagnostics import Diagnostic
from llmc.extension import Registry, load
from llmc.ir.graph import Module
from llmc.ir.text import parse_file, show
from llmc.ir.verify import verify
from llmc.passes.base import Ctx, Pass
from llmc.passes.pipeline import parse_pipeline, run_pipeline, spell_pass
from llmc.targets.target import Target


def main_opt(args: argparse.Namespace, out: IO[str]) -> int:
    """Run `llmc opt`. Everything printed besides IR starts with //, so that the output can be parsed again."""
    registry = load()
    ops = registry.opset()
    _check_file(args.file)
    m = parse_file(args.file, ops)
    verify(m)
    target = registry.target(args.target)
    passes = _passes(args, registry, target)
    ctx = Ctx(ops, target, registry.kernels, args.fuel, args.only)
    if args.only and not any(ctx.allows(n) for g in m.graphs.values() for n in g.nodes):
        cause = f"--only {args.only}: no node of {args.file} is in a module with this path"
        raise Diagnostic("E424", cause, "use a path from the comments at the nodes, such as model.layers.0")
    check = args.check or args.rounded
    before = m.clone() if check else Module()
    times: list[str] = []

    def observe(i: int, p: Pass, changes: int, seconds: float, m: Module) -> None:
        times.append(f"// time: {p.name}: {seconds * 1e3:.1f} ms, {changes} changes\n")
        if args.print_after in (p.name, "all"):
            print(f"// after {p.name}: {changes} changes\n{show(m)}", file=out)

    run_pipeline(m, passes, ctx, observe)
    print(show(m), end="", file=out)
    if args.explain:
        out.writelines(f"// miss: {miss}\n" for miss in ctx.misses)
        out.writelines(f"// choice: {line}\n" for row in ctx.choices for line in _choice_lines(row))
    if args.time:
        out.writelines(times)
    if check:
        out.writelines(f"// check: {result}\n" for result in compare(before, m, rounded=args.rounded))
    return 0


def _choice_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a heading and one line per kernel of a row of `Choices`: the chosen one, the next best, the others."""
    sizes = ", ".join(f"{symbol}={size}" for symbol, size in row["sizes"].items())
    yield f"@{row['graph']}: {row['count']} x {row['node']} at {row['loc'] or 'no module'}; compared at {sizes}"
    yield f"  chosen: {_timed(row)}, best of {row['ways']}"
    yield from (f"  next: {_timed(other)}" for other in row["others"])
    yield from (f"  not {name}: {why}" for name, why in row["refused"].items())


def _timed(choice: Mapping[str, Any]) -> str:
    schedule = ", ".join(f"{name}={value}" for name, value in choice["schedule"].items())
    kernel = f"{choice['kernel']} {{{schedule}}}" if schedule else choice["kernel"]
    return f"{kernel}, {choice['us']} us {'measured' if choice['measured'] else 'predicted'}"


def _check_file(name: str) -> None:
    """Raise Diagnostic E100, which names a stage if there is one, for a folder."""
    folder = Path(name)
    if folder.is_dir():
        stages = sorted(folder.glob("ir/*.llir"))
        remedy = f"name a file in it, such as {stages[0]}" if stages else "name a file of IR (.llir)"
        raise Diagnostic("E100", f"{name} is a folder", remedy)


def _passes(args: argparse.Namespace, registry: Registry, target: Target) -> Sequence[Pass]:
    """Parse the pipeline and cut it after --stop-after; raises Diagnostic E420 if a named pass is not in it."""
    passes = parse_pipeline(args.passes, registry.passes, registry.pipelines_for(target))
    for option, name in (("--stop-after", args.stop_after), ("--print-after", args.print_after)):
        if name and name not in [p.name for p in passes] and (option, name) != ("--print-after", "all"):
            names = ", ".join(map(spell_pass, passes)) or "none"
            raise Diagnostic("E420", f"{option} {name}: the pipeline has no such pass", f"use one of: {names}")
    if args.stop_after:
        last = max(i for i, p in enumerate(passes) if p.name == args.stop_after)
        passes = passes[: last + 1]
    return passes
