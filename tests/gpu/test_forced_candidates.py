"""Each kernel that is one of several for an op, forced in turn, on a GPU: greedy tokens and log-probabilities beside a
CPU, one request at a time and in batches of rows of different lengths with chunks of prompts.

By default, one trial for each kernel, and one of each of a few families, are drawn from SEED; --all-trials runs all.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from draw import SEED
from gpu.error_ratio import excess
from gpu.forced_cases import (
    CPU_DTYPES,
    FAMILIES,
    FLASH,
    LONG,
    WIDE,
    Trial,
    compile_all,
    cpu_path,
    drawn_trials,
    made,
    missing,
    not_forced,
    one_of_each,
    op_of,
    ran,
    rivals,
)
from gpu.test_models import LOGPROBS, ROUTED, compare, errors
from llmc_runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu
STEPS = 10
PROMPTS = 24
DRAWN = 8  # families
NEAR_TIES = ("moe", "quantized_moe", "row_recurrence", "chunk_")  # ops of models where rounding can change a lot
# The largest median error of models with values that only a GPU rounds. It is 0.03 if a model of this size in float32
# rounds its activations to 8-bit floats.
MOST_ROUNDED = 0.08
WAYS = ("alone", "batched")
Answers = dict[str, list[Any]]  # way -> completions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--all-trials", default=False)
    if "trial" in metafunc.fixturenames:
        trials = WIDE if every else one_of_each(WIDE, SEED)
        metafunc.parametrize("trial", trials, ids=lambda t: t.name)
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES if every else Random(SEED).sample(sorted(FAMILIES), DRAWN))


@pytest.fixture(scope="session")
def of_families(request: Any) -> dict[str, list[Trial]]:
    """The trials of the selected tests, by family."""
    selected = [p["family"] for p in _parameters(request) if "family" in p]
    found: dict[str, list[Trial]] = {name: [] for name in selected}
    for trial in drawn_trials(selected, request.config.getoption("--all-trials", default=False), SEED, _jobs()):
        found[trial.model.name].append(trial)
    return found


@pytest.fixture(scope="session")
def failed(request: Any, of_families: dict[str, list[Trial]]) -> dict[str, str]:
    """Compile the artifacts of the selected tests; return the error of each one that failed."""
    trials = [p[name] for p in _parameters(request) for name in ("trial", "plain") if name in p]
    found = compile_all([*trials, *(t for of_family in of_families.values() for t in of_family)], _jobs())
    return {why.partition(": ")[0]: why for why in found}  # by the stem of the path


def _parameters(request: Any) -> list[dict[str, Any]]:
    return [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]


def _jobs() -> int:
    return os.cpu_count() or 1


@lru_cache(maxsize=8)
def answers(path: Path, length: int) -> Answers:
    """Return the greedy completions of prompts of 1 token to the most, one at a time and in batches."""
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=LOGPROBS)
    llm = LLM(path, say=lambda text: None)
    try:
        found = {}
        for way in WAYS:
            drawn = prompts(length, way)
            groups = [[p] for p in drawn] if way == "alone" else [drawn]
            found[way] = [out.outputs[0] for g in groups for out in llm.generate(g, params, use_tqdm=False)]
        return found
    finally:
        llm.close()


def prompts(length: int, way: str) -> list[list[int]]:
    """Draw prompts, the first of the most tokens, the second of one; the fourth begins as the third does.

    The two ways have other prompts, so that batches compute them: none of their pages are in the cache.
    """
    rng, most = np.random.default_rng([SEED, WAYS.index(way)]), length - STEPS
    drawn = [rng.integers(3, 320, n).tolist() for n in (most, 1, 45, *rng.integers(1, most, PROMPTS - 4))]
    return [*drawn[:3], [*drawn[2][:32], 5, 6, 7], *drawn[3:]]


def check_answers(trial: Trial) -> None:
    """Compare tokens and log-probabilities with a CPU in float32, by errors relative to those of another device.

    This is a CPU in bfloat16, or, of a model with values that only a GPU rounds, the GPU with the kernels that `select`
    chooses.
    """
    model = trial.model
    exact = answers(cpu_path(model, "float32"), model.length)
    other = answers(Trial(model).path if model.rounded else cpu_path(model, "bfloat16"), model.length)
    found = answers(trial.path, model.length)
    routed = ROUTED if any(op_of(row).startswith(NEAR_TIES) for row in trial.choices) else 0.0
    for way in WAYS:
        ours, theirs = (errors(x[way], exact[way]) for x in (found, other))
        medians = [float(np.median(np.concatenate(x))) for x in (ours, theirs)]
        print(f"{way}: the median error is {medians[0]:.2g}, that of the other device {medians[1]:.2g}")
        assert not model.rounded or max(medians) < MOST_ROUNDED
        assert not (reason := excess(ours, theirs)), f"{way}: {reason}"
        compare(found[way], exact[way], 4 * max(x.max() for x in theirs), routed, other[way])


def check(trial: Trial, failed: dict[str, str]) -> None:
    if not made(trial.path) and (why := missing(trial)):
        pytest.skip(why)
    print(f"{trial.name}, SEED={SEED}")
    needed = (trial.path, Trial(trial.model).path, *(cpu_path(trial.model, dtype) for dtype in CPU_DTYPES))
    why = [failed[path.stem] for path in needed if path.stem in failed]
    assert not why, why
    assert not not_forced(trial, trial.choices)
    check_answers(trial)


def test_kernel_beside_cpu(trial: Trial, failed: dict[str, str]) -> None:
    check(trial, failed)


def test_family_beside_cpu(family: str, of_families: dict[str, list[Trial]], failed: dict[str, str]) -> None:
    """With the kernels of one of its trials forced."""
    assert of_families[family], f"no op of {family} has several kernels"
    for trial in of_families[family]:
        check(trial, failed)


@pytest.mark.parametrize("plain", [Trial(LONG)], ids=lambda t: t.name)
def test_without_optional_packages(plain: Trial, failed: dict[str, str]) -> None:
    """An artifact that was compiled without them says so, and answers as a CPU does."""
    assert plain.path.stem not in failed, failed[plain.path.stem]
    notes = json.loads((plain.path / "report" / "compile.json").read_text())["notes"]
    if not missing(Trial(LONG, kernels=(FLASH,))) and not any("without the kernel" in n for n in notes):
        pytest.skip("the extra `flash` is installed")
    assert [n for n in notes if n.startswith(f"compiled without the kernel {FLASH}: ") and "[flash]" in n]
    assert FLASH not in {kernel for _, kernel in ran(plain.choices)}
    check_answers(plain)


def test_every_candidate_runs(request: Any, failed: dict[str, str]) -> None:
    """With --all-trials, each of them computes each of its ops in some trial."""
    if not request.config.getoption("--all-trials", default=False):
        pytest.skip("only with --all-trials")
    found = {pair for t in WIDE if made(t.path) for pair in ran(t.choices)}
    absent = {t.kernels for t in WIDE if not made(t.path)}  # skipped for lack of a package
    expected = {(op, k) for op, kernels in rivals().items() for k in kernels}
    assert {(op, k) for op, k in expected - found if (k,) not in absent} == set()
