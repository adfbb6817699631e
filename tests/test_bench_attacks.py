"""The attack table's own arithmetic: percentiles, windows, the text of rows, and the bodies that it sends."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psutil")
from llmc_runtime.bench.http_client import Reply

from bench.attacks import run
from bench.attacks.figures import answers_text, gaps_of, memory_window, quantile, table
from bench.attacks.link import Answer, Door, error_of
from bench.attacks.many import burst, flood, head_without_body, pipeline
from bench.attacks.rows import ATTACKS, BODIES, BODY, Attack, patterns
from bench.attacks.run import chosen
from bench.attacks.server import _memory
from bench.attacks.steps import intervals
from bench.attacks.watch import Asker, Streams, code_of, request
from bench.gpu.attacks import verdict, verdicts

SETTINGS = {"host": "127.0.0.1", "port": 1, "key": "k", "streams": 1, "tokens": 5}


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.5, 50.0), (0.505, 51.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)]
)
def test_a_quantile_is_a_value_that_so_many_do_not_exceed(share: float, value: float) -> None:
    assert quantile([float(i) for i in range(1, 101)], share) == value
    assert quantile([], share) == 0.0 and quantile([7.0], share) == 7.0


def test_a_gap_that_is_open_counts_once_it_is_the_longest() -> None:
    result = gaps_of([0.002] * 98 + [0.010, 0.030], [0.020, 4.0])
    assert result == {"tokens": 100, "p50_ms": 2.0, "p99_ms": 30.0, "max_ms": 4000.0}
    assert gaps_of([]) == {"tokens": 0, "p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
    assert gaps_of([], [1.0])["max_ms"] == 1000.0


def test_a_window_of_streams_has_its_own_events_and_what_is_open() -> None:
    streams = Streams(SETTINGS)
    streams.gaps = [(1.0, 0.9), (2.0, 0.001), (3.0, 0.002), (9.0, 0.5)]
    streams.firsts, streams.statuses = [(1.5, 0.3), (2.5, 0.004)], [(2.2, 200), (2.3, 429), (2.4, -1), (0.5, 0)]
    streams.latest, streams.requested = {0: 3.9}, {1: 3.0}
    streams.firsts.append((3.001, 0.004))  # in the step of the event at 3.0
    result = streams.window(1.9, 4.0)
    assert result["slowest"] == [(1100.0, 2.0), (100.0, 1.0)]
    assert result["starts"] == 2 and result["decode"]["tokens"] == 1 and result["decode"]["max_ms"] == 1.0
    assert result["tokens"] == 2 and result["max_ms"] == 100.0 and result["ttft_max_ms"] == 1000.0
    assert result["refused"] == {"429": 1, "broken": 1}
    assert streams.window(8.0, 10.0)["p50_ms"] == 500.0


def test_a_window_of_requests_counts_those_that_were_open_in_it() -> None:
    asker = Asker(SETTINGS, 0.1, lambda number: ("/health", None))
    asker.done = [(0.0, 0.5, 200, ""), (0.8, 0.4, 200, ""), (1.5, 0.1, 400, "invalid_value"), (2.5, 0.1, 200, "")]
    asker.began = 1.9
    result = asker.window(1.0, 2.0)
    assert result == {"count": 3, "statuses": {"200": 1, "400 invalid_value": 1}, "worst_ms": [400.0, 100.0, 100.0]}


def test_memory_before_at_the_peak_and_after_by_role() -> None:
    mib = 1 << 20
    samples = [(0.0, {"front": 10 * mib}), (1.0, {"front": 12 * mib, "engine": 5 * mib}), (2.0, {"front": 90 * mib}),
               (3.0, {"front": 20 * mib})]  # fmt: skip
    assert memory_window(samples, 1.5, 9.0) == {"engine": [5, 0, 0], "front": [12, 90, 20]}
    assert memory_window([], 0.0, 1.0) == {}


def test_answers_that_differ_only_in_numbers_are_one_line() -> None:
    result = (("1 MB", 400, 2.0, "710 tokens"), ("1 MB", 400, 9.0, "8 tokens"), ("again", 0, 1.0, "late"))
    rows = [Answer(*one).json() for one in result]
    assert answers_text(rows).splitlines() == [
        "1 MB: 2 x 400 in 9.00 s (710 tokens)", "again: none in 1.00 s (late)",
    ]  # fmt: skip


def test_errors_are_reported_by_code_and_message() -> None:
    body = json.dumps({"error": {"code": "queue_full", "message": "later", "type": "x", "param": None}}).encode()
    assert error_of(body) == "queue_full: later" and code_of(503, body) == "queue_full"
    assert error_of(b"<html>") == "<html>" and code_of(502, b"<html>") == "?" and code_of(200, body) == ""


def test_requests_are_whole_messages() -> None:
    head, _, body = request("127.0.0.1", "k", "/tokenize", {"prompt": "x"}).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head and b"Authorization: Bearer k" in head
    assert json.loads(body) == {"prompt": "x"} and b"Content-Length" not in request("h", "", "/health")
    assert b"Authorization" not in request("h", "", "/health")


@pytest.mark.drawn
@pytest.mark.parametrize("name", BODIES)
def test_large_bodies_are_json_within_the_limit(name: str) -> None:
    data = BODIES[name][1]()
    assert BODY * 0.9 < len(data) <= BODY
    if "one value" not in name:  # nested deeper than Python reads
        assert isinstance(json.loads(data), dict)


def test_every_row_has_its_attacks_under_names_of_their_own() -> None:
    assert {one.row for one in ATTACKS} == set(range(1, 17))
    assert len({one.name for one in ATTACKS}) == len(ATTACKS)
    form = patterns(lambda i: (chr(97 + i % 26), "xy"[i // 26]))["response_format"]["json_schema"]["schema"]
    assert len({one["pattern"] for one in form["allOf"]}) == 32


def test_attacks_are_chosen_by_row_and_by_a_regular_expression() -> None:
    assert {one.row for one in chosen("9,10", "")} == {9, 10}
    assert [one.name for one in chosen("", "^ten times|engine$")] == ["ten times the peak", "four ends of the engine"]
    with pytest.raises(ValueError, match="no attack"):
        chosen("1", "^ten times")


def test_a_window_without_an_attack_is_shared_by_two_attacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The window after an attack is also the one before the next attack on the same server."""
    order: list[str] = []
    bench = run.Bench(tmp_path, tmp_path, [], rest=0.0, min_seconds=0.0)

    class Idle:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: {} if name != "cpu" else Counter()

    def opened() -> Any:
        bench.watch = Idle()  # type: ignore[assignment]
        return SimpleNamespace(changes=lambda: "same", log=tmp_path / "log", cpu_waits=dict)

    (tmp_path / "log").touch()
    monkeypatch.setattr(run, "Sampler", lambda server: Idle())
    monkeypatch.setattr(bench, "open", opened)
    monkeypatch.setattr(bench, "serves", lambda server: True)
    monkeypatch.setattr(bench, "_quiet", lambda: order.append("quiet") or {"window": len(order)})
    attack = Attack(1, "x", lambda ground: order.append("attack") or [])  # type: ignore[func-returns-value]
    first, second = bench.run(attack, True), bench.run(attack, False)
    assert order == ["quiet", "attack", "quiet", "attack", "quiet"]
    assert first["after"] is second["quiet"] and first["quiet"] is not first["after"]
    bench.run(attack, True)
    assert order[5:] == ["quiet", "attack", "quiet"], "another server"


