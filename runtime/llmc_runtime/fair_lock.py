"""Turns: threads use one object in order of arrival, and nothing breaks into a turn; it knows nothing of the object.

Invariant: from the beginning of a turn to its end no other turn, no Ctrl-C and no finalizer runs. A Ctrl-C that comes
meanwhile is delivered at the end; what finalizers want done is done there, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType

from llmc_runtime.format.errors import LlmcError


class Turns:
    """A context manager: `with turns:` is one turn. LlmcError E609 in a process forked from the one that made it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._guard = threading.Lock()  # of the owner and the queue
        self._owner = 0
        self._queue: deque[tuple[threading.Lock, int]] = deque()
        self._late: deque[Callable[[], None]] = deque()
        self._interrupt = _Interrupt()

    def __enter__(self) -> None:
        if self.elsewhere:
            cause = f"the LLM was opened by process {self._process}; a forked process has none of its threads"
            raise LlmcError("E609", cause, "open the LLM after the fork, or start processes with the method spawn")
        if self._owner == threading.get_ident():
            raise RuntimeError("the LLM is used from within its own turn, by a signal handler or an executor")
        interrupt = _Interrupt()
        interrupt.hold()
        self._take(wait=True)
        self._interrupt = interrupt

    def __exit__(self, *exc: object) -> None:
        interrupt = self._interrupt
        try:
            self._do_late()
        finally:
            self._give()
            interrupt.release()

    @property
    def elsewhere(self) -> bool:
        """Whether this process is a fork of the one that made the turns."""
        return os.getpid() != self._process

    def soon(self, action: Callable[[], None]) -> None:
        """Have `action` run as a turn or at the end of one: now where nobody has a turn. It never waits, so that a
        finalizer, which may run anywhere, can call it."""
        self._late.append(action)
        if self.elsewhere:
            return
        interrupt = _Interrupt()
        interrupt.hold()
        try:
            if self._take(wait=False):
                try:
                    self._do_late()
                finally:
                    self._give()
        finally:
            interrupt.release()

    def _do_late(self) -> None:
        while self._late:
            self._late.popleft()()

    def _take(self, *, wait: bool) -> bool:
        # A finalizer may run while this very thread holds the guard: who must not wait does not wait for that either.
        if not self._guard.acquire(blocking=wait):
            return False
        try:
            if not self._owner:
                self._owner = threading.get_ident()
                return True
            if not wait:
                return False
            ticket = threading.Lock()
            ticket.acquire()
            self._queue.append((ticket, threading.get_ident()))
        finally:
            self._guard.release()
        ticket.acquire()  # until it is handed over
        return True

    def _give(self) -> None:
        with self._guard:
            self._owner = 0
            if self._queue:
                ticket, self._owner = self._queue.popleft()
                ticket.release()


class _Interrupt:
    """SIGINT held back in the main thread, whose Python handler is the only one that can raise there."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._came = False

    def hold(self) -> None:
        """From now on an interrupt is noted only."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """The handler is back, and runs if it was wanted."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
