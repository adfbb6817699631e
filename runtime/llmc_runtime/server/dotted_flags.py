"""Flags that take a JSON object, written as one flag for each key: `--speculative-config.method ngram`, as in vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any


def join_dotted(arguments: Sequence[str], takes_object: Callable[[str], bool]) -> list[str]:
    """Return the arguments with the keys of each flag joined to one JSON object, at the place of its first key.

    A value is JSON if it can be parsed, else text. Dashes in keys are underscores. `takes_object` decides which flags
    take an object; others are unchanged. Raises ValueError if a value is missing, or if an object is given twice, in
    whole and by keys.
    """
    joined: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            joined += [argument, *rest]
            break
        name, equals, value = argument.partition("=")
        flag, dot, path = name.partition(".")
        if not (dot and path and takes_object(flag)):
            joined.append(argument)
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            raise ValueError(f"{name} needs a value")
        if flag not in objects:
            objects[flag], places[flag] = {}, len(joined)
            joined.append(flag)
        _set(objects[flag], path.replace("-", "_").split("."), _parsed(value if equals else rest.pop(0)), name)
    whole = {argument.partition("=")[0] for i, argument in enumerate(joined) if i not in places.values()}
    if twice := next((flag for flag in objects if flag in whole), None):
        raise ValueError(f"{twice} is given as a whole and by its keys")
    for flag, place in places.items():
        joined[place] = f"{flag}={json.dumps(objects[flag])}"
    return joined


def _set(target: dict[str, Any], path: Sequence[str], value: Any, name: str) -> None:
    for key in path[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{name} contradicts an earlier flag")
        target = inner
    if path[-1] in target:
        raise ValueError(f"{name} is given twice")
    target[path[-1]] = value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
