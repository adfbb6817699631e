"""Chats whose output is a list of typed parts, streamed as events with names."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.server.http.lazy_json import SLICE_SECONDS, is_lazy
from llmc_runtime.server.http.replies import LastEvents, named_event
from llmc_runtime.server.openai.chat import ChatResponse, ParsedChoice
from llmc_runtime.server.openai.generation_response import WHOLE_INTERVAL, Choice, Scores
from llmc_runtime.server.openai.message_tokens import MessageTokens, Piece, ScoredToken, TokenTexts
from llmc_runtime.server.tool_calls.message import Delta, MessageParser, is_cut
from llmc_runtime.server.updates import Updates


class NamedEventsResponse(ChatResponse):
    """A chat with one output. Subclasses make parts and events from its deltas."""

    end = b""
    _last: list[dict[str, Any]]  # the events after generation
    _whole: dict[str, Any]  # the complete response

    @abstractmethod
    def _opening(self) -> Iterable[dict[str, Any]]:
        """Return the events before the output."""

    @abstractmethod
    def _take(self, delta: Delta, tokens: Sequence[ScoredToken]) -> Iterable[dict[str, Any]]:
        """Add new output, and return its events. `tokens` are those of its content, if log-probabilities are sent."""

    @abstractmethod
    def _closing(self, finish: str, stop: int | str | None) -> tuple[Iterable[dict[str, Any]], dict[str, Any]]:
        """Return the last events and the complete response. `finish` and `stop` are the reasons of chats."""

    async def complete(self) -> dict[str, Any]:
        """See GenerationResponse. The tokens of a message are found piece by piece, as in a stream."""
        if not self._request.logprobs:
            return await super().complete()
        self._call = replace(self._call, interval=WHOLE_INTERVAL)
        async with aclosing(self._events(await self._started())) as events:
            async for _ in events:
                pass
        return self._whole

    def _body(self, choices: list[list[Choice]], scores: list[Scores]) -> dict[str, Any]:
        choice = choices[0][0]
        assert isinstance(choice, ParsedChoice)
        self._usage.reasoning = choice.parser.reasoning_tokens
        for _ in self._take(choice.delta(), ()):
            pass
        finish = choice.parser.finish_reason(choice.finish_reason) or "stop"
        return self._closing(finish, choice.stop_reason)[1]

    async def _chunks(self, updates: Updates) -> AsyncIterator[dict[str, Any] | bytes]:
        """Yield the events. The opening follows the first update, which reports the cached tokens."""
        async with aclosing(self._events(updates)) as events:
            async for event in events:
                yield event if is_lazy(event) else named_event(event)
        last = b""
        for event in self._last:
            if is_lazy(event):
                if last:
                    yield last
                yield event
                last = b""
            else:
                last += named_event(event)
        yield LastEvents(last)

    async def _events(self, updates: Updates) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events up to the end of generation, and set `_last` to those after it.

        An update may have hundreds of tokens; every SLICE_SECONDS, others run.
        """
        parser, opened, encoding = self._parser(), False, self._serving.encoding.of(self._call.key)
        texts, message = TokenTexts(self._serving.prompting), MessageTokens()
        async with aclosing(updates) as items:  # type: ignore[type-var]
            async for index, update in items:
                self._usage.take(index, update)
                if not opened:
                    opened = True
                    for event in self._opening():
                        yield event
                (output,) = update.outputs
                finish, until = output.finish_reason, time.perf_counter() + SLICE_SECONDS
                for delta, tokens in self._parsed(output, parser, texts, message):
                    self._usage.reasoning = parser.reasoning_tokens
                    for event in self._take(delta, tokens):
                        yield event
                    if time.perf_counter() > until:
                        await encoding.pause()
                        until = time.perf_counter() + SLICE_SECONDS
                if finish is not None:
                    events, self._whole = self._closing(parser.finish_reason(finish) or "stop", output.stop_reason)
                    self._last = list(events)

    def _parsed(
        self, output: CompletionOutput, parser: MessageParser, texts: TokenTexts, message: MessageTokens
    ) -> Iterator[tuple[Delta, list[ScoredToken]]]:
        """Yield the parser's results for an update, with log-probabilities piece by piece with the content's tokens."""
        final = output.finish_reason is not None
        cut = is_cut(output.finish_reason, output.stop_reason)
        if not self._request.logprobs:
            yield parser.take(output.text, output.token_ids, final=final, cut=cut), []
            return
        for piece in texts.push(output):
            delta = parser.take(piece.text, [token.id for token in piece.tokens], final=False)
            yield delta, message.take(piece, delta)
        if final:
            delta = parser.take("", (), final=True, cut=cut)
            yield delta, message.take(Piece(""), delta)
