"""Strict reading of parsed JSON: typed fields, closed key sets, bounded sizes; it knows nothing of what they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from llmc_runtime.format.errors import LlmcError

T = TypeVar("T")

MAX_JSON = 16 << 20
MAX_VALUES = 250_000  # in one document: parsed they take some 70 MB
MAX_NAME = 240
MAX_PARTS = 8
REMEDY = "copy the artifact again, or recompile it"

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_KEY = re.compile(r"[0-9a-f]{8,64}\Z")


def damaged(where: str, why: str) -> LlmcError:
    """The error for a file that does not say what it must."""
    return LlmcError("E103", f"{where}: {why}", REMEDY)


def load_json(data: bytes, where: str) -> Any:
    """`data` as JSON without duplicate keys, NaN or excessive depth or size; LlmcError E103 otherwise."""
    if (why := too_much(data, MAX_JSON, MAX_VALUES)) is not None:
        raise damaged(where, why)
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        check_unicode(data, found)
        return found
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"is not valid JSON ({str(error)[:120]})") from None


def too_much(data: bytes, most_bytes: int, most_values: int) -> str | None:
    """Why parsing `data` as JSON could take too much memory or time, told by its bytes alone; None: it cannot."""
    if len(data) > most_bytes:
        return f"{len(data)} bytes of JSON, over the cap of {most_bytes}"
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    return f"up to {values} values of JSON, over the cap of {most_values}" if values > most_values else None


def check_unicode(data: bytes, found: Any) -> None:
    """UnicodeEncodeError (a ValueError) where `found`, parsed from `data`, holds half of a surrogate pair alone."""
    if b"\\ud" in data or b"\\uD" in data:
        json.dumps(found, ensure_ascii=False).encode("utf-8")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate key")
    return out


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def check_name(name: str, where: str) -> str:
    """`name` when it is a plain relative path (no empty, hidden, `.` or `..` part); LlmcError E104 otherwise."""
    parts = name.split("/")
    if len(name) > MAX_NAME or len(parts) > MAX_PARTS or not all(_PART.match(p) for p in parts):
        raise LlmcError(
            "E104", f"{where}: {name[:120]!r} is not a safe file name", "use an artifact written by llmc compile"
        )
    return name


def is_safe_name(name: str) -> bool:
    """Whether `check_name` accepts it."""
    parts = name.split("/")
    return len(name) <= MAX_NAME and len(parts) <= MAX_PARTS and all(_PART.match(p) for p in parts)


class Fields:
    """One JSON object being read; every getter names the place in its error. `close` refuses keys nobody asked for."""

    def __init__(self, value: Any, where: str, lenient: bool = False) -> None:
        if not isinstance(value, dict):
            raise damaged(where, "expected an object")
        self._value: dict[str, Any] = value
        self._left = set(value)
        self._lenient = lenient
        self.where = where

    def get(self, key: str, default: Any = ...) -> Any:
        if key not in self._value:
            if default is ...:
                raise damaged(self.where, f"{key!r} is missing")
            return default
        self._left.discard(key)
        return self._value[key]

    def text(self, key: str, default: Any = ...) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise damaged(self.where, f"{key!r} must be text")
        return value

    def integer(self, key: str, default: Any = ..., low: int = 0, high: int = 1 << 62) -> int:
        return self._integer(self.get(key, default), key, low, high)

    def _integer(self, value: Any, key: str, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise damaged(self.where, f"{key!r} must be an integer in [{low}, {high}]")
        return value

    def list(self, key: str, item: Callable[[Any, str], T], default: Any = ..., cap: int = 1 << 20) -> tuple[T, ...]:
        value = self.get(key, default)
        if not isinstance(value, list) or len(value) > cap:
            raise damaged(self.where, f"{key!r} must be a list of at most {cap}")
        return tuple(item(v, f"{self.where}.{key}[{i}]") for i, v in enumerate(value))

    def table(self, key: str, item: Callable[[Any, str], T], default: Any = ..., cap: int = 1 << 20) -> dict[str, T]:
        value = self.get(key, default)
        if not isinstance(value, dict) or len(value) > cap:
            raise damaged(self.where, f"{key!r} must be an object of at most {cap} entries")
        return {k: item(v, f"{self.where}.{key}[{k[:80]!r}]") for k, v in value.items()}

    def hash(self, key: str) -> str:
        return a_hash(self.get(key), f"{self.where}.{key}")

    def key(self, key: str) -> str:
        return a_key(self.get(key), f"{self.where}.{key}")

    def name(self, key: str, default: Any = ...) -> str:
        value = self.text(key, default)
        return check_name(value, f"{self.where}.{key}") if value else value

    def sub(self, key: str) -> Fields:
        return Fields(self.get(key), f"{self.where}.{key}", self._lenient)

    def close(self) -> None:
        if self._left and not self._lenient:
            raise damaged(self.where, f"unknown key {sorted(self._left)[0][:80]!r}")


def a_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise damaged(where, "must be text")
    return value


def an_integer(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise damaged(where, "must be an integer")
    return value


def a_hash(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _HASH.match(value):
        raise damaged(where, "must be a sha256 in lower-case hex")
    return value


def a_key(value: Any, where: str) -> str:
    """A kernel's content hash, whole or shortened: it names its file."""
    if not isinstance(value, str) or not _KEY.match(value):
        raise damaged(where, "must be 8 to 64 digits of lower-case hex")
    return value


def a_name(value: Any, where: str) -> str:
    return check_name(a_text(value, where), where)


def a_range(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise damaged(where, "must be [low, high]")
    low, high = an_integer(value[0], where), an_integer(value[1], where)
    if not 0 <= low <= high:
        raise damaged(where, f"[{low}, {high}] is not a range")
    return low, high
