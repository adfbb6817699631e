"""`llmc bench`: figures against streams whose times are known, the load client against servers that misbehave."""

from __future__ import annotations

import io
import json
import math
import random
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import of_test
from llmc_runtime.bench.command import parser, run
from llmc_runtime.bench.figures import ReportSpec, figures
from llmc_runtime.bench.http_client import Reply, WireError
from llmc_runtime.bench.record import CUT, OK, Record, Stream
from llmc_runtime.bench.request_bodies import Recipe, read_items
from llmc_runtime.bench.workload import Mix, parse_mix
from llmc_runtime.format.errors import LlmcError

DONE = b"data: [DONE]\r\n\r\n"
MODELS = {"data": [{"id": "toy", "vocab_size": 428}]}


def chunked(body: bytes, rng: random.Random) -> bytes:
    """The body in chunks of random sizes, one of them with an extension, and a trailer."""
    out, at = b"", 0
    while at < len(body):
        size = rng.randint(1, 40)
        part = body[at : at + size]
        out += b"%x%s\r\n%s\r\n" % (len(part), rng.choice([b"", b";x=1"]), part)
        at += size
    return out + b"0\r\nX-End: 1\r\n\r\n"


def split(data: bytes, rng: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = rng.choice((1, 2, 3, 7, 50))
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_reply_is_read_whole_however_it_comes_apart(framing: str) -> None:
    rng = random.Random(of_test())
    for _ in range(50):
        body = bytes(random.randrange(256) for _ in range(random.randrange(200)))
        head = {
            "chunked": b"Transfer-Encoding: chunked\r\n",
            "length": b"content-length: %d\r\n" % len(body),
            "close": b"",
        }[framing]
        sent = b"HTTP/1.1 200 OK\r\nX: y\r\n" + head + b"\r\n"
        sent += chunked(body, rng) if framing == "chunked" else body
        reply = Reply()
        got = b"".join(reply.feed(part) for part in split(sent, rng))
        assert (got, reply.status) == (body, 200)
        assert reply.complete == reply.reusable == (framing != "close")


@pytest.mark.parametrize("sent", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_replies_that_are_not_http_are_reported(sent: bytes) -> None:
    with pytest.raises(WireError):
        Reply().feed(sent)


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}).encode() + b"\n\n"


def test_a_stream_s_times_are_those_of_its_chunks_with_text() -> None:
    now = [0.0]
    record = Record(0, 0.0, sent=10.0)
    stream = Stream(record, lambda: now[0])
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\r\n\r\n'
    script = [(11.0, event("")), (12.0, b": ping\n\n" + event("a")[:9]), (12.5, event("a")[9:]),
              (12.75, event("b") + event("c")), (14.0, event("d", "length")), (15.0, usage), (16.0, DONE)]  # fmt: skip
    for now[0], data in script:
        stream.feed(data)
    assert stream.complete and record.counted
    assert (record.first, record.last, record.chunks) == (12.5, 14.0, 4)
    assert record.gaps.tolist() == [0.25, 0.0, 1.25]
    assert (record.prompt_tokens, record.output_tokens) == (7, 5)


def test_an_error_event_or_no_end_is_no_whole_stream() -> None:
    broken = Stream(Record(0, 0.0), time.monotonic)
    broken.feed(event("a") + b'data: {"error": {"message": "gone"}}\n\n')
    assert not broken.complete and broken.error == "gone"
    cut = Stream(Record(0, 0.0), time.monotonic)
    cut.feed(event("a"))
    assert not cut.complete and not cut.error


def test_streams_of_other_servers_are_read_as_events_are_defined() -> None:
    """Empty data, data of several lines, "error": null, [DONE] with no blank line or not at all, several choices."""
    lines = json.dumps({"choices": [{"text": "a", "finish_reason": None}]}, indent=1).encode().split(b"\n")
    several = b"id: 1\r\n" + b"".join(b"data: " + line + b"\r\n" for line in lines) + b"\r\n"
    sent = [b": hello\n\ndata:\n\n", several, event("b", error=None), event("c", "stop"), b"data: [DONE]"]
    record = Record(0, 0.0)
    stream = Stream(record, time.monotonic)
    for data in sent:
        assert stream.complete == (record.chunks == 3)
        for one in split(data, random.Random(of_test())):
            stream.feed(one)
    assert stream.complete and record.chunks == 3
    both = Stream(Record(0, 0.0), time.monotonic)
    for index, finish in ((0, None), (1, None), (1, "stop"), (0, "length")):
        assert not both.complete
        choice = {"index": index, "delta": {"content": "x"}, "finish_reason": finish}
        both.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    assert both.complete


