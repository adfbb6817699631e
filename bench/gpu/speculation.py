"""Speed-up by speculative decoding at fixed acceptance rates, compared with the maximum for step times and rate.

    python -m bench.gpu.speculation --artifacts DIR --out DIR --limit SECONDS [--batches 1,8,32,256]
                                    [--methods ngram,suffix,draft,eagle] [--nothing [too]] [--rounds N]
                                    [--compile-only]
    python -m bench.gpu.speculation --model small --target cpu:native --batches 1,4 ...       a dry run without a GPU

The weights are random, so the rate is set by the requests (see `requests`): verification is that of every engine.
DIR gets results.json and tables.md after every measurement.

For each batch and method: the time per token of plain decoding, of the cost model's choice, and of each fixed number of
drafts k. With the rate r, a step of k drafts gives (1 - r^(k+1)) / (1 - r) tokens per row (Leviathan et al. 2023), so
the times of the steps with k drafts allow a speed-up of max over k of tokens(k) * plain step / step(k), at least 1.

With --nothing, requests draw from the whole vocabulary at a temperature at which no draft is right, so that what is
measured is the cost of a method that is switched on in vain. With `--nothing too`, both are measured, methods without
a gate only in vain.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from math import ceil, log, sqrt
from pathlib import Path
from typing import Any

from llmc_runtime import SamplingParams
from llmc_runtime.engine.loader import Opened, open_engine
from llmc_runtime.engine.open_model import open_model
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.speculation import Speculation

from bench import shapes
from bench.gpu.independent_drafts import IndependentDrafts
from bench.shapes import Shape
from llmc.console import Console
from llmc.draft_model import with_draft
from llmc.driver import start
from llmc.extension import Contributions
from llmc.options import Options

SEED, DRAFTS, PROMPT = 1, 7, 128
WARM, MEASURED = 64, 192  # tokens per row of a round before and while time is taken
SAMPLED = 4096  # tokens of all rows and rounds for the cost model's choice: the share of accepted drafts varies less
TEMPERATURE = 20.0  # makes differences between random logits small against the biases
TOO, IN_VAIN = "too", "nothing"
FIXED = (1, 2, 3, 5, 7)  # numbers of drafts of the formula
BATCHES = (1, 8, 32, 256)
HEAD_VOCAB = 32000  # tokens that the head can draft, as in published heads
TINY = replace(shapes.SMALL, name="tiny", hidden=128, intermediate=256, layers=1)
DRAFT_MODELS = {shapes.LLAMA31_8B.name: shapes.LLAMA32_1B, shapes.SMALL.name: TINY}
MODELS = {s.name: s for s in (shapes.LLAMA31_8B, shapes.SMALL)}


@dataclass(frozen=True)
class Method:
    """A method, its acceptance rate, and the speed-ups that are the project's goals, by batch size."""

    name: str
    speculate: str | None
    rate: float
    gates: Mapping[int, float] = field(default_factory=dict)


PLAIN = Method("plain", None, 0.7)
METHODS = (
    Method("prompt lookup", f"ngram:{DRAFTS}", 0.7, {1: 2.4, 8: 2.0, 32: 1.6, 256: 0.98}),
    Method("suffix matching", f"suffix:{DRAFTS}", 0.7),
    Method("draft model", f"draft:{DRAFTS}", 0.8, {1: 1.65, 8: 1.45, 32: 1.2, 256: 0.98}),
    Method("EAGLE-3 head", f"eagle:{DRAFTS}", 0.8, {1: 2.3, 8: 2.0, 32: 1.5, 256: 0.98}),
)


class FixedDrafts(Speculation):
    """Makes and verifies `fixed` drafts whenever there is room, whether they pay or not."""

    fixed = 0
    wants = True

    def choose(self, request: Request, room: int) -> int:
        """Return the number of drafts."""
        return min(room, self.fixed)


@dataclass(frozen=True)
class Measured:
    """Seconds per token of a row, seconds of a step, tokens of a row in a step, and the share of accepted drafts.

    The share is that of first drafts, since drafts after a rejected one are never compared.
    """

    seconds_per_token: float
    step: float
    tokens_per_step: float
    rate: float


