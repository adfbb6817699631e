"""Bodies of the maximum size, complete and incomplete: /health responds meanwhile, and their memory is released."""

from __future__ import annotations

import json
import threading
import time

import psutil
import pytest

from tests.attacks.conftest import KEYS
from tests.attacks.target import Target, target, until
from tests.attacks.test_http import watched
from tests.attacks.wire import Link

MB = 1 << 20
FRONT_GROWTH, ALL_GROWTH = 64 * MB, 256 * MB


def filled(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


def bodies(size: int) -> list[tuple[str, bytes]]:
    """Legal and illegal ones, each slow to decode, to check or to tokenize in a way of its own."""
    start, many = b'{"max_tokens":1,"prompt":', b'{"max_tokens":1,"prompt":"x","u":'
    half = (size - 100) // 2
    names = b",".join(b'"%07d":1' % i for i in range(size // 12))
    return [
        ("/v1/completions", many + b"[" * half + b"]" * half + b"}"),
        ("/v1/completions", filled(many + b"[", b"{},", b"{}]}", size)),
        ("/v1/completions", filled(many + b"[", b'{"a":1},', b"1]}", size)),
        ("/v1/completions", filled(many + b"[", b"1.5,", b"1]}", size)),
        ("/v1/completions", filled(start + b"[", b"[1],", b"[1]]}", size)),
        ("/v1/completions", filled(b'{"prompt":"x","allowed_token_ids":[', b"1,", b"1]}", size)),
        ("/v1/completions", filled(start + b'"', b"word ", b'"}', size)),
        ("/v1/completions", filled(start + b'"', b"\\u00e9", b'"}', size)),
        ("/v1/completions", filled(b'{"prompt":"x","model":"', b"a", b'"}', size)),
        ("/v1/completions", b'{"prompt":"x","max_tokens":1,' + names + b"}"),
        ("/v1/chat/completions", filled(b'{"messages":[{"role":"user","content":"', b"a b ", b'"}]}', size)),
        ("/v1/chat/completions", filled(b'{"messages":[', b'{"role":"user","content":""},', b"{}]}", size)),
        ("/tokenize", filled(b'{"return_token_strs":true,"prompt":"', b"a b ", b'"}', size)),
        ("/detokenize", filled(b'{"tokens":[', b"70,", b"70]}", size)),
    ]


def test_21_large_bodies_do_not_stop_the_loop(steady: Target, full: bool) -> None:
    size = 8 * MB if full else 2 * MB
    steady.ask("/tokenize", json.dumps({"prompt": "a b " * 10_000}).encode())  # both text processes are there
    before, cases, odd = steady.memory(), bodies(size), list[object]()

    def load() -> None:
        while cases:
            reply = steady.ask(*cases.pop(), timeout=120)
            if reply.status not in (200, 400, 404, 413, 503):
                odd.append((reply, steady.words()))

    threads = [threading.Thread(target=load) for _ in range(3)]
    with watched(steady) as seconds:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    p99 = seconds[int(0.99 * (len(seconds) - 1))]
    print(f"p99 of /health {p99 * 1e3:.0f} ms of {len(seconds)}")
    assert not odd, odd
    assert p99 < (0.1 if full else 0.5), (p99, len(seconds))
    until(lambda: steady.memory() - before < ALL_GROWTH)


@pytest.mark.usefixtures("full_only")
def test_06_unfinished_bodies_together(full: bool) -> None:
    """400 connections with 8 MB of a body each: bounded, and the other key's large bodies are taken."""
    with target("--max-num-seqs", "8", "--max-connections", "600", keys=KEYS) as server:
        server.steady()
        front = psutil.Process(server.process.pid)
        before, own, links = server.memory(), front.memory_info().rss, list[Link]()
        for _ in range(400):
            link = Link(server, timeout=1.0)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n"
            link.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {8 * MB}\r\n\r\n".encode())
            links.append(link)
        stop = time.monotonic() + 10

        def send(mine: list[Link]) -> None:
            for link in mine:
                try:
                    link.sendall(b" " * (8 * MB - 1))
                except OSError:  # refused
                    continue

        threads = [threading.Thread(target=send, args=[links[i::8]]) for i in range(8)]
        for thread in threads:
            thread.start()
        peak = 0
        while time.monotonic() < stop:
            peak = max(peak, server.memory())
            reply = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, "u": "x" * MB}, key=KEYS[1])
            assert reply.status == 200, reply
        assert peak - before < ALL_GROWTH, (peak, before)
        for link in links:
            link.close()
        for thread in threads:
            thread.join()
        until(lambda: front.memory_info().rss - own < FRONT_GROWTH)
        server.steady("unfinished bodies")


def test_21_text_processes_end_with_a_server_that_is_killed() -> None:
    with target() as server:
        found: set[int] = set()

        def there() -> bool:
            found.update(server.processes().keys() - server.lasting().keys())
            return bool(found)

        until(there)  # one is started before any request
        server.process.kill()
        until(lambda: not any(psutil.pid_exists(pid) for pid in found))
