"""The attacks of the table, by row: valid requests that are expensive for the server. Each returns its responses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.attacks.corner_rows import connections, grammars, sampling, stores, texts
from bench.attacks.further_rows import refused_work, valid_work
from bench.attacks.link import Answer, Door, together
from bench.attacks.many import burst, flood, head_without_body, pipeline
from bench.attacks.order_rows import orders
from bench.attacks.reader_rows import readers
from bench.attacks.server import KEYS, Server, python_path
from bench.attacks.watch import request

BODY = 8_000_000  # bytes of a large body; the server's own limit is 8 MiB
AMBIGUOUS = 'start: s\ns: s s | /[a-z ]/ | s "," s | '
INNOCENT = 'start: text\ntext: text " " text | word\nword: /[a-z]+/'
KILLS = 4
IDS, PROMPTS = 1000, 128  # of the row about prompt log-probabilities


@dataclass
class Field:
    """The target of an attack. `notes` are for the report; `connections` scales the row about unfinished bodies."""

    server: Server
    until: float
    connections: int = 400
    hold: float = 5.0
    tokens: int = 512
    notes: list[str] = field(default_factory=list)

    @property
    def door(self) -> Door:
        """The attacker's access to the server."""
        return Door(self.server.host, self.server.port, KEYS["attacker"], self.until)


Run = Callable[[Field], list[Answer]]


@dataclass(frozen=True)
class Attack:
    """An attack with a unique `name`. `ends`: the server cannot be used afterwards. `min_seconds`: that it needs."""

    row: int
    name: str
    run: Run
    ends: bool = False
    min_seconds: float = 0.0


def completion(**more: Any) -> dict[str, Any]:
    """Return a body of /v1/completions."""
    return {"prompt": "x", "max_tokens": 8, **more}


def schema(form: Any) -> dict[str, Any]:
    """Return a completion with a JSON schema."""
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
    return completion(response_format=response_format)


def forms(bodies: Sequence[dict[str, Any]], again: bool = True) -> Run:
    """Request structured outputs, all at once; then repeat the first of them."""

    def run(ground: Field) -> list[Answer]:
        ask = ground.door.ask
        answers = together([partial(ask, "request", "/v1/completions", body) for body in bodies])
        return [*answers, ask("again", "/v1/completions", bodies[0])] if again else answers

    return run


def patterns(letters: Callable[[int], tuple[str, str]]) -> dict[str, Any]:
    """Return an intersection of 32 patterns."""
    every = [{"pattern": ".*{}.*{}.*".format(*letters(i))} for i in range(32)]
    return schema({"type": "string", "allOf": every})


def grammar(text: str | None, n: int) -> Run:
    """Request n sequences with a grammar, or without one, to find the cost of the sequences themselves."""
    form = {} if text is None else {"structured_outputs": {"grammar": text}}

    def run(ground: Field) -> list[Answer]:
        body = completion(n=n, max_tokens=ground.tokens, temperature=1.0, seed=5, ignore_eos=True, **form)
        return [ground.door.ask(f"n={n}", "/v1/completions", body)]

    return run


def filled(before: str, piece: str, after: str, size: int = BODY) -> bytes:
    """Return a body of about `size` bytes: pieces separated by commas."""
    count = (size - len(before) - len(after)) // (len(piece) + 1)
    return (before + ",".join([piece] * count) + after).encode()


def unknown(piece: str) -> bytes:
    """Return a valid completion with a large unknown field."""
    return filled('{"prompt": "x", "max_tokens": 1, "unknown": [', piece, "]}")


def nested(depth: int) -> bytes:
    """Return a body with one value nested as deep as the body is long, or one of values nested `depth` deep."""
    if depth:
        return unknown("[" * depth + "]" * depth)
    half = BODY // 2 - 40
    return b'{"prompt": "x", "max_tokens": 1, "unknown": ' + b"[" * half + b"]" * half + b"}"


