"""The time of requests without drafts by that of the same ones with drafts, in one process and in turns.

    python -m bench.speculation_pairs [--loads TEXT] [--method ngram|suffix|draft|eagle] [--rounds N] [--artifacts DIR]

Both run on the same artifact and engine, so that differences between processes, which bench.speculation has, do not
count: 0.98 means that the method costs 2 %. Processor time, one thread.

The first four figures are of whole requests, and vary by 1 or 2 % between runs because of other programs. The last one
is of steps: the number of those of each kind (see `kind_of`), times the median of their durations.
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
from llmc_runtime.sched.step import Step, Work, prompt_tokens

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


class StepTimes:
    """The durations of the steps of an engine, in seconds of processor time, by kind. Stays attached to the engine."""

    def __init__(self, llm: LLM) -> None:
        self.by_kind = defaultdict[Any, list[float]](list)
        self._step, self._commit = llm.engine.step, llm.engine.scheduler.commit
        self._scheduler, self._kinds = llm.engine.scheduler, list[Any]()
        llm.engine.step, self._scheduler.commit = self._timed, self._recorded  # type: ignore[method-assign]

    def _timed(self) -> Any:
        began = time.process_time()
        deltas = self._step()
        seconds = time.process_time() - began
        for kind in self._kinds:
            self.by_kind[kind].append(seconds)
        self._kinds.clear()
        return deltas

    def _recorded(self, output: Any) -> Any:
        policy: Any = self._scheduler.speculation
        self._kinds.append((type(policy), policy.unmeasured, *kind_of(*self._scheduler._in_flight[0])))
        return self._commit(output)

    def seconds(self, policy: type) -> float:
        """Return the time of all steps under a policy, each taken to last as long as the median of its kind."""
        return sum(len(times) * median(times) for kind, times in self.by_kind.items() if kind[0] is policy)


def kind_of(step: Step, requests: Sequence[Request]) -> tuple[Any, ...]:
    """Return what the duration of a step depends on: rows, tokens of prompts, the drafts that are verified and made,
    whether a head's entries are computed, and whether a request has just begun to decode.
    """
    verified, made = (sum(getattr(item, name) for item in step.work) for name in ("drafts", "propose"))
    begins = any(len(request.tokens) - request.num_prompt == 1 for request in requests)
    return len(step.work), prompt_tokens(step.work), verified, made, step.plain, begins


def ratios(llm: LLM, steps: StepTimes, load: Load, rounds: int) -> str:
    """Return a row: by the lowest times after WARM_ROUNDS, by their lower quartiles, the median, all rounds, steps."""
    speculation, times, of_rounds = llm.engine.scheduler.speculation, defaultdict[Any, list[float]](list), []
    parts = [
        replace(load, prompts=load.prompts[at : at + load.batch]) for at in range(0, len(load.prompts), load.batch)
    ]
    for number in range(rounds):
        if number == WARM_ROUNDS:
            steps.by_kind.clear()
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
    of_steps = steps.seconds(Never) / steps.seconds(Speculation)
    figures = (of(min), of(lambda took: took[len(took) // 4]), median(each[WARM_ROUNDS:]), never / drafts, of_steps)
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
        steps = StepTimes(llm)
        print("| load | lowest | lower quartile | median of rounds | all rounds | steps |\n" + "|---" * 6 + "|")
        for load in (load for load in LOADS if args.loads in load.name):
            print(ratios(llm, steps, load, args.rounds), flush=True)


if __name__ == "__main__":
    main()
