"""Tokens per second with and without speculative decoding by prompt lookup, on repetitive and on held-out text.

    python -m bench.speculation [--model DIR] [--drafts K] [--rounds N] [--threads N]

The contenders take turns: the model compiled without --speculate, compiled with it but not speculating, and
speculating. They give the same tokens. The best round of each is reported, in processor time of this process, which
other jobs on the machine disturb less than wall time; with one thread the two are the same on an idle machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc_runtime import LLM, SamplingParams

from llmc.driver import compile_model
from llmc.options import Options

MODEL = Path(__file__).resolve().parent.parent / "examples" / "demo-model"
REPETITIVE = (
    "The cat sat on the mat. The dog lay on the rug. The cat sat on the mat. The dog lay on the rug. The cat sat",
    "one two three four five one two three four five one two three four five one two",
    "Name: Ann. Town: Rome. Name: Ben. Town: Oslo. Name: Cal. Town: Rome. Name: Dan. Town:",
    "The river is long. The river is wide. The river is deep. The river is long. The river is",
)
HELD_OUT = (
    "When the morning came, the old man went down to the harbour and",
    "The history of the city begins with a small settlement near the",
    "She opened the letter and began to read it slowly, for",
    "In the middle of the forest there was a house in which",
)
TOKENS = 256  # generated per request


@dataclass(frozen=True)
class Load:
    """Requests that run together: prompts, how often each, and the temperature."""

    name: str
    prompts: tuple[str, ...]
    temperature: float


LOADS = (
    Load("repetitive, greedy, batch 1", REPETITIVE[:1], 0.0),
    Load("repetitive, greedy, batch 8", REPETITIVE * 2, 0.0),
    Load("held-out, greedy, batch 1", HELD_OUT[:1], 0.0),
    Load("held-out, temperature 0.7, batch 1", HELD_OUT[1:2], 0.7),
    Load("held-out, temperature 1, batch 1", HELD_OUT[2:3], 1.0),
    Load("held-out, temperature 1, batch 8", HELD_OUT * 2, 1.0),
)


def contenders(model: Path, drafts: int, threads: int, folder: Path) -> Mapping[str, LLM]:
    """Compile the model twice and open the three contenders."""
    compile_model(model, folder / "plain.llmc", Options())
    compile_model(model, folder / "drafts.llmc", Options(speculate=drafts))
    fixed = {"threads": threads, "enable_prefix_caching": False}
    return {
        "plain": LLM(folder / "plain.llmc", **fixed),
        "off": LLM(folder / "drafts.llmc", **fixed),
        "ngram": LLM(folder / "drafts.llmc", speculate=f"ngram:{drafts}", **fixed),
    }


def run(llm: LLM, load: Load) -> tuple[float, list[list[int]]]:
    """Return the processor seconds of a load, and its tokens."""
    params = [
        SamplingParams(temperature=load.temperature, max_tokens=TOKENS, ignore_eos=True, seed=i)
        for i in range(len(load.prompts))
    ]
    begin = time.process_time()
    out = llm.generate(list(load.prompts), params, use_tqdm=False)
    return time.process_time() - begin, [list(one.outputs[0].token_ids) for one in out]


def row(llms: Mapping[str, LLM], load: Load, rounds: int) -> str:
    """Measure one load; return its row of the table."""
    counters = ("num_steps", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    before = [float(llms["ngram"].stats()[name]) for name in counters]
    best: dict[str, float] = {}
    for _ in range(rounds):
        results = {name: run(llm, load) for name, llm in llms.items()}
        if any(tokens != results["plain"][1] for _, tokens in results.values()):
            raise SystemExit(f"{load.name}: the contenders' tokens differ")
        best = {name: min(best.get(name, seconds), seconds) for name, (seconds, _) in results.items()}
    steps, drafted, accepted = (float(llms["ngram"].stats()[n]) - b for n, b in zip(counters, before, strict=True))
    total = TOKENS * len(load.prompts)
    speeds = " | ".join(f"{total / best[name]:.0f}" for name in ("plain", "off", "ngram"))
    ratios = f"{best['plain'] / best['off']:.2f} | **{best['plain'] / best['ngram']:.2f}**"
    share = accepted / drafted if drafted else 0.0
    return f"| {load.name} | {speeds} | {ratios} | {TOKENS * rounds / steps:.2f} | {share:.2f} |"


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--model", type=Path, default=MODEL, help="folder of a model")
    p.add_argument("--drafts", type=int, default=4, help="drafted tokens per row and step (4)")
    p.add_argument("--rounds", type=int, default=12, help="rounds of each contender (12)")
    p.add_argument("--threads", type=int, default=1, help="threads of the engine (1)")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llms = contenders(args.model, args.drafts, args.threads, Path(folder))
        print("| load | plain tok/s | off | ngram | off/plain | ngram/plain | tokens a step and row | accepted |")
        print("|---|---|---|---|---|---|---|---|")
        for load in LOADS:
            print(row(llms, load, args.rounds), flush=True)


if __name__ == "__main__":
    main()
