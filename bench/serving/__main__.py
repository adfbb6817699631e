"""`python -m bench.serving`: runs the suites, prints a table, writes JSON."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import kit
from bench.serving import suites


def main() -> None:
    ap = argparse.ArgumentParser(prog="python -m bench.serving")
    ap.add_argument("--suites", default="throughput,latency,queue")
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--out", type=Path, default=kit.BUILD / "serving.json")
    args = ap.parse_args()
    chosen = {"throughput": suites.throughput, "latency": suites.latency, "queue": suites.queue}
    rows: list[dict[str, Any]] = []
    for name in args.suites.split(","):
        rows += chosen[name](args.rounds)
    print("| front end | measured | target | ratio | us of processor a token: front, engine, client | tokens a chunk |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(_cells(row)) + " |")
    when = datetime.now(UTC).isoformat(timespec="minutes")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"when": when, "machine": kit.machine(), "rows": rows}, indent=1) + "\n")


def _cells(row: dict[str, Any]) -> list[str]:
    target, met = row.get("target"), row.get("held")
    verdict = "" if target is None else f"{target:,.5g} {'held' if met else 'missed'}"
    cpu = ", ".join(f"{value:.1f}" for value in row.get("cpu_us_per_token", {}).values())
    ratio, chunk = row.get("ratio"), row.get("tokens_per_chunk")
    return [
        row["name"], f"{row['measured']:,.5g} {row['unit']}", verdict, "" if ratio is None else f"{ratio:.3f}", cpu,
        "" if chunk is None else f"{chunk:.2f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
