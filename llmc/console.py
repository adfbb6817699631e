"""What a compile tells while it runs and when it has ended; it decides nothing."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import IO, Any

SETTLED = 2.0  # seconds after which a rate is worth telling


@dataclass
class Summary:
    """What a compile did: seconds a stage, and what came out. `next`: a line with a command that makes use of it."""

    output: str
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    next: str = ""

    def as_json(self) -> dict[str, Any]:
        told = {"output": self.output, "seconds": self.seconds, **self.facts, "notes": self.notes}
        return told | ({"next": self.next} if self.next else {})

    def text(self) -> str:
        total = sum(self.seconds.values())
        stages = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items())
        facts = [f"  {k.replace('_', ' ')}: {v}" for k, v in self.facts.items()]
        facts.append(f"  look inside: llmc inspect {self.output}; llmc report {self.output}")
        after = [self.next] if self.next else []
        return "\n".join([f"{self.output} in {total:.1f} s ({stages})", *facts, *after])


class Console:
    """Progress as lines on a stream; on a terminal a running stage rewrites its line."""

    def __init__(self, out: IO[str] | None = None):
        self.out = out or sys.stderr
        self.live = self.out.isatty()
        self.shown = 0.0
        self.begun: dict[str, tuple[float, int]] = {}

    def note(self, text: str) -> None:
        self._clear()
        self.out.write(f"{text}\n")
        self.out.flush()

    def begin(self, name: str, detail: str = "") -> None:
        """A stage begins; a terminal shows it until the stage tells more."""
        if self.live:
            self._clear()
            self.out.write(f"  {name} ...{f' {detail}' if detail else ''}")
            self.out.flush()

    def stage(self, name: str, detail: str, seconds: float) -> None:
        self.begun.pop(name, None)
        self.note(f"[{seconds:6.1f} s] {name}: {detail}")

    def part(self, name: str, done: int, of: int, unit: str = "") -> None:
        """`done` of `of`, and how long the rest takes at this rate; shown at most five times a second, and only on a
        terminal."""
        now = time.monotonic()
        begun, before = self.begun.setdefault(name, (now, done))
        if not self.live or now - self.shown < 0.2:
            return
        self.shown = now
        left = (now - begun) * (of - done) / (done - before) if done > before else 0.0
        rest = f", {left:.0f} s left" if now - begun > SETTLED and left >= 1 else ""
        self._clear()
        self.out.write(f"  {name}: {_amount(done, unit)} of {_amount(of, unit)}{rest}")
        self.out.flush()

    def _clear(self) -> None:
        if self.live:
            self.out.write("\r\x1b[K")


class Quiet(Console):
    """No progress at all."""

    def note(self, text: str) -> None:
        pass

    def begin(self, name: str, detail: str = "") -> None:
        pass

    def part(self, name: str, done: int, of: int, unit: str = "") -> None:
        pass

    def _clear(self) -> None:
        pass


def _amount(n: int, unit: str) -> str:
    return f"{n / 1e6:.0f} MB" if unit == "B" else f"{n}{unit}"