def figures(p99: float) -> dict[str, Any]:
    one = {"count": 1, "statuses": {"200": 1}, "worst_ms": [5.0]}
    gaps = {"tokens": 9, "p50_ms": 1.0, "p99_ms": p99, "max_ms": 9.0}
    itl = {**gaps, "ttft_max_ms": 3.0, "refused": {}, "starts": 2, "decode": gaps, "slowest": [(70.0, 9.0)]}
    steps = {"all": gaps, "decode": gaps, "prompts": 3}
    watcher, waits = {"turns": gaps, "waited_ms": 0.5}, {"front": 1.5, "engine": 0.0}
    return {
        "itl": itl,
        "watcher": watcher,
        "waits": waits,
        "steps": steps,
        **dict.fromkeys(("health", "completion", "schema", "tokenize"), one),
    }


def test_a_row_of_the_table_and_its_verdict_on_a_gpu() -> None:
    common = {"row": 3, "name": "x", "answers": [Answer("a", 400).json()], "memory": {"front": [1, 2, 3]}}
    common |= {"processes": "same", "quiet": figures(9.0), "after": figures(11.0)}
    rows = [{**common, "beside": figures(p99)} for p99 in (11.0, 12.1, 12.2, 0.0)]
    times = "1.0 / 9.0 / 9 | 1.0 / 11.0 / 9 | 1.0 / 11.0 / 9"
    assert f"| 3 | x | a: 400 in 0.00 s | {times} | 5 | 5 | front 1>2>3 | same |" in table(rows)
    lines = verdicts(rows).splitlines()
    held, unsure, missed, none = (line for line in lines if line.startswith("["))
    assert "  beside: steps of the engine 1.0 / 11.0 / 9; 3 with prompts, the others 1.0 / 11.0 / 9" in lines
    waited = "ms without a CPU: watching 0.5, front 1.5, engine 0.0"
    assert f"  after: slowest steps, at > of ms: 70 > 9.0; {waited}" in lines
    assert "  quiet: 2 streams started; without their steps 1.0 / 9.0 / 9" in lines[1]
    assert "9.00 > 11.00 > 11.00 ms, 1.100 (held)" in held and "1.210 (unsure)" in unsure
    assert "1.220 (missed)" in missed and "(missed)" in none
    assert verdict((10.0, 10.9), 11.6) == "missed", "the windows without an attack are alike"
    alone = {**common, "beside": {name: rows[0]["beside"][name] for name in ("itl", "health", "watcher", "waits")}}
    assert f"| {times} | 5 | 0 |" in table([alone])


