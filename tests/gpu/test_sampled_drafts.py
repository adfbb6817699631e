"""Continuations sampled on a GPU with drafts have the distribution of those without: chi-square of large samples.

python tests/gpu/test_sampled_drafts.py --compile-only              compile on any machine what is missing
python tests/gpu/test_sampled_drafts.py 100000 --limit 90           up to 100,000 continuations of each cell, in 90 s
python tests/gpu/test_sampled_drafts.py 100000 --random             the same of a random model with 16 ids
pytest tests/gpu/test_sampled_drafts.py --confcutdir tests/gpu      a sample, in less than a minute

A cell is a method and a setting. Steps overlap, as they always do on a GPU; numbers of drafts change from plan to
plan; the KV cache is too small for all rows, so that some are preempted. The kernels of a GPU depend on the number of
tokens of a step and round differently, so tokens with the same seeds may differ: the chi-square is of samples with
other seeds. A rule with a planted error (see wrong_rule) is compared in the same way. Several processes share the GPU,
because most of the time is that of the host. Artifacts are in build/gpu/sampled. The demonstration model has settings
with grammars; a step of the random one (see random_drafts) takes less time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import ne, sub
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[2]
if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from draw import SEED  # noqa: E402
from gpu.random_drafts import POSITIONS, RANDOM_SETTINGS, make_random_models, random_task  # noqa: E402
from llmc_runtime import LLM  # noqa: E402
from llmc_runtime.format.manifest import Manifest  # noqa: E402
from llmc_runtime.sched.scheduler import Scheduler  # noqa: E402
from llmc_runtime.sched.step import Step  # noqa: E402
from models.sampled_drafts import (  # noqa: E402
    DRAFTS,
    HEADS,
    JSON,
    METHODS,
    MODEL,
    REGEX,
    SETTINGS,
    Continuation,
    artifact_of,
    counted,
    force_drafts,
    sample,
    score,
    task_of,
)

from llmc.codegen.backends.triton import template  # noqa: E402
from llmc.driver import compile_model  # noqa: E402
from llmc.options import Options  # noqa: E402

pytestmark = pytest.mark.gpu
FOLDER = ROOT / "build" / "gpu" / "sampled"
TARGET = "cuda:sm_90"
PAGES_PER_ROW = 1.6  # of the KV cache; each row needs one or two pages of its own
GUIDED_BLOCK = 500  # continuations of a setting with a grammar that a process samples before it goes to the next one
GRACE = 1.0  # seconds that a step waits for masks, so that those after drafts come in time
LIMIT = 4.5  # standard deviations from the expected chi-square
PLAIN, WRONG = "plain", "wrong"  # no drafts; before the name of a method: with the planted error
OTHER_SEEDS = 1 << 40  # distance of the seeds of plain decoding from those of the methods
# In row_accept: an entry takes the draft after it in place of its sample, if the sample is another, larger id.
TAKEN = "sampled = tl.load(sampled_ptr + at, mask=verifies, other=0)"
KEPT = """
        follows = verifies & (tl.load(rows_ptr + at + 1, mask=verifies & (at + 1 < entry_count), other=-1) == row)
        place = tl.load(positions_ptr + end - 1, mask=verifies, other=0) + 1
        draft = tl.load(history_ptr + place, mask=follows & (place < max_length), other=1 << 30)
        sampled = tl.minimum(sampled, draft)"""


@dataclass(frozen=True)
class Models:
    """A model, its options --draft by artifact, and how it is sampled: `planted` are the methods that are also sampled
    with the planted error, `block` continuations are sampled before a process goes to the next setting. A step has
    `logits` entries: rows with their drafts.
    """

    folder: Path
    model: Path
    drafts: Mapping[str, str]
    settings: Sequence[str]
    methods: Sequence[str]
    planted: Sequence[str]
    length: int
    logits: int
    block: int

    @property
    def processes(self) -> Mapping[str, int]:
        """How many processes sample with each method."""
        return {PLAIN: 4, **dict.fromkeys(self.methods, 3), **{f"{WRONG} {method}": 1 for method in self.planted}}

    def artifact(self, method: str) -> Path:
        """Return the folder of the artifact with which a method runs."""
        planted, base = method.startswith(WRONG), artifact_of(method.removeprefix(f"{WRONG} "))
        return self.folder / (f"{WRONG}-{base}" if planted else base)

    def size(self, setting: str) -> int:
        """The number of continuations of a block; masks that depend on the tokens before take longer."""
        return GUIDED_BLOCK if setting in (REGEX, JSON) else self.block


def demo(target: str) -> Models:
    """The demonstration model."""
    return Models(FOLDER / target, MODEL, HEADS, list(SETTINGS), list(METHODS), ["ngram"], 96, 512, 2500)


def random(target: str) -> Models:
    """A random model, whose files are made if they are missing."""
    files = FOLDER / "random"
    drafts = make_random_models(files)
    methods = ["ngram", "draft", "eagle"]
    return Models(
        FOLDER / f"{target}-random", files / "model", drafts, list(RANDOM_SETTINGS), methods, methods, POSITIONS,
        2048, 5000,
    )  # fmt: skip


def make(models: Models, target: str = TARGET, cache: Path = FOLDER / "cache") -> None:
    """Compile the artifacts that are missing, each in a process of its own."""
    paths = {models.artifact(method) for method in models.processes}
    missing = sorted(path for path in paths if not (path / "manifest.json").is_file())
    if missing:
        with ProcessPoolExecutor(len(missing), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(make_one, missing, repeat(models), repeat(target), repeat(cache)))


def make_one(path: Path, models: Models, target: str, cache: Path) -> None:
    """Compile an artifact in float32, in which kernels for other numbers of tokens round nearly alike."""
    options = Options(
        target=target, dtype="float32", max_model_len=models.length, max_num_seqs=models.logits, speculate=DRAFTS,
        draft=models.drafts[path.name.removeprefix(f"{WRONG}-")], cache=cache,
    )  # fmt: skip
    with patch.object(template, "load", wrong_rule if path.name.startswith(WRONG) else template.load):
        compile_model(models.model, path, options)


def wrong_rule(name: str, load: Any = template.load) -> template.Module:
    """Return a template module; row_accept of row_draft with the planted error."""
    module: template.Module = load(name)
    if name != "row_draft":
        return module
    accept = module.definitions["row_accept"]
    assert accept.text.count(TAKEN) == 1
    planted = replace(accept, text=accept.text.replace(TAKEN, TAKEN + KEPT))
    return replace(module, definitions=MappingProxyType({**module.definitions, "row_accept": planted}))


@dataclass
class Cell:
    """The continuations of a setting: how often each was sampled, and the first block of them in order of seeds.

    drafts, accepted, preemptions: what the engine counted. With `same`, plain decoding has the methods' seeds.
    """

    count: int = 0
    counts: Counter[Continuation] = field(default_factory=Counter)
    first: list[Continuation] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0

    def add(self, other: Cell) -> None:
        """Add the sample of another process."""
        self.count += other.count
        self.counts.update(other.counts)
        self.first = self.first or other.first
        self.drafts, self.accepted = self.drafts + other.drafts, self.accepted + other.accepted
        self.preemptions += other.preemptions


@dataclass
class Sampled:
    """What a process has sampled, by setting, and how many of its steps, with or without drafts to verify, were planned
    while another one was in flight. `same` has the first block of plain decoding with the methods' seeds.
    """

    method: str
    cells: dict[str, Cell]
    same: dict[str, list[Continuation]]
    prompts: dict[str, list[int]]
    steps: Counter[str]


def work(method: str, number: int, models: Models, count: int, settings: Sequence[str], end: float) -> Sampled:
    """Sample the blocks `number`, `number` + the method's processes and so on of each setting, until the time `end`."""
    artifact = models.artifact(method)
    kv = Manifest.load((artifact / "manifest.json").read_bytes()).kv
    speculate = METHODS.get(method.removeprefix(f"{WRONG} "))
    rows = models.logits // (1 + DRAFTS)
    nbytes = int(PAGES_PER_ROW * rows) * kv.bytes_per_page
    options = {"speculate": speculate, "max_num_seqs": rows, "kv_cache_memory_bytes": nbytes}
    found = Sampled(method, {name: Cell() for name in settings}, {}, {}, Counter())
    begin = SEED * 10**6 + (OTHER_SEEDS if method == PLAIN else 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        force_drafts(monkeypatch, overlap=True)
        count_overlaps(monkeypatch, found.steps)
        llm = LLM(artifact, say=lambda text: None, **options)
        llm.engine._grace = GRACE
        is_random = models.model != MODEL
        tasks = {name: random_task(name) if is_random else task_of(llm, name) for name in settings}
        found.prompts = {name: task.prompt for name, task in tasks.items()}
        if method == PLAIN and not number:
            for name, task in tasks.items():
                found.same[name] = sample(llm, task, range(SEED * 10**6, SEED * 10**6 + models.size(name)))
        at = number
        while at * models.block < count and time.time() < end:
            for name, task in tasks.items():
                size, cell, before = models.size(name), found.cells[name], counted(llm)
                drawn = sample(llm, task, range(begin + at * size, begin + (at + 1) * size))
                drafts, accepted, preemptions = map(sub, counted(llm), before)
                cell.add(Cell(size, Counter(drawn), drawn if at == 0 else [], drafts, accepted, preemptions))
            at += models.processes[method]
        llm.close()
    return found


def count_overlaps(monkeypatch: pytest.MonkeyPatch, steps: Counter[str]) -> None:
    """Count the steps that are planned while another one is in flight."""
    plan = Scheduler.next

    def next_step(self: Scheduler) -> Step:
        flying = bool(self._in_flight)
        step = plan(self)
        if step.work:
            steps["all"] += 1
            steps["overlapped"] += flying
            steps["overlapped, with drafts"] += flying and any(item.drafts for item in step.work)
        return step

    monkeypatch.setattr(Scheduler, "next", next_step)


def sampled(models: Models, count: int, settings: Sequence[str], limit: float) -> dict[str, Sampled]:
    """Return the samples of plain decoding, of all methods and of the planted error, by name."""
    end, found = time.time() + limit, dict[str, Sampled]()
    names = [(method, number) for method, most in models.processes.items() for number in range(most)]
    with ProcessPoolExecutor(len(names), mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(work, method, number, models, count, ["plain"] if WRONG in method else settings, end)
            for method, number in names
        ]
        for part in (future.result() for future in futures):
            whole = found.setdefault(part.method, part)
            if whole is not part:
                assert whole.prompts == part.prompts
                for name, cell in part.cells.items():
                    whole.cells[name].add(cell)
                whole.steps.update(part.steps)
                whole.same |= part.same
    return found


@dataclass(frozen=True)
class Comparison:
    """The chi-square of `count` of a cell's continuations beside plain decoding with other seeds, as a normal deviate;
    of its first block, how many continuations differ from those of plain decoding with the same seeds.
    """

    method: str
    setting: str
    sampled: int
    count: int
    deviate: float
    changed: int
    first: int
    drafts: int
    accepted: int
    preemptions: int


def comparisons(found: Mapping[str, Sampled]) -> Iterator[Comparison]:
    """Compare the cells of all methods; samples of unequal size are reduced to the smaller one."""
    plain = found[PLAIN]
    for method, part in found.items():
        if method == PLAIN:
            continue
        for name, cell in part.cells.items():
            count = min(cell.count, plain.cells[name].count)
            ours, others = (fewer(x.counts, count) for x in (cell, plain.cells[name]))
            changed = sum(map(ne, cell.first, plain.same[name]))
            yield Comparison(
                method,
                name,
                cell.count,
                count,
                score(ours, others),
                changed,
                len(cell.first),
                cell.drafts,
                cell.accepted,
                cell.preemptions,
            )


def fewer(counts: Counter[Continuation], count: int) -> Counter[Continuation]:
    """Return a random part of a sample."""
    import numpy as np

    keys = sorted(counts)
    if counts.total() == count:
        return counts
    drawn = np.random.default_rng(SEED).multivariate_hypergeometric([counts[key] for key in keys], count)
    return Counter(dict(zip(keys, drawn.tolist(), strict=True)))


def faults(found: Mapping[str, Sampled], rows: Sequence[Comparison]) -> list[str]:
    """Return what a test of these samples must not find."""
    wrong = []
    for row in rows:
        name = f"{row.method}, {row.setting}"
        if (row.deviate > LIMIT) != row.method.startswith(WRONG):
            wrong.append(f"{name}: {row.deviate:.1f} standard deviations")
        if not row.accepted:
            wrong.append(f"{name}: none of {row.drafts} drafts accepted")
    for method, part in found.items():
        drafts, accepted, preemptions = (
            sum(getattr(cell, name) for cell in part.cells.values()) for name in ("drafts", "accepted", "preemptions")
        )
        if drafts == accepted and method != PLAIN:
            wrong.append(f"{method}: all of {drafts} drafts accepted")
        if not preemptions:
            wrong.append(f"{method}: no request was preempted")
        if not part.steps["overlapped"]:
            wrong.append(f"{method}: no step overlapped with another one")
    return wrong


@pytest.mark.parametrize("models", [demo, random])
def test_continuations_with_drafts_are_distributed_like_those_without(models: Callable[[str], Models]) -> None:
    pytest.importorskip("llguidance")
    made = models(TARGET)
    make(made)
    print(f"SEED={SEED}")
    found = sampled(made, 3 * made.block, made.settings, limit=30)
    rows = list(comparisons(found))
    print(table(found, rows))
    assert not faults(found, rows)


def table(found: Mapping[str, Sampled], rows: Sequence[Comparison]) -> str:
    """Return the comparisons and the counts of steps as Markdown."""
    heads = ("method, setting", "continuations", "compared", "deviation", "changed", "drafts accepted", "preemptions")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"{row.method}, {row.setting}", str(row.sampled), str(row.count), f"{row.deviate:.2f}"]
        cells += [f"{row.changed} of {row.first}", f"{row.accepted} of {row.drafts}", str(row.preemptions)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{method}: {dict(part.steps)}" for method, part in found.items())])


def main() -> int:
    """Compile, or sample and print the table; return 1 if a sample of a method is wrong, or the planted error is not
    detected.
    """
    ap = argparse.ArgumentParser(description="compare continuations with and without drafts")
    ap.add_argument("count", type=int, nargs="?", default=100000, help="continuations of a method and setting (100000)")
    ap.add_argument("--limit", type=float, default=90, metavar="SECONDS", help="no sample begins after this time (90)")
    ap.add_argument("--settings", type=lambda text: text.split(","), default=None, metavar="A,B", help="(all)")
    ap.add_argument("--random", action="store_true", help="the random model instead of the demonstration model")
    ap.add_argument("--target", default=TARGET, metavar="NAME", help=f"machine to compile for ({TARGET})")
    ap.add_argument("--cache", type=Path, default=FOLDER / "cache", metavar="DIR", help="compiled kernels")
    ap.add_argument("--out", type=Path, metavar="FILE", help="file of the results, as JSON")
    ap.add_argument("--compile-only", action="store_true")
    args = ap.parse_args()
    models = (random if args.random else demo)(args.target)
    make(models, args.target, args.cache)
    if args.compile_only:
        return 0
    begin = time.time()
    found = sampled(models, args.count, args.settings or models.settings, args.limit)
    rows = list(comparisons(found))
    print(table(found, rows), f"{time.time() - begin:.0f} s, SEED={SEED}", *faults(found, rows), sep="\n")
    if args.out:
        args.out.write_text(json.dumps({"seed": SEED, "rows": [vars(row) for row in rows]}, indent=1) + "\n")
    return 1 if faults(found, rows) else 0


if __name__ == "__main__":
    sys.exit(main())