def text(size: int, seed: int = 1) -> str:
    """Return words of random letters."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    return " ".join(draw.choices(words, k=size // 6))[:size]


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "unknown field [[[...]]], one value": ("/v1/completions", partial(nested, 0)),
    "unknown field of [[...]] 50 deep": ("/v1/completions", partial(nested, 50)),
    "unknown field of {}": ("/v1/completions", partial(unknown, "{}")),
    "prompt of [1],[1],...": ("/v1/completions", partial(filled, '{"max_tokens": 1, "prompt": [', "[1]", "]}")),
    "4M allowed_token_ids": (
        "/v1/completions", partial(filled, '{"prompt": "x", "max_tokens": 1, "allowed_token_ids": [', "1", "]}")
    ),
    "/tokenize, token strings": (
        "/tokenize", partial(filled, '{"return_token_strs": true, "prompt": "x', "the river", '"}')
    ),
}  # fmt: skip


def sent(name: str, times: int = 1) -> Run:
    """Send one of BODIES that many times at once."""

    def run(ground: Field) -> list[Answer]:
        path, make = BODIES[name]
        data = make()
        return together([partial(ground.door.ask, f"{len(data) / 1e6:.1f} MB", path, data)] * times)

    return run


def prompts(count: int, size: int) -> Run:
    """Send prompts of text that exceed the context."""

    def run(ground: Field) -> list[Answer]:
        bodies = [json.dumps(completion(prompt=text(size, seed))).encode() for seed in range(count)]
        return together([partial(ground.door.ask, f"{size / 1e6:.0f} MB", "/v1/completions", data) for data in bodies])

    return run


def unfinished(ground: Field) -> list[Answer]:
    """Open connections that send a large body except for its last byte, and wait."""
    began = time.monotonic()
    uploads = Uploads(ground)
    uploads.run(ground.until, ground.hold)
    uploads.close()
    seconds, links, statuses = time.monotonic() - began, uploads.sent, uploads.statuses
    megabytes = sum(links.values()) / 1e6
    ground.notes.append(f"{len(links)} connections, {uploads.complete} sent all but a byte, {megabytes:.0f} MB taken")
    waiting = len(links) - sum(statuses.values())
    answers = [Answer(f"{count} connections", int(s) if s.isdigit() else 0, seconds, "" if s.isdigit() else s)
             for s, count in statuses.items()]  # fmt: skip
    return [*answers, Answer(f"{waiting} connections", 0, seconds, "held to the end")] if waiting else answers


class Uploads:
    """Connections that each send a large body except for its last byte.

    sent: bytes of each connection; complete: connections that have sent everything; statuses: of the responses
    """

    def __init__(self, ground: Field) -> None:
        self._data = memoryview(request(ground.server.host, KEYS["attacker"], "/v1/completions", b" " * BODY)[:-1])
        self.sent: dict[socket.socket, int] = {}
        self.statuses: Counter[str] = Counter()
        self.complete = 0
        self._selector = selectors.DefaultSelector()
        for _ in range(ground.connections):
            with contextlib.suppress(OSError):
                link = ground.door.connect()
                link.setblocking(False)
                self.sent[link] = 0
                self._selector.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def run(self, until: float, hold: float) -> None:
        """Send until `until`, until `hold` seconds have passed without progress, or until no connection is left."""
        moved = time.monotonic()
        while self._selector.get_map() and time.monotonic() < min(until, moved + hold):
            for key, events in self._selector.select(0.05):
                link = key.fileobj
                assert isinstance(link, socket.socket)
                try:
                    if events & selectors.EVENT_READ:
                        received = link.recv(65536)
                        self._end(
                            link, received.split(b" ", 2)[1].decode() if received.startswith(b"HTTP") else "closed"
                        )
                    else:
                        self._send(link)
                        moved = time.monotonic()
                except OSError as e:
                    self._end(link, type(e).__name__)

    def close(self) -> None:
        """Close all connections."""
        for link in self.sent:
            link.close()

    def _send(self, link: socket.socket) -> None:
        begin = self.sent[link]
        self.sent[link] += link.send(self._data[begin : begin + (1 << 18)])
        if self.sent[link] == len(self._data):
            self.complete += 1
            self._selector.modify(link, selectors.EVENT_READ)

    def _end(self, link: socket.socket, status: str) -> None:
        self.statuses[status] += 1
        self._selector.unregister(link)


def kills(ground: Field) -> list[Answer]:
    """Kill the engine process four times; after the last, wait until the server has reacted."""
    answers, server = [], ground.server
    for number in range(1, KILLS + 1):
        pid = server.engine
        if pid is None:
            break
        os.kill(pid, signal.SIGKILL)
        began, last = time.monotonic(), Answer("")
        while time.monotonic() < ground.until and server.process.poll() is None:
            last = ground.door.ask("", "/ready")
            if last.status == 200 and server.engine not in (None, pid):
                break
            if number == KILLS and time.monotonic() - began > ground.hold * 3:
                break
            time.sleep(0.05)
        code = server.process.poll()
        ending = f"the process ended with exit code {code}" if code is not None else last.error
        last.label, last.seconds, last.error = f"kill {number}", time.monotonic() - began, ending
        answers.append(last)
        if last.status != 200 and code is None:
            request = ground.door.ask("completion", "/v1/completions", completion())
            ground.notes.append(
                f"after kill {number} a completion gets {request.status}, Retry-After {request.retry_after}"
            )
    return answers


def scored(ground: Field) -> list[Answer]:
    """Request log-probabilities of many long prompts."""
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 250) for _ in range(IDS)] for _ in range(PROMPTS)]
    answer = ground.door.ask(f"{PROMPTS} x {IDS} ids", "/v1/completions",
                          {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20})  # fmt: skip
    ground.notes.append(f"the answer has {answer.size / 1e6:.1f} MB")
    return [answer]


def flooded(ground: Field) -> list[Answer]:
    """Send more requests than can be served, from a separate process."""
    server = ground.server
    seconds = max(2.0, min(8.0, ground.door.remaining / 4 - 0.5))
    options = {"host": server.host, "port": server.port, "key": KEYS["attacker"], "seconds": seconds, "times": 10}
    options["drain"] = max(1.0, ground.door.remaining - 2 * seconds - 5.0)  # the rest of the time limit
    command = [sys.executable, "-m", "bench.attacks.flood", json.dumps(options)]
    try:
        env = {**os.environ, "PYTHONPATH": python_path()}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=ground.door.remaining, env=env)
    except subprocess.TimeoutExpired:
        return [Answer("flood", 0, 0.0, "the load did not end before the deadline")]
    figures = json.loads(done.stdout)
    ground.notes.append(json.dumps(figures))
    share = f"goodput {figures['goodput']:.1f}/s, {100 * figures['share']:.0f} % of the peak of {figures['peak']:.1f}/s"
    refused = f"refusals p50 {figures['refused_p50_ms']:.1f}, p99 {figures['refused_p99_ms']:.1f} ms"
    return [Answer(f"{figures['offered']:.0f}/s", 200, figures["seconds"], f"{share}, {refused}")]


def bursts(make: Callable[[Field], bytes]) -> Run:
    """Open thousands of connections at the same time, each with these bytes."""
    return lambda ground: burst(ground.door, make(ground))


def floods(clients: int, path: str, body: Any = None, key: str = KEYS["attacker"]) -> Run:
    """Repeat a small request on some connections."""
    return lambda ground: flood(ground.door, request(ground.server.host, key, path, body), clients)


def repeated(make: Callable[[Door], list[Answer]]) -> Run:
    """Repeat the requests of rows 11 to 16."""
    return lambda ground: make(ground.door)


INVALID = {"prompt": "x", "max_tokens": -1}
HEAD_OF_X = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX:"
ATTACKS: tuple[Attack, ...] = (
    Attack(1, "multipleOf 99999989 and 99999971",
           forms([schema({"type": "integer", "multipleOf": n}) for n in (99999989, 99999971)])),
    Attack(1, "allOf of 32 patterns .*a.*x.*", forms([patterns(lambda i: (chr(97 + i % 26), "xy"[i // 26]))])),
    Attack(1, "allOf of 32 patterns, other letters",
           forms([patterns(lambda i: (chr(65 + i % 26), chr(97 + i * 7 % 26)))])),
    Attack(1, "regex a? x 20,000 + a x 20,000",
           forms([completion(structured_outputs={"regex": "a?" * 20000 + "a" * 20000})])),
    Attack(1, "multipleOf 524287", forms([schema({"type": "integer", "multipleOf": 524287})])),
    Attack(2, "no attack: plain text, n=15", grammar(None, 15)),
    Attack(2, "ambiguous grammar of 39 bytes, n=15", grammar(AMBIGUOUS, 15)),
    Attack(2, "no attack: plain text, n=60", grammar(None, 60)),
    Attack(2, "ambiguous grammar of 39 bytes, n=60", grammar(AMBIGUOUS, 60)),
    Attack(2, "innocent text grammar, n=4", grammar(INNOCENT, 4)),
    *(Attack(3, name, sent(name)) for name in BODIES),
    Attack(3, "unknown field of [[...]] 50 deep, four at once", sent("unknown field of [[...]] 50 deep", 4)),
    Attack(4, "4 prompts of 8 MB", prompts(4, BODY - 100)),
    Attack(4, "32 prompts of 1 MB", prompts(32, 1_000_000)),
    Attack(5, "unfinished bodies of 8 MB", unfinished),
    Attack(7, "128 prompts of 1,000 ids, prompt_logprobs 20", scored),
    Attack(8, "ten times the peak", flooded, min_seconds=16.0),
    Attack(9, "4,000 silent connections", bursts(lambda ground: b"")),
    Attack(9, "4,000 halves of heads", bursts(lambda ground: b"GET /health HTTP/1.1\r\nHost: loc")),
    Attack(9, "4,000 heads of 60 KiB without an end", bursts(lambda ground: HEAD_OF_X + b"x" * 60_000)),
    Attack(9, "4,000 heads with spaces before a NUL", bursts(lambda ground: HEAD_OF_X + b" " * 28_000 + b"\0\r\n\r\n")),
    Attack(9, "4,000 heads without a body", bursts(lambda ground: head_without_body(KEYS["attacker"]))),
    Attack(9, "4,000 invalid requests",
           bursts(lambda ground: request(ground.server.host, KEYS["attacker"], "/v1/completions", INVALID))),
    Attack(9, "4,000 pipelines of 40 requests, unread",
           bursts(lambda ground: pipeline(ground.server.host, KEYS["attacker"], "/openapi.json", 40))),
    Attack(10, "8 x small invalid requests", floods(8, "/v1/completions", INVALID)),
    Attack(10, "8 x invalid requests with 1,400 lists", floods(8, "/v1/completions", {**INVALID, "x": [[]] * 1400})),
    Attack(10, "8 x wrong key", floods(8, "/v1/completions", INVALID, key="unknown")),
    Attack(10, "8 x unknown path", floods(8, "/nothing")),
    Attack(10, "24 x max_tokens 1", floods(24, "/v1/completions", completion(max_tokens=1))),
    Attack(10, "24 x /tokenize", floods(24, "/tokenize", {"prompt": "hello world"})),
    *(Attack(11, name, repeated(make)) for name, make in valid_work().items()),
    *(Attack(12, name, repeated(make)) for name, make in refused_work().items()),
    *(Attack(13, name, repeated(make)) for family in (grammars, texts, sampling) for name, make in family().items()),
    *(Attack(14, name, repeated(make)) for family in (stores, connections) for name, make in family().items()),
    *(Attack(15, name, repeated(make)) for name, make in orders().items()),
    *(Attack(16, name, repeated(make)) for name, make in readers().items()),
    Attack(6, "four ends of the engine", kills, ends=True),
)  # fmt: skip
