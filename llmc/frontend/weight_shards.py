"""Finds the numbered files of a checkpoint that has lost its index."""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBERED = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")


def numbered_shards(names: Iterable[str]) -> list[str]:
    """Return the files model-00001-of-N to model-N-of-N in order, or [] unless exactly one such set is complete."""
    sets = [_names(count) for count, numbers in _numbers(names).items() if len(numbers) == count]
    return sets[0] if len(sets) == 1 else []


def missing_shards(names: Iterable[str]) -> list[str]:
    """Return the numbered files that an incomplete set lacks; [] if there is no set, or if there are several."""
    sets = _numbers(names)
    if len(sets) != 1:
        return []
    ((count, numbers),) = sets.items()
    return [name for number, name in enumerate(_names(count), 1) if number not in numbers]


def _numbers(names: Iterable[str]) -> dict[int, set[int]]:
    """Return the numbers of the files by the count in their names. A number beyond its count belongs to no set."""
    by_count: dict[int, set[int]] = {}
    for m in filter(None, map(NUMBERED.fullmatch, names)):
        number, count = int(m[1]), int(m[2])
        if 1 <= number <= count:
            by_count.setdefault(count, set()).add(number)
    return by_count


def _names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
