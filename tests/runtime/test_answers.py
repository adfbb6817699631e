"""Large responses: JSON in pieces, packed log-probabilities, the limit on a response's size and its accounting."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from llmc_runtime import SamplingParams
from llmc_runtime.engine.messages import Rows
from llmc_runtime.logprobs import Logprob, LogprobRows
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.step import TokenLogprobs

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.lazy_json import Encoding, Lazy, is_lazy, pieces
from llmc_runtime.server.http.replies import JsonSlices, JsonStream, as_answer
from llmc_runtime.server.operations.admission import Admission
from llmc_runtime.server.requests.parse import parse
from llmc_runtime.server.requests.request_fields import ChatRequest, CompletionRequest
from llmc_runtime.server.requests.response_size import check_size, cut, size_of
from llmc_runtime.server.text_pool import text_messages as m
from llmc_runtime.server.text_pool.text_process import TextProcess

from tests.runtime.served import Served, served, until


def drawn(depth: int) -> tuple[Any, Any]:
    """A value with Lazy in it, and the same with lists."""
    kind = random.randrange(3, 8) if depth == 0 else random.randrange(8)
    if kind < 3:
        count = random.choice([0, 1, 3, 600, 1500])
        numbers = [random.choice([None, 1.5, 'a\u2028"', 7]) for _ in range(count)]
        return (Lazy(iter(numbers)), numbers) if kind else (numbers, numbers)
    if kind == 3 and depth < 3:
        both = [drawn(depth + 1) for _ in range(random.randrange(4))]
        return Lazy((one for one, _ in both), small=False), [other for _, other in both]
    if kind < 6 and depth < 3:
        named = {random.choice(['k"', "é", "x"]) + str(i): drawn(depth + 1) for i in range(random.randrange(4))}
        return {k: one for k, (one, _) in named.items()}, {k: other for k, (_, other) in named.items()}
    scalar = random.choice([None, True, -0.1, "text", 1 << 40])
    return scalar, scalar


def test_the_pieces_of_a_value_are_its_json() -> None:
    for _ in range(300):
        lazy, plain = drawn(0)
        parts = list(pieces(lazy))
        assert b"".join(parts) == msgspec.json.encode(plain)
        assert max(map(len, parts)) < 10_000
    assert is_lazy({"a": [{"b": Lazy([])}]}) and is_lazy([0] * 1000) and not is_lazy({"a": [{"b": [1, 2]}]})


@pytest.mark.parametrize("text", ["\x01" * 300_000, 'a"\u00e9\U0001f600' * 50_000, "x" * (1 << 20)])
def test_a_long_text_is_encoded_in_pieces(text: str) -> None:
    """Wherever it is: 8 MiB of characters that are escaped take 170 ms in one call."""
    for value in (text, {"k": text}, {"k": [{"k": text}, text]}, [text, 1], Lazy([{"k": text}], small=False)):
        parts = list(pieces(value))
        assert is_lazy(value) and max(map(len, parts)) < 100_000
        plain = value.items if isinstance(value, Lazy) else value
        assert b"".join(parts) == msgspec.json.encode(plain)
    assert not is_lazy({"k": "x" * 1000})


def test_a_small_answer_has_its_length_and_a_large_one_is_sent_in_slices_that_let_others_run() -> None:
    async def main() -> None:
        encoding, ended = Encoding(), list[str]()
        small = await as_answer({"a": Lazy([1])}, encoding, lambda: None, lambda: ended.append("small"))
        assert small.body == b'{"a":[1]}' and small.headers["content-length"] == "9" and ended == ["small"]
        rows = [{str(i): {"logprob": -0.5, "text": "x" * 20}} for i in range(20_000)]
        large = await as_answer({"a": Lazy(rows)}, encoding, lambda: None, lambda: ended.append("large"))
        assert isinstance(large, JsonStream) and "content-length" not in large.headers
        turns, sent = [0], list[bytes]()

        async def others() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.Event().wait()

        task = asyncio.create_task(others())
        await large({"type": "http"}, receive, send)
        task.cancel()
        assert json.loads(b"".join(sent)) == {"a": rows} and ended == ["small", "large"]
        assert turns[0] > len(sent) > 10 and max(map(len, sent)) < 1 << 19

    asyncio.run(main())


def test_large_responses_of_a_key_do_not_delay_those_of_others() -> None:
    """Keys take turns: another key's response waits for a slice or two, however many the first key has."""

    async def main() -> None:
        encoding, slices = Encoding(), list[str]()

        async def encode(key: str, count: int) -> None:
            items = ("x" * 70_000 for _ in range(count))  # a slice each
            async for _ in encoding.of(key).parts(Lazy(items)):
                slices.append(key)

        first = [asyncio.create_task(encode("a", 1000)) for _ in range(40)]
        while len(slices) < 50:
            await asyncio.sleep(0)
        before = len(slices)
        await asyncio.wait_for(encode("b", 5), 60)
        assert len(slices) - before <= 3 * 6 and slices.count("b") == 6
        before = len(slices)
        await asyncio.wait_for(encoding.of("c").pause(), 60)
        assert len(slices) - before <= 2
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        await asyncio.wait_for(encode("a", 1), 60)

    asyncio.run(main())


