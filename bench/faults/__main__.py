"""`python -m bench.faults [--minutes N] [--only A,B] [--seed N] [--json FILE]`: the fault run, a table and JSON.

Exit code 1 if an answer was wrong, a KV page remained in use, or a failure was not announced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from bench.faults.client import NEVER, Judged  # noqa: E402
from bench.faults.leaving import leaving  # noqa: E402
from bench.faults.model import story  # noqa: E402
from bench.faults.nonsense import nonsense  # noqa: E402
from bench.faults.overload import overload  # noqa: E402
from bench.faults.settings import settings  # noqa: E402
from bench.faults.strikes import outcomes, strikes  # noqa: E402
from tests.attacks.target import TOOLS, target  # noqa: E402

MINUTES = 12.0  # that the numbers below take, about
PATIENT = {"restart_delay": 0.0, "max_restarts": 10**6}  # many restarts within an hour


async def killed(draw: Random, share: float) -> dict[str, Any]:
    """Kill the engine process (SIGKILL)."""
    with target(engine={"pace": 0.004}, front=PATIENT) as server:
        return await strikes(server, draw, signal.SIGKILL, max(2, int(50 * share)))


async def stopped(draw: Random, share: float) -> dict[str, Any]:
    """Stop the engine process (SIGSTOP)."""
    with target(engine={"pace": 0.004}, front=PATIENT) as server:
        return await strikes(server, draw, signal.SIGSTOP, max(2, int(30 * share)))


async def usual(draw: Random, share: float) -> dict[str, Any]:
    """Kill the engine process under the default limits: three restarts an hour, with growing delays."""
    with target(engine={"pace": 0.004}) as server:
        return await strikes(server, draw, signal.SIGKILL, 3)


async def left(draw: Random, share: float) -> dict[str, Any]:
    """Disconnecting clients."""
    with tempfile.TemporaryDirectory(prefix="llmc-faults-") as folder:
        log = Path(folder) / "steps"
        with target("--max-num-seqs", "16", engine={"pace": 0.01, "log": str(log)}) as server:
            return await leaving(server, draw, max(40, int(1000 * share)), log)


async def flooded(draw: Random, share: float) -> dict[str, Any]:
    """Ten times the peak load."""
    bounds = ("--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--max-num-queued-reqs", "64")
    with target(*bounds, "--kv-cache-memory-bytes", "8M", engine={"pace": 0.02}) as server:
        return await overload(server, draw, max(5.0, 60 * share), 10, 64)


async def fed(draw: Random, share: float) -> dict[str, Any]:
    """Damaged bodies."""
    with target("--max-num-seqs", "16", *TOOLS) as server:
        return await nonsense(server, draw, max(500, int(100_000 * share)))


async def varied(draw: Random, share: float) -> dict[str, Any]:
    """Random settings of caching, chunks and preemption."""
    return await settings(target, draw, max(2, int(40 * share)), 80)


async def model(draw: Random, share: float) -> dict[str, Any]:
    """The demonstration model on the CPU target (make demo)."""
    path = ROOT / "build" / "demo.llmc"
    if not path.is_dir():
        print(f"{path.relative_to(ROOT)} is not there: make demo")
        return outcomes(Judged())
    return await story(path, target, draw, share)


SCENARIOS: dict[str, Callable[[Random, float], Any]] = {
    "kill": killed, "stop": stopped, "kill-usual": usual, "leave": left, "overload": flooded, "malformed": fed,
    "settings": varied, "model": model,
}  # fmt: skip


def main() -> int:
    """Run the command."""
    ap = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    ap.add_argument("--minutes", type=float, default=MINUTES, help=f"approximate duration in minutes ({MINUTES:g})")
    ap.add_argument("--only", default="", help=f"scenarios, comma-separated: {', '.join(SCENARIOS)}")
    ap.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    ap.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = ap.parse_args()
    print(f"seed {args.seed}", flush=True)
    names = [name for name in args.only.split(",") if name] or list(SCENARIOS)
    results: dict[str, Any] = {}
    for name in names:
        began = time.monotonic()
        results[name] = asyncio.run(SCENARIOS[name](Random(f"{args.seed} {name}"), args.minutes / MINUTES))
        print(f"\n{name}: {time.monotonic() - began:.0f} s", flush=True)
        for key, value in results[name].items():
            if value not in ([], 0) or key in NEVER:
                print(f"  {key:26} {value:.3f}" if isinstance(value, float) else f"  {key:26} {value}", flush=True)
    zero = totals(results)
    print("\n" + "\n".join(f"{words}: {count}" for words, count in zero.items()), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"seed": args.seed, "totals": zero, **results}, indent=1) + "\n")
    return 1 if any(zero[words] for words in MUST_BE_ZERO) else 0


MUST_BE_ZERO = ("wrong answers", "pages held at the end", "unannounced failures", "answers cut short")


def totals(results: dict[str, Any]) -> dict[str, Any]:
    """Return the totals of all scenarios. Each scenario ends when no KV page is in use, and fails if one remains."""
    rows = list(results.values())
    return {
        "answers checked": sum(row["right"] + row["wrong"] for row in rows),
        "wrong answers": sum(row["wrong"] for row in rows),
        "pages held at the end": sum(row.get("pages held", 0) for row in rows),
        "unannounced failures": sum(row["failed"] for row in rows),
        "answers cut short": sum(row["cut"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
