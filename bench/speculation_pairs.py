"""The time of requests without drafts by that of the same ones with drafts, in one process and in turns.

    python -m bench.speculation_pairs [--loads TEXT] [--method ngram|suffix|draft|eagle] [--rounds N] [--artifacts DIR]

Both run on the same artifact and engine, so that differences between processes, which bench.speculation has, do not
count: 0.98 means that the method costs 2 %. Processor time, one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from llmc_runtime import LLM
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.step import Work

from bench.speculation import DRAFT, HEAD, LOADS, METHODS, MODEL, Load, contenders, run

WARM_ROUNDS = 2  # in which costs are measured for the first time


class Never(Speculation):
    """Drafts nothing, and learns nothing."""

    def begin_idle(self) -> bool:
        self._idle = self.quiet = True
        return True

    def plain(self, work: Sequence[Work], requests: Sequence[Request] = ()) -> bool:
        return True

    def choose(self, request: Request, room: int) -> int:
        return 0

    def learn(self, *args: Any) -> None: ...


def ratios(llm: LLM, load: Load, rounds: int) -> str:
    """Return a row: by the lowest times after WARM_ROUNDS, by their lower quartiles, the median, and all rounds."""
    speculation, times, of_rounds = llm.engine.scheduler.speculation, defaultdict[Any, list[float]](list), []
    parts = [
        replace(load, prompts=load.prompts[at : at + load.batch]) for at in range(0, len(load.prompts), load.batch)
    ]
    for number in range(rounds):
        sums = {Never: 0.0, Speculation: 0.0}
        for at, part in enumerate(parts):
            for kind in list(sums)[:: 1 if (number + at) % 2 else -1]:
                speculation.__class__ = kind
                seconds, _ = run(llm, part, time.process_time)
                times[kind, at].append(seconds)
                sums[kind] += seconds
        of_rounds.append(sums)
    speculation.__class__ = Speculation
    late = {key: sorted(took[WARM_ROUNDS:]) for key, took in times.items()}

    def of(pick: Any) -> float:
        never, drafts = (sum(pick(late[kind, at]) for at in range(len(parts))) for kind in (Never, Speculation))
        return float(never / drafts)

    each = [sums[Never] / sums[Speculation] for sums in of_rounds]
    never, drafts = (sum(sums[kind] for sums in of_rounds) for kind in (Never, Speculation))
    figures = (of(min), of(lambda took: took[len(took) // 4]), median(each[WARM_ROUNDS:]), never / drafts)
    return f"| {load.name} | " + " | ".join(f"{x:.3f}" for x in figures) + " |"


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--loads", default="", metavar="TEXT", help="only loads whose names have this text")
    p.add_argument("--method", choices=METHODS, default="eagle", help="method of drafting (eagle)")
    p.add_argument("--rounds", type=int, default=14, help="rounds, of which the first two warm up (14)")
    p.add_argument("--artifacts", type=Path, metavar="DIR", help="folder that keeps the artifacts")
    args = p.parse_args()
    if args.rounds <= WARM_ROUNDS:
        p.error(f"--rounds must be more than {WARM_ROUNDS}")
    with tempfile.TemporaryDirectory() as folder:
        llm = contenders(MODEL, DRAFT, HEAD, 4, 1, args.artifacts or Path(folder))[args.method]
        print("| load | lowest | lower quartile | median of rounds | all rounds |\n" + "|---" * 5 + "|")
        for load in (load for load in LOADS if args.loads in load.name):
            print(ratios(llm, load, args.rounds), flush=True)


if __name__ == "__main__":
    main()
