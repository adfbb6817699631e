"""FairLock: a FIFO lock. SIGINT and the actions of finalizers are deferred while it is held."""

from __future__ import annotations

import _signal  # its functions do not convert handlers to enums, which takes ten times as long as setting one
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType

from llmc_runtime.format.errors import LlmcError

_SIGINT = int(signal.SIGINT)


class FairLock:
    """A context manager that threads enter in order of arrival.

    While it is held, no handler of SIGINT and no action of `run_soon` runs; both run when it is released. Entering it
    raises LlmcError E609 in a forked process, and RuntimeError in the thread that holds it.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._guard = threading.Lock()  # protects the owner and the queue
        self._owner = 0
        self._queue: deque[tuple[threading.Lock, int]] = deque()
        self._deferred: deque[Callable[[], None]] = deque()
        self._interrupt = _DeferredInterrupt()

    def __enter__(self) -> None:
        if self.forked:
            cause = f"the LLM was opened by process {self._process}; a forked process has none of its threads"
            raise LlmcError("E609", cause, "open the LLM after the fork, or start processes with the method spawn")
        if self._owner == threading.get_ident():
            raise RuntimeError("the LLM is used while this thread holds its lock, by a signal handler or an executor")
        interrupt = _DeferredInterrupt()
        interrupt.hold()
        self._acquire(wait=True)
        self._interrupt = interrupt

    def __exit__(self, *exc: object) -> None:
        interrupt = self._interrupt
        try:
            self._run_deferred()
        finally:
            self._release()
            interrupt.release()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the lock."""
        return os.getpid() != self._process

    def run_soon(self, action: Callable[[], None]) -> None:
        """Run `action` under the lock: now if the lock is free, else when it is released. Never waits, so that a
        finalizer can call it at any point."""
        self._deferred.append(action)
        if self.forked:
            return
        interrupt = _DeferredInterrupt()
        interrupt.hold()
        try:
            if self._acquire(wait=False):
                try:
                    self._run_deferred()
                finally:
                    self._release()
        finally:
            interrupt.release()

    def _run_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    def _acquire(self, *, wait: bool) -> bool:
        # A finalizer may run while this thread holds the guard, so it must not wait for the guard either.
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
        ticket.acquire()  # until _give releases it
        return True

    def _release(self) -> None:
        with self._guard:
            self._owner = 0
            if self._queue:
                ticket, self._owner = self._queue.popleft()
                ticket.release()


class _DeferredInterrupt:
    """Defers SIGINT in the main thread, the only one in which Python runs signal handlers."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._received = False

    def hold(self) -> None:
        """Record interrupts instead of handling them."""
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(_SIGINT, self._note)

    def release(self) -> None:
        """Restore the handler, and call it if an interrupt was received."""
        if self._handler is not None:
            _signal.signal(_SIGINT, self._handler)
            if self._received:
                self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
