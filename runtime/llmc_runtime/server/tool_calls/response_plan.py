"""The structure of a chat's response (reasoning, content, calls) and the grammar that enforces it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar.definition import Definition, close_objects
from llmc_runtime.grammar.lark_text import Marker, TooLong, json_rule, limited, slashed
from llmc_runtime.grammar.structural_tag import structural_rules
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.structured_outputs import MAX_BYTES, StructuredOutputsParams
from llmc_runtime.server.http.errors import ApiError, to_api_error
from llmc_runtime.server.requests.request_fields import ChatRequest
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.definitions import MAX_CALLS, Tools, tools_of
from llmc_runtime.server.tool_calls.history import calls_in
from llmc_runtime.server.tool_calls.parser_select import OutputFormats
from llmc_runtime.server.tool_calls.reasoning import ReasoningFormat, lark_of
from llmc_runtime.server.tool_calls.registry import FORMATS, Llama3Json

_MAX_CHARACTERS = 3 * MAX_BYTES  # maximum characters of a grammar's parts, most of which are counted twice


def calls_of(tools: Tools, form: type[CallFormat], marker: Marker, free: bool = False) -> str:
    """Return rules in which `calls` matches what the tools allow.

    With `free`, it matches text that contains calls, of which those of strict tools follow their schemas. Raises
    ApiError 400 if the format cannot express a schema.
    """
    rules = {name: f"a{i}" for i, name in enumerate(tools.schemas)}
    max_calls = MAX_CALLS if tools.several and form.several else 1
    texts = [form.free_rules(rules, marker, max_calls, tools.known) if free else form.rules(rules, marker, max_calls)]
    for name, schema in tools.schemas.items():
        try:
            texts.append(form.arguments(rules[name], schema, marker, not free or name in tools.strict))
        except ValueError as e:
            raise ApiError(f"tools: the parameters of {name} cannot be enforced: {e}", param="tools") from None
    return "\n".join(texts)


def form_of(form: StructuredOutputsParams, param: str, marker: Marker) -> str:
    """Return rules in which `form` matches the requested output format. Raises ApiError 400 if that is impossible."""
    if form.kind in ("json", "json_object"):
        try:
            return f"form: {_of_schema(form, param)}"
        except (ValueError, RecursionError) as e:  # a schema given as text has not been parsed before
            raise ApiError(f"{param}: the JSON schema cannot be read: {str(e)[:100]}", param=param) from None
    if form.kind == "structural_tag":
        try:
            return structural_rules(json.loads(form.text), marker, "form", Definition.of(form).json_options)
        except (ValueError, RecursionError) as e:
            raise ApiError(f"{param}: the structural tag cannot be used: {str(e)[:200]}", param=param) from None
    if form.kind == "choice":
        return "form: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(form.text))
    if form.kind == "regex":
        return f"form: /{slashed(form.text)}/"
    if "::=" in form.text:
        cause = "a grammar in GBNF cannot be combined with reasoning or tools: write it in Lark's syntax"
        raise ApiError(f"{param}: {cause}", param=param)
    return f"form: %lark {{\n{form.text}\n}}"


def _of_schema(form: StructuredOutputsParams, param: str) -> str:
    schema = {"type": "object"} if form.json_object else _schema(form.text, param)
    if form.disable_additional_properties:
        close_objects(schema)
    return json_rule(schema, Definition.of(form).json_options)


def answer(parts: list[str], body: str, thought: str | None, param: str) -> StructuredOutputsParams:
    """Combine the rules into one grammar: `body`, after the rule `thought` if there is reasoning.

    Raises ApiError 400 about the field `param` if the grammar is too large.
    """
    start = f"start: {body}" if thought is None else f"start: thought body\nbody: {body}\n{thought}"
    text = "\n".join(["%llguidance {}", start, *parts, ""])
    if len(text.encode(errors="replace")) > MAX_BYTES:
        cause = f"the grammar of the answer has {len(text)} characters, at most {MAX_BYTES}"
        raise ApiError(f"{param}: {cause}; use fewer tools, or smaller schemas", param=param)
    try:
        return StructuredOutputsParams(grammar=text)
    except LlmcError as e:
        raise ApiError(f"{param}: {e.cause}", param=param) from None


def _schema(text: str, param: str) -> dict[str, Any]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ApiError(f"{param}: a JSON schema is an object", param=param)
    return schema


@dataclass(frozen=True)
class ResponsePlan:
    """The structure of a response; fields are None if the part does not exist.

    - `tools`, `form`: the tools that may be called, and the format of calls (or of all answers).
    - `reasoning`: the format of reasoning; `opened`: the output starts inside of it.
    - `earlier`: the number of tool calls in the messages.
    """

    formats: OutputFormats
    tools: Tools | None = None
    form: type[CallFormat] | None = None
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    earlier: int = 0

    @property
    def plain(self) -> bool:
        """Whether the output is content only."""
        return self.form is None and self.reasoning is None

    @property
    def strict(self) -> bool:
        """Whether calls follow schemas although they are not forced."""
        return self.tools is not None and bool(self.tools.strict) and self.form is not None

    @property
    def visible(self) -> frozenset[int]:
        """The special tokens that have to appear in an output's text."""
        marks = () if self.form is None else tuple(self.form.markers)
        return self.formats.special(marks if self.reasoning is None else (*marks, *self.reasoning.marks))

    def after(self, prompt: Prompt, request: ChatRequest) -> ResponsePlan:
        """Return the plan for an output after this prompt, which may have closed or opened the reasoning."""
        reasoning, text = self.reasoning, prompt.text or ""
        if reasoning is None:
            return self
        content = request.messages[-1].get("content") if request.continue_final_message else None
        if request.continue_final_message and isinstance(content, str):
            return replace(self, opened=reasoning.opened(text, content))
        if reasoning.closed(text):
            return replace(self, reasoning=None)
        return replace(self, opened=reasoning.opened(text, None))

    def constrained(self, params: SamplingParams, param: str) -> SamplingParams:
        """Return the parameters with the response's grammar, if one is needed.

        `param` is the field that requested the output format. Raises ApiError 400 if there is no such grammar.
        """
        output_format, tools = params.structured_outputs, self.tools
        forced = tools is not None and tools.forced
        strict = output_format is None and not forced and self.strict
        if self.plain or (output_format is None and not forced and not strict):
            return params
        try:
            with limited(_MAX_CHARACTERS):
                whole = self._grammar(output_format if not forced else None, strict, param)
        except TooLong as e:
            raise ApiError(f"{'tools' if tools else param}: {e}", param="tools" if tools else param) from None
        try:
            return replace(params, structured_outputs=whole)
        except LlmcError as e:  # parameters that a grammar excludes
            raise to_api_error(e, "messages") from None

    def _grammar(
        self, output_format: StructuredOutputsParams | None, strict: bool, param: str
    ) -> StructuredOutputsParams:
        """Return the grammar of the response; `output_format` is that of its content. Raises ApiError 400, TooLong."""
        tools, marker = self.tools, self.formats.marker
        thought = None if self.reasoning is None else lark_of(self.reasoning, self.opened, marker)
        parts, body = [], []
        if tools is not None and self.form is not None:
            parts.append(calls_of(tools, self.form, marker, strict))
            body.append("calls")
        if output_format is not None:
            parts.append(form_of(output_format, param, marker))
            body.append("form" if self.form is None else f"{self.form.before_answer(marker)} form")
        return answer(parts, " | ".join(body), thought, "tools" if tools else param)


def plan_of(request: ChatRequest, formats: OutputFormats) -> ResponsePlan:
    """Return the plan for a request. Raises ApiError 400."""
    tools = tools_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    if tools is None:
        channels = formats.calls is not None and formats.calls.channels
        return ResponsePlan(formats, None, formats.calls if channels else None, formats.reasoning)
    form = formats.calls
    if form is None and not tools.forced:
        names = ", ".join(dict.fromkeys(call_format.name for call_format in FORMATS))
        cause = "tools: the format of this model's calls is unknown"
        raise ApiError(f"{cause}. Try: serve it with --tool-call-parser (one of {names})", param="tools")
    if tools.forced and request.structured_outputs is not None:
        cause = "tool_choice requires calls, which excludes structured_outputs"
        raise ApiError(f"{cause}: use one of them", param="structured_outputs")
    earlier = calls_in(request.messages)
    return ResponsePlan(formats, tools, form or Llama3Json, formats.reasoning, earlier=earlier)
