"""Strict reading of parsed JSON: typed fields, closed sets of keys, bounded sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import LlmcError

Item = Any  # a function of a value and the place that errors name, or a class with such a method `read`

MAX_JSON = 16 << 20
MAX_VALUES = 250_000  # values in one document; parsed they take about 70 MB
MAX_NAME = 240
MAX_PARTS = 8
REMEDY = "copy the artifact again, or recompile it"

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_INTEGERS = frozenset((int,))  # not bool
_KEY = re.compile(r"[0-9a-f]{8,64}\Z")


def damaged(where: str, reason: str) -> LlmcError:
    """Return the error for a file with invalid content."""
    return LlmcError("E103", f"{where}: {reason}", REMEDY)


def load_json(data: bytes, where: str) -> Any:
    """Parse JSON; raise LlmcError E103 for duplicate keys, NaN, invalid Unicode, or excessive depth or size."""
    if (reason := too_much(data, MAX_JSON, MAX_VALUES)) is not None:
        raise damaged(where, reason)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        check_unicode(data, value)
        return value
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"is not valid JSON ({str(error)[:120]})") from None


def too_much(data: bytes, max_bytes: int, max_values: int) -> str | None:
    """Return why parsing `data` as JSON might take too much memory or time, judged by its bytes; None if it cannot."""
    if len(data) > max_bytes:
        return f"{len(data)} bytes of JSON; at most {max_bytes} are allowed"
    if len(data) <= max_values:  # a value takes a byte at least
        return None
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    return f"up to {values} values of JSON; at most {max_values} are allowed" if values > max_values else None


def check_unicode(data: bytes, value: Any) -> None:
    """Raise UnicodeEncodeError (a ValueError) if `value`, parsed from `data`, contains an unpaired surrogate."""
    if b"\\" in data and (b"\\ud" in data or b"\\uD" in data):  # one byte is found sooner than three
        json.dumps(value, ensure_ascii=False).encode("utf-8")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate key")
    return out


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def check_name(name: str, where: str) -> str:
    """Return `name` if it is a relative path without empty, hidden, `.` or `..` parts; else raise LlmcError E104."""
    if not is_safe_name(name):
        cause = f"{where}: {name[:120]!r} is not a safe file name"
        raise LlmcError("E104", cause, "use an artifact written by llmc compile")
    return name


def is_safe_name(name: str) -> bool:
    """Return whether `check_name` accepts the name."""
    parts = name.split("/")
    return len(name) <= MAX_NAME and len(parts) <= MAX_PARTS and all(_PART.match(p) for p in parts)


class Fields:
    """Reads one JSON object. Getters raise LlmcError E103, naming the field; `close` rejects unknown keys.

    With `lenient`, unknown keys are ignored. `item` arguments read a part by (value, where), or are classes whose
    method `read` does (see record.Record).
    """

    def __init__(self, value: Any, where: str, lenient: bool = False) -> None:
        if not isinstance(value, dict):
            raise damaged(where, "expected an object")
        self._value: dict[str, Any] = value
        self._lenient = lenient
        self.where = where

    def get(self, key: str) -> Any:
        """Return the raw value of a field."""
        try:
            return self._value[key]
        except KeyError:
            raise damaged(self.where, f"{key!r} is missing") from None

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.get(key)
        if not isinstance(value, str):
            raise damaged(self.where, f"{key!r} must be text")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise damaged(self.where, f"{key} is not true or false")
        return value

    def integer(self, key: str, low: int = 0, high: int = 1 << 62) -> int:
        """Return an integer in [low, high]."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise damaged(self.where, f"{key!r} must be an integer in [{low}, {high}]")
        return value

    def bit(self, key: str) -> bool:
        """Return 0 or 1 as a boolean."""
        return bool(self.integer(key, high=1))

    def item(self, key: str, item: Item) -> Any:
        """Return what `item(value, where)` reads."""
        return self._read(item)(self.get(key), f"{self.where}.{key}")

    def list(self, key: str, item: Item, cap: int = 1 << 20) -> tuple[Any, ...]:
        """Return a list of at most `cap` elements, each read by `item(value, where)`."""
        value, read = self.get(key), self._read(item)
        if not isinstance(value, list) or len(value) > cap:
            raise damaged(self.where, f"{key!r} must be a list of at most {cap}")
        try:
            return tuple([read(v, self.where) for v in value])
        except LlmcError:
            pass  # read again, for an error that names the element: composing every element's place takes as long
        return tuple(read(v, f"{self.where}.{key}[{i}]") for i, v in enumerate(value))

    def integers(self, key: str, cap: int = 1 << 20) -> tuple[int, ...]:
        """Return a list of at most `cap` integers."""
        value = self.get(key)
        if isinstance(value, list) and len(value) <= cap and set(map(type, value)) <= _INTEGERS:
            return tuple(value)
        return self.list(key, an_integer, cap)

    def table(self, key: str, item: Item, cap: int = 1 << 20) -> Mapping[str, Any]:
        """Return an object of at most `cap` entries, whose values are read by `item(value, where)`."""
        value, read = self.get(key), self._read(item)
        if not isinstance(value, dict) or len(value) > cap:
            raise damaged(self.where, f"{key!r} must be an object of at most {cap} entries")
        return MappingProxyType({k: read(v, f"{self.where}.{key}[{k[:80]!r}]") for k, v in value.items()})

    def hash(self, key: str) -> str:
        """Return a SHA-256 in lower-case hex."""
        return a_hash(self.get(key), f"{self.where}.{key}")

    def key(self, key: str) -> str:
        """Return a kernel's content hash; see `a_key`."""
        return a_key(self.get(key), f"{self.where}.{key}")

    def name(self, key: str) -> str:
        """Return a safe file name (see `check_name`) or ""."""
        value = self.text(key)
        return check_name(value, f"{self.where}.{key}") if value else value

    def sub(self, key: str) -> Fields:
        """Return the reader of a nested object."""
        return Fields(self.get(key), f"{self.where}.{key}", self._lenient)

    def close(self, known: Collection[str]) -> None:
        """Raise LlmcError E103 if the object has other keys, unless the reader is lenient."""
        if not self._lenient and (unknown := self._value.keys() - known):
            raise damaged(self.where, f"unknown key {min(unknown)[:80]!r}")

    def _read(self, item: Item) -> Callable[[Any, str], Any]:
        read = getattr(item, "read", None)
        return item if read is None else partial(read, lenient=self._lenient)


