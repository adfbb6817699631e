"""Converts one output to an OpenAI message as it is generated: its reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc_runtime.server.tool_calls.call_format import CallPiece
from llmc_runtime.server.tool_calls.reasoning import ReasoningParser, ReasoningTokens
from llmc_runtime.server.tool_calls.response_plan import ResponsePlan


@dataclass
class Delta:
    """New output: reasoning, content, and pieces of calls, with ids for those that start."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a stream's `delta` object; {} if there is nothing new."""
        fields: dict[str, Any] = {"content": self.content} if self.content else {}
        if self.reasoning:
            fields |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        return fields | ({"tool_calls": self.calls} if self.calls else {})


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return all deltas of an output as one, with one piece for each call."""
    calls, arguments = list[dict[str, Any]](), list[list[str]]()
    for piece in (piece for delta in deltas for piece in delta.calls):
        if "id" in piece:
            calls.append(piece)
            arguments.append([])
        arguments[-1].append(piece["function"]["arguments"])
    whole = [
        {**call, "function": {**call["function"], "arguments": "".join(parts)}}
        for call, parts in zip(calls, arguments, strict=True)
    ]
    return Delta("".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), whole)


def is_cut(finish_reason: str | None, stop_reason: int | str | None) -> bool:
    """Return whether an output was cut off before the model ended it: by max_tokens, a stop string or an abort."""
    return finish_reason != "stop" or isinstance(stop_reason, str)


class MessageParser:
    """The state of one output of a plan. With `quiet`, its reasoning is separated but not returned."""

    def __init__(self, plan: ResponsePlan, quiet: bool = False) -> None:
        self._plan, self._quiet = plan, quiet
        form, tokenizer = plan.reasoning, plan.formats.tokenizer
        self._reasoning = None if form is None else ReasoningParser(form, plan.opened)
        self._counted = None if form is None or tokenizer is None else ReasoningTokens(form, tokenizer)
        known = {} if plan.tools is None else plan.tools.known
        self._form, self._calls = plan.form, None if plan.form is None else plan.form(known)
        self._several = plan.tools is not None and plan.tools.several
        self._forced = plan.tools is not None and plan.tools.forced
        self.reasoning_tokens = self.num_calls = 0

    def take(self, text: str, ids: Sequence[int], *, final: bool, cut: bool = False) -> Delta:
        """Append text, generated from `ids`, and return the output that is now certain.

        `final` marks the end of the text, and `cut` that the output was cut off. If a tool call is forced, nothing is
        content: everything else is markup of calls.
        """
        delta = Delta(content=text)
        if self._reasoning is not None:
            delta.reasoning, delta.content = self._split(self._reasoning, text, ids, final)
        if self._calls is None:
            return delta
        pieces = self._calls.push(delta.content) + (self._calls.finish(cut=cut) if final else [])
        delta.content = "" if self._forced else "".join(piece for piece in pieces if isinstance(piece, str))
        for piece in pieces:
            if isinstance(piece, CallPiece) and (self._several or piece.index == 0):
                self._add(delta.calls, piece)
        return delta

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the message's finish reason: "tool_calls" if it stopped after calls."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def message(self, delta: Delta) -> dict[str, Any]:
        """Return the message of a finished output; `delta` is all of it, see `joined`."""
        calls = [{"id": call["id"], "type": "function", "function": call["function"]} for call in delta.calls]
        content = None if not delta.content and (calls or self.reasoning_tokens or self._forced) else delta.content
        fields: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if delta.reasoning:
            fields |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        return fields | ({"tool_calls": calls} if calls else {})

    def _split(self, parser: ReasoningParser, text: str, ids: Sequence[int], final: bool) -> tuple[str, str]:
        inside = parser.inside
        reasoning, content = parser.push(text, final=final)
        if inside and self._counted is not None:
            self._counted.take(ids)
            if parser.thinking:
                self.reasoning_tokens = self._counted.count(ended=not parser.inside)
        return "" if self._quiet else reasoning, content

    def _add(self, calls: list[dict[str, Any]], piece: CallPiece) -> None:
        function = {"arguments": piece.arguments}
        if piece.name is None:
            if calls and calls[-1]["index"] == piece.index:
                calls[-1]["function"]["arguments"] += piece.arguments
            else:
                calls.append({"index": piece.index, "function": function})
            return
        call_id = "" if self._form is None else self._form.call_id(piece.name, self._plan.earlier + piece.index)
        self.num_calls += 1
        function = {"name": piece.name, "arguments": piece.arguments}
        calls.append({"index": piece.index, "id": call_id, "type": "function", "function": function})
