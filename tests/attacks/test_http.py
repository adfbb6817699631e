"""Malicious connections: huge, slow and invalid HTTP, unusual JSON, growth of metrics, long texts, disconnects."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tests.attacks.bodies import prompt
from tests.attacks.oracle import GOLDEN
from tests.attacks.target import JSON, Target, target, until
from tests.attacks.wire import Link, head, raw

POSTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip
BODY = json.dumps(GOLDEN).encode()


def feed(server: Target, first: bytes, piece: bytes, times: int, patience: float = 20.0) -> tuple[int, int, float]:
    """Send `first` and then a piece again and again, until the server takes none for `patience` seconds: the status of
    the answer (0: closed without one), bytes that could be sent, seconds."""
    began, sent = time.monotonic(), 0
    with Link(server) as link:
        usual = link.gettimeout()
        link.settimeout(patience)
        if link.send_some(first):
            while sent < len(piece) * times and link.send_some(piece):
                sent += len(piece)
        link.settimeout(usual)
        return link.answer().status, sent, time.monotonic() - began


WATCH = """
import http.client, select, sys, time
link, seconds = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2])), []
print(flush=True)
while not seconds or sys.stdin not in select.select([sys.stdin], [], [], 0.005)[0]:
    began = time.monotonic()
    link.request("GET", "/health")
    assert link.getresponse().read() == b""
    seconds.append(time.monotonic() - began)
