"""Rewrites JSON schemas into equivalent ones that llguidance supports.

- Integer formats (`int32`, `uint8`, ...) become bounds, as in OpenAPI's registry of formats: llguidance ignores them.
- Bounds that allow all integers of 64 bits, or all finite doubles, are replaced by ones that llguidance has, or left
  out. An exclusive bound of 0 becomes 1e-15 or -1e-15 if the other bound is less than 1 away from 0: llguidance would
  allow 0.
- `propertyNames` with a `pattern`, an `enum` or a `const` becomes `patternProperties` or `properties`, if the schema
  has neither of them.
- Keywords whose value allows everything, such as `"uniqueItems": false`, are left out.
- With a `discriminator`, OpenAPI requires its property: each option of `oneOf` gets it in `required`, so that the
  options exclude each other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

# Keywords whose value is a schema or a list of schemas, and those whose value maps names to schemas.
OF_SCHEMAS = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems", "additionalItems")
OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_BITS_64 = 2**63 - 1024  # llguidance reads bounds as doubles; this is the largest one below 2**63
_SIGNS: Mapping[str, int] = MappingProxyType(
    {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}  # 1: a lower bound
)
_ENDS = (
    ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", 1),
    ("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", -1),
)
_SMALLEST = 1e-15  # in place of an exclusive bound of 0
_FORMATS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)}
    | {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)}
    | dict.fromkeys(("int64", "int"), (-_BITS_64, _BITS_64))
    | dict.fromkeys(("uint64", "uint"), (0, _BITS_64))
)
_NUMBERS = frozenset({"float", "double", "decimal", "number"})  # formats of all numbers
_ALLOW_ALL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "uniqueItems": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}), "not": (False,),
        "propertyNames": (True, {}, {"type": "string"}), "dependentRequired": ({},), "dependentSchemas": ({},),
        "dependencies": ({},),
    }
)  # fmt: skip


def supported(schema: Any) -> Any:
    """Return an equivalent schema; parts that are not schemas are returned unchanged.

    Formats and bounds of 64 bits exclude the 1,024 outermost values at each end. Raises ValueError for another format
    of integers, and for other bounds beyond 64 bits.
    """
    if not isinstance(schema, Mapping):
        return schema
    out = {key: value for key, value in schema.items() if not _allows_all(key, value)}
    for key in OF_NAMED_SCHEMAS:
        if isinstance(out.get(key), Mapping):
            out[key] = {name: supported(part) for name, part in out[key].items()}
    for key in OF_SCHEMAS:
        if key in out:
            parts = out[key]
            out[key] = [supported(part) for part in parts] if isinstance(parts, list) else supported(parts)
    _discriminate(out)
    _name_properties(out)
    _bound_integers(out)
    _limit_bounds(out)
    _exclude_zero(out)
    return out


def _allows_all(key: str, value: Any) -> bool:
    return any(type(value) is type(permissive) and value == permissive for permissive in _ALLOW_ALL.get(key, ()))


def _discriminate(schema: dict[str, Any]) -> None:
    """Require the property of the discriminator in each option."""
    name, options = schema.get("discriminator"), schema.get("oneOf")
    name = name.get("propertyName") if isinstance(name, Mapping) else None
    if not isinstance(name, str) or not isinstance(options, list):
        return
    schema["oneOf"] = [_requiring(option, name) for option in options]


def _requiring(option: Any, name: str) -> Any:
    required = option.get("required", []) if isinstance(option, Mapping) else None
    if not isinstance(required, list) or name in required:
        return option
    return {**option, "required": [*required, name]}


def _name_properties(schema: dict[str, Any]) -> None:
    """Replace `propertyNames` if it is a pattern or a list of names."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or "properties" in schema or "patternProperties" in schema:
        return
    value, kind = schema.get("additionalProperties", True), {**names}
    if kind.pop("type", "string") != "string":
        return
    if kind.keys() == {"pattern"}:
        schema["patternProperties"] = {kind["pattern"]: value}
    elif kind.keys() in ({"enum"}, {"const"}):
        listed = kind["enum"] if "enum" in kind else [kind["const"]]
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            return
        schema["properties"] = dict.fromkeys(listed, value)
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _bound_integers(schema: dict[str, Any]) -> None:
    """Replace the format of an integer by bounds."""
    kind, form = schema.get("type"), schema.get("format")
    if not isinstance(kind, list):
        kind = [] if kind is None else [kind]
    kinds: list[Any] = kind
    if not isinstance(form, str) or "string" in kinds:
        return
    if form not in _FORMATS:
        if "integer" in kinds and form not in _NUMBERS:
            raise ValueError(f"unknown format of integers: {form[:64]!r}; use minimum and maximum")
        return
    if kinds and not {"integer", "number"} & set(kinds):
        return
    del schema["format"]
    if kind is not None:
        listed = ["integer" if name == "number" else name for name in kinds]
        schema["type"] = listed if isinstance(kind, list) else listed[0]
    low, high = _FORMATS[form]
    _bound(schema, "minimum", "exclusiveMinimum", low, 1)
    _bound(schema, "maximum", "exclusiveMaximum", high, -1)


def _bound(schema: dict[str, Any], name: str, exclusive: str, bound: int, sign: int) -> None:
    """Set a bound unless the schema's own is stricter: larger if `sign` is 1, smaller if it is -1."""
    value = schema.get(name)
    if _is_number(value) and sign * value >= sign * bound:
        return
    schema[name] = bound
    if isinstance(schema.get(exclusive), bool):  # JSON Schema draft 4: a flag of the schema's own bound
        del schema[exclusive]


def _limit_bounds(schema: dict[str, Any]) -> None:
    """Reduce bounds beyond 64 bits, which llguidance would replace by others or reject."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    integers = "integer" in kinds and "number" not in kinds
    for name, sign in _SIGNS.items():
        value = schema.get(name)
        if not _is_number(value) or abs(value) <= _BITS_64:
            continue
        allows_all = sign * value < 0
        if integers and allows_all:
            schema[name] = -sign * _BITS_64
        elif allows_all and abs(value) >= sys.float_info.max:
            del schema[name]
        else:
            raise ValueError(f"{name} is beyond 64 bits: {value!s:.40}; use a smaller bound, or leave it out")


def _exclude_zero(schema: dict[str, Any]) -> None:
    """Replace an exclusive bound of 0 if the other bound is less than 1 away."""
    for near, exclusive, far, far_exclusive, sign in _ENDS:
        own, flag = schema.get(near), schema.get(exclusive)
        bound = own if flag is True else flag  # JSON Schema draft 4 has flags
        others = [sign * schema[name] for name in (far, far_exclusive) if _is_number(schema.get(name))]
        is_stricter = flag is not True and _is_number(own) and sign * own > 0
        if _is_number(bound) and bound == 0 and not is_stricter and 0 < min(others, default=1) < 1:
            del schema[exclusive]
            schema[near] = sign * min(_SMALLEST, min(others) / 2)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
