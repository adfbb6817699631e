"""Steps of the toy artifact on the CUDA device: complete steps, padding, graphs, uploads and releases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cuda.early_context import EarlyContext
from llmc_runtime.device.gpu import gpu_run
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.loader import open_engine
from llmc_runtime.engine.open_model import open_model
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.step import RowInit, RowPages, RowParams, Step, Work

from llmc.artifact.write import write_artifact
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver


@pytest.fixture
def executor(driver: Driver, tmp_path: Path) -> Iterator[Executor]:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    artifact = open_artifact(tmp_path / "toy.llmc")
    made = Executor(artifact, open_device(artifact, 2))
    driver.log()
    yield made
    made.close()
    made.close()


def init(row: int, tokens: list[int], pages: list[int], **params: Any) -> RowInit:
    return RowInit(row, tokens, 0, len(tokens), RowParams(**params), pages)


def test_closing_one_device_leaves_another_of_the_same_thread_usable(executor: Executor, tmp_path: Path) -> None:
    """As when a name is bound to a new LLM: the old one is closed after the new one has opened."""
    artifact = open_artifact(tmp_path / "toy.llmc")
    older = Executor(artifact, open_device(artifact, 2))
    tokens = [3, 1, 4]
    step = Step([init(3, tokens, [7])], [], [Work(3, 3, True)])
    assert executor.run(step).tokens == older.run(step).tokens == [tiny.expected(tokens)]
    older.close()
    assert executor.run(step).tokens == [tiny.expected(tokens)]


def test_capacity_is_a_share_of_what_is_left(executor: Executor) -> None:
    assert executor.capacity.pages == tiny.ROWS * tiny.M and executor.depth == 2
    assert executor.device.describe()["arch"] == "sm_90"


def test_prefill_in_chunks_then_decode(executor: Executor) -> None:
    a, b = [5, 6, 7, 8, 9, 10], [3, 1, 4]
    out = executor.run(Step([init(1, a, [9, 4]), init(3, b, [7])], [], [Work(1, 4, False), Work(3, 3, True)]))
    assert out.tokens == [None, tiny.expected(b)] and out.logprobs == [None, None]
    b.append(tiny.expected(b))
    out = executor.run(Step([], [], [Work(3, 1, True), Work(1, 2, True)]))
    assert out.tokens == [tiny.expected(b), tiny.expected(a)]
    a, b = [*a, tiny.expected(a)], [*b, tiny.expected(b)]
    out = executor.run(Step([], [RowPages(3, 1, [2])], [Work(1, 1, True), Work(3, 1, True)]))
    assert out.tokens == [tiny.expected(a), tiny.expected(b)]


def test_steps_are_launched_ahead(executor: Executor, driver: Driver) -> None:
    """Steps run only when they are waited for; by then, rows have been rebuilt and inputs changed for the next step."""
    rng = np.random.default_rng(7)
    rows = {r: [int(t) for t in rng.integers(0, tiny.V, 3 + r)] for r in range(3)}
    prompts = {r: len(t) for r, t in rows.items()}
    free = iter(rng.permutation(32).tolist())
    pages = {r: [next(free) for _ in range(tiny.M)] for r in rows}
    inits = [init(r, t, pages[r]) for r, t in rows.items()]
    plans = [Step(inits, [], [Work(r, len(t), True) for r, t in rows.items()])]
    plans += [Step([], [], [Work(r, 1, True) for r in live]) for live in ([0, 1, 2], [2, 0], [1], [0, 1, 2], [1, 2, 0])]
    again = [int(t) for t in rng.integers(0, tiny.V, 9)]
    plans.append(Step([init(1, again, pages[1][::-1])], [], [Work(0, 1, True), Work(1, 9, True)]))
    plans.append(Step([], [], [Work(1, 1, True), Work(0, 1, True)]))
    tickets: list[Any] = []
    for plan in [*plans, None, None]:
        if plan is not None:
            tickets.append((plan, executor.launch(plan)))
        if len(tickets) < 2 and plan is not None:
            continue
        if not tickets:
            break
        done, ticket = tickets.pop(0)
        found = executor.wait(ticket)
        for change in done.inits:
            rows[change.row], prompts[change.row] = list(change.tokens), len(change.tokens)
        for work, token in zip(done.work, found.tokens):
            known = rows[work.row]
            assert token == tiny.expected(known, known[prompts[work.row] :].count(1)), (done, work)
            known.append(token)
    with pytest.raises(RuntimeError, match="waited for once"):
        executor.wait(ticket)


def test_whether_a_step_has_ended_is_known_without_waiting(executor: Executor) -> None:
    first = executor.launch(Step([init(0, [1, 2, 3], [0])], [], [Work(0, 3, True)]))
    second = executor.launch(Step([], [], [Work(0, 1, True)]))
    assert not executor.done(first) and not executor.done(second)
    executor.wait(first)
    assert executor.done(first) and not executor.done(second)
    executor.wait(second)
    assert executor.done(second)


def test_no_more_than_depth_steps_are_under_way(executor: Executor) -> None:
    step = Step([init(0, [1, 2, 3], [0])], [], [Work(0, 3, True)])
    executor.launch(step)
    executor.launch(Step([], [], [Work(0, 1, True)]))
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        executor.launch(step)
    executor.settle()
    assert executor.run(step).tokens == [tiny.expected([1, 2, 3])]


def test_a_decode_step_sends_only_what_changed(executor: Executor, driver: Driver) -> None:
    executor.run(Step([init(r, [r + 1, 2], [r, 9 + r]) for r in range(3)], [], [Work(r, 2, True) for r in range(3)]))
    assert driver.log()[-4:] == ["launch", "launch-pdl", "down", "mark"]
    decode = Step([], [], [Work(r, 1, True) for r in range(3)])
    executor.run(decode)
    assert driver.log() == ["up", "graph2", "replay", "down", "mark"]  # one graph of two launches, for 4 rows
    executor.run(decode)
    assert driver.log() == ["replay", "down", "mark"]
    executor.run(Step([], [], decode.work[:1]))
    assert driver.log() == ["up", "graph2", "replay", "down", "mark"]
    executor.run(Step([], [RowPages(0, 2, [20])], [*decode.work[:2]]))
    assert driver.log() == ["up", "up", "graph2", "replay", "down", "mark"]


def prompt(length: int, row: int = 0) -> tuple[Step, int]:
    """Return the step of a prompt of some length, and the token that it samples."""
    tokens = [(7 * length + i) % tiny.V for i in range(length)]
    return Step([init(row, tokens, [*range(tiny.M)])], [], [Work(row, length, True)]), tiny.expected(tokens)


def run_prompts(executor: Executor, driver: Driver, lengths: list[int]) -> list[str]:
    """Run prompts one after the other, check their tokens, and return how each was launched."""
    ways = {("launch", "launch-pdl"): "launches", ("graph2", "replay"): "captured", ("replay",): "replayed"}
    found = []
    for length in lengths:
        step, want = prompt(length)
        driver.log()
        assert executor.run(step).tokens == [want]
        found.append(ways[tuple(x for x in driver.log() if x not in ("up", "zero", "down", "mark"))])
    return found


def test_steps_with_prompts_whose_size_recurs_are_graphs(executor: Executor, driver: Driver) -> None:
    """Of prompts rounded up to 16 tokens, the second is captured, and further ones are replayed."""
    assert run_prompts(executor, driver, [9, 12, 16, 17, 9, 30]) == [
        "launches", "captured", "replayed", "launches", "replayed", "captured",
    ]  # fmt: skip


def test_a_graph_of_prompts_gives_way_if_it_is_not_used(
    executor: Executor, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "_MAX_GRAPHS", 1)
    monkeypatch.setattr(gpu_run, "_IDLE_RUNS", 3)
    assert run_prompts(executor, driver, [3, 3, 20, 20, 20, 3, 20]) == [
        "launches", "captured", "launches", "launches", "captured", "launches", "replayed",
    ]  # fmt: skip


def test_only_the_latest_sizes_of_prompts_are_remembered(
    executor: Executor, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "_MAX_SEEN", 1)
    assert run_prompts(executor, driver, [3, 20, 3, 3]) == ["launches", "launches", "launches", "captured"]


def test_padding_harms_no_row(executor: Executor) -> None:
    """Three rows run in the graph for four; the fourth row of the device belongs to another sequence."""
    executor.run(Step([init(3, [9, 8, 7], [3])], [], [Work(3, 3, True)]))
    executor.run(Step([init(r, [r + 1, 2], [r]) for r in range(3)], [], [Work(r, 2, True) for r in range(3)]))
    before = [t.view.copy() for t in executor.rows._tables.values()]
    executor.run(Step([], [], [Work(r, 1, True) for r in range(3)]))
    for old, table in zip(before, executor.rows._tables.values()):
        np.testing.assert_array_equal(old[3], table.view[3])
    assert executor.rows._tables["length"].view[:, 0].tolist() == [3, 3, 3, 3]


def test_all_graphs_on_request(executor: Executor, driver: Driver) -> None:
    assert executor.prepare() == 3  # one row; two and four
    assert driver.log() == ["graph2"] * 3
    executor.run(Step([init(0, [1, 2, 3], [0])], [], [Work(0, 3, True)]))
    driver.log()
    executor.run(Step([], [], [Work(0, 1, True)]))
    assert driver.log() == ["up", "replay", "down", "mark"]


def test_logprobs_are_fetched_where_wanted(executor: Executor, driver: Driver) -> None:
    inits = [init(0, [1, 2], [0], want_logprobs=True), init(1, [2, 1], [1])]
    out = executor.run(Step(inits, [], [Work(1, 2, True), Work(0, 2, True)]))
    assert driver.log().count("down") == 5 and out.logprobs[0] is None
    found = out.logprobs[1]
    assert found is not None and found.rank == 1 and found.logprob == -0.5 * out.tokens[1]  # type: ignore[operator]
    assert list(found.top_ids) == [(out.tokens[1] + k) % tiny.V for k in range(tiny.TOP)]  # type: ignore[operator]
    executor.run(Step([], [], [Work(1, 1, True)]))
    assert driver.log().count("down") == 1


def test_rows_hold_what_was_sent(executor: Executor) -> None:
    executor.run(Step([init(2, [1] * 5, [3, 5])], [], [Work(2, 5, True)]))
    tables = executor.rows._tables
    assert tables["counts"].view[2].sum() == 1
    params = RowParams(temperature=0.5, top_k=7, seed=(1 << 63) + 5, min_tokens=2, stops=(9, 11))
    executor.run(Step([RowInit(2, [40, 33, 2, 1, 1, 63], 4, 2, params, [6, 8])]))
    counts = np.zeros(tiny.V, np.int32)
    counts[[2, 63]], counts[1] = 1, 2
    np.testing.assert_array_equal(tables["counts"].view[2], counts)
    assert list(tables["seen"].view[2].view(np.uint32)) == [0, 1 << 8 | 1 << 1]
    assert list(tables["iparams"].view[2]) == [7, 5, -(1 << 31), 2, 4, 0, 0, 0]
    executor.run(Step([init(2, [4, 4], [1])]))
    assert not tables["counts"].view[2].any()


def test_any_thread_may_run_steps(executor: Executor) -> None:
    found: list[Any] = []
    step = Step([init(0, [1, 2, 3], [0])], [], [Work(0, 3, True)])
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(executor.run(step).tokens))
        thread.start()
        thread.join()
    assert found == [[tiny.expected([1, 2, 3])]] * 2


def test_a_size_that_no_program_serves(executor: Executor) -> None:
    with pytest.raises(LlmcError, match="E614"):
        executor.run(Step([], [], [Work(0, 49, True)]))


def test_random_weights_are_those_of_the_cpu(driver: Driver, tmp_path: Path) -> None:
    step = Step([init(0, [1, 2], [0])], [], [Work(0, 2, True)])
    found = []
    for name, made in (("cuda", toy.parts(tmp_path, weights=7)), ("cpu", tiny.parts(tmp_path, weights=7))):
        write_artifact(tmp_path / f"{name}.llmc", made)
        artifact = open_artifact(tmp_path / f"{name}.llmc")
        executor = Executor(artifact, open_device(artifact, 1), 1024)
        found.append(executor.run(step).tokens)
        executor.close()
    assert found[0] == found[1]


def test_rows_that_grow_together_take_one_copy(executor: Executor, driver: Driver) -> None:
    executor.run(Step([init(r, [r + 1, 2], [r]) for r in range(4)], [], [Work(r, 2, True) for r in range(4)]))
    driver.log()
    executor.launch(Step([], [RowPages(r, 1, [9 + r, 20 - r]) for r in (3, 1, 0)], []))
    assert driver.log() == ["up", "mark"]
    executor.settle()
    pages = executor.rows._tables["pages"].view
    assert [list(p[:3]) for p in pages] == [[0, 9, 20], [1, 10, 19], [2, 0, 0], [3, 12, 17]]


def test_the_context_is_made_while_the_programs_are_read(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    options = EngineOptions(str(tmp_path / "toy.llmc"))
    contexts, take = [], EarlyContext.take
    monkeypatch.setattr(EarlyContext, "take", lambda number: contexts.append(take(number)) or contexts[-1])
    for _ in range(2):
        with open_model(Path(options.model), options) as artifact:
            open_engine(artifact, options).close()
    assert len(contexts) == 2 and all(contexts)


def test_a_context_that_cannot_be_made_ahead_is_made_by_the_device(driver: Driver, tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    options = EngineOptions(str(tmp_path / "toy.llmc"))
    driver.fail("cuDevicePrimaryCtxRetain", 2)
    with open_model(Path(options.model), options) as artifact:
        EarlyContext.begin(0)  # one is waiting already
        open_engine(artifact, options).close()
    assert EarlyContext.take(0) is None


def test_a_context_that_no_device_takes_is_released(driver: Driver, tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    options = EngineOptions(str(tmp_path / "toy.llmc"))
    with pytest.raises(ZeroDivisionError), open_model(Path(options.model), options):
        raise ZeroDivisionError
    assert driver.retained == 0
    with pytest.raises(LlmcError, match="E118"), open_model(Path(options.model), options, digest="another"):
        pass
    assert driver.retained == 0
