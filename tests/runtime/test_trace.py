"""The trace of the engine's loop: a file that Perfetto reads, and figures of the device's idle time."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime import LLM, LlmcError
from llmc_runtime import trace as trace_module
from llmc_runtime.cli import run_command
from llmc_runtime.trace import PARTS, Trace, attach_trace

from tests.runtime.rig import Rig


class Paced(Rig):
    """A rig whose device takes `busy` seconds a step, one after the other."""

    def __init__(self, depth: int, busy: float) -> None:
        super().__init__(depth)
        self.busy, self.free = busy, 0.0
        self.ends: dict[int, float] = {}

    def launch(self, step: Any) -> Any:
        ticket = super().launch(step)
        self.free = max(self.free, time.perf_counter()) + self.busy
        self.ends[ticket] = self.free
        return ticket

    def done(self, ticket: Any) -> bool:
        return time.perf_counter() >= self.ends[ticket]

    def wait(self, ticket: Any) -> Any:
        while not self.done(ticket):
            time.sleep(1e-4)
        return super().wait(ticket)


def run(depth: int, busy: float, host: float, path: Path) -> Trace:
    rig = Paced(depth, busy)
    trace = attach_trace(rig.engine, path)
    for name in "ab":
        rig.add(name, 5, max_tokens=12)
    while rig.engine.has_work():
        rig.step()
        time.sleep(host)
    return trace


def test_at_depth_1_the_time_of_the_host_is_exposed(tmp_path: Path) -> None:
    found = run(1, 0.003, 0.004, tmp_path / "t.json").summary()
    assert found["steps"] == 12 and found["rows"] == 2
    assert found["exposed_us"] >= 4000 and found["exposed_sum_us"] >= 11 * 4000
    assert found["wait_us"] >= 2900


def test_at_depth_2_a_quick_host_exposes_nothing(tmp_path: Path) -> None:
    found = run(2, 0.02, 0.001, tmp_path / "t.json").summary()
    assert found["exposed_us"] == 0 and found["steps"] == 12


def test_at_depth_2_a_slow_host_is_seen(tmp_path: Path) -> None:
    found = run(2, 0.001, 0.01, tmp_path / "t.json").summary()
    assert found["exposed_us"] >= 9000


class Time:
    """A clock that a test sets, in us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(trace_module, "perf_counter_ns", lambda: self.now * 1000)


def test_the_definition_of_exposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rig, done = Time(monkeypatch), Rig(2), {0}
    trace = Trace(tmp_path / "t.json", done.__contains__)
    rig.add("a", 3)
    plan = rig.scheduler.next()

    def note(at: int, part: str, what: Any = ()) -> float:
        clock.now = at
        trace.note(part, what)
        return trace.summary()["exposed_sum_us"]

    note(0, "begin"), note(10, "plan", plan)
    assert note(20, "launch", [1]) == 0, "nothing was asked of the device before"
    note(30, "plan", plan)
    assert note(40, "launch", [1, 2]) == 0, "the first step still ran when the second was launched"
    note(1000, "wait", [2]), note(1010, "commit", True), note(1020, "begin", [2]), note(1030, "plan", plan)
    done.update((1, 2))
    assert note(1500, "launch", [2, 3]) == 480, "the second step ended between 1020 and 1500"
    note(1510, "wait", [3]), note(1520, "commit", True)
    done.add(3)
    note(1700, "begin", [3]), note(1710, "plan", plan)
    assert note(1800, "launch", [3, 4]) == 480 + 290, "the third step was last known to run at 1510"
    note(1810, "wait", [4]), note(1820, "commit", True)
    assert note(2500, "wait") == 770 and note(2510, "commit", True) == 770
    note(2520, "begin"), note(2530, "plan", plan)
    assert note(2600, "launch", [5]) == 870, "nothing was queued since 2500"
    note(2610, "forget"), note(5000, "begin"), note(5010, "plan", plan), note(5020, "launch", [6]), note(6000, "wait")
    note(6010, "commit", False), note(9000, "begin"), note(9010, "plan", plan)
    assert note(9020, "launch", [7]) == 870, "no request was alive"
    figures = trace.summary()
    assert (figures["steps"], figures["exposed_us"], figures["exposed_p99_us"]) == (5, 195, 480)
    trace.clear()
    assert set(trace.summary().values()) == {0} and "0 steps" in trace.describe()


def test_the_file_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = run(2, 0.001, 0.0, path)
    assert [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"] == []
    trace.write()
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"llmc", "engine"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(events) == len(spans) + 4 and all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    engine = [span for span in spans if span["tid"] == 1]
    assert {span["name"] for span in engine} == set(PARTS)
    for track in (1, 2):
        line = [span for span in spans if span["tid"] == track]
        for before, after in itertools.pairwise(line):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    for step in range(12):
        mine = [span for span in engine if span["args"]["step"] == step and span["args"]["rows"]]
        assert [span["name"] for span in mine] == list(PARTS)
        assert {(span["args"]["rows"], span["args"]["tokens"]) for span in mine} == {(2, 2 if step else 10)}
    device = [span["args"]["step"] for span in spans if span["tid"] == 2]
    assert device == list(range(12))


def test_a_trace_may_begin_while_a_step_is_under_way(tmp_path: Path) -> None:
    rig = Rig(2)
    rig.add("a", 5, max_tokens=9)
    rig.step()
    rig.step()
    trace = attach_trace(rig.engine, tmp_path / "t.json")
    rig.drain()
    assert trace.summary()["steps"] == 6, "nine, less two that were waited for and one that was under way"
    trace.finish()
    first = (tmp_path / "t.json").read_text()
    assert '"commit"' in first
    trace.clear()
    trace.finish()
    assert (tmp_path / "t.json").read_text() == first


def test_a_file_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match="E645"):
        Trace(tmp_path / "none" / "t.json", lambda ticket: True)


def test_an_llm_writes_its_trace_when_it_is_closed(toy: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    llm = LLM(toy, trace=path, say=lambda line: None)
    llm.generate("abc", use_tqdm=False)
    assert llm.trace is not None and llm.trace.summary()["steps"] == 16
    llm.close()
    assert len(json.loads(path.read_text())["traceEvents"]) > 5 * 16
    with LLM(toy, say=lambda line: None) as plain:
        assert plain.trace is None


def test_the_option_of_llmc_run(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    assert run_command([str(toy), "-p", "abc", "-n", "5", "--ignore-eos", "-v", "--trace", str(path)]) == 0
    assert "5 steps of 1 rows (median): plan" in capsys.readouterr().err
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(span["name"] == "commit" for span in spans) == 5
    assert run_command([str(toy), "-p", "abc", "-q", "--trace", str(tmp_path / "no" / "t")]) == 1
    assert "E645" in capsys.readouterr().err
