"""Run the attacks of the table: a server with neighbours, a quiet window, the attack, and a pause."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.attacks.figures import describe, milliseconds, table
from bench.attacks.link import Door
from bench.attacks.rows import ATTACKS, Attack, Field, schema
from bench.attacks.server import ADMIN_KEY, KEYS, Sampler, Server, last_log_lines
from bench.attacks.steps import Recording
from bench.attacks.watch import ORDINARY, Watch

SETTLE = 1.5  # seconds of streams before anything is measured
PAUSE = 0.5  # seconds after a window, in which the watching process computes figures and cannot watch
PATIENCE = 3.0  # maximum seconds of a small request after an attack if the server is reused


Save = Callable[[list[dict[str, Any]]], None]


@dataclass
class Bench:
    """Settings of a run; see the options of the command."""

    artifact: Path
    folder: Path
    options: list[str]
    neighbours: int = 1
    tokens: int = 900
    attacked: int = 512
    seconds: float = 4.0
    limit: float = 30.0
    rest: float = 3.0
    connections: int = 400
    start: float = 120.0
    min_seconds: float = 2.0  # seconds of a window during an attack
    ordinary: Sequence[str] = ORDINARY  # small requests next to the streams
    trace: bool = False  # whether windows have the engine's times of steps, `steps`
    server: Server | None = None
    watch: Watch | None = None
    quiet: dict[str, Any] | None = None  # the last window without an attack, if the server is still the same

    def start_server(self) -> Server:
        """Start a server unless one runs, and warm it up."""
        if self.server is None:
            self.server = Server(self.artifact, self.folder / "server.log", self.options, self.start)
            door = Door(self.server.host, self.server.port, KEYS["neighbour"], time.monotonic() + self.start)
            door.ask("warm", "/v1/completions", schema({"type": "object"}))
        return self.server

    def watched(self, ordinary: Sequence[str]) -> Watch:
        """Start the neighbours, with these small requests next to them."""
        server = self.start_server()
        watch = Watch(server.host, server.port, KEYS["neighbour"], self.neighbours, self.tokens, ordinary)
        time.sleep(SETTLE)
        return watch

    def open(self) -> Server:
        """Start a server with its neighbours unless they run."""
        server = self.start_server()
        if self.watch is None:
            self.watch = self.watched(self.ordinary)
        return server

    def close(self) -> None:
        """End the server."""
        if self.watch is not None:
            self.watch.end()
        if self.server is not None:
            self.server.end()
        self.server = self.watch = self.quiet = None

    def run(self, attack: Attack, keep: bool) -> dict[str, Any]:
        """Run one attack and return its figures."""
        server = self.open()
        assert self.watch is not None
        sampler = Sampler(server)
        quiet = self.quiet or self._quiet()
        sampler.take()
        recording = self._recording(self.min_seconds)
        begin, cpu, waits = time.monotonic(), sampler.cpu(), server.cpu_waits()
        end = time.monotonic() + max(self.limit, attack.min_seconds)
        ground = Field(server, end, self.connections, tokens=self.attacked)
        answers = attack.run(ground)
        seconds = time.monotonic() - begin
        time.sleep(max(0.2, self.min_seconds - seconds))
        end = time.monotonic()
        beside = self.watch.window(begin, end)
        beside["waits"] = _since(waits, server)
        beside["steps"] = recording.result() if recording else {}
        sampler.take()
        spent = sampler.cpu() - cpu
        time.sleep(self.rest)
        after = self.quiet = self._quiet()
        changes = server.changes()
        sampler.stop()
        result = {
            "row": attack.row, "name": attack.name, "seconds": seconds, "answers": [a.json() for a in answers],
            "notes": ground.notes, "quiet": quiet, "beside": beside, "after": after, "cpu": dict(spent),
            "memory": sampler.window(begin, time.monotonic()), "processes": changes, "log": last_log_lines(server),
        }  # fmt: skip
        if not keep or attack.ends or changes != "same" or not self.serves(server):
            self.close()
        return result

    def _quiet(self) -> dict[str, Any]:
        """Measure a window without an attack."""
        assert self.watch is not None
        server = self.open()
        start, waits, recording = time.monotonic(), server.cpu_waits(), self._recording(self.seconds)
        time.sleep(self.seconds)
        window = self.watch.window(start, time.monotonic())
        window["waits"] = _since(waits, server)
        window["steps"] = recording.result() if recording else {}
        time.sleep(PAUSE)
        return window

    def _recording(self, seconds: float) -> Recording | None:
        """Start to record the engine's steps, if windows have them."""
        if not self.trace or self.server is None:
            return None
        return Recording(self.server.host, self.server.port, ADMIN_KEY, seconds)

    def serves(self, server: Server) -> bool:
        """Return whether a new schema of the neighbour's key is served within a few seconds, so that no attack is still
        running.
        """
        form = schema({"type": "object", "properties": {f"after{time.monotonic_ns()}": {"type": "null"}}})
        door = Door(server.host, server.port, KEYS["neighbour"], time.monotonic() + PATIENCE)
        return door.ask("after", "/v1/completions", form).status == 200


def _since(waits: dict[str, float], server: Server) -> dict[str, float]:
    """Return the milliseconds for which the processes of the server had no CPU since these waits."""
    return {role: milliseconds(seconds - waits.get(role, 0.0)) for role, seconds in server.cpu_waits().items()}


def chosen(rows: str, only: str) -> list[Attack]:
    """Return the attacks of some rows whose names match a regular expression. Raises ValueError if there are none."""
    numbers = {int(row) for row in rows.split(",") if row}
    attacks = [attack for attack in ATTACKS if (not numbers or attack.row in numbers) and re.search(only, attack.name)]
    if not attacks:
        raise ValueError(f"no attack has --rows {rows or 'any'} and a name that matches {only!r}")
    return attacks


def run_all(
    bench: Bench, attacks: list[Attack], keep: bool, end: float = float("inf"), save: Save = lambda rows: None
) -> list[dict[str, Any]]:
    """Run attacks, print and save each result; attacks that do not fit before `end` are listed."""
    results: list[dict[str, Any]] = []
    limit = bench.limit
    try:
        for attack in attacks:
            remaining = end - time.monotonic()
            if remaining < bench.seconds + bench.rest + max(bench.min_seconds, attack.min_seconds):
                print(f"\n[{attack.row}] {attack.name}: no time left", flush=True)
                continue
            bench.limit = min(limit, remaining)
            results.append(bench.run(attack, keep))
            print(describe(results[-1]), flush=True)
            save(results)
    finally:
        bench.close()
    print("\n" + table(results), flush=True)
    return results