@dataclass
class Totals:
    """Sums over the rounds of a measurement."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0

    def measured(self, batch: int) -> Measured:
        """Return the figures per token and step of a row."""
        rows = self.tokens / batch
        return Measured(
            self.seconds / rows, self.seconds / self.steps, rows / self.steps, self.accepted / max(1, self.verified)
        )


def requests(count: int, shape: Shape, method: Method, tokens: int) -> Iterator[Request]:
    """Yield requests whose tokens are drawn from two ids, independently of the text, with probabilities p and 1 - p.

    p is such that two draws, such as a draft and the next token, are equal with probability p^2 + (1 - p)^2, the rate.
    Suffix matching drafts the likelier id more often than it is drawn. At rate 0, all ids of the vocabulary are drawn.
    """
    params: dict[str, Any] = {"temperature": TEMPERATURE, "ignore_eos": True, "max_tokens": tokens}
    if method.rate:
        p = (1 + sqrt(2 * method.rate - 1)) / 2
        params |= {"allowed_token_ids": [5, 6], "logit_bias": {5: TEMPERATURE * log(p / (1 - p))}}
    for _ in range(count):
        prompt, seed = [random.randrange(7, shape.vocab) for _ in range(PROMPT)], random.getrandbits(62)
        yield Request(f"{seed}", prompt, SamplingParams(seed=seed, **params))


def measure(opened: Opened, batch: int, shape: Shape, method: Method, rounds: int) -> Measured:
    """Measure decoding of `batch` rows."""
    totals = Totals()
    for _ in range(rounds):
        one_round(opened, list(requests(batch, shape, method, WARM + MEASURED + 4 * DRAFTS)), totals)
    return totals.measured(batch)


def one_round(opened: Opened, batch: Sequence[Request], totals: Totals) -> None:
    """Decode until each row has grown from WARM to WARM + MEASURED tokens; add to the totals."""
    engine, tokens = opened.engine, Counter({request.id: 0 for request in batch})
    for request in batch:
        engine.add(request)
    steps, begin, before, drafted = 0, 0.0, 0, (0, 0)
    while max(tokens.values()) < WARM + MEASURED:
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens[delta.id] += len(delta.new_token_ids)
        steps += 1
        if not begin and min(tokens.values()) >= WARM:
            begin, before, steps, drafted = time.perf_counter(), tokens.total(), 0, first_drafts(opened)
    assert begin and steps, "a row was done before the last one had begun"
    totals.seconds += time.perf_counter() - begin
    totals.steps += steps
    totals.tokens += tokens.total() - before
    now = first_drafts(opened)
    totals.verified, totals.accepted = totals.verified + now[0] - drafted[0], totals.accepted + now[1] - drafted[1]
    for name in tokens:
        engine.abort(name)
    while engine.has_work():
        engine.step()


def first_drafts(opened: Opened) -> tuple[int, int]:
    """Return how many first drafts were verified so far, and accepted."""
    counters = opened.engine.counters
    return counters.spec_decode_num_drafts, counters.spec_decode_num_accepted_tokens_per_pos.get("0", 0)


@dataclass
class Results:
    """All measurements: (batch, method, drafts) -> Measured, where drafts is "chosen" or a fixed number."""

    plan: argparse.Namespace
    end: float
    measured: dict[tuple[int, str, str], Measured] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def rounds(self, batch: int) -> int:
        """Return the rounds of a measurement of steps: more than one if the rows are few."""
        return int(min(self.plan.rounds, max(1, 8 // batch)))

    def add(self, batch: int, method: Method, drafts: str, opened: Opened, rounds: int) -> None:
        """Measure one cell unless the time is over, print it and save all."""
        name = f"{method.name} at batch {batch}, drafts {drafts}"
        if time.monotonic() > self.end:
            self.failed.append(f"{name}: no time left")
            return
        m = measure(opened, batch, MODELS[self.plan.model], method, rounds)
        self.measured[batch, method.name, drafts] = m
        times = f"{m.seconds_per_token * 1e3:.3f} ms a token, {m.step * 1e3:.3f} ms a step"
        print(f"{name}: {times}, {m.tokens_per_step:.2f} tokens a step, {m.rate:.2f} accepted first", flush=True)
        self.save()

    def save(self) -> None:
        """Write results.json and tables.md."""
        self.plan.out.mkdir(parents=True, exist_ok=True)
        rows = [{"batch": b, "method": m, "drafts": d, **asdict(x)} for (b, m, d), x in self.measured.items()]
        (self.plan.out / "results.json").write_text(json.dumps({"rows": rows, "failed": self.failed}, indent=1) + "\n")
        (self.plan.out / "tables.md").write_text(self.table())

    def table(self) -> str:
        """Return the table of speed-ups."""
        head = "method | batch | plain ms | speed-up | gate | allowed (drafts) | of it | tokens a step | accepted"
        lines = [f"| {head} |", "|" + "---|" * 9]
        for method in METHODS:
            for batch in self.plan.batches:
                plain, drafted = (self.measured.get((batch, m.name, "chosen")) for m in (PLAIN, method))
                if plain is None or drafted is None:
                    continue
                gain = plain.seconds_per_token / drafted.seconds_per_token
                allowed, drafts = self.allowed(batch, method, plain.step)
                gate = f"{method.gates[batch]:.2f}" if batch in method.gates else ""
                lines.append(
                    f"| {method.name}, rate {method.rate} | {batch} | {plain.step * 1e3:.3f} | **{gain:.2f}** |"
                    f" {gate} | {allowed:.2f} ({drafts}) | {gain / allowed:.2f} |"
                    f" {drafted.tokens_per_step:.2f} | {drafted.rate:.2f} |"
                )
        if self.plan.nothing:
            lines = [*(lines if self.plan.nothing == TOO else ()), "", *self.vain()]
        return "\n".join([*lines, *(f"\nFailed: {x}" for x in self.failed)]) + "\n"

    def vain(self) -> list[str]:
        """Return the lines of the table of methods that have nothing to draft."""
        lines = ["| method | batch | plain, ms a token | with the method | ratio |", "|" + "---|" * 5]
        for (batch, name, drafts), drafted in self.measured.items():
            plain = self.measured.get((batch, PLAIN.name, IN_VAIN))
            if plain is not None and name != PLAIN.name and drafts == IN_VAIN:
                a, b = plain.seconds_per_token * 1e3, drafted.seconds_per_token * 1e3
                lines.append(f"| {name} | {batch} | {a:.3f} | {b:.3f} | **{b / a:.3f}** |")
        return lines

    def allowed(self, batch: int, method: Method, plain: float) -> tuple[float, int]:
        """Return the largest speed-up that the fixed numbers of drafts allow, and its number; 1 and 0 for none."""
        best = (1.0, 0)
        for drafts in FIXED:
            if (fixed := self.measured.get((batch, method.name, str(drafts)))) is not None:
                tokens = (1 - method.rate ** (drafts + 1)) / (1 - method.rate)
                best = max(best, (tokens * plain / fixed.step, drafts))
        return best


def artifact(plan: argparse.Namespace, name: str, **more: Any) -> Path:
    """Return an artifact of the model without weight files; compile it if it is missing. `more` are Options."""
    path: Path = plan.artifacts / f"{plan.model}-{name}.llmc"
    if not (path / "manifest.json").is_file():
        options = with_draft(Options(
            target=plan.target, dtype="bfloat16", max_model_len=2048, max_num_seqs=max(plan.batches),
            max_num_batched_tokens=max(512, 32 * max(plan.batches)), cache=plan.artifacts / "cache", reuse=False,
            weights=f"random:{SEED}", **more,
        ))  # fmt: skip
        job = start(shapes.folder(MODELS[plan.model], plan.artifacts), path, options, True, Console(sys.stderr))
        if options.draft:
            name, place = IndependentDrafts.name, f"{IndependentDrafts.__module__}:{IndependentDrafts.__name__}"
            known = {**job.registry.passes.texts, name: place}
            job.registry = replace(job.registry, passes=Contributions(job.registry.passes.kind, known))
            job.options = replace(
                job.options, pipeline=f"{job.target.pipeline}, after page-attention: {IndependentDrafts.name}"
            )
        job.run()
    return path


def make_all(plan: argparse.Namespace, kinds: Sequence[str]) -> dict[str, Path]:
    """Return the artifacts of all kinds, compiling several at once if there are enough cores."""
    each = {kind: compiled_for(plan, kind) for kind in kinds}  # writes the models' configurations
    shapes.folder(MODELS[plan.model], plan.artifacts)
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // 4), multiprocessing.get_context("spawn")) as pool:
        made = {kind: pool.submit(artifact, plan, kind, **options) for kind, options in each.items()}
        return {kind: future.result() for kind, future in made.items()}


def kind_of(method: Method) -> str:
    """Return the name of the method's artifact: its own name without the number of drafts."""
    return (method.speculate or "plain").partition(":")[0]


