"""Progress lines and the final summary of a compile."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import IO, Any

from llmc_runtime.format.size_text import size_text

MIN_SECONDS = 2.0  # time a stage must have run before its remaining time is estimated


@dataclass
class Summary:
    """The outcome of a compile: seconds per stage, facts about the artifact, notes, and a suggested next command."""

    output: str
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    next: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON-compatible data."""
        summary = {"output": self.output, "seconds": self.seconds, **self.facts, "notes": self.notes}
        return summary | ({"next": self.next} if self.next else {})

    def text(self) -> str:
        """Return the summary as lines for a terminal."""
        total = sum(self.seconds.values())
        stages = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items())
        facts = [f"  {k.replace('_', ' ')}: {v}" for k, v in self.facts.items()]
        facts.append(f"  look inside: llmc inspect {self.output}; llmc report {self.output}")
        after = [self.next] if self.next else []
        return "\n".join([f"{self.output} in {total:.1f} s ({stages})", *facts, *after])


class Console:
    """Progress as lines on a stream; on a terminal, a running stage rewrites its line."""

    def __init__(self, out: IO[str] | None = None):
        """Write to `out`, by default stderr."""
        self.out = out or sys.stderr
        self.live = self.out.isatty()
        self.shown = 0.0
        self.started: dict[str, tuple[float, int]] = {}

    def note(self, text: str) -> None:
        """Print one line."""
        self._write(f"{text}\n")

    def begin(self, name: str, detail: str = "") -> None:
        """Announce a stage. Shown only on a terminal, until the stage prints its next line."""
        if self.live:
            self._write(f"  {name} ...{f' {detail}' if detail else ''}")

    def stage(self, name: str, detail: str, seconds: float) -> None:
        """Print the line of a finished stage."""
        self.started.pop(name, None)
        self.note(f"[{seconds:6.1f} s] {name}: {detail}")

    def part(self, name: str, done: int, of: int, unit: str = "") -> None:
        """Show progress `done` of `of` and the estimated time left.

        Printed only on a terminal and at most five times a second. `unit` "B" prints megabytes.
        """
        now = time.monotonic()
        started, before = self.started.setdefault(name, (now, done))
        if not self.live or now - self.shown < 0.2:
            return
        self.shown = now
        left = (now - started) * (of - done) / (done - before) if done > before else 0.0
        rest = f", {left:.0f} s left" if now - started > MIN_SECONDS and left >= 1 else ""
        self._write(f"  {name}: {_amount(done, unit)} of {_amount(of, unit)}{rest}")

    def _write(self, text: str) -> None:
        """Print text; on a terminal, it replaces the current line."""
        self.out.write(f"\r\x1b[K{text}" if self.live else text)
        self.out.flush()


class Quiet(Console):
    """A console that prints nothing."""

    def _write(self, text: str) -> None:
        pass


def _amount(n: int, unit: str) -> str:
    return size_text(n) if unit == "B" else f"{n}{unit}"
