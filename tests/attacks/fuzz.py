"""A fuzz run: workers send the requests of shots.py while a neighbour streams; at the end, the faults are listed.

How noise of the machine is treated (two cores serve, attack and measure):

- ITL: the neighbour's 99th percentile of each window of 20 s may be three times its quiet value, or FLOOR_ITL where
  that is more. One window of a run may be over: only a second one is a fault. The longest gap may take WORST_ITL.
- /health: probed every 20 ms. The second-worst probe of a window may take 100 ms, the worst WORST_HEALTH.
- memory: resident bytes of each process, before and after a rest. A process that was not there before counts from 0.

A sample, which shares its processors with other tests, multiplies the limits of time by SAMPLE.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.attacks.link import Answer, Door
from bench.attacks.server import SERVE
from bench.attacks.watch import Watch, request
from tests.attacks.bodies import fields
from tests.attacks.shots import DROPPED, KEY, RAW, SLOW, WHOLE, Described, Shot, shot
from tests.attacks.target import TOOLS, Target, target

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "build" / "demo.llmc"
KEYS = ("neighbour-secret-key", "first-attacker-key", "second-attacker-key")
WORKERS = 4
STEP = "32"  # tokens: with more, one step of a long prompt is longer than the floor of the ITL on two cores
WINDOW, QUIET, REST = 20.0, 5.0, 10.0  # seconds
TIMES_ITL, FLOOR_ITL, WORST_ITL = 3.0, 40.0, 1000.0  # times the quiet value; milliseconds
HEALTH, WORST_HEALTH = 100.0, 500.0  # milliseconds
GROWTH = 256 << 20  # bytes of a process
SAMPLE = 20.0
INNOCENT = ("completion", "schema", "tokenize")
GOLDEN = {"prompt": "The kernel", "max_tokens": 24, "temperature": 0, "seed": 7, "ignore_eos": True}
HEARD = 4096  # bytes of an answer that a slow client keeps
LAST = 40  # requests that are shown where something is wrong


@dataclass
class Figures:
    """What a run measured; `windows` are the watching process's. `odd`: answers that must not be, in words; `last` and
    `open`: the latest requests, and those that have no answer yet."""

    quiet: dict[str, Any] = field(default_factory=dict)
    windows: list[dict[str, Any]] = field(default_factory=list)
    before: dict[tuple[int, float], int] = field(default_factory=dict)
    after: dict[tuple[int, float], int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    golden: tuple[bytes, bytes] = (b"", b"")
    statuses: Counter[str] = field(default_factory=Counter)
    open: dict[int, str] = field(default_factory=dict)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST))

    def faults(self, lenient: float = 1.0) -> list[str]:
        """Return the faults of a run as texts, those of time last; `lenient` multiplies the limits of time."""
        found = list[str]()
        for process, held in self.after.items():
            grown = held - self.before.get(process, 0)
            if grown > GROWTH:
                found.append(f"process {process[0]} keeps {grown >> 20} MiB more")
        if self.golden[0] != self.golden[1]:
            found.append(f"the golden prompt was answered {self.golden[1]!r:.300}, before {self.golden[0]!r:.300}")
        return found + self.ended + self.odd + self._of_windows(lenient)

    def _of_windows(self, lenient: float) -> list[str]:
        """Return what was slow, and refusals of others."""
        most = lenient * max(FLOOR_ITL, TIMES_ITL * self.quiet["itl"]["p99_ms"])
        over = [one["itl"]["p99_ms"] for one in self.windows if one["itl"]["p99_ms"] > most]
        found = [f"ITL p99 {over} ms, at most {most:.0f}"] if len(over) > 1 or (over and len(self.windows) == 1) else []
        for one in self.windows:
            if not one["itl"]["tokens"] or one["itl"]["max_ms"] > lenient * WORST_ITL:
                found.append(f"ITL: {one['itl']}, at most {lenient * WORST_ITL:.0f} ms")
            if lost := {k: n for k, n in one["itl"]["refused"].items() if k not in ("429", "503")}:
                found.append(f"the neighbour's streams got {lost}")
            worst, second = [*one["health"]["worst_ms"], 0.0, 0.0][:2]
            if second > lenient * HEALTH or worst > lenient * WORST_HEALTH:
                found.append(f"/health took {worst} and {second} ms, at most {lenient * WORST_HEALTH:.0f} and "
                             f"{lenient * HEALTH:.0f}")  # fmt: skip
            for name in INNOCENT:
                bad = {k: n for k, n in one[name]["statuses"].items() if k.split()[0] not in ("200", "429", "503")}
                found += [f"a small {name} of another key got {bad}"] if bad else []
        return found


def odd(made: Shot, got: Answer) -> str:
    """Return what is wrong with a response; "" if nothing is."""
    retryable = got.status in (503, 504) and bool(got.retry_after)
    if got.status < 500 or retryable or (made.manner == RAW and got.status in (501, 505)):
        return ""
    return f"{got.status} {got.error} for {made}"


@contextlib.contextmanager
def server(demo: bool) -> Iterator[Target]:
    """The demonstration model, or the simulated device."""
    common: dict[str, Any] = {"keys": KEYS}
    if not demo:
        with target(
            "--max-num-seqs", "16", "--response-store-bytes", "4MiB", *TOOLS, engine={"pace": 0.001}, **common
        ) as one:
            yield one
        return
    command = (*SERVE, str(DEMO))
    options = ("--port", "0", "--served-model-name", "toy", "--disable-access-log", "--max-num-batched-tokens", STEP)
    with target(*options, program=command, **common) as one:
        yield one


class Fuzz:
    """One run against a server. `only`: the requests (worker, number) that are sent, instead of all."""

    def __init__(self, server: Target, seed: int, seconds: float, only: Sequence[tuple[int, int]] = ()) -> None:
        self.server, self.seed, self.seconds, self.only = server, seed, seconds, only
        self.figures = Figures()
        self.known = self.describe()
        self._over = threading.Event()

    def describe(self) -> Described:
        """From /openapi.json."""
        document = self.server.ask("/openapi.json").json
        gets = sorted(path for path, methods in document["paths"].items() if "get" in methods)
        return Described(fields(document), gets)

    def memory(self) -> dict[tuple[int, float], int]:
        """Resident bytes by process."""
        found = {}
        for pid, began in self.server.processes().items():
            with contextlib.suppress(psutil.Error):
                found[pid, began] = psutil.Process(pid).memory_info().rss
        return found

    def golden(self) -> bytes:
        """The answer to the golden prompt; asked again while the server is full."""
        for _ in range(100):
            reply = self.server.ask("/v1/completions", GOLDEN, timeout=30)
            if reply.status not in (429, 503):
                return str(reply.json["choices"][0]["text"]).encode() if reply.status == 200 else repr(reply).encode()
            time.sleep(0.2)
        return repr(reply).encode()

    def run(self) -> Figures:
        """Measure in quiet, send, rest, measure again."""
        found, server = self.figures, self.server
        first = self.golden()
        watch = Watch(server.host, server.port, KEYS[0], streams=1, tokens=200)
        try:
            time.sleep(2.0)  # first grammars, first pages
            begin = time.monotonic()
            time.sleep(min(QUIET, self.seconds))
            found.quiet = watch.window(begin, time.monotonic())
            found.before = self.memory()
            workers = [threading.Thread(target=self.work, args=[i], daemon=True) for i in range(WORKERS)]
            for worker in workers:
                worker.start()
            end = time.monotonic() + self.seconds
            while (begin := time.monotonic()) < end - 0.5 and not found.ended:
                time.sleep(min(WINDOW, end - begin))
                found.windows.append(watch.window(begin, time.monotonic()))
                found.ended += self.ended()
            self._over.set()
            for worker in workers:
                worker.join(30)
        finally:
            self._over.set()
            watch.end()
        if not found.ended:
            time.sleep(min(REST, self.seconds))
            found.after, found.golden = self.memory(), (first, self.golden())
            found.ended += self.ended()
        return found

    def ended(self) -> list[str]:
        """The server's own processes that are no more."""
        now = self.server.processes()
        gone = [pid for pid, began in self.server.pids.items() if now.get(pid) != began and self._lasting(pid)]
        return [f"process {pid} ended; it said {self.server.words()}" for pid in gone]

    def _lasting(self, pid: int) -> bool:
        """Whether it is the front or the engine; the processes that they start may come and go."""
        return pid in (self.server.process.pid, self._engine)

    @property
    def _engine(self) -> int:
        return min(self.server.pids.keys() - {self.server.process.pid})

    def work(self, worker: int) -> None:
        """Send one request after another, at a low priority: a client's work is not the server's."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        key, number = KEYS[1 + worker % 2], 0
        while not self._over.is_set():
            if not self.only or (worker, number) in self.only:
                self.one(worker, number, key)
            elif number > max(number for _, number in self.only):
                return
            number += 1

    def one(self, worker: int, number: int, key: str) -> None:
        """Send one, and keep what became of it."""
        found, made = self.figures, shot(self.seed, worker, number, self.known)
        found.open[worker] = f"{worker}.{number} {made}"
        try:
            got = send(self.server.host, self.server.port, key, made)
        except Exception as e:  # the server said what is no HTTP, or this program is wrong
            got = Answer(made.kind, 0, 0.0, repr(e))
            found.odd.append(f"{found.open[worker]}: {e!r}")
        found.last.append(f"{found.open.pop(worker)} -> {got.status} {got.error:.100} in {got.seconds:.2f} s")
        found.statuses[f"{made.kind} {got.status}"] += 1
        if wrong := odd(made, got):
            found.odd.append(f"{worker}.{number} {wrong}")


def send(host: str, port: int, key: str, made: Shot) -> Answer:
    """Send a request as it wants to be sent."""
    door = Door(host, port, key, time.monotonic() + made.patience)
    raw = (made.body or b"").replace(KEY, key.encode())
    data = raw if made.manner == RAW else request(host, key, made.path, made.body)
    if made.manner in (WHOLE, RAW):
        return door.exchange(made.kind, data)
    got, began, heard = Answer(made.kind), time.monotonic(), b""
    with contextlib.suppress(OSError), door.connect() as link:
        link.settimeout(door.remaining)
        link.sendall(data)
        while made.manner == SLOW and time.monotonic() < door.until and (received := link.recv(100)):
            heard = (heard + received)[:HEARD]
            time.sleep(0.05)
        if made.manner == DROPPED:
            time.sleep(door.remaining / 2)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
    if heard.startswith(b"HTTP/1.1 "):
        got.status = int(heard[9:12])
        got.retry_after = "yes" if b"retry-after:" in heard.lower() else ""
    got.seconds = time.monotonic() - began
    return got
