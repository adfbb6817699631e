"""Shared by the benches of single ops: their options, the timer, and the table of every kernel's schedules."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmc.codegen.candidates import candidates as node_candidates
from llmc.codegen.tuning_records import Tuning
from llmc.extension import Registry, load
from llmc.ir.graph import Graph, Node
from llmc.measure.timing import Timer, Trial
from llmc.targets.target import Target

Row = dict[str, object]


def parser(description: str, tokens: str, ways: int) -> argparse.ArgumentParser:
    """Return a parser of the common options. tokens: the default sizes. ways: the default number of schedules."""
    ap = argparse.ArgumentParser(description=description)
    ap.add_argument("--target", default="cuda:sm_90")
    ap.add_argument("--tokens", default=tokens)
    ap.add_argument("--ways", type=int, default=ways, help="number of Triton schedules")
    ap.add_argument("--seconds", type=float, default=0.003, help="of a round")
    ap.add_argument("--cache", type=Path, help="folder of compiled kernels that is kept")
    ap.add_argument("--compile-only", action="store_true", help="compile into --cache; needs no GPU")
    ap.add_argument("--json", type=Path, help="file for all rows, one JSON object per line")
    ap.add_argument("--record", type=Path, help="tuning file for all times")
    return ap


def timer_of(args: argparse.Namespace, cache: Path) -> tuple[Timer, Registry, Target]:
    """Return the timer that the options ask for, the registry and the target; raises Diagnostic without a GPU."""
    registry = load()
    target = registry.target(args.target)
    timer = Timer(target, registry, cache, jobs=None, context=1024, page=target.page_size, seconds=args.seconds)
    if not args.compile_only:
        timer.check_device()
    return timer, registry, target


def candidates(
    graph: Graph, node: Node, env: Mapping[str, int], ours: Sequence[str], ways: int, tuning: Tuning,
    registry: Registry, target: Target,
) -> list[Trial]:  # fmt: skip
    """Return the best `ways` Triton schedules of a node, and every schedule of the kernels `ours`."""
    options = node_candidates(node, registry.kernels, target, env, tuning, prefer=ours)
    own_options = [o for o in options if o.kernel.name in ours]
    theirs = [o for o in options if o.kernel.name not in ours][:ways]
    return [Trial(node, graph, env, o.kernel, o.schedule) for o in (*theirs, *own_options)]


def save_rows(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Append the rows to the file of --json."""
    if args.json:
        with args.json.open("a") as f:
            f.writelines(f"{json.dumps(r)}\n" for r in rows)


def report(title: str, names: Mapping[str, str], rows: Sequence[Row], shown: str = "") -> None:
    """Print the best of each side, then all rows, fastest first.

    names: the side of a kernel; that of others is Triton. shown: the key of another number of a row.
    """
    best: dict[str, object] = {}
    for r in rows:
        best.setdefault(names.get(str(r["kernel"]), "Triton"), r["us"])
    print(f"{title}: {', '.join(f'{side} {us} us' for side, us in best.items())}")
    for r in rows:
        more = f"{r[shown]:>6} TFLOP/s  " if shown else ""
        print(f"  {r['us']:>9} us  {more}{r['kernel']} {r['schedule']}", flush=True)
