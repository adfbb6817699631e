"""Compare the runtimes of two checkouts of this repository on this CPU, in alternating calls.

    python bench/checkouts.py OLD_CHECKOUT NEW_CHECKOUT OLD.llmc NEW.llmc [--rounds N] [--json]

Each artifact was compiled by its checkout. Two processes stay open and generate greedily in turns: old, new, new, old.
After each call both are idle for 150 ms, as threads that still wait for work would slow down the other process. Prints
the medians of both, and new / old by medians and by minima.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

PAUSE = 0.15  # seconds
CASES = ((1, 16, 48), (8, 64, 16), (32, 64, 8), (1, 400, 1))  # rows, tokens of each prompt, new tokens


def serve(artifact: str) -> None:
    """Answer each line of stdin, a case, with the seconds of one call. It uses the llmc_runtime of PYTHONPATH."""
    from llmc_runtime import LLM, SamplingParams

    llm = LLM(artifact, enable_prefix_caching=False, say=lambda text: None)
    for line in sys.stdin:
        rows, length, new = json.loads(line)
        prompts = [[random.randrange(3, 256) for _ in range(length)] for _ in range(rows)]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - begin, flush=True)
    llm.close()


class Side:
    """A checkout's process that has its artifact open."""

    def __init__(self, checkout: Path, artifact: Path) -> None:
        env = os.environ | {"PYTHONPATH": f"{checkout.resolve()}:{checkout.resolve() / 'runtime'}"}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(artifact.resolve())]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, case: tuple[int, int, int]) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        answer = float(self.process.stdout.readline())
        time.sleep(PAUSE)
        return answer

    def close(self) -> None:
        self.process.communicate()


def measure(old: Side, new: Side, case: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Return the medians of both sides in seconds, and their ratios; the first call of each is not counted."""
    times: dict[Side, list[float]] = {old: [], new: []}
    for number in range(rounds + 1):
        for side in (old, new)[:: 1 if number % 2 else -1]:
            times[side].append(side.seconds(case))
    a, b = times[old][1:], times[new][1:]
    medians = statistics.median(a), statistics.median(b)
    return {"old": medians[0], "new": medians[1], "ratio": medians[1] / medians[0], "ratio_of_minima": min(b) / min(a)}


def main() -> None:
    ap = argparse.ArgumentParser(prog="python bench/checkouts.py", description="Compare two checkouts on this CPU.")
    ap.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="old and new")
    ap.add_argument("artifacts", nargs=2, type=Path, metavar="ARTIFACT", help="compiled by them")
    ap.add_argument("--rounds", type=int, default=12, metavar="N", help="calls of each for each case (12)")
    ap.add_argument("--json", action="store_true", help="print a JSON object for each case")
    a = ap.parse_args()
    old, new = (Side(checkout, artifact) for checkout, artifact in zip(a.checkouts, a.artifacts, strict=True))
    for case in CASES:
        found = measure(old, new, case, a.rounds)
        name = "{} rows, {} in, {} out".format(*case)
        figures = "{old:.4f} s, {new:.4f} s, {ratio:.3f} ({ratio_of_minima:.3f})".format(**found)
        print(json.dumps({"case": name, **found}) if a.json else f"{name}: {figures}", flush=True)
    old.close()
    new.close()


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else main()
