"""Record: the base of dataclasses that are stored as JSON. Each field declares once how it is read and written.

@dataclass(frozen=True)
class FileInfo(Record):
    sha256: str = stored(Fields.hash)
    bytes: int = stored(Fields.integer)
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from llmc_runtime.format.expr import Expr
from llmc_runtime.format.json_fields import Fields, damaged

_MAX_INTERNED = 1 << 14
_NO_REFERENCES = 2  # the version of marshal whose bytes do not depend on which equal values are one object


@dataclass(frozen=True)
class _Stored:
    """How a field is stored: see `stored`."""

    read: Callable[..., Any]
    bounds: Mapping[str, Any]
    write: Callable[[Any], Any]
    omitted: bool
    absent: Any
    default: Any


def stored(
    read: Callable[..., Any],
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    absent: Any = ...,
    omitted: bool = False,
    write: Callable[[Any], Any] | None = None,
    **bounds: Any,
) -> Any:
    """Return a dataclass field that is stored as JSON.

    read:     a method of Fields, called with the reader, the field's name and `bounds`; raises LlmcError E103
    default:  of the dataclass; `factory` makes a mutable one
    absent:   value of a key that is missing (by default, `default`); MISSING: the key is required
    omitted:  whether a value that is equal to `default` is not written
    write:    returns the JSON value (by default, `plain`)
    """
    absent = default if absent is ... else absent
    metadata = {"stored": _Stored(read, bounds, write or plain, omitted, absent, default)}
    return field(default_factory=factory, metadata=metadata) if factory else field(default=default, metadata=metadata)


class Record:
    """A dataclass with stored fields. `json_order` names them in the order of the file; by default, their own.

    With `interned`, equal JSON gives the same object, so the class has to be frozen: the programs of a model share most
    buffers and many launches. `own` names fields of such a class that differ between records whose other fields are
    equal, as in the launches of a model's layers: the others are then read once.
    """

    json_order: ClassVar[tuple[str, ...]] = ()
    interned: ClassVar[bool] = False
    own: ClassVar[tuple[str, ...]] = ()
    _by_json: ClassVar[dict[Any, Any]] = {}  # interned records of all classes
    _shared: ClassVar[dict[Any, dict[str, Any]]] = {}  # the values of all fields that are not in `own`

    @classmethod
    def read(cls, value: Any, where: str, lenient: bool = False) -> Self:
        """Read a record from parsed JSON. With `lenient`, unknown keys are ignored.

        Raises LlmcError E103, or E108 for a size expression, naming `where` and the field.
        """
        if not cls.interned:
            return cls._read(value, where, lenient)
        key = cls, lenient, _identity(value, where)
        record = Record._by_json.get(key)
        if record is None:
            record = cls._read(value, where, lenient)
            _remember(Record._by_json, key, record)
        return record

    @classmethod
    def _read(cls, value: Any, where: str, lenient: bool) -> Self:
        if cls.own and isinstance(value, dict):
            values = cls._read_shared(value, where, lenient)
        else:
            values = _read_fields(value, cls._fields(), where, lenient)
        record = cls(**values)
        record.validate(where)
        return record

    @classmethod
    def _read_shared(cls, value: dict[str, Any], where: str, lenient: bool) -> dict[str, Any]:
        """Read the values of all fields, those that are not in `own` only if they differ from the ones read before."""
        own = {name: value[name] for name in cls.own if name in value}
        others = {name: item for name, item in value.items() if name not in own}
        key = cls, lenient, _identity(others, where)
        shared = Record._shared.get(key)
        if shared is None:
            shared = _read_fields(others, cls._fields(own=False), where, lenient)
            _remember(Record._shared, key, shared)
        return shared | _read_fields(own, cls._fields(own=True), where, lenient)

    @classmethod
    def _fields(cls, own: bool | None = None) -> dict[str, _Stored]:
        """Return how the fields are stored, by name: all, or only those that are (not) in `cls.own`."""
        kind: Any = cls
        return _stored_fields(kind, own)

    @staticmethod
    def forget_interned() -> None:
        """Release the interned records, as soon as everything that has them in common is read."""
        Record._by_json.clear()
        Record._shared.clear()

    def validate(self, where: str) -> None:
        """Raise LlmcError E103 if a value is unknown, or contradicts another field."""

    def json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        stored_fields = self._fields()
        out = {}
        for name in self.json_order or stored_fields:
            stored, value = stored_fields[name], getattr(self, name)
            if not (stored.omitted and value == stored.default):
                out[name] = stored.write(value)
        return out


def _read_fields(value: Any, declared: Mapping[str, _Stored], where: str, lenient: bool) -> dict[str, Any]:
    """Read these fields of a record from a JSON object, and refuse other keys."""
    reader, values = Fields(value, where, lenient), {}
    for name, stored in declared.items():
        if name in value:
            values[name] = stored.read(reader, name, **stored.bounds)
        elif stored.absent is MISSING:
            raise damaged(where, f"{name!r} is missing")
        else:
            values[name] = stored.absent
    reader.close()
    return values


def _identity(value: Any, where: str) -> bytes:
    """Return bytes that are equal for equal JSON only. Unlike `==`, they tell 1, 1.0 and true apart."""
    try:
        return marshal.dumps(value, _NO_REFERENCES)
    except ValueError:
        raise damaged(where, "is nested too deeply") from None


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= _MAX_INTERNED:
        cache.clear()
    cache[key] = value


@cache
def _stored_fields(cls: Any, own: bool | None) -> dict[str, _Stored]:
    return {
        declared.name: declared.metadata["stored"]
        for declared in fields(cls)
        if own is None or (declared.name in cls.own) == own
    }


def plain(value: Any) -> Any:
    """Return a value as JSON: records as objects, size expressions as texts, tuples as lists."""
    if isinstance(value, Record):
        return value.json()
    if isinstance(value, Expr):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def nullable(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for `stored` that also accepts null, as None."""
    return lambda reader, name, **bounds: None if reader.get(name) is None else read(reader, name, **bounds)