@pytest.mark.parametrize("sent", ["null", '"ping"', '{"choices": [null]}', '{"choices": 5}', "{", '{"usage": 3}'])
def test_events_that_are_no_completions_are_reported(sent: str) -> None:
    with pytest.raises(ValueError):
        Stream(Record(0, 0.0), time.monotonic).feed(f"data: {sent}\n\n".encode())


def test_figures_are_those_of_the_records() -> None:
    sent, gaps = (
        [random.uniform(0, 5) for _ in range(40)],
        [[random.uniform(0.001, 0.1) for _ in range(9)] for _ in range(40)],
    )
    first = [at + random.uniform(0.01, 0.5) for at in sent]
    records = []
    for i in range(40):
        last = first[i] + sum(gaps[i])
        status = (OK, OK, OK, CUT)[i % 4]
        records.append(
            Record(0, sent[i], sent[i], first[i], last, last, 3, 20, 10, True, status, "", array("f", gaps[i]))
        )
    records.append(Record(0, 1.0, 1.0, end=9.0, prompt_tokens=3, error="HTTP 503: full"))
    done = [i for i in range(40) if i % 4 != 3]
    goal = 1e3 * float(np.median([first[i] - sent[i] for i in done]))
    result = figures(records, 0.5, ReportSpec(percentiles=(50, 99.9), goals={"ttft": goal}))
    end = max([9.0, *(r.end for r in records)])
    assert (result["completed"], result["failed"], result["cut"]) == (30, 1, 10)
    assert result["duration"] == pytest.approx(end - 0.5)
    assert (result["total_input_tokens"], result["total_output_tokens"], result["tokens_per_chunk"]) == (120, 800, 2.0)
    assert result["output_throughput"] == pytest.approx(800 / (end - 0.5))
    assert result["request_throughput"] == pytest.approx(30 / (end - 0.5))
    assert result["request_goodput"] == pytest.approx(15 / (end - 0.5))
    ttft = [1e3 * (first[i] - sent[i]) for i in range(40)]
    assert result["mean_ttft_ms"] == pytest.approx(np.mean(ttft))
    assert result["std_ttft_ms"] == pytest.approx(np.std(ttft))
    assert result["p99.9_ttft_ms"] == pytest.approx(np.percentile(ttft, 99.9))
    tpot = [1e3 * sum(one) / 19 for one in gaps]
    assert result["median_tpot_ms"] == pytest.approx(np.median(tpot), rel=1e-5)
    assert result["p50_itl_ms"] == pytest.approx(1e3 * np.median(np.concatenate(gaps)), rel=1e-5)
    assert result["mean_e2el_ms"] == pytest.approx(np.mean([1e3 * (first[i] - sent[i] + sum(gaps[i])) for i in done]))
    assert result["errors"] == {"HTTP 503: full": 1}
    assert result["max_concurrent_requests"] == max(sum(r.sent <= at < r.end for r in records) for at in [*sent, 1.0])


def test_requests_are_the_same_however_many_processes_share_them() -> None:
    mix = Mix("m", rate=random.uniform(1, 50), num_prompts=23, input_len=9, output_len=7, range_ratio=0.5, prefix_len=4)
    seed = random.randrange(100)
    recipe = Recipe("/v1/completions", "toy", 428, seed)

    def bodies(processes: int) -> list[dict[str, Any]]:
        sources = [recipe.bodies(mix, process, processes) for process in range(processes)]
        return [json.loads(next(sources[i % processes])[0]) for i in range(23)]

    alone = bodies(1)
    assert bodies(3) == alone
    assert len({json.dumps(body["prompt"][4:]) for body in alone}) == 23
    assert len({json.dumps(body["prompt"][:4]) for body in alone}) == 1
    assert {4 <= len(body["prompt"]) - 4 <= 14 and 3 <= body["max_tokens"] <= 11 for body in alone} == {True}
    assert all(16 <= token < 428 * 0.9 for body in alone for token in body["prompt"])
    assert list(mix.arrivals("1")) == list(mix.arrivals("1")) and len(list(mix.arrivals("1"))) == 23


def test_arrivals_have_the_requested_rate_and_burstiness() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        gaps = np.diff(list(Mix(rate=20.0, burstiness=burstiness, num_prompts=5000).arrivals("7")))
        assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
        assert np.var(gaps) / np.mean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.2)
    for seed in "123":
        times = list(Mix(rate=50.0, duration=2.0).arrivals(seed))
        assert len(times) == 100 and times[0] == 0.0 and max(times) < 2.0 and times == sorted(times)
    assert len(list(Mix(rate=50.0, duration=2.0, num_prompts=7).arrivals("7"))) == 7


