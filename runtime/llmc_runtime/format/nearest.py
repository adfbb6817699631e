"""Suggestions for misspelt names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MIN_SIMILARITY = 0.7  # similarity of a part of a name from which it is suggested


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three names like `name`, the most similar first.

    If no name is similar as a whole, these are names of which a part is, such as rms_norm for nrom.
    """
    from difflib import SequenceMatcher, get_close_matches  # slow to import, and for errors only

    names = list(known)
    if close := get_close_matches(name, names, 1, 0.7):
        return close
    scored = [(max(SequenceMatcher(None, name, part).ratio() for part in _parts(n)), n) for n in names]
    ranked = sorted((-score, len(n), n) for score, n in scored if score >= _MIN_SIMILARITY)
    return [n for _, _, n in ranked[:3]] or get_close_matches(name, names, 1)


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[-_./:]", name) if part] or [name]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a remedy for a misspelt name: "did you mean 'a'?", or the text `otherwise` if no name is like it."""
    names = [repr(n) for n in nearest(name, known)]
    if not names:
        return otherwise
    return f"did you mean {' or '.join([', '.join(names[:-1]), names[-1]] if len(names) > 1 else names)}?"
