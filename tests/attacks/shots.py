"""Random requests of the fuzzer, each drawn from its own seed: the bytes, the way to read the response, and the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any

from tests.attacks import forms
from tests.attacks.bodies import at_the_edge, damaged, edge, valid
from tests.attacks.fake_engine import VOCAB
from tests.attacks.forms import size

MOST = 8 << 20  # bytes of a body that the server reads
LENGTH = 1024  # tokens of the longest sequence
WHOLE, SLOW, DROPPED, RAW = "whole", "slow", "dropped", "raw"
KEY = b"@KEY@"


@dataclass
class Shot:
    """`body`: None for GET; for RAW, all bytes of the connection, KEY in the place of the API key. `patience`: seconds
    until the client goes."""

    kind: str
    path: str
    body: bytes | None
    manner: str = WHOLE
    patience: float = 10.0
    method: str = ""

    def __str__(self) -> str:
        sent = b"" if self.body is None else self.body
        return f"{self.kind} {self.manner} {self.path} {len(sent)} bytes, {self.patience:.1f} s: {sent[:200]!r}"


@dataclass
class Described:
    """The server's OpenAPI description: (endpoint, path of a field), and the paths of GET."""

    fields: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)


def _sent(kind: str, path: str, body: Any) -> Shot:
    return Shot(kind, path, body if isinstance(body, bytes) else json.dumps(body).encode())


def legal(draw: Random, known: Described) -> Shot:
    """A small valid request."""
    path, body = valid(draw)
    return _sent("legal", path, body)


def broken(draw: Random, known: Described) -> Shot:
    """A damaged one."""
    return _sent("broken", *damaged(draw))


def at_edge(draw: Random, known: Described) -> Shot:
    """Every field of the description, values at the edges."""
    path, names = draw.choice(known.fields)
    return _sent("edge", path, at_the_edge(draw, path, names, edge(draw)))


PIECES = (
    "[1]", "{}", "[]", "[[[[[[]]]]]]", '{"a":{"b":{}}}', "1", "1.5e3", "null", '""', '"x"', '"\\u0041\\ud83d\\ude00"',
    "[1,2,3]", '{"role":"user","content":"x"}', '["a","b"]', "1234567890123456789", '"' + "word " * 50 + '"',
)  # fmt: skip
PLACES = (
    "unknown", "prompt", "messages", "input", "system", "tokens", "stop", "allowed_token_ids", "bad_words",
    "stop_token_ids",
    "tools",
    "logit_bias", "chat_template_kwargs", "structured_outputs", "user", "cache_salt", "add_special_tokens",
)  # fmt: skip
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip


