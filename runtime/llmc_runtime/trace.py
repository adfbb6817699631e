"""A trace of the engine's loop: who waits for whom, step by step, as a file that opens in ui.perfetto.dev. No device.

*Host time exposed* in front of a step is time in which the device had nothing queued though requests were alive, as
well as the host can tell. Where at the end of the step's launch the step before it still runs, it is 0. Else it is the
time from the last moment at which the host knew the device to have work, to the end of the launch: it knows so when a
launch ends, when it sees at the beginning of a call or after a wait that the newest step still runs, and when it has
waited for the only one. So the figure errs upwards only, but for open steps: such a one counts as running until it has
sampled, though the device may wait for its masks. The first step after a time without requests has none. The
host sees whether a step runs by asking the executor (`done(ticket)`); where that cannot say, a step counts as done.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

from llmc_runtime.format.errors import LlmcError

PARTS = ("plan", "launch", "wait", "commit")
_MOST = 1 << 18  # spans kept, the latest: some 50,000 steps
_TRACKS = ("engine", "device, as the host sees it", "host time exposed")  # numbered from 1


class _What(NamedTuple):
    """A step: its number, rows and tokens."""

    step: int
    rows: int
    tokens: int


_BEFORE = _What(-1, 0, 0)
Row = tuple[int, str, int, int, int, int, int]  # track, name, begin and end in ns, step, rows, tokens


class _Span(NamedTuple):
    """One stretch of time on one track, in ns."""

    track: int
    name: str
    begin: int
    end: int
    what: _What


class Recorder:
    """Collects what an engine notes, the latest `most` spans. `done` says of a ticket whether its step has run."""

    def __init__(self, done: Callable[[Any], bool], most: int = _MOST) -> None:
        self._done = done
        self._began = perf_counter_ns()
        self._spans: deque[_Span] = deque(maxlen=most)
        self._exposed: deque[int] = deque(maxlen=_MOST)
        self._under_way: deque[tuple[_What, int]] = deque()  # launched, not waited for, and when the launch ended
        self._last = 0  # the end of the part before
        self._busy: int | None = None  # when the device was last known to have work; None: nothing was asked of it
        self._what = _BEFORE  # the step in the hands of the engine
        self._number = 0  # of the next step to be launched
        self._ended = -1  # when the device was done with the last step waited for, as the host sees it

    def clear(self) -> None:
        """Forget what was recorded, for a measurement that begins now."""
        self._spans.clear()
        self._exposed.clear()

    def note(self, part: str, what: Any) -> None:
        """A part of a step has ended now.

        `what`: the Step of "plan", whether requests are alive after "commit", nothing after "forget" (the steps under
        way were given up), else the tickets under way: after "begin" (a call begins), "launch" and "wait".
        """
        now = perf_counter_ns()
        if part == "begin":
            while len(self._under_way) < len(what):  # launched before this trace began
                self._under_way.appendleft((_BEFORE, now))
            self._look(now, what)
        elif part == "plan":
            self._what = _What(self._number, len(what.work), what.num_tokens)
            self._span("plan", now)
        elif part == "launch":
            self._launched(now, what)
        elif part == "wait":
            self._waited(now, what)
        elif part == "commit":
            self._span("commit", now)
            if not what:
                self._busy = None
        else:
            self._under_way.clear()
            self._busy = None
        self._last = perf_counter_ns()

    def _span(self, part: str, now: int) -> None:
        self._spans.append(_Span(1, part, self._last, now, self._what))

    def _look(self, now: int, tickets: Sequence[Any]) -> None:
        if tickets and self._busy is not None and not self._done(tickets[-1]):
            self._busy = now

    def _launched(self, now: int, tickets: Sequence[Any]) -> None:
        self._span("launch", now)
        if self._busy is not None:
            runs = len(tickets) > 1 and not self._done(tickets[-2])
            begin = now if runs else self._busy
            self._exposed.append(now - begin)
            if not runs:
                self._spans.append(_Span(3, "exposed", begin, now, self._what))
        self._under_way.append((self._what, now))
        self._busy = now
        self._number += 1

    def _waited(self, now: int, tickets: Sequence[Any]) -> None:
        self._what, launched = self._under_way.popleft()
        if self._what is not _BEFORE:
            self._span("wait", now)
            self._spans.append(_Span(2, "step", max(launched, self._ended), now, self._what))
        self._ended = now
        if tickets:
            self._look(now, tickets)
        else:
            self._busy = now

    def summary(self) -> dict[str, float]:
        """Figures since the last `clear`: steps waited for, their median rows, the medians of each part in us, and of
        the host time exposed (see above) the median, the 99th percentile and the sum, in us. 0 where there is none."""
        by_part: dict[str, list[int]] = {part: [] for part in PARTS}
        rows = []
        for span in self._spans:
            if span.track == 1:
                by_part[span.name].append(span.end - span.begin)
            elif span.track == 2:
                rows.append(span.what.rows)
        exposed = sorted(self._exposed)
        found = {"steps": float(len(rows)), "rows": _median(rows)}
        found |= {f"{part}_us": _median(times) / 1e3 for part, times in by_part.items()}
        found["exposed_us"] = _median(exposed) / 1e3
        found["exposed_p99_us"] = (exposed[len(exposed) * 99 // 100] if exposed else 0) / 1e3
        found["exposed_sum_us"] = sum(exposed) / 1e3
        return found

    def describe(self) -> str:
        """The summary in one line."""
        s = self.summary()
        parts = ", ".join(f"{part} {s[f'{part}_us']:.0f}" for part in PARTS)
        return (
            f"{s['steps']:.0f} steps of {s['rows']:.0f} rows (median): {parts} us; "
            f"host time exposed {s['exposed_us']:.0f} us a step (median), {s['exposed_p99_us']:.0f} us (p99)"
        )

    def rows(self) -> list[Row]:
        """What was recorded, for `document`."""
        return [(s.track, s.name, s.begin - self._began, s.end - self._began, *s.what) for s in self._spans]


class Trace(Recorder):
    """A recorder for the file at `path`, which `write` makes. LlmcError E645 where it cannot be written, at once."""

    def __init__(self, path: str | Path, done: Callable[[Any], bool]) -> None:
        super().__init__(done)
        self.path = Path(path)
        self.finish: Callable[[], object] = self.write  # writes for the last time
        self.write()

    def write(self) -> None:
        """The file, with everything so far. LlmcError E645."""
        try:
            self.path.write_text(json.dumps(document(self.rows())), encoding="utf-8")
        except OSError as e:
            raise LlmcError("E645", f"{self.path} cannot be written: {e.strerror}", "name a file elsewhere") from e


def document(rows: Iterable[Row]) -> dict[str, Any]:
    """What a recorder has, in the trace event format: complete events, times in us since it began."""
    names = [_meta("thread_name", tid, name) for tid, name in enumerate(_TRACKS, 1)]
    events = [_meta("process_name", 0, "llmc"), *names, *map(_event, rows)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(row: Row) -> dict[str, Any]:
    track, name, begin, end, step, rows, tokens = row
    what = {"step": step, "rows": rows, "tokens": tokens}
    return {
        "name": name,
        "ph": "X",
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "pid": 1,
        "tid": track,
        "args": what,
    }


def follow(engine: Any, path: str | Path) -> Trace:
    """A trace of an engine from now on, written when it is finished or the engine goes. LlmcError E645."""
    trace = Trace(path, _done_of(engine))
    engine.note = trace.note
    trace.finish = weakref.finalize(engine, trace.write)
    return trace


def overhear(engine: Any, most: int) -> tuple[Recorder, Callable[[], None]]:
    """A recorder of an engine from now on, beside whoever listens already, and what ends it. Between two steps."""
    recorder, before = Recorder(_done_of(engine), most), engine.note

    def both(part: str, what: Any) -> None:
        before(part, what)
        recorder.note(part, what)

    def stop() -> None:
        engine.note = before

    engine.note = both
    return recorder, stop


def _done_of(engine: Any) -> Callable[[Any], bool]:
    return getattr(engine.executor, "done", lambda ticket: True)


def _meta(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}


def _median(values: Sequence[int]) -> float:
    return float(median(values)) if values else 0.0
