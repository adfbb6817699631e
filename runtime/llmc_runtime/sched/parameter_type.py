"""The declaration of a sampling parameter: its values, their JSON type, and where it can be set.

`SamplingParams` declares each parameter once, as a dataclass field made by `parameter`. Its checks, the fields of HTTP
requests, the OpenAPI description, the flags of llmc-run, the message to the engine process and the table in
docs/running.md are derived from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Annotated, Any

from llmc_runtime.format.errors import LlmcError

MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class Values:
    """The values that a parameter may have.

    allowed:   description of the allowed values
    check:     returns a value in its normal form; ValueError if it is not allowed
    json_type: makes the type of a request's field, for msgspec. Its JSON schema has the range, which `check` enforces,
               and the largest length, which the server checks before it reads the contents
    argument:  the keywords of argparse's `add_argument` that read the value; None: it cannot be a flag
    unit:      of one value
    """

    allowed: str
    check: Callable[[Any], Any]
    json_type: Callable[[], Any] | None = None
    argument: Mapping[str, Any] | None = None
    unit: str = ""


def numbers(low: float, high: float, *, above: bool = False) -> Values:
    """Floats from `low` to `high`; `above`: without `low` itself."""

    def check(value: Any) -> float:
        number = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
        if not number or not low <= value <= high or (above and value == low):  # NaN is in no range
            raise ValueError
        return value if type(value) is float else float(value)

    def json_type() -> Any:
        return Annotated[float, _schema(**{"exclusiveMinimum" if above else "minimum": low}, maximum=high)]

    allowed = f"a number {f'above {low}, up to' if above else f'from {low} to'} {high}"
    return Values(allowed, check, json_type, {"type": float, "metavar": "X"})


def integers(low: int, high: int = MAX_INT, *, optional: bool = False, unit: str = "", allowed: str = "") -> Values:
    """Integers from `low` to `high`; `optional`: or None."""

    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if not _is_int(value) or not low <= value <= high:
            raise ValueError
        return value if type(value) is int else int(value)

    return Values(
        allowed or f"{'none, or ' if optional else ''}{low} to {high}",
        check,
        lambda: Annotated[int, _schema(minimum=low, maximum=high)],
        {"type": int, "metavar": "N"},
        unit=unit,
    )


def flag() -> Values:
    """True or False."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Values("true or false", check, lambda: bool, {"action": "store_true"})


def strings(max_count: int, size: int, *, total: int = 0, single: bool = False, visible: bool = False) -> Values:
    """Up to `max_count` strings of 1 to `size` bytes, as a tuple.

    `total`: the bytes of all together, 0: no limit; `single`: a string is the same as a list of one;
    `visible`: a string that is only white space is not allowed.
    """

    def is_valid(text: object) -> bool:
        if not isinstance(text, str) or not 0 < len(text) <= size or (visible and not text.strip()):
            return False
        return len(text.encode(errors="replace")) <= size

    def check(value: Any) -> tuple[str, ...]:
        if isinstance(value, str) and not single:
            raise ValueError
        texts = (value,) if isinstance(value, str) else _tuple(value)
        if len(texts) > max_count or not all(map(is_valid, texts)):
            raise ValueError
        if total and sum(len(text.encode(errors="replace")) for text in texts) > total:
            raise ValueError
        return texts

    def json_type() -> Any:
        text = Annotated[str, _schema(minLength=1, maxLength=size)]
        several = Annotated[list[text], _schema(maxItems=max_count)]
        return text | several if single else several

    together = f", {total} together" if total else ""
    allowed = f"{'a string or ' if single else ''}up to {max_count} strings of 1 to {size} bytes{together}"
    argument = {"action": "append", "metavar": "TEXT"}
    return Values(allowed, check, json_type, argument)


def token_ids(max_count: int) -> Values:
    """Up to `max_count` token ids, as a tuple."""

    def check(value: Any) -> tuple[int, ...]:
        ids = _tuple(value)
        if len(ids) > max_count or not _are_ids(ids):
            raise ValueError
        return tuple(map(int, ids)) if ids else ()

    return Values(f"up to {max_count} token ids from 0 to {MAX_INT}", check, lambda: _ids(maxItems=max_count))


def token_set(max_count: int, mask: type) -> Values:
    """1 to `max_count` token ids, as an ascending tuple without repeats; a `mask` as it is; or None."""

    def check(value: Any) -> Any:
        if value is None or isinstance(value, mask):
            return value
        ids = _tuple(value)
        if not 0 < len(ids) <= max_count or not _are_ids(ids):
            raise ValueError
        return tuple(sorted(set(map(int, ids))))

    def json_type() -> Any:
        return _ids(minItems=1, maxItems=max_count)

    return Values(f"1 to {max_count} token ids from 0 to {MAX_INT}", check, json_type)


