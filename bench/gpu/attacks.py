"""The table of bench.attacks on a GPU, with a large model of random weights and many neighbouring streams.

    python -m bench.gpu.attacks [--model NAME] [--artifact DIR | --artifacts DIR] [--out DIR] [--limit SECONDS] ...

One server serves all attacks as long as its processes live. Target: the neighbours' ITL p99 during each attack is
within 10 % of the mean of the values immediately before and after it, which are shown: where these differ by more than
10 % themselves, the verdict is "unsure" if the value during the attack is at most 10 % above the larger of them. Small
requests of the bench beside the attacks (`--ordinary`) begin with steps that have a prompt in them, which become the
99th percentile if there are several a second; `--windows` shows that, and the front's processor time. DIR gets
attacks.json, written after each attack, attacks.md and server.log. Attacks for which no time is left are named.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.attacks.figures import itl_text, parts_text, table
from bench.attacks.run import Bench, chosen, run_all
from bench.attacks.watch import ORDINARY
from bench.gpu.card import state, why_no_gpu
from bench.gpu.plan import MODELS, parser, plan_of
from bench.gpu.served import artifact

TARGET = 1.10  # maximum ratio of the p99 during an attack to the p99 without one


def verdicts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per attack: the ratio of the p99s, and whether it meets the target."""
    lines = []
    for row in rows:
        around = row["quiet"]["itl"]["p99_ms"], row["after"]["itl"]["p99_ms"]  # steps grow slower as streams grow
        quiet, beside = sum(around) / 2, row["beside"]["itl"]["p99_ms"]
        longest = f"max {row['quiet']['itl']['max_ms']:.0f} > {row['beside']['itl']['max_ms']:.0f} ms"
        figures = f"ITL p99 {around[0]:.2f} > {beside:.2f} > {around[1]:.2f} ms, {beside / quiet if quiet else 0:.3f}"
        lines.append(f"[{row['row']}] {row['name']}: {figures} ({verdict(around, beside)}); {longest}")
        lines += [f"  {name}: {part}" for name in ("quiet", "beside", "after") for part in parts_text(row[name])]
    return "\n".join(lines)


def verdict(around: tuple[float, float], beside: float) -> str:
    """Return "held", "missed", or "unsure" for a p99 between those of two windows without an attack."""
    if not (min(around) and beside):
        return "missed"
    if beside <= TARGET * sum(around) / 2:
        return "held"
    return "unsure" if max(around) > TARGET * min(around) and beside <= TARGET * max(around) else "missed"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if unknown := set(names) - set(ORDINARY):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are not known; there are {', '.join(ORDINARY)}")
    return names


def quiet_windows(bench: Bench) -> None:
    """Print the streams' latency and the front's processor time a token, without small requests and with each."""
    for ordinary in ((), *((name,) for name in ORDINARY)):
        watch, front = bench.watched(ordinary), psutil.Process(bench.start_server().process.pid)
        try:
            before, begin = sum(front.cpu_times()[:2]), time.monotonic()
            time.sleep(bench.seconds)
            window = watch.window(begin, time.monotonic())
            spent = sum(front.cpu_times()[:2]) - before
        finally:
            watch.end()
        tokens = window["itl"]["tokens"]
        print(f"quiet, {ordinary or 'streams alone'}: ITL {itl_text(window['itl'])} ms, {tokens} tokens, the front "
              f"{1e6 * spent / max(1, tokens):.1f} us of processor time a token", flush=True)  # fmt: skip


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    ap = parser()
    ap.prog = "python -m bench.gpu.attacks"
    ap.add_argument("--model", default="llama-3.1-8b", help=f"one of {', '.join(MODELS)}")
    ap.add_argument("--artifact", type=Path, metavar="DIR", help="artifact to serve instead of the model")
    ap.add_argument("--rows", default="", metavar="N,N", help="numbers of the table's rows to run; default all")
    ap.add_argument("--only", default="", metavar="REGEX", help="run only attacks whose names match")
    ap.add_argument("--rounds", type=int, default=1, metavar="N", help="how often to run each attack; default 1")
    ap.add_argument("--neighbours", type=int, default=64, metavar="N", help="number of greedy streams; default 64")
    ap.add_argument(
        "--neighbour-tokens", type=int, default=4000, metavar="N", help="tokens of each stream; default 4000"
    )
    ap.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="seconds without an attack before each one; default 4"
    )
    ap.add_argument(
        "--attack-limit", type=float, default=15.0, metavar="S", help="maximum seconds of one attack; default 15"
    )
    ap.add_argument("--rest", type=float, default=1.0, metavar="S", help="seconds of rest after each attack; default 1")
    ap.add_argument(
        "--connections", type=int, default=400, metavar="N", help="connections with unfinished bodies; default 400"
    )
    ap.add_argument("--batched", type=int, default=512, metavar="N", help="maximum tokens of a step; default 512")
    ap.add_argument("--windows", action="store_true", help="first measure what the small requests of the bench do")
    ap.add_argument("--ordinary", type=_names, default=(), metavar="A,B", help=f"small requests beside the streams, of "
                    f"{', '.join(ORDINARY)}; default none")  # fmt: skip
    ap.add_argument("--trace", action="store_true", help="record the engine's times of steps in each window")
    ap.add_argument("--options", default="", metavar="TEXT", help="further options of llmc-serve")
    ap.set_defaults(limit=420.0, out=Path("build/bench/gpu/attacks"))
    return ap


def main(argv: Sequence[str] | None = None) -> None:
    began, ap = time.monotonic(), arguments()
    args = ap.parse_args(argv)
    if args.artifact is None and (why := why_no_gpu()):
        raise SystemExit(f"no GPU: {why}")
    args.models = args.model
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.artifact or artifact(replace(plan_of(args), models=()), MODELS[args.model])
    print(f"[{time.monotonic() - began:.0f} s] {path} ({state()})", flush=True)
    options = ["--prepare", "--max-num-batched-tokens", str(args.batched), *shlex.split(args.options)]
    bench = Bench(
        path, args.out, options, args.neighbours, args.neighbour_tokens,
        seconds=args.seconds, limit=args.attack_limit, rest=args.rest, connections=args.connections, start=300.0,
        ordinary=args.ordinary, trace=args.trace,
    )  # fmt: skip

    def keep(rows: list[dict[str, Any]]) -> None:
        (args.out / "attacks.json").write_text(json.dumps({"device": state(), "rows": rows}, indent=1) + "\n")

    if args.windows:
        quiet_windows(bench)
    rows = run_all(bench, args.rounds * chosen(args.rows, args.only), True, began + args.limit, keep)
    text = verdicts(rows)
    (args.out / "attacks.md").write_text(f"{table(rows)}\n\n{text}\n")
    print(f"\n{text}\n[{time.monotonic() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