def test_times_of_steps_are_those_between_their_ends() -> None:
    """Steps of 10, 20 and 11 ms, the second with a prompt; other spans do not count."""
    ends = {0: (3.0, 8, 8), 1: (13.0, 8, 8), 2: (33.0, 8, 40), 3: (44.0, 8, 8)}
    events = [
        {"name": name, "ts": 1e3 * (end - 2), "dur": 2e3, "args": {"step": n, "rows": rows, "tokens": tokens}}
        for n, (end, rows, tokens) in ends.items() for name in ("step", "wait")
    ]  # fmt: skip
    found = intervals([{"name": "thread_name", "ph": "M"}, *reversed(events)])
    assert found["prompts"] == 1 and found["all"] == {"tokens": 3, "p50_ms": 11.0, "p99_ms": 20.0, "max_ms": 20.0}
    assert found["decode"] == {"tokens": 2, "p50_ms": 10.0, "p99_ms": 11.0, "max_ms": 11.0}


def test_memory_is_read_from_counters_as_adding_up_pages_stops_the_process() -> None:
    """Adding up the pages of a process locks its memory map."""
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=9 << 20, shared=2 << 20))
    assert _memory(process) == 7 << 20  # type: ignore[arg-type]


def test_a_reply_in_chunks_is_read_as_the_bench_reads_it() -> None:
    reply = Reply()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert reply.feed(head + b"7\r\ndata: x\r\n0\r\n\r\n") == b"data: x" and reply.complete


@contextmanager
def answering() -> Iterator[Door]:
    """A server that answers each request without a body: /health with 200, others with 400."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            while (await reader.readline()).strip():
                pass
            status = b"200 OK" if b"/health" in head else b"400 Bad Request"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        there.set()
        while not over.is_set():
            await asyncio.sleep(0.01)

    ports, there, over = list[int](), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert there.wait(30)
    yield Door("127.0.0.1", ports[0], "k", time.monotonic() + 60)
    over.set()
    thread.join(30)


def test_a_burst_counts_its_responses_and_probes_after_all_connections() -> None:
    with answering() as door:
        opened, health, *ends = burst(door, request("localhost", "k", "/nothing"), count=20, hold=1.0)
        assert (opened.label, health.status) == ("20 connections", 200)
        assert [(one.label, one.status) for one in ends] == [("20 of 20 connections", 400)]
        assert [one.status for one in burst(door, b"", count=3, hold=0.0)] == [0, 200, 0]
    assert pipeline("h", "k", "/", 3) == request("h", "k", "/") * 3
    assert head_without_body("k").endswith(b"Bearer k\r\nContent-Length: 3000\r\n\r\n")


def test_a_flood_repeats_a_request_on_kept_connections() -> None:
    with answering() as door:
        found = flood(door, request("localhost", "k", "/nothing"), clients=3, seconds=0.3)
    assert [one.status for one in found] == [400] and found[0].seconds > 0