def biases(max_count: int, limit: float) -> Values:
    """A number for each of up to `max_count` token ids, cut to -`limit` to `limit`, as a dict; None if empty.

    Ids may be strings, as in JSON.
    """

    def check(value: Any) -> dict[int, float] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping) or len(value) > max_count:
            raise ValueError
        out = {}
        for key, bias in value.items():
            if type(key) is int and type(bias) is float and 0 <= key <= MAX_INT and bias == bias:
                out[key] = limit if bias > limit else max(-limit, bias)
                continue
            token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
            number = isinstance(bias, Real) and not isinstance(bias, bool) and bias == bias
            if not _is_int(token) or not 0 <= token <= MAX_INT or not number:
                raise ValueError
            out[int(token)] = min(limit, max(-limit, float(bias)))
        return out or None

    def json_type() -> Any:
        return Annotated[dict[str, float], _schema(maxProperties=max_count, propertyNames={"pattern": "^[0-9]+$"})]

    return Values(f"up to {max_count} token ids from 0 to {MAX_INT}, and a number for each", check, json_type)


def instance(kind: type) -> Values:
    """None, or an object of a class; requests declare a separate field for it."""

    def check(value: Any) -> Any:
        if value is not None and not isinstance(value, kind):
            raise ValueError
        return value

    return Values(f"none, or a {kind.__name__}", check)


@dataclass(frozen=True)
class Parameter:
    """A declared parameter.

    text:           the description, for help texts and docs
    flag:           whether llmc-run has a flag of this name
    short:          another spelling of the flag
    request:        whether HTTP requests have a field of this name, type and range
    engine:         whether the engine process needs it; the others apply to the text, which the front end makes
    model_default:  whether a model's generation_config.json may set its default: "always", "sampling" (only if
                    do_sample is true), or "" (never)
    float_column:   the float column of the device row in which kernels read it, if any (see sched.row_columns)
    int_column:     the same of the integer columns
    """

    name: str
    default: Any
    values: Values
    text: str
    flag: bool = False
    short: str = ""
    request: bool = True
    engine: bool = True
    model_default: str = ""
    float_column: int | None = None
    int_column: int | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The spellings of the flag, none if there is no flag."""
        long = "--" + self.name.replace("_", "-")
        return tuple(filter(None, (self.short, long))) if self.flag else ()

    def check(self, value: Any) -> Any:
        """Return a value in its normal form. Raises LlmcError E601 if it is not allowed."""
        try:
            return self.values.check(value)
        except ValueError:
            raise refused(self.name, value, self.values.allowed) from None


def parameter(default: Any, values: Values, text: str, **more: Any) -> Any:
    """Return a dataclass field that declares a parameter; `more` are fields of Parameter."""
    return field(default=default, metadata={"declared": (values, text, more)})


def parameters_of(owner: type) -> Mapping[str, Parameter]:
    """Return the parameters that a dataclass declares, by name."""
    declared = {}
    for attribute in fields(owner):
        values, text, more = attribute.metadata["declared"]
        declared[attribute.name] = Parameter(attribute.name, attribute.default, values, text, **more)
    return MappingProxyType(declared)


def refused(name: str, value: object, allowed: str) -> LlmcError:
    """Return LlmcError E601: parameter `name` may not be `value`; `allowed` describes the allowed values."""
    try:
        shown = repr(value[:80] if isinstance(value, str | list | tuple) else value)
    except Exception as error:  # an integer of thousands of digits, a hostile __repr__
        shown = f"<{type(value).__name__}: {type(error).__name__}>"
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return LlmcError("E601", f"{name} = {shown} is not allowed", f"{name}: {allowed}", name)


def _schema(**schema: Any) -> Any:
    from msgspec import Meta  # the server's; sampling works without it

    return Meta(extra_json_schema=schema)


def _ids(**schema: Any) -> Any:
    token = Annotated[int, _schema(minimum=0)]
    return Annotated[list[token], _schema(**schema)]


def _is_int(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _are_ids(values: tuple[Any, ...]) -> bool:
    if set(map(type, values)) <= {int}:  # the common case: a check one by one is slow for many
        return not values or (min(values) >= 0 and max(values) <= MAX_INT)
    return all(_is_int(value) and 0 <= value <= MAX_INT for value in values)


def _tuple(value: object) -> tuple[Any, ...]:
    """Return the items of an iterable, none for None; ValueError for anything else."""
    if value is None or type(value) is tuple:
        return value or ()
    try:
        if not isinstance(value, bytes | dict) and isinstance(value, Iterable):
            return tuple(value)
    except TypeError:  # an array without dimensions
        pass
    raise ValueError