def anything(value: Any, where: str) -> Any:
    """Accept any value."""
    return value


def a_text(value: Any, where: str) -> str:
    """Check that the value is a string."""
    if not isinstance(value, str):
        raise damaged(where, "must be text")
    return value


def an_integer(value: Any, where: str) -> int:
    """Check that the value is an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise damaged(where, "must be an integer")
    return value


def a_hash(value: Any, where: str) -> str:
    """Check that the value is a SHA-256 in lower-case hex."""
    if not isinstance(value, str) or not _HASH.match(value):
        raise damaged(where, "must be a sha256 in lower-case hex")
    return value


def a_key(value: Any, where: str) -> str:
    """Check that the value is a kernel's content hash, possibly shortened to 8 digits; it names the kernel's file."""
    if not isinstance(value, str) or not _KEY.match(value):
        raise damaged(where, "must be 8 to 64 digits of lower-case hex")
    return value


def a_name(value: Any, where: str) -> str:
    """Check that the value is a safe file name."""
    return check_name(a_text(value, where), where)


def a_range(value: Any, where: str) -> tuple[int, int]:
    """Check that the value is [low, high] with 0 <= low <= high."""
    if not isinstance(value, list) or len(value) != 2:
        raise damaged(where, "must be [low, high]")
    low, high = an_integer(value[0], where), an_integer(value[1], where)
    if not 0 <= low <= high:
        raise damaged(where, f"[{low}, {high}] is not a range")
    return low, high
