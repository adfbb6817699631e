"""An asyncio client that classifies every response: right, wrong, announced failure, or unannounced failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.attacks.fake_engine import VOCAB
from tests.attacks.oracle import answer

# Outcomes of a request. The last three must not occur: a wrong text, an unannounced failure, and an end within a
# response.
RIGHT, REFUSED, REPORTED, INVALID = "right", "refused", "reported", "invalid"
WRONG, FAILED, CUT = "wrong", "failed", "cut"
NEVER = (WRONG, FAILED, CUT)
_DEADLINE = 120.0  # seconds of silence


@dataclass
class Answer:
    """A response. Status 0: the connection ended before one. `error`: the code of the error object, in the body or as
    the last event.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    error: str = ""
    done: bool = False
    body: bytes = b""
    cached: int = 0

    @property
    def announced(self) -> bool:
        """Whether the response is a refusal in the documented form."""
        return self.status in (429, 503) and "retry-after" in self.headers and "retry-after-ms" in self.headers


@dataclass
class Request:
    """A completion whose answer is known beforehand."""

    prompt: list[int]
    max_tokens: int
    stream: bool
    seed: int
    n: int = 1
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON body."""
        fields = {
            "prompt": self.prompt, "max_tokens": self.max_tokens, "stream": self.stream, "seed": self.seed, "n": self.n,
            "temperature": self.temperature, "ignore_eos": True, **self.extra,
        }  # fmt: skip
        return json.dumps(fields).encode()

    def judge(self, response: Answer) -> str:
        """Classify the response."""
        if response.status == 200 and response.done:
            expected = {i: answer(self.prompt, self.max_tokens, self.seed + i, self.temperature) for i in range(self.n)}
            return RIGHT if response.texts == expected else WRONG
        if response.announced:
            return REPORTED if response.error == "engine_unavailable" else REFUSED
        if response.status == 200 and response.error == "engine_unavailable":
            return REPORTED
        return CUT if response.status in (0, 200) else FAILED if response.status >= 500 else INVALID


def drawn(draw: Random, max_tokens: int = 40, shared: list[list[int]] | None = None, longest: int = 60) -> Request:
    """Draw a request; if there are `shared` prefixes, half of the prompts start with one."""
    suffix = [draw.randrange(3, VOCAB - 1) for _ in range(draw.randrange(1, longest))]
    first = draw.choice(shared) if shared and draw.random() < 0.5 else []
    cut = draw.randrange(len(first) + 1) if draw.random() < 0.3 else len(first)
    return Request(first[:cut] + suffix, draw.randrange(1, max_tokens + 1), draw.random() < 0.5, draw.getrandbits(40))


class Client:
    """Connections to one server, which are reused."""

    def __init__(self, host: str, port: int, key: str = "") -> None:
        self.host, self.port = host, port
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def head(self, path: str, length: int) -> bytes:
        """Return the head of a POST request."""
        kind = "Content-Type: application/json\r\n"
        words = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\n{kind}{self._key}Content-Length: {length}\r\n\r\n"
        return words.encode()

    async def ask(self, body: bytes, path: str = "/v1/completions") -> Answer:
        """Send one request. A connection that was closed while idle is replaced once."""
        async with asyncio.timeout(_DEADLINE):
            for old in (True, False):
                link = self._free.pop() if self._free and old else await self.link()
                got = Answer()
                try:
                    link[1].write(self.head(path, len(body)) + body)
                    await _hear(link[0], got)
                except (OSError, EOFError, ValueError):
                    link[1].close()
                    if old and not got.status:
                        continue
                    return got
                if got.headers.get("connection") == "close":
                    link[1].close()
                else:
                    self._free.append(link)
                return got
        return Answer()

    async def link(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection(self.host, self.port)

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def _hear(reader: asyncio.StreamReader, got: Answer) -> None:
    line = await reader.readline()
    if not line:
        raise EOFError
    status = int(line.split()[1])
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        got.headers[name.lower()] = value.strip()
    got.status = status
    if got.headers.get("transfer-encoding") == "chunked":
        async for event in _events(reader):
            _take(got, event)
        return
    got.body = await reader.readexactly(int(got.headers.get("content-length", "0")))
    if status == 200:
        _whole(got)
    elif got.body:
        got.error = str(json.loads(got.body)["error"]["code"])


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the events of a stream, independent of how its bytes are split."""
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        *events, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n\n")
        for event in events:
            yield event
    await reader.readuntil(b"\r\n")


def _take(got: Answer, event: bytes) -> None:
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        got.done = True
        return
    piece = json.loads(data)
    if "error" in piece:
        got.error = str(piece["error"]["code"])
        return
    for choice in piece["choices"]:
        got.texts[choice["index"]] = got.texts.get(choice["index"], "") + (choice.get("text") or "")


def _whole(got: Answer) -> None:
    body = json.loads(got.body)
    got.done = True
    if "choices" in body:
        got.texts = {choice["index"]: choice.get("text", "") for choice in body["choices"]}
        got.cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]


class Judged:
    """Outcomes of a scenario, with their durations."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self.odd: list[str] = []  # descriptions of outcomes that must not occur

    async def send(self, client: Client, request: Request) -> str:
        """Send a request, classify its response, and count it."""
        began = time.monotonic()
        got = await client.ask(request.body)
        outcome = request.judge(got)
        self.counts[outcome] += 1
        self.seconds.setdefault(outcome, []).append(time.monotonic() - began)
        if outcome in (*NEVER, INVALID) and len(self.odd) < 20:
            self.odd.append(
                f"{outcome}: {got.status} {got.error} {got.texts} {got.body[:200]!r} for {request.body[:300]!r}"
            )
        return outcome
