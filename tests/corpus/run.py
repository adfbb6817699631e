"""The corpus as a program: runs every family, prints a table and each violation; `--seed N --only FAMILY` repeats."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from corpus import judge  # noqa: E402
from corpus.judge import Case, Outcome, run_all, wrong  # noqa: E402
from corpus.sizes import FAMILIES  # noqa: E402


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    ap.add_argument("--full", action="store_true", help="all of it; without, a sample of every family")
    ap.add_argument("--only", default="", help="families, separated by commas")
    ap.add_argument("--jobs", type=int, default=2)
    ap.add_argument("--slack", type=float, default=1.0, help="factor of the allowed seconds, for a busy machine (1)")
    ap.add_argument("--find", default="", help="only cases whose name has this")
    ap.add_argument("-v", "--verbose", action="store_true", help="print what every case said")
    args = ap.parse_args()
    judge.SECONDS *= args.slack
    os.environ["RUST_BACKTRACE"] = "0"
    print(f"seed {args.seed}", flush=True)
    bad = 0
    only = [n for n in args.only.split(",") if n]
    for name, family in FAMILIES.items():
        if not only or name in only:
            with tempfile.TemporaryDirectory(prefix="llmc-corpus-") as folder:
                cases = list(family(Path(folder), Random(f"{args.seed} {name}"), args.full))
                bad += report(name, [c for c in cases if args.find in c.name], args.jobs, args.verbose)
    print(f"{bad} broken promises" if bad else "every promise was kept", flush=True)
    return 1 if bad else 0


def report(name: str, cases: list[Case], jobs: int, verbose: bool) -> int:
    """Run a family and print a line about it, and one for each broken promise. How many there are."""
    begin = time.monotonic()

    def report(index: int, outcome: Outcome) -> None:
        if (why := wrong(cases[index], outcome)) and not verbose:
            print(f"  seen: {cases[index].name[:100]!r}: {why[:100]!r}", flush=True)
        if verbose:
            print(f"  {cases[index].name}: {outcome.code}, {outcome.seconds:.3f} s, {outcome.memory >> 10} KiB: "
                  f"{outcome.text.strip()}", flush=True)  # fmt: skip

    found = run_all(cases, jobs, report)
    broken = [(cases[i].name, why) for i, o in sorted(found.items()) if (why := wrong(cases[i], o))]
    codes = Counter(o.error or ("passed" if o.code == 0 else "?") for o in found.values())
    words = ", ".join(f"{code} {n}" for code, n in codes.most_common())
    slowest = max((o.seconds for o in found.values()), default=0.0)
    largest = max((o.memory for o in found.values()), default=0)
    print(f"{name:12} {len(found):6} cases in {time.monotonic() - begin:5.0f} s, slowest {slowest:.3f} s, "
          f"largest {largest / (1 << 20):5.1f} MiB: {words}", flush=True)  # fmt: skip
    assert len(found) == len(cases), f"{len(cases) - len(found)} cases were not run"
    for case, why in broken[:40]:
        print(f"  BROKEN {case[:200]!r}: {why}", flush=True)
    return len(broken)


if __name__ == "__main__":
    sys.exit(main())