print(*sorted(seconds))
"""


@contextlib.contextmanager
def watched(server: Target) -> Iterator[list[float]]:
    """The times of /health during the block, sorted, taken by a process of its own: this one is busy attacking."""
    found: list[float] = []
    command = [sys.executable, "-c", WATCH, server.host, str(server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdin is not None and watcher.stdout is not None
        watcher.stdout.readline()
        yield found
        watcher.stdin.close()
        found += map(float, watcher.stdout.read().split())
    assert found


def test_06_headers_that_are_huge_or_many(steady: Target, times: Callable[[int, int], int]) -> None:
    """100 MB of a header, and 10,000 of them: refused soon, in no memory."""
    before = steady.memory()
    line = f"GET /health HTTP/1.1\r\nHost: {steady.host}\r\n".encode()
    status, sent, seconds = feed(steady, line + b"X-Long: ", b"y" * (1 << 20), times(8, 100))
    assert status in (0, 400, 431) and seconds < 5, (status, sent, seconds)  # what comes after is dropped
    many = b"".join(b"X-%d: y\r\n" % i for i in range(10_000))
    assert raw(steady, line + many + b"\r\n").status in (0, 400, 431)
    assert raw(steady, line + b"".join(b"X-%d: y\r\n" % i for i in range(150)) + b"\r\n").status == 431
    assert raw(steady, line + b"X-Long: " + b"y" * 40_000 + b"\r\n\r\n").status == 431
    assert raw(steady, b"GET /" + b"y" * 200_000 + b" HTTP/1.1\r\n\r\n").status in (0, 400, 414, 431)
    assert raw(steady, b"y" * 200_000 + b"\r\n\r\n").status in (0, 400, 414)
    assert steady.memory() - before < 50 << 20


def test_06_white_space_in_malformed_lines(steady: Target) -> None:
    """Each is refused at once, with or without a key: a parser that divides the spaces in all ways takes seconds."""
    start, spaces = b"GET / HTTP/1.1\r\nHost: x\r\n", b" " * 28_000
    chunked = head(steady, Transfer_Encoding="chunked")
    for sent in (
        start + b"X:%b\0\r\n\r\n" % spaces, start + b"X:%b\v\r\n\r\n" % spaces,
        chunked + b"0\r\nX:%b\0\r\n\r\n" % spaces[:1900], chunked + b"5;%b\nX\r\nabcde\r\n" % spaces[:1900],
    ):  # fmt: skip
        for _ in range(20):
            assert raw(steady, sent).status == 400, sent[:60]


def test_06_bodies_that_are_huge(steady: Target, times: Callable[[int, int], int], draw: Random) -> None:
    """200 MB announced, streamed in chunks, or hidden behind a small number; on every endpoint. Where nobody reads a
    body, most endpoints are sent 4 MB of them."""
    before, size = steady.memory(), times(20, 200) << 20
    for path in POSTS:
        assert raw(steady, head(steady, path, Content_Length=size) + b"{").status == 413, path
        assert raw(steady, head(steady, path, Content_Length="9" * 400) + b"{").status in (400, 413), path
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        status, sent, seconds = feed(steady, head(steady, path, Transfer_Encoding="chunked"), chunk, size >> 20)
        assert status in (0, 413) and seconds < 10, (status, sent, seconds)
    paths = [path for path, _ in steady.routes]
    whole = draw.sample(paths, 3)
    for path in paths:
        pieces = (size >> 20) if path in whole else 4
        first = head(steady, path, "GET", Content_Length=size)
        status, sent, _ = feed(steady, first, b" " * (1 << 20), pieces, patience=1.0)  # most are never read
        assert status != 500, path
    assert steady.memory() - before < 80 << 20


def test_06_bombs_are_not_opened(steady: Target) -> None:
    """Compressed bodies are refused as they come, whatever they are called."""
    body = b'{"prompt": "' + b"x" * (50 << 20) + b'"}'
    squeezed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body), "zstd": b"\x28\xb5\x2f\xfd" + b"\0" * 999}
    for name, data in squeezed.items():
        for spelled in (name, name.upper(), f"identity, {name}", f"{name}, {name}", f" {name}"):
            reply = steady.ask("/v1/completions", data, headers={**JSON, "Content-Encoding": spelled})
            assert reply.status == 415, (spelled, reply)
        assert steady.ask("/v1/completions", data).status == 400
        sent = head(steady, Transfer_Encoding=f"{name}, chunked") + b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n"
        assert raw(steady, sent).status in (0, 400, 413, 415, 501)
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/json5",
    ):
        assert steady.ask("/v1/completions", BODY, headers={"Content-Type": kind}).status == 415, kind


def test_06_messages_that_two_readers_read_in_two_ways(steady: Target) -> None:
    """Two lengths, a length and chunks, invalid chunks, bare line ends: refused; no smuggled request is answered."""
    inner = head(steady, "/v1/models", "GET")
    for sent in (
        head(steady, Content_Length=4, Transfer_Encoding="chunked") + b"0\r\n\r\n" + inner,
        head(steady, Content_Length="4, 4") + b"{}  ", head(steady, Content_Length="+4") + b"{}  ",
        head(steady, Content_Length="0x4") + b"{}  ", head(steady, Content_Length="-1") + b"{}",
        head(steady, Transfer_Encoding="chunked, identity") + b"0\r\n\r\n", head(steady, Transfer_Encoding="x") + b"{}",
        head(steady, Transfer_Encoding="chunked") + b"-1\r\n{}\r\n0\r\n\r\n",
        head(steady, Transfer_Encoding="chunked") + b"fffffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        head(steady, Transfer_Encoding="chunked") + b"2;" + b"x" * 300_000 + b"\r\n{}\r\n0\r\n\r\n",
        head(steady)[:-2] + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
        head(steady)[:-2] + b"X: y\r\n folded: z\r\n\r\n", head(steady)[:-2] + b"X y\r\n\r\n",
        head(steady)[:-2] + b"X\0: y\r\n\r\n",
        head(steady)[:-2] + b" Content-Length: 2\r\n\r\n{}", b"POST /tokenize HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
        b"\0" * 3000,
    ):  # fmt: skip
        with Link(steady, 5) as link:
            link.send_some(sent)
            with contextlib.suppress(TimeoutError):
                while (reply := link.answer()).status:
                    assert reply.status in (400, 401, 413, 414, 415, 431, 501, 505), (sent[:200], reply)
                    link.settimeout(0.3)


def test_06_slow_clients_hold_nobody(steady: Target, times: Callable[[int, int], int]) -> None:
    """Connections that send nothing, half a head or a byte now and then are closed; others are served."""
    links = []
    for i in range(times(150, 2000)):
        links.append(link := Link(steady))
        link.sendall(
            (b"", b"GET /heal", b"GET /health HTTP/1.1\r\nHost: loc", head(steady, Content_Length=50) + b"{")[i % 4]
        )
    began = time.monotonic()
    steady.steady("slow connections")
    assert time.monotonic() - began < 10
    for link in links[::3]:
        with contextlib.suppress(OSError):
            link.sendall(b"x")
    for link in links:
        link.close()


def test_06_half_a_request_is_let_go(full_only: None) -> None:
    """An incomplete head gets 408 after 15 s, an incomplete body after 30 s; a silent connection is closed."""
    with target() as server:
        starts = (b"GET /health HTTP/1.1\r\nHost: loc", b"", head(server, Content_Length=50) + b"{")
        links = [Link(server, 60) for _ in starts]
        for link, start in zip(links, starts):
            link.sendall(start)
        over = threading.Event()

        def drip() -> None:  # a byte a second does not keep it
            while not over.wait(1.0):
                with contextlib.suppress(OSError):
                    links[0].sendall(b"x")

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        assert links[0].answer().status == 408 and time.monotonic() - began < 20
        assert links[1].answer().status == 408 and time.monotonic() - began < 20
        assert links[2].answer().status == 408 and time.monotonic() - began < 40
        over.set()


def test_06_one_byte_at_a_time(steady: Target, times: Callable[[int, int], int]) -> None:
    """A body in chunks of a byte is read or refused in time linear in its bytes, and others are served meanwhile."""
    chunks = b"".join(b"1\r\n%c\r\n" % c for c in BODY)
    with Link(steady) as link:
        link.sendall(head(steady, Transfer_Encoding="chunked") + chunks + b"0\r\n\r\n")
        assert link.answer().status == 200
    began = time.monotonic()
    with watched(steady) as seconds, Link(steady, 60) as link:
        link.send_some(head(steady, Transfer_Encoding="chunked"))
        for _ in range(times(30, 3000)):
            link.send_some(b"1\r\n \r\n" * 1000)
        link.send_some(b"0\r\n\r\n")
        assert link.answer().status in (0, 400, 408)
    assert time.monotonic() - began < 60 and seconds[-1] < 0.5, seconds[-5:]


def test_06_pipelined_requests(steady: Target, times: Callable[[int, int], int]) -> None:
    """Many requests at once on a connection: each is answered, in order; if the client disconnects, they end."""
    one = head(steady, Content_Length=len(BODY)) + BODY
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Link(steady) as link:
        link.sendall((one + health) * 20)
        for _ in range(20):
            assert json.loads(link.answer().body)["usage"]["completion_tokens"] == 12
            assert link.answer().status == 200
    for _ in range(times(3, 30)):
        link = Link(steady)
        link.sendall(one * 200)
        link.reset()


def test_06_resets_at_random_points(steady: Target, draw: Random, times: Callable[[int, int], int]) -> None:
    """A connection that is reset anywhere in a request or a response releases all resources."""
    for i in range(times(40, 2000)):
        body = json.dumps({**GOLDEN, "prompt": prompt(draw), "max_tokens": 60, "stream": bool(i % 2)}).encode()
        sent = head(steady, draw.choice(POSTS), Content_Length=len(body)) + body
        link = Link(steady)
        link.sendall(sent[: draw.randrange(len(sent) * 2)])
        if draw.random() < 0.5:
            link.settimeout(0.01)
            with contextlib.suppress(TimeoutError, ConnectionError):
                link.recv(draw.randrange(1, 400))
        link.reset() if draw.random() < 0.6 else link.close()


def test_07_json_that_is_none(steady: Target, draw: Random) -> None:
    """Depth, numbers, surrogates, control characters, names twice: 400 on every endpoint, or read as JSON says."""
    deep = (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000, b"[" * 70 + b"]" * 70)
    odd = (
        b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"9" * 5000, b"1" * 400 + b".5", b'"\\ud800"',
        b'"\\udfff\\ud800"',
        b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"\n"', b'"\0"', b"01", b"+1", b".5", b"5.", b"0x10", b"'a'",
        b"tru", b"None",
        b"/**/1", b"1,", b"[1,]", b'{"a":1,}', b'{a:1}', b"", *deep,
    )  # fmt: skip
    for path in POSTS:
        for bad in odd:
            for shell in (b'{"prompt": %s, "messages": %s, "tokens": %s}' % (bad, bad, bad), b'{"x": %s}' % bad, bad):
                reply = steady.ask(path, shell)
                assert reply.status == 400 and reply.code, (path, shell[:100], reply)
        for whole in (
            b"\xef\xbb\xbf{}",
            "{}".encode("utf-16"),
            "{}".encode("utf-32"),
            b"{}\0",
            b"{}{}",
            b"[]",
            b"5",
            b'"x"',
            b"null",
        ):
            assert steady.ask(path, whole).status == 400, (path, whole)
    twice = b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2, "ignore_eos": true}'
    assert steady.ask("/v1/completions", twice).json["usage"]["completion_tokens"] == 2
    zero = b'{"prompt": "x\\u0000y", "max_tokens": 1}'
    assert steady.ask("/v1/completions", zero).status == 200


def test_20_metrics_and_logs_do_not_grow_with_words(
    steady: Target, draw: Random, times: Callable[[int, int], int]
) -> None:  # fmt: skip
    """New methods, paths, models, fields, keys and ids add no line to the metrics. The log has a request's method, path
    and id, truncated and printable, and nothing of its body, query and other headers."""

    def names() -> list[str]:
        return sorted({line.split(" ")[0] for line in steady.ask("/metrics").body.decode().splitlines()})

    def one(i: int, link: Link) -> None:
        word, ours = f"marked{draw.getrandbits(60):x}", f"id-{draw.getrandbits(60):x}"
        options = {"prompt": "x", "max_tokens": 1, "model": word, word: 1, "user": word, "cache_salt": word}
        body = json.dumps(options).encode()
        first = head(steady, f"/path{i}%0d%0a{ours}?{word}={i}", f"METHOD{i}", X_Request_Id=ours, User_Agent=word)
        second = head(steady, f"/v1/completions?{word}", X_Request_Id=f"{ours}\t{word}", Content_Length=len(body))
        link.sendall(first if i % 2 else second + body)
        assert link.answer().status in (404, 405)

    with Link(steady) as link:
        for i in range(20):  # every reason that there is has been met once
            one(i, link)
        for more in ({"cache_salt": "a"}, {"stream": True}, {"n": 2}):
            steady.ask("/v1/completions", {"prompt": "x", "max_tokens": 5, "ignore_eos": True, **more})
        time.sleep(0.5)  # the engine's own figures are a heartbeat old
        before, first_line, count = names(), len(steady.lines), times(200, 15_000)
        for i in range(count):
            one(i, link)
    assert names() == before
    new_lines = steady.lines[first_line:]
    assert len(new_lines) < count + 20 and not any("marked" in line.lower() for line in new_lines)
    assert all(re.match(r"llmc: |\d{4}-\d\d-\d\d ", line) for line in new_lines), new_lines[:5]


def test_21_long_texts_do_not_stop_the_loop(steady: Target, draw: Random, full: bool) -> None:
    """Texts and conversations that are slow to tokenize and to render, several at a time: /health answers meanwhile."""
    size = (1 << 20) if full else (1 << 17)
    texts = ("a" * size, "ab " * (size // 3), "\u0301" * (size // 2), "<|user|>" * (size // 8), " " * size,
    "\U0001f600" * (size // 4),
             "".join(draw.choice("abc \n\t\u00e9\u6771") for _ in range(size // 2)))  # fmt: skip
    cases: list[tuple[str, dict[str, Any]]] = []
    for i in range(50 if full else 9):
        text = texts[i % len(texts)]
        cases += [
            ("/tokenize", {"prompt": text}), ("/v1/completions", {"prompt": text, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "stop": [text[:200]]}),
        ][i % 3 : i % 3 + 1]  # fmt: skip
    odd: list[Any] = []

    def load() -> None:
        while cases:
            reply = steady.ask(*cases.pop())
            if reply.status not in (200, 400):
                odd.append((reply, steady.words()))

    threads = [threading.Thread(target=load) for _ in range(3)]
    with watched(steady) as seconds:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    p99 = seconds[int(0.99 * (len(seconds) - 1))]
    assert not odd, odd
    print(f"p99 of /health {p99 * 1e3:.0f} ms of {len(seconds)}")
    assert p99 < (0.2 if full else 0.5), (p99, len(seconds))


def test_23_clients_that_leave(draw: Random, times: Callable[[int, int], int]) -> None:
    """Streaming and plain requests whose client disconnects at a random point: all end, their pages are freed, and the
    server is unaffected."""
    with target("--max-num-seqs", "8", engine={"pace": 0.002}) as server:
        server.steady()
        for i in range(times(16, 1000)):
            more: dict[str, Any] = {"prompt": prompt(draw, 60), "max_tokens": 150, "stream": bool(i % 2), "n": 1}
            body = json.dumps({**GOLDEN, **more}).encode()
            link = Link(server)
            link.sendall(head(server, Content_Length=len(body)) + body)
            link.settimeout(draw.choice((0.001, 0.004, 0.02)))
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(draw.randrange(3)):
                    link.recv(500)
            link.reset() if draw.random() < 0.5 else link.close()
            if i % 50 == 49:
                server.steady(i)
        until(lambda: not server.figure("num_requests_running"), 5)
        server.steady("disconnects")
        server.at_rest()
