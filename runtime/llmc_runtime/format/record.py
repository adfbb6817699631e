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
    metadata = {"stored": _Stored(read, bounds, write or plain, omitted, absent)}
    return field(default_factory=factory, metadata=metadata) if factory else field(default=default, metadata=metadata)


class Record:
    """A dataclass with stored fields. `json_order` names them in the order of the file; by default, their own.

    With `interned`, equal JSON gives the same object, so the class has to be frozen: the programs of a model share most
    buffers and many launches.
    """

    json_order: ClassVar[tuple[str, ...]] = ()
    interned: ClassVar[bool] = False
    _by_json: ClassVar[dict[Any, Any]] = {}  # interned records of all classes

    @classmethod
    def read(cls, value: Any, where: str, lenient: bool = False) -> Self:
        """Read a record from parsed JSON. With `lenient`, unknown keys are ignored.

        Raises LlmcError E103, or E108 for a size expression, naming `where` and the field.
        """
        if not cls.interned:
            return cls._read(value, where, lenient)
        try:
            key = cls, lenient, repr(value)
        except RecursionError:
            raise damaged(where, "is nested too deeply") from None
        record = Record._by_json.get(key)
        if record is None:
            record = cls._read(value, where, lenient)
            if len(Record._by_json) >= _MAX_INTERNED:
                Record._by_json.clear()
            Record._by_json[key] = record
        return record

    @classmethod
    def _read(cls, value: Any, where: str, lenient: bool) -> Self:
        reader, values = Fields(value, where, lenient), {}
        kind: Any = cls
        for name, (stored, _) in _stored_fields(kind).items():
            if name in value:
                values[name] = stored.read(reader, name, **stored.bounds)
            elif stored.absent is MISSING:
                raise damaged(where, f"{name!r} is missing")
            else:
                values[name] = stored.absent
        reader.close()
        record = cls(**values)
        record.validate(where)
        return record

    @staticmethod
    def forget_interned() -> None:
        """Release the interned records, as soon as everything that has them in common is read."""
        Record._by_json.clear()

    def validate(self, where: str) -> None:
        """Raise LlmcError E103 if a value is unknown, or contradicts another field."""

    def json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        kind: Any = type(self)
        stored_fields = _stored_fields(kind)
        out = {}
        for name in self.json_order or stored_fields:
            stored, default = stored_fields[name]
            value = getattr(self, name)
            if not (stored.omitted and value == default):
                out[name] = stored.write(value)
        return out


@cache
def _stored_fields(cls: Any) -> dict[str, tuple[_Stored, Any]]:
    """Return how each field of a record is stored, and its default, by name."""
    return {declared.name: (declared.metadata["stored"], declared.default) for declared in fields(cls)}


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