def test_a_large_answer_of_a_text_process_is_received_in_parts() -> None:
    ours, theirs = socket.socketpair()
    process, data = TextProcess.__new__(TextProcess), random.Random(3).randbytes(2_500_000)
    process._link = ours
    ours.setblocking(False)
    writer = threading.Thread(target=theirs.sendall, args=[m.HEAD.pack(m.ANSWER, len(data)) + data])
    writer.start()
    kind, parts = asyncio.run(process.receive_parts())
    writer.join()
    assert kind == m.ANSWER and b"".join(parts) == data and max(map(len, parts)) <= 1 << 20
    ours.close()
    theirs.close()


def test_parts_of_a_document_are_freed_as_they_are_sent() -> None:
    """To free tens of megabytes at once takes the event loop milliseconds."""
    parts = [bytearray(b"[" + b" " * 99_999), *(bytearray(b" " * 100_000) for _ in range(8)), bytearray(b"1]")]
    left, sent = list[int](), list[bytes]()

    async def send(message: Any) -> None:
        left.append(len(parts))
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(JsonSlices(parts)({"type": "http"}, receive, send))
    assert json.loads(b"".join(sent)) == [1] and len(b"".join(sent)) == 900_002
    assert left[0] == 10 and left[-1] == 0 and sorted(left, reverse=True) == left and len(set(left)) == 11


def test_a_client_that_leaves_ends_the_encoding() -> None:
    async def main() -> None:
        made, ended, gone = [0], list[bool](), list[bool]()

        def endless() -> Iterator[str]:
            while True:
                made[0] += 1
                yield "x" * 100

        reply = await as_answer(Lazy(endless()), Encoding(), lambda: gone.append(True), lambda: ended.append(True))

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)

        await asyncio.wait_for(reply({"type": "http"}, receive, send), 20)
        before = made[0]
        await asyncio.sleep(0.01)
        assert gone == ended == [True] and made[0] == before

    asyncio.run(main())


def test_packed_rows_are_what_went_in() -> None:
    for width in (0, 1, 20):
        rows = [
            TokenLogprobs(
                -random.random(), random.randrange(1, 99), tuple(random.sample(range(500), k)), (-random.random(),) * k
            )
            for k in (random.randint(0, width) for _ in range(30))
        ]
        packed = PackedLogprobs(width)
        packed.extend(rows[:10])
        for row in rows[10:]:
            packed.append(row)
        assert packed == rows and packed[3:7] == rows[3:7] and packed[-1] == rows[-1]
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(Rows(width, bytes(packed.data))), type=Rows).packed()
        assert again == rows and packed != rows[:-1]
        assert [packed.own(i) for i in range(30)] == [(row.logprob, row.rank) for row in rows]
    wide = PackedLogprobs(1)
    wide.append(TokenLogprobs(-1.0, 4, (5, 6), (-0.1, -0.2)))
    assert wide[0] == TokenLogprobs(-1.0, 4, (5,), (-0.1,)), "the likeliest are kept"
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([1, b"123"]), type=Rows)


def test_views_make_the_mappings_that_are_read() -> None:
    packed = PackedLogprobs(2)
    for i in range(4):
        packed.append(TokenLogprobs(-1.0 - i, 2, (9, 3 + i), (-0.5, -1.0 - i)))
    tokens, spelled = [2, 3, 4, 5, 6], str
    view = LogprobRows(tokens, packed, spelled, 0, 5, 1)
    assert view[0] is None and view.own(0) is None and len(view) == 5
    assert view[1] == {3: Logprob(-1.0, 2, "3"), 9: Logprob(-0.5, 1, "9")} and view.own(1) == Logprob(-1.0, 2, "3")
    assert view == list(view) and view[1:3] == list(view)[1:3]
    first, second = (LogprobRows(tokens[1:], packed, spelled, *part) for part in ((0, 1), (1, 4)))
    assert first.joined(second) == view[1:]
    with pytest.raises(ValueError, match="consecutive"):
        second.joined(first)


def completion(**fields: Any) -> CompletionRequest:
    return parse(msgspec.json.encode({"prompt": [1], **fields}), CompletionRequest, lambda name: None)