def large(draw: Random, known: Described) -> Shot:
    """A list of one piece again and again, a deep value, or a long text, in some field; up to the limit in size."""
    path, place, most = draw.choice(PATHS), draw.choice(PLACES), size(draw, MOST)
    before = {"max_tokens": 2, "prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [70]}
    if path == "/v1/responses":
        before = {"max_output_tokens": 2, "input": "x"}
    before.pop(place, None)
    start = json.dumps(before)[:-1] + f', "{place}": '
    kind, room = draw.randrange(6), max(1, most - len(start) - 20)
    if kind == 0:
        value = '"' + draw.choice(("a", "word ", " ", "é", "\\u0041", "\\n", "1", "😀")) * (room // 6) + '"'
    elif kind == 1:
        depth = room // 2
        value = "[" * depth + "]" * depth
    elif kind == 2:
        piece = draw.choice(PIECES)
        value = "{" + ",".join(f'"{i}":{piece}' for i in range(min(200_000, room // (len(piece) + 9)))) + "}"
    else:
        piece = draw.choice(PIECES)
        value = "[" + ",".join([piece] * (room // (len(piece) + 1))) + "]"
    return Shot("large", path, (start + value + "}").encode(), patience=15.0)


def formed(draw: Random, known: Described) -> Shot:
    """Structured outputs; functions now and then."""
    body: dict[str, Any] = {"max_tokens": size(draw, 300), "temperature": 1, "n": draw.choice((1, 1, 1, 4, 15, 60))}
    body |= forms.structured(draw)
    if draw.random() < 0.6:
        return _sent("formed", "/v1/completions", {"prompt": "x", **body})
    body["messages"] = [{"role": "user", "content": "x"}]
    if draw.random() < 0.4:
        names = range(size(draw, 64))
        body["tools"] = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": {
                "a": forms.schema(draw, 1)}}, "strict": draw.random() < 0.5}} for i in names
        ]  # fmt: skip
        body["tool_choice"] = draw.choice(("required", "auto"))
        body.pop("structured_outputs", None)
        body.pop("response_format", None)
    return _sent("formed", "/v1/chat/completions", body)


def work(draw: Random, known: Described) -> Shot:
    """Many tokens: long prompts, many of them, many outputs, log-probabilities."""

    def ids() -> list[int]:
        return [draw.randrange(3, VOCAB - 1)] * size(draw, LENGTH + 40)

    most = size(draw, LENGTH)
    body: dict[str, Any] = {"prompt": [ids() for _ in range(size(draw, 128))], "max_tokens": most, "temperature": 1}
    body |= {"n": size(draw, 64), "ignore_eos": draw.random() < 0.5, "stream": draw.random() < 0.4}
    if draw.random() < 0.3:
        body |= {"logprobs": draw.randint(0, 20)}
    if draw.random() < 0.3 and not body["stream"]:
        body |= {"prompt_logprobs": draw.randint(0, 20), "max_tokens": 1}
    if draw.random() < 0.3:
        body |= {"echo": True}
    return _sent("work", "/v1/completions", body)


def read(draw: Random, known: Described) -> Shot:
    """Draw a request with the method GET."""
    path = (
        draw.choice(known.gets)
        .replace("{response_id}", "{name}")
        .replace("{name}", draw.choice(("toy", "x" * size(draw, 20_000), "%2e%2e", "a/b")))
    )
    path += draw.choice(("", "", "?x=" + "y" * size(draw, 20_000), "?a[]=1&b"))
    return Shot("read", path, None)


RAW_HEADS = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 60_000,
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n",
    b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 3000,
    b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\n",
)  # fmt: skip


def unusual(draw: Random, known: Described) -> Shot:
    """Bytes that are no request, or one in tiny chunks, or two hundred at once."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Authorization: Bearer " + KEY + b"\r\n"
    kind = draw.randrange(4)
    if kind == 0:
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * size(draw, 100_000) + b"0\r\n\r\n"
    elif kind == 1:
        data = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * size(draw, 200)
    elif kind == 2:
        data = head + b"Content-Length: %d\r\n\r\n" % MOST + b" " * size(draw, MOST)
    else:
        data = draw.choice(RAW_HEADS)
    return Shot("unusual", "", data, RAW, draw.uniform(0.2, 3.0))


KINDS: Mapping[str, tuple[int, Callable[[Random, Described], Shot]]] = MappingProxyType(
    {
        "legal": (20, legal), "broken": (20, broken), "edge": (20, at_edge), "large": (12, large),
        "formed": (14, formed), "work": (6, work), "read": (4, read), "unusual": (4, unusual),
    }
)  # fmt: skip


def shot(seed: int, worker: int, number: int, known: Described) -> Shot:
    """The request of this number of a worker; it depends on nothing else."""
    draw = Random(f"{seed} shot {worker} {number}")
    names = list(KINDS)
    kind = draw.choices(names, [KINDS[name][0] for name in names])[0]
    made = KINDS[kind][1](draw, known)
    if made.manner == WHOLE and draw.random() < 0.15:
        made.manner = draw.choice((SLOW, DROPPED))
        made.patience = draw.uniform(0.05, 3.0)
        if made.body and made.path.startswith("/v1/") and made.body.endswith(b"}") and len(made.body) < 100_000:
            made.body = made.body[:-1] + b', "stream": true}'
    return made
