"""Random grammars, regular expressions and JSON schemas, many of them costly: ambiguous, counted, or large."""

from __future__ import annotations

from random import Random
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PRIMES = (7, 97, 10007, 524287, 99999989, 99999971, 2**31 - 1)


def size(draw: Random, most: int) -> int:
    """Return a number from 1 to `most`; all orders of magnitude are equally likely."""
    return max(1, min(most, round(most ** draw.random())))


def grammar(draw: Random) -> str:
    """A grammar in llguidance's Lark: a few rules of one another, most of them ambiguous."""
    names = ["start", "s", "t", "word"][: draw.randint(2, 4)]

    def terminal() -> str:
        kind = draw.randrange(5)
        if kind == 0:
            return '"' + draw.choice(LETTERS) * draw.randint(1, 3) + '"'
        if kind == 1:
            return "/[a-z ]/"
        if kind == 2:
            return f"/{expression(draw, 2)}/"
        return f'"{draw.choice(LETTERS)}"{draw.choice("*+?")}' if kind == 3 else '" "'

    def one() -> str:
        parts = [draw.choice(names[1:]) if draw.random() < 0.5 else terminal() for _ in range(draw.randint(0, 3))]
        if parts and draw.random() < 0.1:
            parts[0] += f"~{draw.randint(0, 3)}..{size(draw, 10**6)}"
        return " ".join(parts)

    rules = [f"{name}: " + " | ".join(one() for _ in range(draw.randint(1, 4))) for name in names]
    if draw.random() < 0.2:
        rules.append("long: " + " | ".join(f'"{LETTERS[i % 26]}{i}"' for i in range(size(draw, 4000))))
    return "\n".join(rules)


def expression(draw: Random, depth: int = 3) -> str:
    """A regular expression without look-around."""
    if not depth:
        return draw.choice((draw.choice(LETTERS), ".", "[a-z]", "\\d", "[^a]", "a?"))
    kind = draw.randrange(6)
    inner = expression(draw, depth - 1)
    if kind == 0:
        return f"({inner}){draw.choice('*+?')}"
    if kind == 1:
        return f"({inner}){{{draw.randint(0, 3)},{size(draw, 3000)}}}"
    if kind == 2:
        return f"({inner}|{expression(draw, depth - 1)})"
    if kind == 3:
        return f".*{inner}.*{draw.choice(LETTERS)}.*"
    if kind == 4:
        times = size(draw, 20_000)
        return "a?" * times + "a" * times if draw.random() < 0.2 else inner + expression(draw, depth - 1)
    return inner + expression(draw, depth - 1)


def schema(draw: Random, depth: int = 3) -> Any:
    """A JSON schema."""
    made = (_number, _text, _enum, _object, _array, _several, _recursive)
    return (draw.choice(made) if depth else draw.choice(made[:3]))(draw, depth)


def _number(draw: Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": draw.choice(("integer", "number"))}
    if draw.random() < 0.5:
        found["multipleOf"] = draw.choice(PRIMES) if draw.random() < 0.7 else draw.choice((0.1, 1e-9, 3.7))
    if draw.random() < 0.4:
        found |= {"minimum": -size(draw, 10**18), "maximum": size(draw, 10**18)}
    return found


def _text(draw: Random, depth: int) -> dict[str, Any]:
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": expression(draw)}
    if kind == 1:
        return {"type": "string", "minLength": size(draw, 10**4), "maxLength": size(draw, 10**6)}
    if kind == 2:
        patterns = [{"pattern": f".*{draw.choice(LETTERS)}.*{draw.choice(LETTERS)}.*"} for _ in range(size(draw, 40))]
        return {"type": "string", "allOf": patterns}
    return {"type": "string", "format": draw.choice(("date-time", "uuid", "ipv6", "email", "hostname"))}


def _enum(draw: Random, depth: int) -> dict[str, Any]:
    return {"enum": [f"{draw.choice(LETTERS)}{i}" for i in range(size(draw, 5000))]}


def _object(draw: Random, depth: int) -> dict[str, Any]:
    names = [f"n{i}" for i in range(size(draw, 6 if depth < 3 else 200))]
    inner = schema(draw, depth - 1)
    properties = {name: schema(draw, depth - 1) if draw.random() < 0.3 else inner for name in names}
    found = {"type": "object", "properties": properties, "required": draw.sample(names, draw.randint(0, len(names)))}
    return found | draw.choice(
        ({}, {"additionalProperties": False}, {"minProperties": 3}, {"additionalProperties": inner})
    )


def _array(draw: Random, depth: int) -> dict[str, Any]:
    return {
        "type": "array",
        "items": schema(draw, depth - 1),
        "minItems": size(draw, 50),
        "maxItems": size(draw, 10**5),
    }


def _several(draw: Random, depth: int) -> dict[str, Any]:
    several = [schema(draw, depth - 1) for _ in range(draw.randint(1, 4))]
    return {draw.choice(("anyOf", "oneOf", "allOf")): several}


def _recursive(draw: Random, depth: int) -> dict[str, Any]:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}, "value": schema(draw, depth - 1)}}
    return {"$defs": {"a": node}, "$ref": "#/$defs/a"}


def structured(draw: Random) -> dict[str, Any]:
    """The fields of a request that ask for one of these."""
    kind = draw.randrange(6)
    if kind == 0:
        return {"structured_outputs": {"grammar": grammar(draw)}}
    if kind == 1:
        return {"structured_outputs": {"regex": expression(draw, draw.randint(1, 5))}}
    if kind == 2:
        return {"structured_outputs": {"choice": [f"w{draw.randrange(10**6)}" for _ in range(size(draw, 3000))]}}
    if kind == 3:
        return {"structured_outputs": {"json": schema(draw)}}
    own = {"name": "x", "schema": schema(draw), "strict": draw.random() < 0.5}
    return {"response_format": {"type": "json_schema", "json_schema": own}}
