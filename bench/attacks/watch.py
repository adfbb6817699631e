"""Measure a server from a separate process: a neighbour's streams, /health, and small ordinary requests.

    python -m bench.attacks.watch '{"host": ..., "port": ..., "key": ..., "streams": N, "tokens": N, "ordinary": []}'

It runs until stdin closes. A line `{"begin": T0, "end": T1}` (time.monotonic) is answered by a line of JSON with the
figures of that window; events before its begin are then dropped, so windows must be requested in order.
A request that is open at the end of a window counts with its time so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import selectors
import subprocess
import sys
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from llmc_runtime.bench.http_client import Connection, Reply, WireError

from bench.attacks.figures import gaps_of, milliseconds
from bench.attacks.server import cpu_wait, python_path

HEALTH_EVERY = 0.02  # seconds
ORDINARY = ("completion", "schema", "tokenize")  # names of the small requests that may run next to the streams
BROKEN = -1  # in place of a status: the stream ended with an error
STEP_SPREAD = 0.004  # seconds within which the tokens of a step arrive
SLOWEST = 5  # steps whose times are reported
RETRY = 0.25  # seconds until a refused stream is requested again
SENTENCE = "When the morning came, the river was quiet and the old mill stood in the light of the early sun. "


def request(host: str, key: str, path: str, body: Any = None) -> bytes:
    """Return a whole HTTP request; a body that is not bytes is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"] if body is not None else []
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + data


class Streams:
    """Greedy streams of one API key, each restarted when it ends; arrival times of their events.

    The first ones are of different lengths, so that their ends, and the lengths of the contexts, are evenly spread.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.gaps: list[tuple[float, float]] = []  # (time, seconds since the event before)
        self.firsts: list[tuple[float, float]] = []  # (time, seconds since the request)
        self.statuses: list[tuple[float, int]] = []
        self.latest: dict[int, float] = {}  # time of the last event of each open stream
        self.requested: dict[int, float] = {}  # time of the request of each stream without an event

    async def run(self, number: int) -> None:
        """Run one stream after another."""
        tokens = max(1, self.settings["tokens"] * (number + 1) // self.settings["streams"])
        while True:
            status = 0
            with contextlib.suppress(OSError, WireError):
                status = await self._one(number, tokens)
            tokens = self.settings["tokens"]
            self.latest.pop(number, None)
            self.statuses.append((time.monotonic(), status))
            if status != 200:
                await asyncio.sleep(RETRY)

    async def _one(self, number: int, tokens: int) -> int:
        host, port, lines, events = self.settings["host"], self.settings["port"], 0, 0
        failed = False
        began = self.requested.setdefault(number, time.monotonic())

        def hear(reply: Reply, body: bytes) -> None:
            nonlocal lines, events, failed
            failed = failed or b'data: {"error"' in body
            lines += body.count(b"\n")  # two end an event; JSON contains none
            came, events = lines // 2 - events, lines // 2
            came -= b"data: [DONE]" in body
            if reply.status != 200 or came < 1:
                return
            now = time.monotonic()
            last = self.latest.get(number)
            if last is None:
                self.requested.pop(number, None)
                self.firsts.append((now, now - began))
            else:
                self.gaps.append((now, now - last))
            self.gaps += [(now, 0.0)] * (came - 1)
            self.latest[number] = now

        body = {"prompt": f"Stream {number}: the river", "max_tokens": tokens, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
        try:
            reply = await connection.send(request(host, self.settings["key"], "/v1/completions", body), hear)
        finally:
            connection.transport.abort()
        return BROKEN if failed else reply.status

    def window(self, begin: float, end: float) -> dict[str, Any]:
        """Return the figures of a window."""
        self.gaps = [event for event in self.gaps if event[0] > begin]
        self.firsts = [event for event in self.firsts if event[0] > begin]
        self.statuses = [event for event in self.statuses if event[0] > begin]
        open_now = [end - last for last in self.latest.values()]
        waiting = [end - began for began in self.requested.values()]
        refused = Counter("broken" if status == BROKEN else str(status)
                          for t, status in self.statuses if t <= end and status != 200)  # fmt: skip
        firsts = [seconds for t, seconds in self.firsts if t <= end] + waiting
        gaps = gaps_of([gap for t, gap in self.gaps if t <= end], open_now)
        starts = [t for t, _ in self.firsts if t <= end]
        return {
            **gaps, "ttft_max_ms": milliseconds(max(firsts, default=0.0)), "refused": dict(refused),
            "slowest": self._slowest(begin, end), "starts": len(starts),
            "decode": gaps_of([gap for t, gap in self.gaps if t <= end and not near(t, starts)]),
        }  # fmt: skip

    def _slowest(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Return the largest gaps of different steps: (milliseconds since the beginning of the window, of the gap)."""
        slowest: list[tuple[float, float]] = []
        for t, gap in sorted((event for event in self.gaps if event[0] <= end), key=lambda event: -event[1]):
            if not any(abs(t - other) < STEP_SPREAD for other, _ in slowest):
                slowest.append((t, gap))
            if len(slowest) == SLOWEST:
                break
        return [(milliseconds(t - begin), milliseconds(gap)) for t, gap in slowest]


def near(t: float, times: Sequence[float]) -> bool:
    """Return whether an event belongs to the same step as one of `times`, which are sorted."""
    at = bisect(times, t)
    return any(abs(t - other) < STEP_SPREAD for other in times[max(0, at - 1) : at + 1])


class TurnSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that records how long each iteration of the event loop takes, besides waiting for events.

    A token that arrives meanwhile is seen up to that much later.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[tuple[float, float]] = []  # (time, seconds) of iterations
        self._returned = time.monotonic()
        self._waited = cpu_wait()

    def select(self, timeout: float | None = None) -> Any:
        """See selectors.BaseSelector."""
        now = time.monotonic()
        self._turns.append((now, now - self._returned))
        ready = super().select(timeout)
        self._returned = time.monotonic()
        return ready

    def window(self, begin: float, end: float) -> dict[str, Any]:
        """Return the figures of the iterations of a window, and the time since the last one for which this process was
        ready and had no CPU.
        """
        turns = [seconds for t, seconds in self._turns if begin < t <= end]
        self._turns.clear()
        before, self._waited = self._waited, cpu_wait()
        return {"turns": gaps_of(turns), "waited_ms": milliseconds(self._waited - before)}


class Asker:
    """Repeats one request over its own connection; records when each began, its duration and its response."""

    def __init__(self, settings: dict[str, Any], every: float, make: Callable[[int], tuple[str, Any]]) -> None:
        self.settings, self.every, self.make = settings, every, make
        self.done: list[tuple[float, float, int, str]] = []  # (began, seconds, status, code)
        self.began: float | None = None

    async def run(self) -> None:
        """Send the request at an interval, or as soon as the previous one has been answered."""
        link: Connection | None = None
        for number in range(1 << 60):
            path, body = self.make(number)
            self.began = began = time.monotonic()
            heard: list[bytes] = []
            status = 0
            try:
                if link is None or link.closed:
                    loop, where = asyncio.get_running_loop(), (self.settings["host"], self.settings["port"])
                    _, link = await loop.create_connection(Connection, *where)
                requested = request(self.settings["host"], self.settings["key"], path, body)
                reply = await link.send(requested, lambda _, data, heard=heard: heard.append(data))
                status, link = reply.status, link if reply.reusable else None
            except (OSError, WireError):
                link = None
            self.began = None
            self.done.append((began, time.monotonic() - began, status, code_of(status, b"".join(heard))))
            await asyncio.sleep(max(0.005, began + self.every - time.monotonic()))

    def window(self, begin: float, end: float) -> dict[str, Any]:
        """Return the figures of a window; a request counts if it was open in it."""
        self.done = [request for request in self.done if request[0] + request[1] > begin]
        rows = [request for request in self.done if request[0] <= end]
        durations = [min(seconds, end - began) for began, seconds, _, _ in rows]
        if self.began is not None and self.began < end:
            durations.append(end - self.began)
        statuses = Counter(f"{status} {code}".strip() for _, _, status, code in rows)
        durations.sort()
        worst = [milliseconds(seconds) for seconds in durations[-1:-4:-1]]
        return {"count": len(durations), "statuses": dict(statuses), "worst_ms": worst}


def code_of(status: int, body: bytes) -> str:
    """Return the code of an error object."""
    if status == 200 or not body:
        return ""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "?"


def ordinary_requests() -> dict[str, tuple[float, Callable[[int], tuple[str, Any]]]]:
    """Return the interval and the request by name (see ORDINARY). Every schema is a new one: none is cached."""

    def completion(number: int) -> tuple[str, Any]:
        return "/v1/completions", {"prompt": f"Question {number}:", "max_tokens": 4, "temperature": 0}

    def schema(number: int) -> tuple[str, Any]:
        item_schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "small", "schema": item_schema}}
        return "/v1/completions", {"prompt": "x", "max_tokens": 4, "temperature": 0, "response_format": form}

    def tokenize(number: int) -> tuple[str, Any]:
        return "/tokenize", {"prompt": f"{number} " + SENTENCE * 50}

    return {"completion": (0.4, completion), "schema": (0.8, schema), "tokenize": (0.4, tokenize)}


async def watch(settings: dict[str, Any], selector: TurnSelector) -> None:
    """Measure until stdin closes."""
    streams = Streams(settings)
    askers = {"health": Asker(settings, HEALTH_EVERY, lambda _: ("/health", None))}
    known = ordinary_requests()
    askers |= {name: Asker(settings, *known[name]) for name in settings["ordinary"]}
    tasks = [asyncio.create_task(streams.run(i)) for i in range(settings["streams"])]
    tasks += [asyncio.create_task(asker.run()) for asker in askers.values()]
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        options = json.loads(line)
        result: dict[str, Any] = {name: asker.window(**options) for name, asker in askers.items()}
        result["watcher"] = selector.window(**options)
        print(json.dumps({"itl": streams.window(**options), **result}), flush=True)
        if failed := next((task for task in tasks if task.done()), None):
            failed.result()


class Watch:
    """The handle of a watching process. `ordinary`: which small requests run next to the streams."""

    def __init__(
        self, host: str, port: int, key: str, streams: int, tokens: int, ordinary: Sequence[str] = ORDINARY
    ) -> None:
        settings = {"host": host, "port": port, "key": key, "streams": streams, "tokens": tokens}
        settings["ordinary"] = list(ordinary)
        command = [sys.executable, "-m", "bench.attacks.watch", json.dumps(settings)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": python_path()}, **pipes)

    def window(self, begin: float, end: float) -> dict[str, Any]:
        """Return the figures between two times of time.monotonic()."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"begin": begin, "end": end}) + "\n")
        self._process.stdin.flush()
        window: dict[str, Any] = json.loads(self._process.stdout.readline())
        return window

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    gc.disable()  # there are no cycles, and a collection would count as the server's time
    turns = TurnSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        runner.run(watch(json.loads(sys.argv[1]), turns))
