"""FairLock: a FIFO lock. SIGINT and the actions of finalizers are deferred while it is held."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from llmc_runtime.format.errors import LlmcError


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
        self._handle_interrupt: Callable[[], None] = lambda: None  # of the owner, see `_defer_interrupt`
        self._loop: _DeferredInterrupt | None = None  # of a loop in the main thread

    def __enter__(self) -> None:
        if self.forked:
            cause = f"the LLM was opened by process {self._process}; a forked process has none of its threads"
            raise LlmcError("E609", cause, "open the LLM after the fork, or start processes with the method spawn")
        if self._owner == threading.get_ident():
            raise RuntimeError("the LLM is used while this thread holds its lock, by a signal handler or an executor")
        handle_interrupt = self._defer_interrupt()
        self._acquire(wait=True)
        self._handle_interrupt = handle_interrupt

    def __exit__(self, *exc: object) -> None:
        handle_interrupt = self._handle_interrupt
        try:
            self._run_deferred()
        finally:
            self._release()
            handle_interrupt()

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
        handle_interrupt = self._defer_interrupt()
        try:
            if self._acquire(wait=False):
                try:
                    self._run_deferred()
                finally:
                    self._release()
        finally:
            handle_interrupt()

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Context manager for a loop that enters the lock in each iteration: it sets the handler of SIGINT once, since
        setting one takes longer than entering the lock. Between two entries, interrupts are handled at once.
        """
        if threading.current_thread() is not threading.main_thread() or self._loop is not None:
            yield
            return
        loop = _DeferredInterrupt()
        try:
            loop.install()
            loop.release()
            self._loop = loop
            yield
        finally:
            self._loop = None
            loop.hold()
            loop.restore()

    def _defer_interrupt(self) -> Callable[[], None]:
        """Defer SIGINT until the returned function is called."""
        if self._loop is not None and threading.current_thread() is threading.main_thread():
            self._loop.hold()
            return self._loop.release
        interrupt = _DeferredInterrupt()
        interrupt.install()
        return interrupt.restore

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
    """Defers SIGINT in the main thread, the only one in which Python runs signal handlers.

    From `install` to `restore`, an interrupt is handled at once, unless there were more calls of `hold` than of
    `release`: then it is handled by the last of these or by `restore`. One call of `hold` counts from the beginning.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._holds, self._received = 1, False

    def install(self) -> None:
        """Set the handler of SIGINT, in the main thread, unless interrupts are ignored or end the process."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._on_interrupt)

    def restore(self) -> None:
        """Restore the handler that was set before `install`."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handle()

    def hold(self) -> None:
        """Defer interrupts."""
        self._holds += 1

    def release(self) -> None:
        """End what `hold` began."""
        self._holds -= 1
        if not self._holds:
            self._handle()

    def _handle(self) -> None:
        if self._received and self._handler is not None:
            self._received = False
            self._handler(signal.SIGINT, None)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._received = True
        elif self._handler is not None:
            self._handler(number, frame)
