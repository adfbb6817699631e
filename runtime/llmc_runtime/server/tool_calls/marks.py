"""Finds marks in text that arrives in pieces: the first mark, and the beginning of a mark at the end."""

from __future__ import annotations

from collections.abc import Sequence


def first_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the position and text of the first of the marks from `start` on, or None."""
    return min(((at, mark) for mark in marks if (at := text.find(mark, start)) >= 0), default=None)


def begun_mark(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest prefix of one of `marks` with which the text ends; 0 for none."""
    longest = min(max(map(len, marks)) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0
