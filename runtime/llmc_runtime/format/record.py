"""Record: the base of dataclasses that are stored as JSON. Each field declares once how it is read and written.

@dataclass(frozen=True)
class FileInfo(Record):
    sha256: str = stored(Fields.hash)
    bytes: int = stored(Fields.integer)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from llmc_runtime.format.expr import Expr
from llmc_runtime.format.json_fields import Fields, damaged

_MAX_INTERNED = 1 << 14


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


@dataclass(frozen=True)
class _SharedValues:
    """The values of the fields that some records have in common, and these records by their own values."""

    values: Mapping[str, Any]
    records: dict[tuple[Any, ...], Any]


class Record:
    """A dataclass with stored fields. `json_order` names them in the order of the file; by default, their own.

    With `interned`, equal JSON gives the same object, so the class has to be frozen: the programs of a model share most
    buffers and many launches. `own` names fields of such a class, with hashable values, that differ between records
    whose other fields are equal, as in the launches of a model's layers: the others are then read once.
    """

    json_order: ClassVar[tuple[str, ...]] = ()
    interned: ClassVar[bool] = False
    own: ClassVar[tuple[str, ...]] = ()
    _by_json: ClassVar[dict[Any, Any]] = {}  # interned records of all classes; of a class with `own`, _SharedValues

    @classmethod
    def read(cls, value: Any, where: str, lenient: bool = False) -> Self:
        """Read a record from parsed JSON. With `lenient`, unknown keys are ignored.

        Raises LlmcError E103, or E108 for a size expression, naming `where` and the field.
        """
        if not cls.interned:
            return cls._read(value, where, lenient)
        if cls.own and isinstance(value, dict):
            return cls._read_own(value, where, lenient)
        return cls._interned(value, where, lenient, cls._read)

    @classmethod
    def _interned(cls, value: Any, where: str, lenient: bool, read: Callable[[Any, str, bool], Any]) -> Any:
        """Return what `read` returned for equal JSON."""
        try:
            key = cls, lenient, repr(value)
        except RecursionError:
            raise damaged(where, "is nested too deeply") from None
        result = Record._by_json.get(key)
        if result is None:
            result = read(value, where, lenient)
            if len(Record._by_json) >= _MAX_INTERNED:
                Record._by_json.clear()
            Record._by_json[key] = result
        return result

    @classmethod
    def _read_own(cls, value: dict[str, Any], where: str, lenient: bool) -> Self:
        """Read the fields that `own` names, and the others if no record with equal ones was read before."""
        own = {name: value[name] for name in cls.own if name in value}
        others = {name: item for name, item in value.items() if name not in own}
        shared: _SharedValues = cls._interned(others, where, lenient, cls._read_others)
        values = _read_fields(own, cls._fields(own=True), where, lenient)
        key = tuple(values.values())
        record = shared.records.get(key)
        if record is None:
            record = cls(**shared.values, **values)
            record.validate(where)
            shared.records[key] = record
        return record

    @classmethod
    def _read_others(cls, value: dict[str, Any], where: str, lenient: bool) -> _SharedValues:
        return _SharedValues(_read_fields(value, cls._fields(own=False), where, lenient), {})

    @classmethod
    def _read(cls, value: Any, where: str, lenient: bool) -> Self:
        record = cls(**_read_fields(value, cls._fields(), where, lenient))
        record.validate(where)
        return record

    @classmethod
    def _fields(cls, own: bool | None = None) -> dict[str, _Stored]:
        """Return how the fields are stored, by name: all, or only those that are (not) in `cls.own`."""
        kind: Any = cls
        return _stored_fields(kind, own)

    @staticmethod
    def forget_interned() -> None:
        """Release the interned records, as soon as everything that has them in common is read."""
        Record._by_json.clear()

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
    reader.close(declared)
    return values


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