def test_mixes_are_written_briefly_and_refused_where_they_make_no_sense() -> None:
    default = Mix(num_prompts=9, max_concurrency=4, burstiness=2.0, output_len=5)
    mix = parse_mix("name=prompts, rate=8,input=2000,output=16,duration=120", default)
    assert mix == Mix("prompts", 8.0, 2.0, None, None, 120.0, 2000, 16)
    assert json.loads(json.dumps(default.to_json())) == {**vars(default), "rate": "inf"}
    for text in ("rate=8", "duration=3", "rate=x,num=1", "speed=3", "num=0", "rate=-1,num=3", "num=1,range_ratio=1"):
        with pytest.raises(LlmcError) as e:
            parse_mix(text, default)
        assert e.value.code == "E670"


def test_data_sets_are_read(tmp_path: Any) -> None:
    path = tmp_path / "set"
    path.write_text('{"prompt": "p", "output_len": 3}\n{"messages": [{"role": "user", "content": "c"}]}\n')
    assert [item.output_len for item in read_items(path, "custom", "/v1/chat/completions")] == [3, None]
    assert [item.prompt for item in read_items(path, "custom", "/v1/completions")] == ["p"]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x" * 40}, {"from": "human", "value": "z"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    (item,) = read_items(path, "sharegpt", "/v1/completions")
    assert (item.prompt, item.output_len) == ("q", 10)
    path.write_text("{")
    with pytest.raises(LlmcError, match="E670") as e:
        read_items(path, "custom", "/v1/completions")
    assert "JSON lines" in e.value.remedy and "ShareGPT" in e.value.remedy


Answer = Callable[[socket.socket, dict[str, Any]], bool]


