"""Tools, choices and earlier calls of requests: accepted, or refused with an error that names the field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("starlette")
import textkit
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar.definition import close_objects
from llmc_runtime.grammar.lark_text import lark
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.prompting import ROLES as ROLES_OF_THE_API
from llmc_runtime.server.prompting import Prompting
from llmc_runtime.server.requests.request_fields import ChatRequest, JsonSchema, ResponseFormat, TokenizeRequest
from llmc_runtime.server.requests.sampling_fields import _of_format
from llmc_runtime.server.tool_calls.definitions import enforced, tools_of
from llmc_runtime.server.tool_calls.history import for_template
from llmc_runtime.server.tool_calls.parser_select import select_formats
from llmc_runtime.server.tool_calls.response_plan import form_of, plan_of
from llmc_runtime.text.chat_template import ChatTemplate
from llmc_runtime.text.template_analysis import TemplateFeatures
from llmc_runtime.text.tokenizer import Tokenizer

from tests.runtime.parrots import FOLDER, TOK, template

OTHERS = ("teacher", "User", "model", "ipython", "tool_results", "system\n", "", "<|im_start|>")
NAMES = (
    "type",
    "function",
    "name",
    "parameters",
    "properties",
    "id",
    "tool_calls",
    "arguments",
    "role",
    "content",
    "x",
)
TEXTS = ("function", "f", "tool", "assistant", "user", "", "required", "object", "[1", '{"a": 1}', "{}", "auto", "é")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def damaged(whole: Any) -> st.SearchStrategy[Any]:
    """The value with a part of it replaced by any other."""

    def replaced(choice: tuple[list[int], Any]) -> Any:
        path, value = choice
        out = copy.deepcopy(whole)
        at = out
        for step in path:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = keys[step % len(keys)] if keys else None
            if key is None or not isinstance(at[key], dict | list) or step == path[-1]:
                if key is not None:
                    at[key] = value
                break
            at = at[key]
        return out

    return st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4), JSON).map(replaced)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(damaged(TOOL).filter(lambda one: isinstance(one, dict)), max_size=3),
    JSON | damaged({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL, TOOL]}}),
)
def test_any_tools_are_taken_or_refused_by_name(tools: list[Any], choice: Any) -> None:
    try:
        found = tools_of(tools, choice, None)
    except ApiError as e:
        assert e.status == 400 and e.param and e.param.startswith("tool")
    else:
        if found is not None:
            assert {one["function"]["name"] for one in found.shown} == set(found.known) >= set(found.schemas)
            assert all(enforced(schema)["type"] == "object" for schema in found.schemas.values())


@settings(max_examples=200, deadline=None)
@given(
    damaged({"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}) | damaged({"role": "tool"}),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_earlier_calls_are_taken_or_refused_by_name(one: Any, calls: bool, as_text: bool, short: bool) -> None:
    if not isinstance(one, dict):
        return
    before = copy.deepcopy(one)
    try:
        (result,) = for_template([one], TemplateFeatures(True, True, calls, as_text), short)
    except ApiError as e:
        assert e.status == 400 and e.param and e.param.startswith("messages[0]")
    else:
        for call in result.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], str) or not as_text
            assert not short or call.get("id") is None or len(call["id"]) == 9
    assert one == before


def test_arguments_ids_and_reasoning_as_templates_want_them() -> None:
    call = {"id": "call_of_others", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "assistant", "tool_calls": [call], "reasoning": "hm"}, {"role": "assistant", "tool_calls": None},
        {"role": "tool", "tool_call_id": "call_of_others", "content": "2"}, {"role": "user", "content": "x"},
    ]  # fmt: skip
    objects, texts = (
        for_template(messages, TemplateFeatures(False, True, True, as_text), as_text) for as_text in (False, True)
    )
    assert objects[0]["tool_calls"][0]["function"]["arguments"] == {"a": [1]} and objects[0]["content"] is None
    assert texts[0]["tool_calls"][0]["function"]["arguments"] == '{"a": [1]}'
    assert objects[0]["reasoning_content"] == "hm" and "tool_calls" not in objects[1] and objects[3] == messages[3]
    assert objects[2]["tool_call_id"] == "call_of_others" == objects[0]["tool_calls"][0]["id"]
    assert texts[2]["tool_call_id"] == texts[0]["tool_calls"][0]["id"] != "call_of_others"
    for text in ("not JSON", '["a"]', "[" * 9999):  # a model wrote it: the conversation can go on
        call["function"]["arguments"] = text  # type: ignore[index]
        (converted, *_) = for_template(messages, TemplateFeatures(False, True, True, False), False)
        assert converted["tool_calls"][0]["function"] == {"name": "f", "arguments": text}


def test_allowed_tools_are_some_of_them() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[1:]}}
        found = tools_of(tools, choice, None)
        assert found is not None and set(found.schemas) == {"b", "c"} and found.several
        assert found.forced == (mode == "required") and found.shown == (tools if found.forced else tools[1:])
    auto: dict[str, Any] = {"mode": "auto", "tools": tools}
    bad: tuple[Any, ...] = (None, {}, auto | {"tools": []}, auto | {"mode": "none"}, auto | {"tools": [1]})
    for allowed in bad:
        with pytest.raises(ApiError, match="tool_choice"):
            tools_of(tools, {"type": "allowed_tools", "allowed_tools": allowed}, None)
    with pytest.raises(ApiError, match="'d' is not one of the tools"):
        tools_of(tools, {"type": "function", "function": {"name": "d"}}, None)


def test_enforced_schemas_are_closed_and_have_no_notes() -> None:
    schema = {
        "title": "T", "description": "x ::= y", "properties": {
            "title": {"type": "string", "description": "of a book", "default": ""},
            "kind": {"enum": ["description", {"title": 1}]},
            "more": {"properties": {"a": {}}, "additionalProperties": True},
            "list": {"items": {"anyOf": [{"properties": {"b": {}}}, {"type": "null"}]}},
        },
    }  # fmt: skip
    assert enforced(schema) == {
        "type": "object", "additionalProperties": False, "properties": {
            "title": {"type": "string"}, "kind": {"enum": ["description", {"title": 1}]},
            "more": {"properties": {"a": {}}, "additionalProperties": True},
            "list": {"items": {"anyOf": [{"properties": {"b": {}}, "additionalProperties": False}, {"type": "null"}]}},
        },
    }  # fmt: skip
    assert enforced({}) == {"type": "object", "properties": {}, "additionalProperties": False}
    assert enforced({"type": "object"}) == {"type": "object"}
    held = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"}
    assert enforced(held) == held


@pytest.mark.parametrize(
    ("text", "calls", "thoughts"),
    [
        ("qwen2.5", "hermes", None), ("qwen3", "hermes", "<think>"), ("llama3", "llama3_json", None),
        ("mistral", "mistral", None), ("mistral_args", "mistral", "[THINK]"), ("reasoner", None, "<think>"),
        ("channels", "openai", "<|channel|>analysis<|message|>"),
        ("chatml", None, None), ("gemma", None, None), ("thinking", None, "<think>"),
    ],
)  # fmt: skip
def test_the_form_of_calls_is_seen_in_the_template(text: str, calls: str | None, thoughts: str | None) -> None:
    found = select_formats(TOK, template(text))
    assert (found.calls and found.calls.name, found.reasoning and found.reasoning.begin) == (
        calls,
        thoughts or "<think>",
    )
    assert all((name is not None) == any(name in line for line in found.lines) for name in (calls,) if name)
    assert select_formats(None, None).lines == () and select_formats(TOK, template(text), "none", "none").calls is None


def test_a_template_that_shows_no_call_leaves_it_to_the_vocabulary() -> None:
    text = "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    for kept, form in (("[ARGS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json"), ("", None)):
        backend = textkit.byte_level()
        if kept != "<tool_call>":
            backend = textkit.sentencepiece()
        backend.add_special_tokens([kept] if kept else [])
        found = select_formats(Tokenizer(backend, {}, {"default": text}), None)
        assert (found.calls and found.calls.name) == form
        assert ("--tool-call-parser" in found.lines[0]) == (form is None)


def test_other_families_are_not_taken_for_known_ones() -> None:
    other = "{{ tools }}{% for m in messages %}<TOOLCALL>[{{ m.tool_calls }}]{% endfor %}"
    for text in (other, "<tool_call>{{ name }}", "<TOOLCALL>[{{ arguments }}]", "{{ messages }}"):
        assert select_formats(TOK, text).calls is None
    for calls, thoughts in (("xlam", "auto"), ("auto", "of_nobody")):
        with pytest.raises(LlmcError, match="is not allowed"):
            select_formats(TOK, template("chatml"), calls, thoughts)
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=[TOOL])
    with pytest.raises(ApiError, match="--tool-call-parser"):
        plan_of(request, select_formats(TOK, other))
    assert ChatTemplate(other, {}).features.tools


ROLES = {"gemma": {"model"}, "llama3": {"ipython"}, "mistral": {"tool_results"}}


@pytest.mark.parametrize("name", sorted(one.stem for one in FOLDER.glob("*.jinja")))
def test_roles_are_those_of_the_api_and_those_that_the_template_names(name: str) -> None:
    prompting = Prompting(TOK, TOK.vocab_size, template(name), 1024)

    def refused(role: Any) -> str | None:
        request = TokenizeRequest(messages=[{"role": "user", "content": "x"}, {"role": role, "content": "y"}])
        try:
            prompting.chat(request)
        except ApiError as e:
            assert e.status == 400
            return e.param
        return None

    assert all(refused(role) != "messages[1].role" for role in ROLES_OF_THE_API)
    for role in (*OTHERS, None, 3, ["user"]):
        assert (refused(role) != "messages[1].role") == (isinstance(role, str) and role in ROLES.get(name, ())), role


def test_roles_of_a_template_are_constants_beside_a_role() -> None:
    for text, roles in (
        ("{% for m in messages %}{{ {'observation': 'O'}[m.role] }}{% endfor %}", {"observation"}),
        (
            "{% for m in messages %}{% if m['role'] in ['critic', 'judge'] %}{% endif %}{% endfor %}",
            {"critic", "judge"},
        ),
        ("{% for m in messages %}{% if m.get('role') == 'poet' %}{% endif %}{% endfor %}", {"poet"}),
        ("{% for m in messages %}{% set r = m.role %}{% if 'x' != r | lower %}{% endif %}{% endfor %}", {"x"}),
        ("{% for m in messages %}{% if m.content == 'critic' %}{% endif %}{{ 'a' ~ m.role }}{% endfor %}", set()),
    ):
        assert ChatTemplate(text, {}).features.roles == roles, text


def test_strict_schemas_are_closed_and_the_rest_of_them_stays() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "object", "properties": {"a": {"enum": [{}]}}}}}
    schema = {
        "type": "object", "properties": {"x": inner, "y": {"anyOf": [inner, {"type": "null"}]},
        "z": {"$ref": "#/$defs/d"}},
        "required": ["x"], "$defs": {"d": {"properties": {"e": {}}, "additionalProperties": {"type": "string"}}},
        "default": {"properties": {"no": "schema"}}, "const": {"properties": {}},
    }  # fmt: skip
    wanted = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=copy.deepcopy(schema), strict=True))
    form = _of_format(wanted)
    assert form is not None and form.disable_additional_properties and form.whitespace_pattern == " ?"
    close_objects(schema)
    both = [schema["properties"]["x"], schema["properties"]["y"]["anyOf"][0]]
    assert schema["additionalProperties"] is False and schema["required"] == ["x"]
    assert schema["default"] == {"properties": {"no": "schema"}} and schema["const"] == {"properties": {}}
    assert schema["$defs"]["d"]["additionalProperties"] == {"type": "string"}
    for one in both:
        assert one["additionalProperties"] is False and list(one["properties"]) == ["properties"]
        assert one["properties"]["properties"]["additionalProperties"] is False
    one_of = [{"required": ["a"]}, {"required": ["b"]}]
    alternatives = {"properties": {"a": {}, "b": {}}, "oneOf": one_of}
    close_objects(alternatives)
    assert alternatives == {"properties": {"a": {}, "b": {}}, "oneOf": one_of, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
        {"properties": {"a": {}}, "oneOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"properties": {"b": {}}}}},
    ],
)
def test_objects_that_several_schemas_describe_stay_open(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    close_objects(schema)
    assert schema == before


def test_answers_are_open_unless_strict() -> None:
    for strict in (None, False):
        open_form = _of_format(ResponseFormat(type="json_schema", json_schema=JsonSchema(schema={}, strict=strict)))
        assert open_form is not None and not open_form.disable_additional_properties


def test_strict_answers_and_strict_calls_have_no_further_properties() -> None:
    llguidance = pytest.importorskip("llguidance")
    words = llguidance.LLTokenizer(TOK.backend.to_str(), n_vocab=TOK.vocab_size, eos_token=[TOK.eos_token_id or 0])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    def takes(grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(words, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.consume_tokens(TOK.encode(text, add_special_tokens=False)))

    for strict in (True, False):
        form = _of_format(ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema, strict=strict)))
        assert form is not None
        grammar = f"start: form\n{form_of(form, 'response_format', lark)}"
        assert takes(grammar, '{"a": 1}') and takes(grammar, '{"a":1}') and takes(grammar, '{ "a" : 1 }')
        assert takes(grammar, '{"a": 1, "b": 2}') is not strict
        assert not takes(grammar, '{"a":  1}') and not takes(grammar, '{\n"a": 1}')
    function = {"name": "f", "parameters": schema, "strict": True}
    request = ChatRequest(messages=[{}], tools=[{"type": "function", "function": function}])
    plan = plan_of(request, select_formats(TOK, template("qwen2.5"), "hermes", "none"))
    wanted = plan.constrained(SamplingParams(max_tokens=9), "tools").structured_outputs
    assert wanted is not None and wanted.grammar is not None
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1%s}}\n</tool_call>'
    assert takes(wanted.grammar, call % "") and not takes(wanted.grammar, call % ', "b": 2')
