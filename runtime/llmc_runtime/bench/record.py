"""Records one streamed request, from its server-sent events: arrival times of chunks and numbers of tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OK, FAILED, CUT = "ok", "failed", "cut"


@dataclass
class Record:
    """A request. Times are in seconds of the monotonic clock, which all processes of a machine share.

    `first` and `last` are the arrival times of the first and last chunk with text. `gaps` are the seconds between
    consecutive chunks with text, in float32. `output_tokens` is the server's count if it reports one, else the number
    of chunks.
    """

    mix: int
    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    counted: bool = False
    status: str = FAILED
    error: str = ""
    gaps: array[float] = field(default_factory=lambda: array("f"))


class Stream:
    """Parses the server-sent events of one completion into its record."""

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self.record, self._clock = record, clock
        self._tail = b""
        self._done = False  # [DONE] was received; servers that do not send it end with their choices
        self._ended: dict[int, bool] = {}  # choice -> whether it has a finish reason
        self.error = ""

    def feed(self, data: bytes) -> None:
        """Process a part of the body. Raises ValueError if an event is not a chunk of a completion."""
        now = self._clock()
        if b"\r" in data:  # JSON contains none, so these are line ends
            data = data.replace(b"\r", b"")
        *events, self._tail = (self._tail + data).split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if payload := b"\n".join(lines):
                try:
                    self._payload(payload, now)
                except (AttributeError, TypeError):
                    raise ValueError(f"an event is not a chunk of a completion: {payload!r:.120}") from None

    @property
    def complete(self) -> bool:
        """Whether the response is complete. Check it at the end of the body."""
        return (self._done or (bool(self._ended) and all(self._ended.values()))) and not self.error

    def _payload(self, payload: bytes, now: float) -> None:
        """Record one event of a stream (a chunk, the usage, an error or the end); `now`: its time in seconds."""
        if payload == b"[DONE]":
            self._done = True
            return
        chunk = json.loads(payload)
        record = self.record
        if error := chunk.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)[:300]
            return
        for choice in chunk.get("choices") or ():
            ends = choice.get("finish_reason") is not None
            index = choice.get("index", 0)
            self._ended[index] = ends or self._ended.get(index, False)
            if _has_text(choice) or (ends and not record.chunks):
                self._chunk(now)
        usage = chunk.get("usage")
        if usage:
            record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
            record.output_tokens = usage.get("completion_tokens") or 0
            record.counted = True

    def _chunk(self, now: float) -> None:
        record = self.record
        if record.chunks:
            record.gaps.append(now - record.last)
        else:
            record.first = now
        record.chunks += 1
        record.last = now


def _has_text(choice: dict[str, Any]) -> bool:
    """Return whether a chunk's choice contains text of any kind."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return bool(
        delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
    )
