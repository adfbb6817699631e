"""Small schemas with long grammars, and schemas that repeat themselves: refused before much of the grammar is made."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest

pytest.importorskip("starlette")
from draw import of_test
from llmc_runtime.grammar import lark_text
from llmc_runtime.grammar.lark_text import TooLong, charged, lark, limited
from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.structured_outputs import MAX_BYTES, StructuredOutputsParams
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.openai.chat import ParsedChoice
from llmc_runtime.server.tool_calls import response_plan, text_values
from llmc_runtime.server.tool_calls.definitions import tools_of
from llmc_runtime.server.tool_calls.message import Delta, MessageParser, joined
from llmc_runtime.server.tool_calls.parser_select import OutputFormats
from llmc_runtime.server.tool_calls.reasoning import THINK
from llmc_runtime.server.tool_calls.registry import FORMATS, Hermes
from llmc_runtime.server.tool_calls.response_plan import ResponsePlan
from llmc_runtime.server.tool_calls.tagged_args import ArguedFormat
from llmc_runtime.server.tool_calls.text_values import types_of
from llmc_runtime.server.tool_calls.xml_shape import XmlShape

from tests.runtime.parrots import TOK

PARAMS = SamplingParams(max_tokens=4)
ARGUED = [form for form in FORMATS if issubclass(form, ArguedFormat)]


def function(schema: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


def definitions(count: int) -> dict[str, Any]:
    return {f"d{i}": {"type": "string", "pattern": "x" * 50} for i in range(count)}


# 30 KB each, whose grammars would have 4 MB and more where arguments are written one by one.
REPEATED: dict[str, dict[str, Any]] = {
    "definitions of each argument": {
        "properties": {f"p{i}": {"type": "array", "minItems": 1} for i in range(300)}, "$defs": definitions(250)},
    "alternatives of each argument": {
        "properties": {f"p{i}": {"$ref": "#/$defs/many"} for i in range(400)},
        "$defs": {"many": {"anyOf": [{"type": "array", "minItems": 1}] * 250}}},
}  # fmt: skip


def plan(form: Any, *tools: dict[str, Any]) -> ResponsePlan:
    return ResponsePlan(OutputFormats(form, None, (), TOK), tools_of(list(tools), "required", None), form)


class Counted:
    """The json module, whose documents are counted."""

    def __init__(self) -> None:
        self.made = 0

    def dumps(self, value: Any, **more: Any) -> str:
        text = json.dumps(value, **more)
        self.made += len(text)
        return text


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("form", ARGUED, ids=lambda form: form.name)
def test_little_of_a_long_grammar_is_made(form: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, tool = Counted(), function(REPEATED[name])
    monkeypatch.setattr(lark_text, "json", counted)
    with pytest.raises(ApiError) as caught:
        plan(form, tool).constrained(PARAMS, "response_format")
    assert caught.value.status == 400 and caught.value.param == "tools" and "too long" in caught.value.message
    assert counted.made < response_plan._MAX_CHARACTERS + 2 * len(json.dumps(tool))


@pytest.mark.parametrize("form", ARGUED, ids=lambda form: form.name)
def test_without_the_limit_it_would_be_long(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_plan, "_MAX_CHARACTERS", 1 << 40)
    with pytest.raises(ApiError, match=r"has \d{7,} characters"):
        plan(form, function(REPEATED["definitions of each argument"])).constrained(PARAMS, "response_format")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_limit_refuses_no_grammar_that_is_short_enough(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some characters are counted twice on the way: with no limit, the size of the whole is refused as well."""
    longest = 0
    for count in range(100, 2000, 400):
        properties = {f"property_{i}": {"type": "integer", "minimum": i} for i in range(count)}
        one = plan(form, function({"properties": properties}))
        try:
            made = one.constrained(PARAMS, "response_format")
        except ApiError:
            monkeypatch.setattr(response_plan, "_MAX_CHARACTERS", 1 << 40)
            with pytest.raises(ApiError, match="characters, at most"):
                one.constrained(PARAMS, "response_format")
            break
        assert made.structured_outputs is not None and made.structured_outputs.grammar is not None
        longest = len(made.structured_outputs.grammar)
    assert longest > MAX_BYTES / 10


