"""Finds marks in text that arrives in pieces: the first mark, and the beginning of a mark at the end."""

from __future__ import annotations

from collections.abc import Sequence


def first_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the position and text of the first of the marks from `start` on, or None.

    Short marks are searched for first, as they may be frequent; other ones only before those.
    """
    first: tuple[int, str] | None = None
    for mark in sorted(marks, key=len):
        at = text.find(mark, start, len(text) if first is None else first[0] + len(mark))
        if at >= 0 and (first is None or (at, mark) < first):
            first = at, mark
    return first


def begun_mark(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest prefix of one of `marks` with which text[start:] ends; 0 for none."""
    longest = min(max(map(len, marks)) - 1, len(text) - start)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0
