"""What one chat's answer consists of: reasoning, content, calls; which grammar makes it so; it reads no output."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.params import SamplingParams
from llmc_runtime.server.errors import ApiError, told
from llmc_runtime.server.fields import ChatRequest
from llmc_runtime.server.tools import formats
from llmc_runtime.server.tools.calls import CallFormat
from llmc_runtime.server.tools.definitions import Tools, tools_of
from llmc_runtime.server.tools.dialect import Dialect
from llmc_runtime.server.tools.families import FORMATS
from llmc_runtime.server.tools.grammar import answer, calls_of, form_of
from llmc_runtime.server.tools.history import calls_in
from llmc_runtime.server.tools.reasoning import ReasoningFormat, lark_of


@dataclass(frozen=True)
class Plan:
    """`tools`, `form`: the calls there may be, and how they, or all answers, are written. `thoughts`: how reasoning is
    marked; `opened`: the output begins within it. Each is None where there is none. `earlier`: how many calls the
    messages have."""

    dialect: Dialect
    tools: Tools | None = None
    form: type[CallFormat] | None = None
    thoughts: ReasoningFormat | None = None
    opened: bool = False
    earlier: int = 0

    @property
    def plain(self) -> bool:
        """The output is content alone."""
        return self.form is None and self.thoughts is None

    @property
    def strict(self) -> bool:
        """Calls that are not forced follow schemas."""
        return self.tools is not None and bool(self.tools.strict) and self.form is not None

    @property
    def visible(self) -> frozenset[int]:
        """The special tokens that the text of an output has to show."""
        marks = () if self.form is None else tuple(self.form.markers)
        return self.dialect.special(marks if self.thoughts is None else (*marks, *self.thoughts.marks))

    def behind(self, prompt: Prompt, asked: ChatRequest) -> Plan:
        """The same for an output behind this prompt: it may have closed the reasoning, or be within."""
        thoughts, text = self.thoughts, prompt.text or ""
        if thoughts is None:
            return self
        content = asked.messages[-1].get("content") if asked.continue_final_message else None
        if asked.continue_final_message and isinstance(content, str):
            return replace(self, opened=thoughts.opened(text, content))
        if thoughts.closed(text):
            return replace(self, thoughts=None)
        return replace(self, opened=thoughts.opened(text, None))

    def constrained(self, params: SamplingParams, param: str) -> SamplingParams:
        """The parameters with the grammar of the answer, where one is needed; `param` asked for its form. ApiError 400
        where there is none."""
        wanted, tools = params.structured_outputs, self.tools
        forced = tools is not None and tools.forced
        strict = wanted is None and not forced and self.strict
        if self.plain or (wanted is None and not forced and not strict):
            return params
        marker = self.dialect.marker
        thought = None if self.thoughts is None else lark_of(self.thoughts, self.opened, marker)
        parts, body = [], []
        if tools is not None and self.form is not None:
            parts.append(calls_of(tools, self.form, marker, strict))
            body.append("calls")
        if wanted is not None and not forced:
            parts.append(form_of(wanted, param))
            body.append("form" if self.form is None else f"{self.form.before_answer(marker)} form")
        whole = answer(parts, " | ".join(body), thought, "tools" if tools else param)
        try:
            return replace(params, structured_outputs=whole)
        except LlmcError as e:  # what a grammar excludes
            raise told(e, "messages") from None


def plan_of(asked: ChatRequest, dialect: Dialect) -> Plan:
    """What the fields of a request ask for. ApiError 400."""
    tools = tools_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    if tools is None:
        channels = dialect.calls is not None and dialect.calls.channels
        return Plan(dialect, None, dialect.calls if channels else None, dialect.thoughts)
    form = dialect.calls
    if form is None and not tools.forced:
        names = ", ".join(dict.fromkeys(one.name for one in FORMATS))
        cause = "tools: in which form this model writes calls is not known"
        raise ApiError(f"{cause}. Try: serve it with --tool-call-parser (one of {names})", param="tools")
    if tools.forced and asked.structured_outputs is not None:
        cause = "tool_choice asks for calls alone, which leaves no text for structured_outputs"
        raise ApiError(f"{cause}: give one of them", param="structured_outputs")
    earlier = calls_in(asked.messages)
    return Plan(dialect, tools, form or formats.Llama3Json, dialect.thoughts, earlier=earlier)
