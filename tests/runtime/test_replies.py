"""How streams leave: ready events are what encoding gives, on any version of HTTP, and who leaves ends the work."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import pytest
from llmc_runtime.server.http.replies import ClientDisconnected, PlainEvents, event, while_connected

from tests.runtime.served import served


def test_plain_events_are_what_encoding_gives() -> None:
    letters = 'a"\\\n\u2028é\U0001f600\x00{'
    for key, choice in (("text", {"text": ""}), ("content", {"delta": {"content": ""}})):
        head = {"id": 'x"index":0', "model": '"text":""', "created": 5}
        chunk = {**head, "choices": [{"index": 0, **choice, "finish_reason": None}], "usage": None}
        plain = PlainEvents(chunk, key)
        for _ in range(50):
            index, text = random.randrange(300), "".join(random.choices(letters, k=random.randrange(9)))
            one = {"text": text} if key == "text" else {"delta": {"content": text}}
            expected = {**head, "choices": [{"index": index, **one, "finish_reason": None}], "usage": None}
            assert plain.event(index, text) == event(expected)


def asked(url: str, version: str, **more: Any) -> tuple[bytes, bytes]:
    """Head and body of the answer, as they came."""
    body = json.dumps({"prompt": [20, 21], "max_tokens": 40, "temperature": 0, "stream": True, **more}).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        head = f"POST /v1/completions HTTP/{version}\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    before, _, after = got.partition(b"\r\n\r\n")
    return before, after


def unchunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        part, end, body = body[: int(size, 16)], body[int(size, 16) :][:2], body[int(size, 16) + 2 :]
        assert end == b"\r\n"
        out += part
    return out


def parsed(body: bytes) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream and its chunks, which [DONE] ends."""
    *events, done, rest = body.decode().split("\n\n")
    assert done == "data: [DONE]" and not rest
    chunks = [json.loads(one.removeprefix("data: ")) for one in events]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), chunks


def test_a_stream_is_the_same_on_any_version_of_http_and_beside_log_probabilities() -> None:
    usage = {"stream_options": {"include_usage": True}}
    with served(pace=0.002) as server:
        head, body = asked(server.url, "1.1", **usage)
        assert b"chunked" in head.lower()
        text, chunks = parsed(unchunked(body))
        head, body = asked(server.url, "1.0", **usage)
        assert b"chunked" not in head.lower()
        assert parsed(body)[0] == text
        slow, others = parsed(unchunked(asked(server.url, "1.1", logprobs=1, **usage)[1]))
    assert slow == text and len(chunks) > 3
    assert {tuple(one) for one in chunks} == {tuple(one) for one in others}
    assert {tuple(c) for one in chunks for c in one["choices"]} == {tuple(c) for one in others for c in one["choices"]}
    assert chunks[-1]["usage"]["completion_tokens"] == 40 and chunks[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("leaves", [True, False])
def test_a_disconnect_cancels_the_work_and_other_cancellations_propagate(leaves: bool) -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def receive() -> Any:
        await asyncio.sleep(0.01 if leaves else 60)
        return {"type": "http.disconnect"}

    async def main() -> None:
        task = asyncio.ensure_future(while_connected(receive, work()))
        if not leaves:
            await asyncio.sleep(0.01)
            task.cancel()
        with pytest.raises(ClientDisconnected if leaves else asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True]


def test_work_that_ends_gives_what_it_has() -> None:
    async def receive() -> Any:
        await asyncio.sleep(60)

    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    async def main() -> int:
        found = await while_connected(receive, work())
        assert len(asyncio.all_tasks()) == 1
        return found

    assert asyncio.run(main()) == 5


def test_a_disconnect_just_after_the_work_keeps_its_result() -> None:
    """Otherwise the response is never closed, and a text process stays reserved."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        left, done = loop.create_future(), loop.create_future()

        async def receive() -> Any:
            await left
            return {"type": "http.disconnect"}

        async def work() -> int:
            loop.call_soon(left.set_result, None)  # the watcher ends in the same round as the work
            loop.call_soon(done.set_result, None)
            await done
            return 5

        found = await while_connected(receive, work())
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        return found

    assert asyncio.run(main()) == 5
