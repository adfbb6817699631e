"""Signals that would end this process at once, as exceptions: what is open is given back; it is no server's drain."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding() -> Iterator[None]:
    """Within, the first SIGTERM or SIGHUP raises SystemExit (128 + its number) in the main thread, and others do
    nothing. Signals that somebody handles or ignores stay theirs; in another thread nothing changes."""
    ended = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise SystemExit(128 + number)

    mine = []
    if threading.current_thread() is threading.main_thread():
        mine = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            if signal.getsignal(number) is end:  # else somebody took it over within
                signal.signal(number, signal.SIG_DFL)