def test_sizes_grow_with_everything_that_multiplies() -> None:
    params = SamplingParams(max_tokens=10)
    plain = size_of(completion(), params, [5, 5], 20)
    assert not plain.reserved and plain.total == 160
    scored = size_of(completion(prompt_logprobs=20), params, [1000] * 128, 128)
    assert scored.reserved and 181_000_000 < scored.total < 260_000_000, "measured: 181 MB"
    twice = size_of(completion(prompt_logprobs=20), SamplingParams(n=2), [1000] * 128, 128)
    assert twice.fixed == 2 * scored.fixed
    with pytest.raises(ApiError, match="--max-answer-bytes") as refusal:
        check_size(completion(prompt_logprobs=20), scored, 64 << 20)
    assert (refusal.value.status, refusal.value.code, refusal.value.param) == (
        400,
        "answer_too_large",
        "prompt_logprobs",
    )
    chat = parse(b'{"messages":[]}', ChatRequest, lambda name: None)
    given = SamplingParams(logprobs=20, n=4, max_tokens=100_000)
    size = size_of(chat, given, [10], 400_000)
    fits = cut(given, size, 64 << 20, 4)
    assert 0 < (fits.max_tokens or 0) < 100_000 and size.per_token * 4 * (fits.max_tokens or 0) <= 64 << 20
    assert cut(SamplingParams(max_tokens=5), size, 64 << 20, 4).max_tokens == 5


def test_answers_are_accounted_for_by_key_and_together() -> None:
    refusals = list[str]()
    admission = Admission(10, 1000, keys=2, answers=100, refused=refusals.append)
    alone = admission.reserve_response("a", 90)
    with pytest.raises(ApiError) as mine:
        admission.reserve_response("a", 10)
    with pytest.raises(ApiError) as ours:
        admission.reserve_response("b", 20)
    assert (mine.value.status, ours.value.status, refusals) == (429, 503, ["answer_bytes"] * 2)
    assert {"Retry-After"} <= set(mine.value.headers) & set(ours.value.headers)
    alone.close()
    alone.close()
    rooms = [
        admission.reserve_response("a", 20),
        admission.reserve_response("a", 30),
        admission.reserve_response("b", 50),
    ]
    for room in rooms:
        room.close()
    assert not admission.answer_bytes


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


def test_an_answer_over_the_limit_is_refused_and_one_under_it_is_whole(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [[random.randrange(10, 200) for _ in range(60)] for _ in range(40)]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 12}
        reply = http.post("/v1/completions", json=body)
        assert (
            reply.status_code == 200
            and reply.headers["transfer-encoding"] == "chunked"
            and len(reply.content) > 1 << 18
        )
        logprobs = [choice["prompt_logprobs"] for choice in reply.json()["choices"]]
        for prompt, rows in zip(ids, logprobs, strict=True):
            assert rows[0] is None and all(str(token) in row for token, row in zip(prompt[1:], rows[1:], strict=True))
        one = http.post("/v1/completions", json=body | {"prompt": ids[0]}).json()
        assert one["choices"][0]["prompt_logprobs"] == logprobs[0]
        monkeypatch.setattr(server.serving, "max_answer", 50_000)
        error = http.post("/v1/completions", json=body).json()["error"]
        assert (error["code"], error["param"]) == ("answer_too_large", "prompt_logprobs")
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "n": 2}
        chat |= {"ignore_eos": True, "seed": 5}
        reply = http.post("/v1/chat/completions", json=chat)
        most = 50_000 // (2 * (8 + 22 * 105))
        assert reply.status_code == 200, reply.text
        assert [len(c["logprobs"]["content"]) for c in reply.json()["choices"]] == [most] * 2
        error = http.post("/v1/chat/completions", json=chat | {"max_tokens": most + 1}).json()["error"]
        assert (error["code"], error["param"]) == ("answer_too_large", "logprobs")
        events = http.post("/v1/chat/completions", json=chat | {"stream": True}).text.split("\n\n")
        chunks = [json.loads(one[6:])["choices"][0] for one in events if one.startswith("data: {")]
        logprobs = [one["logprobs"] for one in chunks if one["index"] == 0 and one["logprobs"]]
        assert [row for one in logprobs for row in one["content"]] == reply.json()["choices"][0]["logprobs"]["content"]
    server.rest()
    assert not server.serving.admission.answer_bytes


def test_a_client_that_leaves_a_large_answer_gives_everything_back(server: Served) -> None:
    body = json.dumps({"prompt": [[20] * 60] * 60, "max_tokens": 1, "prompt_logprobs": 20}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert server.serving.admission.answer_bytes
    server.rest()
    until(lambda: not server.serving.admission.answer_bytes)
