"""Data with many lines is parsed in slices, one per iteration of the event loop, without loss."""

from __future__ import annotations

import asyncio
import json
import random
import socket

import pytest
from draw import of_test
from llmc_runtime.server.http import parser_limits
from llmc_runtime.server.http.parser_limits import SLICE_LINES, SliceTurns, first_slice

from tests.runtime.served import served


def test_slices_end_after_lines_and_make_the_whole() -> None:
    rng = random.Random(of_test())
    for _ in range(200):
        data = bytes(rng.choices(b"1\r\n \n", k=rng.randint(0, 3000)))
        start, slices, rest = rng.randint(0, 20), list[bytes](), data
        while rest:
            one, rest = first_slice(rest, 0 if slices else start)
            assert one and one[0 if slices else start :].count(b"\n") <= SLICE_LINES
            assert not rest or one.endswith(b"\n")
            slices.append(one)
        assert b"".join(slices) == data


def test_one_slice_is_parsed_per_iteration_in_order() -> None:
    async def run() -> list[int]:
        turns, log, per_iteration = SliceTurns(), list[str](), list[int]()

        def parse(name: str, more: int) -> None:
            log.append(name)
            if more:
                turns.add(lambda: parse(name, more - 1))

        for name in "abc":
            turns.add(lambda name=name: parse(name, 2))  # type: ignore[misc]
        while len(log) < 9:
            before = len(log)
            await asyncio.sleep(0)
            per_iteration.append(len(log) - before)
        assert "".join(log) == "abc" * 3
        return per_iteration

    assert set(asyncio.run(run())) <= {0, 1}


@pytest.mark.parametrize("piece", [1, 7, 700, 1 << 20])
def test_requests_in_slices_are_those_that_were_sent(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies in chunks of a few bytes and others in one pipeline, in pieces that end anywhere."""
    monkeypatch.setattr(parser_limits, "SLICE_LINES", 6)
    rng = random.Random(of_test())
    seed = rng.randrange(1 << 30)
    print(f"seed {seed}")
    rng.seed(seed)
    sent, tokens = b"", []
    for number in range(6 if piece > 1 else 2):
        tokens.append(rng.randint(1, 6))
        body = json.dumps({"prompt": "x\n" * rng.randint(1, 30), "max_tokens": tokens[-1]}, indent=1).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        if number % 2:
            sent += head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            continue
        size = rng.randint(1, 5)
        chunks = [body[at : at + size] for at in range(0, len(body), size)]
        sent += head + b"Transfer-Encoding: chunked\r\n\r\n"
        sent += b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n\r\n"
    with served() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as link:
            for at in range(0, len(sent), piece):
                link.sendall(sent[at : at + piece])
            got = b""
            while got.count(b'"completion_tokens":') < len(tokens):
                part = link.recv(1 << 16)
                assert part, got
                got += part
        answers = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in got.split(b"HTTP/1.1 200 OK")[1:]]
        assert [one["usage"]["completion_tokens"] for one in answers] == tokens
        server.rest()


def test_a_body_in_slices_that_is_refused_ends_its_connection() -> None:
    with served() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as link:
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            link.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 300 + b"x\r\n{}\r\n" * 300)
            got = b""
            while part := link.recv(1 << 16):
                got += part
            assert b"HTTP/1.1 200" not in got
        server.rest()