@contextmanager
def scripted(answer: Answer) -> Iterator[int]:
    """Run a server with a thread per connection; `answer` handles each POST until it returns False. Yields its port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                headers = {}
                while (field := stream.readline()) not in (b"\r\n", b""):
                    name, _, value = field.decode().partition(":")
                    headers[name.lower()] = value.strip()
                if line.startswith(b"GET"):
                    body = json.dumps(MODELS).encode()
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                elif not answer(connection, json.loads(stream.read(int(headers["content-length"])))):
                    return

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def part(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def end_of(asked: dict[str, Any], tokens: int) -> bytes:
    usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}
    usage_event = json.dumps({"choices": [], "usage": usage}).encode()
    return part(b"data: " + usage_event + b"\n\n") + part(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def measured(port: int, *options: str) -> tuple[int, dict[str, Any]]:
    args = parser().parse_args(
        ["serve", "--port", str(port), "--json", "--disable-tqdm", "--random-input-len", "5", *options]
    )
    out = io.StringIO()
    code = run(args, {}, out, io.StringIO())
    return code, json.loads(out.getvalue())


def test_a_load_finds_the_times_that_the_server_keeps() -> None:
    first, pause = random.uniform(0.08, 0.12), random.uniform(0.03, 0.05)

    def answer(connection: socket.socket, asked: dict[str, Any]) -> bool:
        time.sleep(first)
        connection.sendall(STREAM)
        for i in range(asked["max_tokens"]):
            time.sleep(pause if i else 0)
            connection.sendall(part(event("xy")))
        connection.sendall(end_of(asked, 2 * asked["max_tokens"]))
        return True

    mixes = ["--mix", "name=long,num=4,concurrency=2,output=6", "--mix", "name=short,num=6,rate=20,output=2"]
    with scripted(answer) as port:
        code, figures = measured(port, "--client-processes", "2", "--num-warmups", "1", *mixes)
    long, short = figures["mixes"]["long"], figures["mixes"]["short"]
    assert code == 0 and (figures["completed"], long["completed"], short["completed"]) == (10, 4, 6)
    assert (long["total_input_tokens"], long["total_output_tokens"], short["total_output_tokens"]) == (20, 48, 24)
    assert long["tokens_per_chunk"] == 2.0 and long["max_concurrent_requests"] == 2
    for one, count in ((long, 6), (short, 2)):  # never before the server; a busy machine may be late, by no other unit
        expected = {"ttft": first, "itl": pause, "tpot": pause * (count - 1) / (2 * count - 1)}
        expected["e2el"] = first + pause * (count - 1)
        for name, seconds in expected.items():
            assert 0.99e3 * seconds <= one[f"median_{name}_ms"] <= 1e3 * seconds + 5000, (name, one)
    assert long["duration"] >= 2 * (first + 5 * pause)


def test_streams_of_a_mix_with_a_duration_are_cut_off_at_its_end() -> None:
    def answer(connection: socket.socket, asked: dict[str, Any]) -> bool:
        connection.sendall(STREAM)
        while True:
            time.sleep(0.01)
            try:
                connection.sendall(part(event("x")))
            except OSError:
                return False

    with scripted(answer) as port:
        code, figures = measured(port, "--num-warmups", "0", "--duration", "0.5", "--max-concurrency", "3")
    assert code == 0 and (figures["completed"], figures["cut"], figures["failed"]) == (0, 3, 0)
    assert 0.5 <= figures["duration"] < 20 and figures["total_output_tokens"] > 3 and figures["mean_e2el_ms"] is None
    assert figures["median_itl_ms"] >= 9


def test_failures_are_counted_and_reported_and_idle_connections_may_be_closed() -> None:
    count = iter(range(1000))

    def answer(connection: socket.socket, asked: dict[str, Any]) -> bool:
        turn = next(count) % 4
        if turn == 0:  # in order, and closed after it without a word
            connection.sendall(STREAM + part(event("a", "length")) + end_of(asked, 1))
            return False
        if turn == 1:
            body = b'{"error": {"message": "the queue is full"}}'
            connection.sendall(b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        elif turn == 2:
            connection.sendall(STREAM + part(b'data: {"error": {"message": "lost"}}\n\n') + b"0\r\n\r\n")
        else:
            connection.sendall(STREAM + part(event("a")))
        return turn != 3

    with scripted(answer) as port:
        code, figures = measured(port, "--num-warmups", "0", "--num-prompts", "8", "--max-concurrency", "1")
    assert code == 1 and (figures["completed"], figures["failed"]) == (2, 6)
    errors = figures["errors"]
    assert errors.pop("HTTP 503: the queue is full") == 2 and errors.pop("lost") == 2
    assert [number for words, number in errors.items() if "closed" in words] == [2]


def test_a_server_that_is_not_there_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LlmcError, match="E671"):
        measured(port)
    with pytest.raises(LlmcError, match="E671"):
        measured(port, "--model", "toy", "--random-vocab-size", "99")
    wrong = ["--goodput speed:3", "--client-processes 0", "--request-timeout 0", "--seed -1", "--num-warmups -1",
             "--num-prompts 0", "--random-vocab-size 0", "--base-url http://h:99999", "--base-url http://h:8x",
             "--base-url http://[::1", "--base-url h:80", "--backend vllm --endpoint /v1/chat/completions"]  # fmt: skip
    for words in wrong:
        with pytest.raises(LlmcError, match="E670"):
            measured(port, *words.split())


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", ""])
def test_an_address_may_have_its_version_or_not(path: str) -> None:
    from llmc_runtime.bench.serve import _base

    for front in ("http://h:80", "https://h/proxy"):
        args = parser().parse_args(["serve", "--base-url", front + path])
        assert _base(args).geturl() == front


def test_a_command_line_of_vllms_benchmark(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    def answer(connection: socket.socket, body: dict[str, Any]) -> bool:
        requests.append(body)
        connection.sendall(STREAM + part(event("a", "length")) + b"0\r\n\r\n")
        return True

    words = f"--num-prompts 2 --num-warmups 0 --save-result --result-dir {tmp_path / 'new'} --result-filename r.json"
    for backend, field in (("vllm", "prompt"), ("openai-chat", "messages"), ("openai", "prompt")):
        with scripted(answer) as port:
            code, figures = measured(port, "--backend", backend, "--goodput", "ttft:60000", "e2el:1e-9", *words.split())
        assert code == 0 and figures["completed"] == 2 and figures["backend"] == backend and field in requests[-1]
        assert figures["request_goodput"] == 0 and figures["goals"] == {"ttft": 60000, "e2el": 1e-9}
        assert json.loads((tmp_path / "new" / "r.json").read_text())["date"] == figures["date"]


def test_a_client_that_is_the_bottleneck_is_reported() -> None:
    from llmc_runtime.bench.serve import _warnings

    mix = Mix(num_prompts=1)
    calm = {"all": {"max_send_delay_ms": math.inf}}
    assert not _warnings(0.5, 2.0, [mix], calm)
    assert "bottleneck" in _warnings(0.99, 2.0, [mix], calm)[0] and "bottleneck" in _warnings(0.1, 50.0, [mix], calm)[0]
    assert "late" in _warnings(0.1, 1.0, [Mix(rate=3.0, num_prompts=1)], {"all": {"max_send_delay_ms": 400.0}})[0]
