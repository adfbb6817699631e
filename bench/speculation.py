"""Tokens per second with and without speculative decoding, on repetitive and on held-out text.

    python -m bench.speculation [--model DIR] [--draft DIR] [--head DIR] [--drafts K] [--every]
                                [--loads TEXT] [--rounds N] [--threads N] [--artifacts DIR]
                                [--step-costs A,B,... [--draft-cost N] [--head-cost N] [--cold-cost N] [--entry-cost N]
                                [--seed N]]

The contenders take turns: the model compiled without --speculate, compiled with --speculate and --draft but not
speculating, speculating by prompt lookup, by the draft model, and by the EAGLE-3 head of an artifact of its own. They
give the same tokens. With --every, K tokens are drafted in every step, whether it pays or not, so that the numbers of
accepted tokens are those of the method alone. The best round of each is
reported, in processor time of this process, which other jobs on the machine disturb less than wall time; with one
thread the two are the same on an idle machine. In rounds after the first, suffix matching finds its earlier outputs.

With --step-costs, durations are not measured: steps take what the costs say (see step_clock), with a random part that
--seed sets. The number of drafts is chosen by these durations, too, so the same command prints the same table on any
machine. All rounds count then, as none is disturbed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams
from llmc_runtime.sched.speculation import Speculation

from bench.step_clock import StepClock, StepCosts, clocked
from llmc.driver import compile_model
from llmc.options import Options

Clock = Callable[[], float]  # seconds
MODEL = Path(__file__).resolve().parent.parent / "examples" / "demo-model"
DRAFT = MODEL.parent / "demo-model-small"
HEAD = MODEL.parent / "demo-model-head"
METHODS = ("ngram", "suffix", "draft", "eagle")
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
QUESTIONS = ("What is a river?", "Define courage.", 'What does "amber" mean?', "Give me another word for quick.")
CHATS = tuple(f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS)
TOKENS = 256  # generated per request
TEXT = {"type": "string", "maxLength": 200}
SCHEMA = {
    "type": "object",
    "properties": {"word": TEXT, "meaning": TEXT, "example": TEXT},
    "required": ["word", "meaning", "example"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Load:
    """Requests, and their temperature; `batch` of them run together. With `grammar`, they follow a JSON schema."""

    name: str
    prompts: tuple[str, ...]
    temperature: float
    batch: int = 1
    grammar: bool = False


LOADS = (
    Load("repetitive, greedy, batch 1", REPETITIVE, 0.0),
    Load("repetitive, greedy, batch 8", REPETITIVE * 2, 0.0, 8),
    Load("held-out, greedy, batch 1", HELD_OUT, 0.0),
    Load("held-out, temperature 0.7, batch 1", HELD_OUT, 0.7),
    Load("held-out, temperature 1, batch 1", HELD_OUT, 1.0),
    Load("held-out, temperature 1, batch 8", HELD_OUT * 2, 1.0, 8),
    Load("chat, greedy, batch 1", CHATS, 0.0),
    Load("chat, temperature 0.7, batch 1", CHATS, 0.7),
    Load("JSON, greedy, batch 1", CHATS, 0.0, grammar=True),
)


def contenders(model: Path, draft: Path, head: Path, drafts: int, threads: int, folder: Path) -> Mapping[str, LLM]:
    """Compile the model three times, unless the folder has the artifacts, and open the contenders."""
    options_of = {
        "plain": Options(),
        "drafts": Options(speculate=drafts, draft=str(draft)),
        "head": Options(speculate=drafts, draft=f"eagle:{head}"),
    }
    for name, options in options_of.items():
        if not (folder / f"{name}.llmc").exists():
            compile_model(model, folder / f"{name}.llmc", options)
    fixed: dict[str, Any] = {"threads": threads, "enable_prefix_caching": False}
    return {
        "plain": LLM(folder / "plain.llmc", **fixed),
        "off": LLM(folder / "drafts.llmc", **fixed),
        **{
            name: LLM(folder / f"{'head' if name == 'eagle' else 'drafts'}.llmc", speculate=f"{name}:{drafts}", **fixed)
            for name in METHODS
        },
    }


def always() -> None:
    """Make every step draft and verify the maximum number of tokens."""
    Speculation.choose = Speculation.num_masked_drafts = lambda self, request, room: room  # type: ignore[method-assign]
    Speculation.wants = True  # type: ignore[assignment,method-assign]
    Speculation.stop = lambda self, request: None  # type: ignore[method-assign]
    Speculation.drafts = lambda self, request, room: max(0, min(room, request.num_drafts))  # type: ignore[method-assign]
    Speculation.prefers_lookup = lambda self, request: False  # type: ignore[method-assign]


def run(llm: LLM, load: Load, clock: Clock) -> tuple[float, list[list[int]]]:
    """Return the seconds of a load by a clock, and its tokens."""
    more: dict[str, Any] = (
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)} if load.grammar else {"ignore_eos": True}
    )
    params = [
        SamplingParams(temperature=load.temperature, max_tokens=TOKENS, seed=i, **more)
        for i in range(len(load.prompts))
    ]
    begin, tokens = clock(), list[list[int]]()
    for at in range(0, len(params), load.batch):
        part = slice(at, at + load.batch)
        out = llm.generate(list(load.prompts[part]), params[part], use_tqdm=False)
        tokens += [list(output.outputs[0].token_ids) for output in out]
    return clock() - begin, tokens


def counts(llm: LLM) -> list[float]:
    """Return the numbers of steps, drafts and accepted drafts."""
    names = ("num_steps", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    return [float(llm.stats()[name]) for name in names]


def row(llms: Mapping[str, LLM], clocks: Mapping[str, StepClock], load: Load, rounds: int) -> str:
    """Measure one load, by the clocks or in processor time; return its row of the table."""
    before = {name: counts(llms[name]) for name in METHODS}
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    count = 0
    for _ in range(rounds):
        results = {name: run(llm, load, clocks.get(name, time.process_time)) for name, llm in llms.items()}
        if any(tokens != results["plain"][1] for _, tokens in results.values()):
            raise SystemExit(f"{load.name}: the contenders' tokens differ")
        count = sum(map(len, results["plain"][1]))
        for name, (took, _) in results.items():
            seconds[name].append(took)
    best = {name: sum(took) / rounds if clocks else min(took) for name, took in seconds.items()}
    cells = [f"{count / best['plain']:.0f}", f"{best['plain'] / best['off']:.2f}"]
    for name in METHODS:
        steps, drafted, accepted = (now - b for now, b in zip(counts(llms[name]), before[name], strict=True))
        share = accepted / drafted if drafted else 0.0
        cells += [
            f"**{best['plain'] / best[name]:.2f}**",
            f"{count * rounds / load.batch / steps:.2f}",
            f"{share:.2f}",
        ]
    return f"| {load.name} | {' | '.join(cells)} |"


def step_clocks(args: argparse.Namespace, names: Iterable[str]) -> dict[str, StepClock]:
    """Return the clock of each contender if there are costs of steps, else none."""
    if not args.step_costs:
        return {}
    one_pass, entries = {"draft": args.draft_cost, "eagle": args.head_cost}, {"eagle": args.entry_cost}
    tokens = tuple(map(float, args.step_costs.split(",")))
    return {
        name: StepClock(
            StepCosts(tokens, one_pass.get(name, 0.0), args.cold_cost, entries.get(name, 0.0)), f"{name} {args.seed}"
        )
        for name in names
    }


def table(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Measure all loads; yield the lines of the table."""
    llms = contenders(args.model, args.draft, args.head, args.drafts, args.threads, folder)
    clocks = step_clocks(args, llms)
    timed = {name: clocked(llm, clocks[name]) if clocks else llm for name, llm in llms.items()}
    of_method = " | ".join(f"{name}/plain | tokens a step and row | accepted" for name in METHODS)
    yield f"| load | plain tok/s | off/plain | {of_method} |"
    yield "|---" * (3 + 3 * len(METHODS)) + "|"
    for load in (load for load in LOADS if args.loads in load.name):
        yield row(timed, clocks, load, args.rounds)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--model", type=Path, default=MODEL, help="folder of a model")
    p.add_argument("--draft", type=Path, default=DRAFT, help="folder of a smaller model with the same tokenizer")
    p.add_argument("--head", type=Path, default=HEAD, help="folder of an EAGLE-3 head for the model")
    p.add_argument("--loads", default="", metavar="TEXT", help="only loads whose names have this text")
    p.add_argument("--every", action="store_true", help="draft in every step, whether it pays or not")
    p.add_argument("--drafts", type=int, default=4, help="drafted tokens per row and step (4)")
    p.add_argument("--rounds", type=int, default=12, help="rounds of each contender (12)")
    p.add_argument("--threads", type=int, default=1, help="threads of the engine (1)")
    p.add_argument("--artifacts", type=Path, metavar="DIR", help="folder that keeps the artifacts")
    costs = p.add_argument_group("durations that are not measured, in steps of one token")
    costs.add_argument("--step-costs", default="", metavar="A,B,...", help="of a step by its tokens")
    costs.add_argument("--head-cost", type=float, default=0.18, metavar="N", help="of a pass of the head (0.18)")
    costs.add_argument("--draft-cost", type=float, default=0.24, metavar="N", help="the same of the model (0.24)")
    costs.add_argument("--cold-cost", type=float, default=0.0, metavar="N", help="of the first draft after a pause (0)")
    costs.add_argument("--entry-cost", type=float, default=0.0, metavar="N", help="of a head's entries, no drafts (0)")
    costs.add_argument("--seed", type=int, default=0, help="of the random part of durations (0)")
    return p.parse_args(words)


def main() -> None:
    """Print the table."""
    args = arguments()
    if args.every:
        always()
    with tempfile.TemporaryDirectory() as folder:
        for line in table(args, args.artifacts or Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
