"""Traces of the engine's loop, step by step, as files for ui.perfetto.dev.

*Host time exposed* is the time before a step in which the device had no queued work although requests were live, as
far as the host can tell. It is 0 if the previous step still runs when the launch ends. Otherwise it is the time from
the last moment at which the device was known to have work until the end of the launch. These moments are

- the end of a launch,
- the beginning of a call or the end of a wait at which `done` reports that the newest step still runs,
- the end of the wait for the only step in flight.

The result is an upper bound, except for open steps: these count as running until they have sampled, although the device
may wait for their masks. The first step after an idle period has no exposed time. If the executor has no
`done(ticket)`, every step counts as done.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, NamedTuple

from llmc_runtime.format.errors import LlmcError

PARTS = ("plan", "launch", "wait", "commit")
_MAX_SPANS = 1 << 18  # the latest ones are kept: about 50,000 steps
_ENGINE, _DEVICE, _EXPOSED = 1, 2, 3  # numbers of tracks
_TRACKS: Mapping[int, str] = MappingProxyType(
    {_ENGINE: "engine", _DEVICE: "device, as the host sees it", _EXPOSED: "host time exposed"}
)


class _StepInfo(NamedTuple):
    """A step: its number, rows and tokens."""

    step: int
    rows: int
    tokens: int


_UNKNOWN = _StepInfo(-1, 0, 0)
Row = tuple[int, str, int, int, int, int, int]  # track, name, begin and end in ns, step, rows, tokens


class _Span(NamedTuple):
    """A span of time on a track, in ns."""

    track: int
    name: str
    begin: int
    end: int
    step: _StepInfo


class Recorder:
    """Records the latest `max_spans` spans of an engine. `done` returns whether the step of a ticket has run."""

    def __init__(self, done: Callable[[Any], bool], max_spans: int = _MAX_SPANS) -> None:
        self._done = done
        self._began = perf_counter_ns()
        self._spans: deque[_Span] = deque(maxlen=max_spans)
        self._exposed: deque[int] = deque(maxlen=_MAX_SPANS)
        self._in_flight: deque[tuple[_StepInfo, int]] = deque()  # steps in flight, with the end of their launch
        self._last = 0  # end of the previous part
        self._busy: int | None = None  # when the device was last known to have work; None: it was idle
        self._step = _UNKNOWN  # the step that the engine works on
        self._number = 0  # number of the next step to be launched
        self._ended = -1  # when the last step ended, as the host sees it

    def clear(self) -> None:
        """Remove the recorded events."""
        self._spans.clear()
        self._exposed.clear()

    def note(self, part: str, subject: Any) -> None:
        """Record that a part of a step ends now.

        part:  "begin" (of a call), "plan", "launch", "wait", "commit", or "forget" (the steps in flight were dropped)
        subject:  the Step for "plan", whether requests are live for "commit", None for "forget", else the tickets
        """
        now = perf_counter_ns()
        if part == "begin":
            while len(self._in_flight) < len(subject):  # launched before this trace began
                self._in_flight.appendleft((_UNKNOWN, now))
            self._update_busy(now, subject)
        elif part == "plan":
            self._step = _StepInfo(self._number, len(subject.work), subject.num_tokens)
            self._span("plan", now)
        elif part == "launch":
            self._launched(now, subject)
        elif part == "wait":
            self._waited(now, subject)
        elif part == "commit":
            self._span("commit", now)
            if not subject:
                self._busy = None
        else:
            self._in_flight.clear()
            self._busy = None
        self._last = perf_counter_ns()

    def _span(self, part: str, now: int) -> None:
        self._spans.append(_Span(_ENGINE, part, self._last, now, self._step))

    def _update_busy(self, now: int, tickets: Sequence[Any]) -> None:
        """Note that the device has work now, if the newest step still runs."""
        if tickets and self._busy is not None and not self._done(tickets[-1]):
            self._busy = now

    def _launched(self, now: int, tickets: Sequence[Any]) -> None:
        self._span("launch", now)
        if self._busy is not None:
            runs = len(tickets) > 1 and not self._done(tickets[-2])
            begin = now if runs else self._busy
            self._exposed.append(now - begin)
            if not runs:
                self._spans.append(_Span(_EXPOSED, "exposed", begin, now, self._step))
        self._in_flight.append((self._step, now))
        self._busy = now
        self._number += 1

    def _waited(self, now: int, tickets: Sequence[Any]) -> None:
        self._step, launched = self._in_flight.popleft()
        if self._step is not _UNKNOWN:
            self._span("wait", now)
            self._spans.append(_Span(_DEVICE, "step", max(launched, self._ended), now, self._step))
        self._ended = now
        if tickets:
            self._update_busy(now, tickets)
        else:
            self._busy = now

    def summary(self) -> dict[str, float]:
        """Return statistics since the last `clear`, 0 without data: the number of steps, their median rows, the median
        of each part in us, and median, 99th percentile and sum of the host time exposed (see the module) in us."""
        by_part: dict[str, list[int]] = {part: [] for part in PARTS}
        rows = []
        for span in self._spans:
            if span.track == _ENGINE:
                by_part[span.name].append(span.end - span.begin)
            elif span.track == _DEVICE:
                rows.append(span.step.rows)
        exposed = sorted(self._exposed)
        stats = {"steps": float(len(rows)), "rows": _median(rows)}
        stats |= {f"{part}_us": _median(times) / 1e3 for part, times in by_part.items()}
        stats["exposed_us"] = _median(exposed) / 1e3
        stats["exposed_p99_us"] = (exposed[len(exposed) * 99 // 100] if exposed else 0) / 1e3
        stats["exposed_sum_us"] = sum(exposed) / 1e3
        return stats

    def describe(self) -> str:
        """Return the summary as one line."""
        s = self.summary()
        parts = ", ".join(f"{part} {s[f'{part}_us']:.0f}" for part in PARTS)
        return (
            f"{s['steps']:.0f} steps of {s['rows']:.0f} rows (median): {parts} us; "
            f"host time exposed {s['exposed_us']:.0f} us a step (median), {s['exposed_p99_us']:.0f} us (p99)"
        )

    def rows(self) -> list[Row]:
        """Return the recorded events, for `document`."""
        return [(s.track, s.name, s.begin - self._began, s.end - self._began, *s.step) for s in self._spans]


class Trace(Recorder):
    """A recorder that writes the file at `path`. Raises LlmcError E645 if it cannot be written."""

    def __init__(self, path: str | Path, done: Callable[[Any], bool]) -> None:
        super().__init__(done)
        self.path = Path(path)
        self.finish: Callable[[], object] = self.write  # writes the file, at most once
        self.write()

    def write(self) -> None:
        """Write everything so far. Raises LlmcError E645."""
        try:
            self.path.write_text(json.dumps(document(self.rows())), encoding="utf-8")
        except OSError as e:
            raise LlmcError("E645", f"{self.path} cannot be written: {e.strerror}", "choose another file") from e


def document(rows: Iterable[Row]) -> dict[str, Any]:
    """Return rows in the trace event format: complete events, times in us since the recorder was made."""
    names = [_meta("thread_name", tid, name) for tid, name in _TRACKS.items()]
    events = [_meta("process_name", 0, "llmc"), *names, *map(_event, rows)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(row: Row) -> dict[str, Any]:
    track, name, begin, end, step, rows, tokens = row
    args = {"step": step, "rows": rows, "tokens": tokens}
    return {
        "name": name,
        "ph": "X",
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "pid": 1,
        "tid": track,
        "args": args,
    }


def attach_trace(engine: Any, path: str | Path) -> Trace:
    """Trace an engine. The file is written by `finish`, or when the engine is deleted. Raises LlmcError E645."""
    trace = Trace(path, _done_of(engine))
    engine.note = trace.note
    trace.finish = weakref.finalize(engine, trace.write)
    return trace


def attach_recorder(engine: Any, max_spans: int) -> tuple[Recorder, Callable[[], None]]:
    """Record an engine, in addition to its present recorder. Return the recorder and a function that detaches it.

    Both are called between two steps.
    """
    recorder, before = Recorder(_done_of(engine), max_spans), engine.note

    def both(part: str, subject: Any) -> None:
        before(part, subject)
        recorder.note(part, subject)

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
