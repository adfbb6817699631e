"""Progress lines and the final summary of a compile, with the command to run next."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from llmc_runtime.format.size_text import size_text

from llmc.frontend.tokenizer_files import TOKENIZER
from llmc.options import Options
from llmc.targets.target import Target

MIN_SECONDS = 2.0  # time a stage must have run before its remaining time is estimated
LIVE_SECONDS = 0.2  # shortest time between two updates of a line on a terminal
SILENT_SECONDS = 10.0  # time without output after which progress is printed as a line elsewhere
_ERASE = "\r\x1b[K"  # the current line of a terminal


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
        output = shlex.quote(self.output)
        facts.append(f"  look inside: llmc inspect {output}; llmc report {output}")
        after = [self.next] if self.next else []
        return "\n".join([f"{self.output} in {total:.1f} s ({stages})", *facts, *after])


class Console:
    """Progress as lines on a stream; on a terminal, a running stage rewrites its line.

    In a pipe or a file, a stage prints a line when it begins, every ten seconds, and when it ends.
    """

    def __init__(self, out: IO[str] | None = None):
        """Write to `out`, by default stderr."""
        self.out = out or sys.stderr
        self.live = self.out.isatty()
        self.shown = 0.0  # when something was written last; on a terminal, when progress was
        self.started: dict[str, tuple[float, int]] = {}

    def note(self, text: str) -> None:
        """Print one line."""
        self._write(f"{text}\n")

    def begin(self, name: str, detail: str = "") -> None:
        """Announce a stage. On a terminal, the line is replaced by the stage's next one."""
        text = f"  {name} ...{f' {detail}' if detail else ''}"
        self._write(text if self.live else f"{text}\n")

    def stage(self, name: str, detail: str, seconds: float) -> None:
        """Print the line of a finished stage."""
        self.started.pop(name, None)
        self.note(f"[{seconds:6.1f} s] {name}: {detail}")

    def part(self, name: str, done: int, of: int, unit: str = "") -> None:
        """Show progress `done` of `of` and the estimated time left.

        Printed on a terminal at most five times a second, elsewhere only if nothing was printed for ten seconds. `unit`
        "B" prints sizes.
        """
        now = time.monotonic()
        started, before = self.started.setdefault(name, (now, done))
        if now - self.shown < (LIVE_SECONDS if self.live else SILENT_SECONDS):
            return
        self.shown = now
        remaining = (now - started) * (of - done) / (done - before) if done > before else 0.0
        rest = f", {remaining:.0f} s left" if now - started > MIN_SECONDS and remaining >= 1 else ""
        text = f"  {name}: {_amount(done, unit if unit == 'B' else '')} of {_amount(of, unit)}{rest}"
        self._write(text if self.live else f"{text}\n")

    def _write(self, text: str) -> None:
        """Print text; on a terminal, it replaces the current line."""
        if not self.live:
            self.shown = time.monotonic()
        self.out.write(f"{_ERASE}{text}" if self.live else text)
        self.out.flush()


def erase_line(out: IO[str]) -> None:
    """Remove an unfinished line of progress from `out`, if that is a terminal."""
    if out.isatty():
        out.write(_ERASE)
        out.flush()


class Quiet(Console):
    """A console that prints nothing."""

    def _write(self, text: str) -> None:
        pass


def _amount(n: int, unit: str) -> str:
    return size_text(n) if unit == "B" else f"{n}{unit}"


def next_command(model: Path, output: Path, o: Options, target: Target, task: str = "") -> str:
    """Return the suggested next command: pack the weights, or run the artifact, or the model with a draft model.

    `model` is the folder of the model. Without a tokenizer the command generates from token ids. `task`: of a model
    that pools.
    """
    if o.weights == "none":
        return f"next: {shlex.join(['llmc', 'pack', str(output), str(model)])}"
    if o.drafts_for is not None:
        return f"next: {shlex.join(['llmc-run', str(o.drafts_for), '--draft-model', str(output)])} --prompt 'Hello'"
    return run_command(output, target.name, target.arch, (model / TOKENIZER).exists(), task)


def run_command(artifact: Path, target: str, arch: str, tokenizer: bool = True, task: str = "") -> str:
    """Return the command that runs an artifact with weights."""
    article = "an" if arch.startswith("s") else "a"  # an sm_90, a gfx942
    machine = "" if target.startswith("cpu:") else f", on a machine with {article} {arch} GPU"
    command = f"llmc-run {shlex.quote(str(artifact))} {f'--{task} ' if task else ''}--prompt 'Hello'"
    if not tokenizer:
        code = f"from llmc_runtime import LLM; print(LLM({str(artifact)!r}).{task or 'generate'}([[1, 2, 3]]))"
        command = "python -c " + (shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"')
    return f"next{machine}: {command}"
