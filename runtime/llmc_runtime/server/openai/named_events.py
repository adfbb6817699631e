"""Chats whose output is a list of typed parts, streamed as events with names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from llmc_runtime.server.http.replies import Final, named_event
from llmc_runtime.server.openai.chat import Chat
from llmc_runtime.server.openai.response import Choice, Scores
from llmc_runtime.server.tool_calls.message import Delta, is_cut
from llmc_runtime.server.updates import Updates


class NamedEvents(Chat):
    """A chat with one output. Subclasses make parts and events from its deltas."""

    end = b""

    @abstractmethod
    def _opening(self) -> Iterable[dict[str, Any]]:
        """Return the events before the output."""

    @abstractmethod
    def _take(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Add new output, and return its events."""

    @abstractmethod
    def _closing(self, finish: str, stop: int | str | None) -> tuple[Iterable[dict[str, Any]], dict[str, Any]]:
        """Return the last events and the complete response. `finish` and `stop` are the reasons of chats."""

    def _body(self, choices: list[list[Choice]], scores: list[Scores]) -> dict[str, Any]:
        choice, parser = choices[0][0], self._parser()
        cut = is_cut(choice.finish_reason, choice.stop_reason)
        delta = parser.take("".join(choice.text), choice.token_ids, True, cut)
        self._usage.reasoning = parser.reasoning_tokens
        for _ in self._take(delta):
            pass
        finish = parser.finish_reason(choice.finish_reason) or "stop"
        return self._closing(finish, choice.stop_reason)[1]

    async def _chunks(self, updates: Updates) -> AsyncIterator[dict[str, Any] | bytes]:
        """Yield the events. The opening follows the first update, which reports the cached tokens."""
        parser, opened, last = self._parser(), False, b""
        async with aclosing(updates) as items:  # type: ignore[type-var]
            async for index, update in items:
                self._usage.take(index, update)
                if not opened:
                    opened = True
                    for one in self._opening():
                        yield named_event(one)
                (output,) = update.outputs
                finish = output.finish_reason
                delta = parser.take(
                    output.text, output.token_ids, finish is not None, is_cut(finish, output.stop_reason)
                )
                self._usage.reasoning = parser.reasoning_tokens
                for one in self._take(delta):
                    yield named_event(one)
                if finish is not None:
                    events, _ = self._closing(parser.finish_reason(finish) or "stop", output.stop_reason)
                    last = b"".join(map(named_event, events))
        yield Final(last)
