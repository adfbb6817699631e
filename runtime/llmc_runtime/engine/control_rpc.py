"""Control RPCs of the engine process: record its loop, reset its prefix cache. EngineClient.call is the front end's
side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from llmc_runtime.engine.messages import ControlReply, ControlRequest
from llmc_runtime.trace import Recorder, attach_recorder

if TYPE_CHECKING:
    from llmc_runtime.engine.engine import Engine

RECORD, RESET = "record", "reset_prefix_cache"
MAX_ROWS = 1 << 16  # maximum rows per recording: about 13,000 steps, 5 MB
MAX_SECONDS = 60.0  # maximum duration of a recording


class _Recording(NamedTuple):
    """A recording of the engine's loop until `end` (time.monotonic), for the request with this number."""

    request_number: int
    end: float
    recorder: Recorder
    stop: Callable[[], None]


class ControlServer:
    """The engine's side. Called by the engine's thread between two steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recording: _Recording | None = None

    def handle(self, request: ControlRequest) -> ControlReply | None:
        """Return the reply; None for a recording that starts, whose reply `finished_recording` returns.

        There is one recording at a time.
        """
        if request.method == RECORD and self._recording is None:
            end = time.monotonic() + min(max(request.seconds, 0.0), MAX_SECONDS)
            self._recording = _Recording(request.number, end, *attach_recorder(self._engine, MAX_ROWS))
            return None
        done = request.method == RESET and self._engine.scheduler.reset_prefix_cache()
        return ControlReply(request.number, done, [])

    def finished_recording(self) -> ControlReply | None:
        """Return the reply of a recording whose time is over, else None."""
        recording = self._recording
        if recording is None or time.monotonic() < recording.end:
            return None
        self._recording = None
        recording.stop()
        return ControlReply(recording.request_number, done=True, rows=recording.recorder.rows())

    @property
    def wait_ms(self) -> int | None:
        """Milliseconds until `finished_recording` returns a reply; None if nothing is being recorded."""
        return None if self._recording is None else max(1, int((self._recording.end - time.monotonic()) * 1000) + 1)
