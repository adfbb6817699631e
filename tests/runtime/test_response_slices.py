"""Responses with log-probabilities: the event loop serves others while many tokens are processed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.logprobs import LogprobRows
from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.sched.packed_logprobs import PackedLogprobs, TokenLogprobs
from llmc_runtime.server.http.lazy_json import PAUSE_BYTES, Encoding, Lazy
from llmc_runtime.server.http.replies import Events
from llmc_runtime.server.openai import named_events
from llmc_runtime.server.openai.message_tokens import ScoredToken, TokenScores, TokenTexts
from llmc_runtime.server.openai.responses import NumberedEvents, OutputItems
from llmc_runtime.server.tool_calls.message import Delta

COUNT = 200
PROMPTING: Any = SimpleNamespace(is_special=lambda token: False, raw=lambda token, text: text.encode())


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> LogprobRows:
    """Rows of 20 candidates, which must not be unpacked."""

    def unpacked(self: LogprobRows, index: int) -> Any:
        raise AssertionError(f"row {index} is unpacked")

    packed = PackedLogprobs(20)
    packed.extend(TokenLogprobs(-1.0, 1, tuple(range(20)), (-1.0,) * 20) for _ in range(COUNT))
    monkeypatch.setattr(LogprobRows, "_row", unpacked)
    return LogprobRows([7] * COUNT, packed, lambda token: "ab", 0, COUNT)


def output_of(rows: LogprobRows) -> CompletionOutput:
    return CompletionOutput(0, "ab" * COUNT, [7] * COUNT, None, rows, None, None)


def test_the_texts_of_tokens_are_found_without_their_candidates(rows: LogprobRows) -> None:
    pieces = list(TokenTexts(PROMPTING).push(output_of(rows)))
    assert [piece.text for piece in pieces] == ["ab"] * COUNT


def test_a_response_that_is_not_streamed_makes_log_probabilities_once(rows: LogprobRows) -> None:
    for streams in (False, True):
        items = OutputItems(NumberedEvents(), TokenScores(PROMPTING, 20, False), False, streams)
        events = items.take(Delta(content="ab"), [ScoredToken(7, rows, 0)])
        if streams:
            with pytest.raises(AssertionError, match="row 0 is unpacked"):
                list(events)
        else:
            assert list(events)[-1]["delta"] == "ab"


class Counting(Encoding):
    """Counts the pauses."""

    pauses = 0

    def of(self, key: str) -> Counting:
        return self

    async def pause(self) -> None:
        self.pauses += 1


def test_others_run_while_an_update_is_processed(monkeypatch: pytest.MonkeyPatch, rows: LogprobRows) -> None:
    monkeypatch.setattr(named_events, "SLICE_SECONDS", 0.0)
    encoding = Counting()
    parser = SimpleNamespace(take=lambda text, tokens, final: Delta(content=text), reasoning_tokens=0)
    response: Any = SimpleNamespace(
        _parser=lambda: parser, _serving=SimpleNamespace(encoding=encoding, prompting=PROMPTING),
        _call=SimpleNamespace(key="a"), _usage=SimpleNamespace(take=lambda index, update: None),
        _opening=lambda: (), _take=lambda delta, tokens: [delta.content], _request=SimpleNamespace(logprobs=True),
    )  # fmt: skip
    response._parsed = lambda *args: named_events.NamedEventsResponse._parsed(response, *args)

    async def updates() -> AsyncIterator[Any]:
        yield 0, SimpleNamespace(outputs=[output_of(rows)])

    async def events() -> list[Any]:
        return [event async for event in named_events.NamedEventsResponse._events(response, updates())]

    assert asyncio.run(events()) == ["ab"] * COUNT
    assert encoding.pauses == COUNT


def test_others_run_between_small_chunks_with_log_probabilities() -> None:
    """Each chunk is encoded in less than a slice, and the next one is there already."""
    entries = [{"token": "ab", "logprob": -1.0}] * 20
    encoding, written = Counting(), list[bytes]()

    async def chunks() -> AsyncIterator[Any]:
        for _ in range(COUNT):
            yield {"logprobs": Lazy(entries)}

    async def write(data: bytes) -> None:
        written.append(data)

    asyncio.run(Events(chunks(), encoding, lambda: None)._write(write))
    size = sum(map(len, written))
    assert len(written) >= COUNT and size > 10 * PAUSE_BYTES
    assert encoding.pauses >= size // (PAUSE_BYTES + max(map(len, written))) - 1
