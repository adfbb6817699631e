"""Runs damaged inputs in child processes and checks the outcome: an error message without a crash, within limits of
time and memory.

A case is run in a forked child, whose time and peak memory are measured against what it had before the case. A case
fails if its child dies or does not respond in time; another child continues with the next case.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS, BYTES, LINES, LETTERS = 2.0, 100 << 20, 5, 1200
HANG = 30.0  # of a child without a word
ROOM = 4 << 30  # of address space beyond the child's own: a runaway ends here, not the machine
CODE = re.compile(r"LLMC-(E\d{3})")


@dataclass(frozen=True)
class Case:
    """One damaged input. `act` gets an empty folder and returns an exit code; its output is checked.

    `harmless`: why the case may also pass ("": it must be refused). `names`: what a refusal must name.
    """

    family: str
    name: str
    act: Callable[[Path], int]
    harmless: str = ""
    names: str = ""


@dataclass
class Outcome:
    """What a case did: exit code (-1: it died), seconds (without waiting for a processor), bytes of memory beyond
    the child's own, what it printed."""

    code: int
    seconds: float
    memory: int
    text: str

    @property
    def error(self) -> str:
        found = CODE.search(self.text)
        return found[1] if found else ""


def wrong(case: Case, outcome: Outcome) -> str:
    """Return which requirement the outcome violates; "" if none."""
    text = outcome.text
    if outcome.code < 0 or "Traceback" in text or "LLMC-E000" in text:
        return "a crash: " + text.strip()[-600:]
    if outcome.seconds > SECONDS:
        return f"it took {outcome.seconds:.2f} s; at most {SECONDS:g} s are allowed"
    if outcome.memory > BYTES:
        return f"it took {outcome.memory >> 20} MiB; at most {BYTES >> 20} MiB are allowed"
    if outcome.code == 0:
        return "" if case.harmless else f"silence: it was accepted ({text.strip()[-200:]})"
    written = text[text.index("LLMC-E") :] if "LLMC-E" in text else ""
    if not written:
        return f"no code: {text.strip()[-300:]}"
    if "\n  Try: " not in written:
        return f"no remedy: {written[:300]}"
    if outcome.code != 4 and (len(written.strip().splitlines()) > LINES or len(written) > LETTERS):
        return f"{len(written.splitlines())} lines of {len(written)} letters: {written[:600]}"
    return "" if case.names in written else f"{case.names!r} is not named: {written[:300]}"


def run_all(
    cases: Sequence[Case], jobs: int, report: Callable[[int, Outcome], None], again: int = 2
) -> dict[int, Outcome]:
    """Run all cases in `jobs` children. A case that was too slow runs `again` times: the machine may have been busy."""
    with tempfile.TemporaryDirectory(prefix="llmc-corpus-") as root:
        found = _run_once(cases, jobs, report, Path(root))
    slow = [i for i, o in found.items() if o.seconds > SECONDS and o.code >= 0]
    if slow and again:
        for i, o in run_all([cases[i] for i in slow], 1, lambda i, o: None, again - 1).items():
            found[slow[i]] = min(o, found[slow[i]], key=lambda o: o.seconds)
    return found


def _run_once(
    cases: Sequence[Case], jobs: int, report: Callable[[int, Outcome], None], root: Path
) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    shares = [list(range(k, len(cases), jobs)) for k in range(jobs)]
    children = {c.fd: c for share in shares if share for c in [Child(cases, share, root)]}
    while children:
        for fd in select.select(list(children), [], [], 1.0)[0]:
            for index, outcome in children[fd].read():
                found[index] = outcome
                report(index, outcome)
        for fd, child in list(children.items()):
            if child.ended or child.silent > HANG:
                del children[fd]
                index, outcome = child.bury()
                if index is not None:
                    found[index] = outcome
                    report(index, outcome)
                if child.left:
                    fresh = Child(cases, child.left, root)
                    children[fresh.fd] = fresh
    return found


class Child:
    """A forked process that runs a share of the cases in order and tells each as a line of JSON."""

    def __init__(self, cases: Sequence[Case], share: list[int], root: Path) -> None:
        self.left = list(share)
        self.ended = False
        self._rest = b""
        self._heard = time.monotonic()
        self.fd, out = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.fd)
            _live(cases, share, out, root)
        os.close(out)

    @property
    def silent(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._heard

    def read(self) -> list[tuple[int, Outcome]]:
        data = os.read(self.fd, 1 << 20)
        self.ended = not data
        self._heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        done = [json.loads(line) for line in lines]
        for index, _ in done:
            self.left.remove(index)
        return [(index, Outcome(**fields)) for index, fields in done]

    def bury(self) -> tuple[int | None, Outcome]:
        """End it. The case that it died of, if it did."""
        hung = not self.ended
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        if not self.left:
            return None, Outcome(0, 0, 0, "")
        why = f"nothing was heard for {HANG:.0f} s" if hung else f"ended by {os.waitstatus_to_exitcode(status)}"
        return self.left.pop(0), Outcome(-1, self.silent, 0, why)


def _live(cases: Sequence[Case], share: list[int], out: int, root: Path) -> None:
    """The child: never returns."""
    scratch = Path(tempfile.mkdtemp(dir=root))
    try:
        size = _memory("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
        raw = os.open(scratch / "said", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        for fd in (1, 2):  # what libraries print by themselves
            os.dup2(raw, fd)
        for i in share:
            outcome = run_one(cases[i], scratch)
            os.write(out, json.dumps([i, vars(outcome)]).encode() + b"\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)


def run_one(case: Case, scratch: Path) -> Outcome:
    """Run a case here, in a folder of its own below `scratch`."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = _memory("VmRSS"), time.perf_counter() - _queued()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = case.act(folder)
        except SystemExit as e:
            code = int(e.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
    seconds, peak = time.perf_counter() - _queued() - begin, _memory("VmHWM")
    shutil.rmtree(folder, ignore_errors=True)
    text = output.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    text = (scratch / "said").read_text(errors="replace")[:2000] + text
    os.truncate(scratch / "said", 0)
    return Outcome(code, seconds, max(0, peak - before), text if len(text) < 8000 else text[:4000] + text[-4000:])


def _queued() -> float:
    """Seconds that this thread could have run and did not, because others had the processors."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
