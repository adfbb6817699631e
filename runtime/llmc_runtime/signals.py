"""Contexts for signals: those that would end this process become exceptions, and Ctrl-C is delayed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding() -> Iterator[None]:
    """A context in which the first SIGTERM or SIGHUP raises SystemExit (128 + its number) in the main thread; further
    ones are ignored. Signals that have a handler or are ignored keep that. Does nothing in other threads."""
    ended = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise SystemExit(128 + number)

    handled = []
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) is end:  # unless another handler was set meanwhile
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A context at whose end Ctrl-C takes effect, if it comes meanwhile. Does nothing in other threads than the main
    one, which Ctrl-C does not interrupt."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    if not callable(handler):
        yield
        return
    missed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: missed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if missed:
            handler(*missed[-1])