def artifact_of(method: Method) -> str:
    """Return the name of the artifact that a method runs on: the host's methods need no other than prompt lookup."""
    return "ngram" if kind_of(method) == "suffix" else kind_of(method)


def compiled_for(plan: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Return the options of the compile of a method's artifact."""
    if kind == "plain":
        return {}
    if kind == "draft":
        return {"speculate": DRAFTS, "draft": str(shapes.folder(DRAFT_MODELS[plan.model], plan.artifacts))}
    return {"speculate": DRAFTS, **({"draft": f"eagle:{head(plan)}"} if kind == "eagle" else {})}


def head(plan: argparse.Namespace) -> Path:
    """Write the config.json of an EAGLE-3 head for the model, one layer as wide as the model's; return its folder."""
    folder: Path = plan.artifacts / f"{plan.model}-head"
    config = json.loads((shapes.folder(MODELS[plan.model], plan.artifacts) / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    layers = int(config["num_hidden_layers"])
    fields = {
        **config, "num_hidden_layers": 1, "draft_vocab_size": min(HEAD_VOCAB, config["vocab_size"]),
        "eagle_aux_hidden_state_layer_ids": [min(2, layers - 1), layers // 2, max(0, layers - 3)],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def run(path: Path, method: Method, results: Results) -> None:
    """Open an engine with a method and measure every batch size."""
    options = EngineOptions(path, enable_prefix_caching=False, speculate=method.speculate, threads=results.plan.threads)
    with open_model(path, options) as artifact:
        opened = open_engine(artifact, options)
    scheduler, vain = opened.engine.scheduler, results.plan.nothing
    chosen = scheduler.speculation
    try:
        for batch in results.plan.batches:
            if not vain or (vain == TOO and (chosen is None or method.gates)):
                _choose(opened, batch, method, "chosen", results)
                if chosen is not None:
                    _fix(opened, batch, method, chosen, results)
                    _draft_by(scheduler, chosen)
            if vain:
                _choose(opened, batch, replace(method, rate=0.0), IN_VAIN, results)
    finally:
        opened.close()


def _choose(opened: Opened, batch: int, method: Method, name: str, results: Results) -> None:
    """Measure the cost model's choice, after a measurement that captures graphs and learns costs."""
    rounds = results.rounds(batch)
    measure(opened, batch, MODELS[results.plan.model], method, rounds)
    if name == "chosen" and method.speculate:
        rounds = max(rounds, ceil(SAMPLED / (MEASURED * batch)))
    results.add(batch, method, name, opened, rounds)


def _fix(opened: Opened, batch: int, method: Method, chosen: Speculation, results: Results) -> None:
    """Measure each fixed number of drafts that all rows can have."""
    costs = {drafts: chosen.draft_count.costs.seconds(batch, drafts) for drafts in (0, *FIXED)}
    print("  ms a step by drafts, as the engine measured:", {k: round(1e3 * v, 3) for k, v in costs.items()})
    for drafts in FIXED:
        if batch * (1 + drafts) <= opened.engine.scheduler.config.logits:
            fixed = FixedDrafts(chosen.config)
            fixed.fixed = drafts
            _draft_by(opened.engine.scheduler, fixed)
            results.add(batch, method, str(drafts), opened, results.rounds(batch))


def _draft_by(scheduler: Scheduler, speculation: Speculation) -> None:
    """Replace what decides about drafts; nothing may run."""
    scheduler.speculation = speculation
    for user in (scheduler.planner, scheduler.host_drafts):
        if user is not None:
            user.speculation = speculation


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(prog="python -m bench.gpu.speculation", description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--out", type=Path, default=Path("build/bench/speculation"), metavar="DIR", help="results")
    folder = Path("build/bench/gpu/artifacts")
    ap.add_argument(
        "--artifacts", type=Path, default=folder, metavar="DIR", help="folder of artifacts, made if missing"
    )
    ap.add_argument("--model", choices=MODELS, default=shapes.LLAMA31_8B.name, help="shape of the model")
    ap.add_argument("--target", default="cuda:sm_90", help="target of artifacts that are made")
    ap.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=BATCHES, metavar="N,N")
    kinds = [kind_of(method) for method in METHODS]
    ap.add_argument("--methods", type=lambda text: text.split(","), default=kinds, metavar="A,B", help=", ".join(kinds))
    ap.add_argument("--limit", type=float, default=570, metavar="SECONDS", help="no measurement starts after this time")
    ap.add_argument("--threads", type=int, help="threads of the engine on a CPU")
    ap.add_argument(
        "--nothing", nargs="?", const="only", choices=("only", TOO), help="measure requests for which no draft is right"
    )
    ap.add_argument("--rounds", type=int, default=8, metavar="N", help="maximum number of rounds of small batches")
    ap.add_argument("--compile-only", action="store_true", help="only compile the artifacts; needs no GPU")
    return ap


def main(argv: list[str]) -> int:
    """Measure all methods; return 1 if one failed."""
    plan = parser().parse_args(argv)
    results = Results(plan, time.monotonic() + plan.limit)
    methods = [PLAIN, *(m for m in METHODS if kind_of(m) in plan.methods)]
    artifacts = make_all(plan, [artifact_of(method) for method in methods])
    if plan.compile_only:
        return 0
    for method in methods:
        try:
            run(artifacts[artifact_of(method)], method, results)
        except Exception as error:  # one method's failure must not cost the others' figures
            results.failed.append(f"{method.name}: {type(error).__name__}: {error}")
            print(results.failed[-1], file=sys.stderr)
    results.save()
    print(results.table())
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
