"""One output on its way into a message: its text becomes reasoning, content and calls as it comes; it has no routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc_runtime.server.tools.calls import CallPiece
from llmc_runtime.server.tools.plan import Plan
from llmc_runtime.server.tools.reasoning import Splitter, reasoning_tokens


@dataclass
class Bit:
    """What is new: texts, and pieces of calls with the ids of those that begin."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def delta(self) -> dict[str, Any]:
        """The fields of a stream's delta; none where nothing is new."""
        told: dict[str, Any] = {"content": self.content} if self.content else {}
        if self.reasoning:
            told |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        return told | ({"tool_calls": self.calls} if self.calls else {})


def is_cut(finish_reason: str | None, stop_reason: int | str | None) -> bool:
    """Whether an output ended before the model ended it: at max_tokens, at a stop string, by an abort."""
    return finish_reason != "stop" or isinstance(stop_reason, str)


class Turn:
    """One output of a plan; `quiet`: its reasoning is told apart, and not told."""

    def __init__(self, plan: Plan, quiet: bool = False) -> None:
        self._plan, self._quiet = plan, quiet
        self._splitter = None if plan.thoughts is None else Splitter(plan.thoughts, plan.opened)
        known = {} if plan.tools is None else plan.tools.known
        self._form, self._calls = plan.form, None if plan.form is None else plan.form(known)
        self._several = plan.tools is not None and plan.tools.several
        self._forced = plan.tools is not None and plan.tools.forced
        self._ids: list[int] = []  # while there may be reasoning
        self.reasoning_tokens = self.num_calls = 0

    def take(self, text: str, ids: Sequence[int], final: bool, cut: bool = False) -> Bit:
        """What is certain with this much more text, which came of `ids`; `final`: no more comes; `cut`: the output
        ended before the model did. Under a forced tool choice nothing is content: what is no call is its markup."""
        bit = Bit(content=text)
        if self._splitter is not None:
            bit.reasoning, bit.content = self._split(self._splitter, text, ids, final)
        if self._calls is None:
            return bit
        pieces = self._calls.push(bit.content) + (self._calls.finish(cut=cut) if final else [])
        bit.content = "" if self._forced else "".join(piece for piece in pieces if isinstance(piece, str))
        for piece in pieces:
            if isinstance(piece, CallPiece) and (self._several or piece.index == 0):
                self._add(bit.calls, piece)
        return bit

    def finish_reason(self, reason: str | None) -> str | None:
        """That of the message: calls end it where nothing else cut it."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def message(self, text: str, ids: Sequence[int], cut: bool = False) -> dict[str, Any]:
        """The message of a finished output; `cut` as for `take`."""
        bit = self.take(text, ids, True, cut)
        calls: list[dict[str, Any]] = []
        for piece in bit.calls:
            if "id" in piece:
                calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        content = None if not bit.content and (calls or self.reasoning_tokens or self._forced) else bit.content
        told: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if bit.reasoning:
            told |= {"reasoning": bit.reasoning, "reasoning_content": bit.reasoning}
        return told | ({"tool_calls": calls} if calls else {})

    def _split(self, splitter: Splitter, text: str, ids: Sequence[int], final: bool) -> tuple[str, str]:
        plan, inside = self._plan, splitter.inside
        reasoning, content = splitter.push(text, final=final)
        if inside:
            self._ids += ids
            if splitter.thinking and plan.thoughts is not None and plan.dialect.tokenizer is not None:
                ended = not splitter.inside
                self.reasoning_tokens = reasoning_tokens(plan.thoughts, plan.dialect.tokenizer, self._ids, ended)
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