def test_an_enumeration_is_refused_by_its_length() -> None:
    """Even if the grammar has no rule for most of its values, since their texts would be read as other values."""
    form = next(form for form in FORMATS if issubclass(form, XmlShape))
    with pytest.raises(ApiError, match="an enum of 10001 values"):
        values = [1, *(str(i) for i in range(10_000))]
        plan(form, function({"properties": {"a": {"enum": values}}})).constrained(PARAMS, "response_format")


def test_an_output_format_behind_reasoning_is_limited_too() -> None:
    triggers = [f"{i:04d}" for i in range(900)]
    tags = [{"begin": one, "content": {"type": "any_text"}, "end": "x"} for one in triggers]
    tag = {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
    form = StructuredOutputsParams(structural_tag=tag)
    with pytest.raises(ApiError, match="too long") as caught:
        ResponsePlan(OutputFormats(None, THINK, (), TOK), reasoning=THINK).constrained(
            SamplingParams(max_tokens=4, structured_outputs=form), "response_format"
        )
    assert caught.value.param == "response_format"


def test_types_of_repeated_values_and_of_long_references() -> None:
    """A list of values is looked at once, and a reference has a limited length."""
    looked = 0

    class Values(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looked
            looked += 1
            return super().__iter__()

    root = {"$defs": {"one": {"enum": Values(["a", 1, 2.5, None, True, [], {}])}}}
    schema = {"anyOf": [{"$ref": "#/$defs/one"}] * 200}
    every = frozenset({"string", "integer", "number", "null", "boolean", "array", "object"})
    assert types_of(schema, root) == every and looked == 1
    deep: dict[str, Any] = {"a": {"type": "string"}}
    for _ in range(600):
        deep = {"a": deep}
    assert text_values.resolved({"$ref": "#/" + "/".join("a" * 400)}, deep) is not None
    assert text_values.resolved({"$ref": "#/" + "/".join("a" * 600)}, deep) is None


def test_a_limit_is_that_of_its_block_and_thread() -> None:
    with limited(10):
        assert charged("x" * 6) and lark("a") == '"a"'
        other = threading.Thread(target=lambda: lark("x" * 100))
        other.start()
        other.join()
        with pytest.raises(TooLong):
            charged("x" * 2)
    assert charged("x" * 100)


CALLS = """<think>
So.</think>Here it is:
<tool_call>
{"name": "f", "arguments": {"a": [1, "two", {"b": null}]}}
</tool_call>
<tool_call>
{"name": "f", "arguments": {"a": "\\u00e9"}}
</tool_call>"""


@pytest.mark.parametrize(("text", "finish"), [(CALLS, "stop"), (CALLS[:90], "length"), ("Only text. ", "stop")])
def test_an_output_that_is_not_streamed_is_parsed_as_it_arrives(text: str, finish: str) -> None:
    """The message is that of the whole text, and the last update is all that is left to parse at the end."""
    rng = random.Random(of_test())
    tools = tools_of([function({})], "auto", None)
    one = ResponsePlan(OutputFormats(Hermes, THINK, (), TOK), tools, Hermes, THINK)
    whole = MessageParser(one)
    expected = whole.message(joined([whole.take(text, [1] * 10, final=True, cut=finish != "stop")]))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text)), k=rng.randrange(1, 9)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        parser, parsed = MessageParser(one), list[str]()
        choice = ParsedChoice(parser)

        def take(text: str, *rest: Any, _taken=parsed, _take=parser.take, **flags: bool) -> Delta:
            _taken.append(text)
            return _take(text, *rest, **flags)

        parser.take = take  # type: ignore[method-assign]
        for i, piece in enumerate(pieces):
            end = finish if i == len(pieces) - 1 else None
            choice.take(CompletionOutput(0, piece, [1], finish_reason=end))
        found = parser.message(choice.delta())
        assert parsed == pieces
        for message in (expected, found):
            for call in message.get("tool_calls", ()):
                call.pop("id", None)
        assert found == expected and parser.num_calls == whole.num_calls
