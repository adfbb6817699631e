"""The table of resource attacks: the effect of each on a neighbour, and its cost for the server.

    python -m bench.attacks ARTIFACT [--rows 1,2,3] [--only REGEX] [--neighbours N] [--limit S] [--json FILE] ...

Each attack gets a new server (`--keep`: one for all while its processes live). The neighbour's streams, /health and
small requests of the neighbour's key are measured first without and then during the attack, at most until the limit,
when the attacker disconnects. Then the server rests, and memory is read again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from bench.attacks.run import Bench, chosen, run_all  # noqa: E402


def main() -> int:
    """Run the command."""
    ap = argparse.ArgumentParser(prog="python -m bench.attacks", description="Measure resource attacks on a server.")
    ap.add_argument("artifact", type=Path)
    ap.add_argument("--rows", default="", metavar="N,N", help="rows of the table (default: all)")
    ap.add_argument("--only", default="", metavar="REGEX", help="only attacks whose names match")
    ap.add_argument(
        "--neighbours", type=int, default=1, metavar="N", help="number of greedy streams of the neighbour (1)"
    )
    ap.add_argument("--neighbour-tokens", type=int, default=900, metavar="N", help="tokens of each stream (900)")
    ap.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="seconds without an attack before each one (4)"
    )
    ap.add_argument("--limit", type=float, default=30.0, metavar="S", help="maximum seconds of an attack (30)")
    ap.add_argument("--rest", type=float, default=3.0, metavar="S", help="seconds before memory is read again (3)")
    ap.add_argument(
        "--connections", type=int, default=400, metavar="N", help="connections with unfinished bodies (400)"
    )
    ap.add_argument("--options", default="", metavar="TEXT", help="further options of llmc-serve")
    ap.add_argument("--keep", action="store_true", help="one server for all attacks")
    ap.add_argument("--list", action="store_true", help="print the attacks and exit")
    ap.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = ap.parse_args()
    attacks = chosen(args.rows, args.only)
    if args.list:
        print("\n".join(f"{attack.row}  {attack.name}" for attack in attacks))
        return 0
    with tempfile.TemporaryDirectory(prefix="llmc-attacks-") as folder:
        bench = Bench(
            args.artifact, Path(folder), shlex.split(args.options), args.neighbours, args.neighbour_tokens,
            seconds=args.seconds, limit=args.limit, rest=args.rest, connections=args.connections,
        )  # fmt: skip
        results = run_all(bench, attacks, args.keep)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
