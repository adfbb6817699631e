"""Random damage of bytes and documents, drawn from a seed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

# What a value of a document is replaced by: nothing of it means what a number, a name or a list should mean there.
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**30, 0.5, -0.0, 1e308, "", " ", "x",
    "1", "../../x", "/etc/passwd", "\0", "\ud800", "é" * 300, "x" * 5000, "%s{}{{x}}", [], [[]], [1], {}, {"": None},
    {"a": {"b": []}}, [0] * 5000, ["x"] * 100,
)  # fmt: skip


def flipped(data: bytes, rng: Random, at: int | None = None) -> tuple[bytes, str]:
    """Change one bit of a byte, or the whole byte; return the bytes and a description."""
    at = rng.randrange(len(data)) if at is None else at
    to = data[at] ^ (1 << rng.randrange(8) if rng.random() < 0.7 else rng.randrange(1, 256))
    return data[:at] + bytes([to]) + data[at + 1 :], f"byte {at}: {data[at]:#04x} to {to:#04x}"


def damaged(data: bytes, rng: Random) -> tuple[bytes, str]:
    """A few bytes changed, inserted, removed or repeated."""
    out, words = bytearray(data), []
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, count = rng.randrange(len(out) + 1), rng.choice((1, 2, 9, 100))
        kind = rng.choice(("flip", "insert", "remove", "repeat", "swap"))
        piece = bytes(out[at : at + count])
        if kind == "flip" and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == "insert":
            out[at:at] = rng.randbytes(count)
        elif kind == "remove":
            del out[at : at + count]
        elif kind == "repeat":
            out[at:at] = piece * rng.choice((1, 3, 50))
        elif kind == "swap":
            out[at : at + count] = piece[::-1]
        words.append(f"{kind} {count} at {at}")
    return bytes(out), ", ".join(words)


def places(doc: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document, the document's own left out."""
    items = doc.items() if isinstance(doc, dict) else enumerate(doc) if isinstance(doc, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(doc: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path."""
    for key in path:
        doc = doc[key]
    return doc


def changed(doc: Any, rng: Random, path: tuple[Any, ...] | None = None) -> tuple[Any, str]:
    """Return a copy of a document with one value replaced, removed, moved or added, and a description."""
    doc = copy.deepcopy(doc)
    found = list(places(doc))
    path = path or rng.choice(found)
    parent, key = at(doc, path[:-1]), path[-1]
    kind = rng.choice(("nasty", "nasty", "nasty", "near", "remove", "other", "add"))
    where = "/".join(str(k)[:40] for k in path)
    if kind == "remove":
        del parent[key]
    elif kind == "add" and isinstance(parent, dict):
        parent["unknown"] = rng.choice(NASTY)
    elif kind == "other":
        parent[key] = copy.deepcopy(at(doc, rng.choice(found)))
    elif kind == "near" and type(parent[key]) in (int, float):
        parent[key] = rng.choice((-1, 2, 1000)) * parent[key] + rng.choice((-1, 0, 1))
    elif kind == "near" and isinstance(parent[key], str) and parent[key]:
        parent[key] = flipped(parent[key].encode("utf-8", "surrogatepass"), rng)[0].decode("utf-8", "replace")
    else:
        parent[key] = rng.choice(NASTY)
    value = "" if kind == "remove" else f" = {repr(at(doc, path))[:60]}" if kind != "add" else ""
    return doc, f"{kind} {where}{value}"
