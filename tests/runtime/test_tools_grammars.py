"""Grammars of calls in every format: they accept the calls that templates write, reject arguments that schemas forbid,
and leave other text free."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from llmc_runtime.grammar import Grammars
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.tool_calls import registry, tagged_args
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.definitions import tools_of
from llmc_runtime.server.tool_calls.parser_select import OutputFormats
from llmc_runtime.server.tool_calls.python_shape import PythonShape
from llmc_runtime.server.tool_calls.registry import FORMATS, Hermes, OpenAI, Pythonic, Qwen3Coder
from llmc_runtime.server.tool_calls.response_plan import answer, calls_of
from llmc_runtime.server.tool_calls.xml_shape import XmlShape

from tests.runtime.followed import Followed
from tests.runtime.parrots import TOK
from tests.runtime.test_tools_text import parsed

END = TOK.eos_token_id or 0
KEYS = (
    "type",
    "anyOf",
    "allOf",
    "enum",
    "const",
    "required",
    "properties",
    "$ref",
    "minLength",
    "pattern",
    "a",
    "nullable",
)
SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}, "on": {"type": "boolean"},
        "kind": {"enum": ["red", "blue", 1, None]}, "maybe": {"anyOf": [{"type": "string", "maxLength": 3},
        {"type": "null"}]},
        "more": {"$ref": "#/$defs/more"}, "code": {"type": "string",
        "pattern": "^[A-Z]{2}-", "title": "A code"},
    },
    "$defs": {"more": {"type": "object", "properties": {"a": {"type": "array",
    "items": {"type": "integer"}}}}},
}  # fmt: skip
NOW: dict[str, Any] = {}
ANY: dict[str, Any] = {"type": "object"}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("f", {"city": "Köln </x> [1]"}), ("f", {"city": "", "days": 3, "on": True, "kind": "red", "maybe": None}),
    ("f", {"city": "a", "kind": 1, "maybe": "né", "more": {"a": [1, 2]}, "code": "AB-1 é"}), ("now", {}),
    ("f", {"city": "a", "kind": None}), ("any", {"x": "y", "size": 1}), ("any", {}),
)  # fmt: skip
BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("f", {}), ("f", {"days": 3}), ("f", {"city": "a", "days": 10}), ("f", {"city": "a", "days": "3 "}),
    ("f", {"city": "a", "kind": "green"}), ("f", {"city": "a", "kind": True}),
    ("f", {"city": "a", "maybe": "long"}), ("f", {"city": "a", "code": "ab-1"}),
    ("f", {"city": "a", "more": {"a": ["b"]}}), ("f", {"city": "a", "other": 1}), ("f", {"city": "a", "on": "maybe"}),
    ("now", {"x": 1}), ("unknown", {}),
)  # fmt: skip


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOK, TOK.vocab_size, [END])
    yield made
    made.close()


def given(strict: bool) -> list[dict[str, Any]]:
    schemas = {"f": SCHEMA, "now": NOW, "any": ANY}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict and name != "any"}}
        for name, schema in schemas.items()
    ]


def guide(grammars: Grammars, form: type[CallFormat], *, free: bool) -> Callable[[], Followed]:
    """Guides for calls of `form`: text with strict ones in it, or enforced ones."""
    tools = tools_of(given(free), "auto" if free else "required", None)
    assert tools is not None
    text = answer([calls_of(tools, form, OutputFormats(form, None, (), TOK).marker, free)], "calls", None, "tools")
    return partial(Followed.of, grammars, text)


def allows(guide: Followed, text: str) -> bool:
    """Whether the text may be all of an answer."""
    for token in TOK.encode(text, add_special_tokens=False):
        if not has(guide.mask(), token):
            return False
        if guide.accept(token):
            return True
    return has(guide.mask(), END)


def has(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def literal(value: Any) -> str:
    """As Python has it, on the outside."""
    return repr(value) if value is None or isinstance(value, bool) else dumped(value)


def template(form: type[CallFormat], name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the family's chat template writes it."""
    marks, items = form.markers, arguments.items()
    if issubclass(form, registry.Glm45):
        line = "\n" if len(arguments) % 2 else ""
        pairs = (f"<arg_key>{k}</arg_key>{line}<arg_value>{bare(v)}</arg_value>{line}" for k, v in items)
        return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"
    if issubclass(form, XmlShape):
        head, tail, end = ("<function=", ">", "</function>")
        first, middle, last, line = "<parameter=", ">", "</parameter>", ""
        if form is registry.MiniMaxM2:
            head, tail, end, first, middle = '<invoke name="', '">', "</invoke>", '<parameter name="', '">'
        if form is registry.Qwen3Coder:
            line = "\n"
        fields = (f"{first}{k}{middle}{line}{bare(v)}{line}{last}\n" for k, v in items)
        return f"{marks[0]}\n{head}{name}{tail}\n{''.join(fields)}{end}\n{marks[1]}"
    if issubclass(form, PythonShape):
        whole = f"[{name}({', '.join(f'{k}={literal(v)}' for k, v in items)})]"
        return whole if form is not registry.Lfm2 else marks[0] + whole + marks[1]
    text = dumped({"name": name, "arguments": arguments})
    arguments = dumped(arguments)  # type: ignore[assignment]
    if form.name in ("deepseek_v3", "deepseek_v31", "kimi_k2"):
        head = {"kimi_k2": f"functions.{name}:0{marks[3]}", "deepseek_v31": f"{name}{marks[3]}"}.get(form.name)
        inner = f"function{marks[3]}{name}\n```json\n{arguments}\n```" if head is None else f"{head}{arguments}"
        return f"{marks[0]}{marks[2]}{inner}{marks[4]}{marks[1]}"
    return {
        registry.Hermes: f"<tool_call>\n{text}\n</tool_call>", registry.Mistral: f"[TOOL_CALLS] [{text}]",
        registry.MistralArgs: f"[TOOL_CALLS]{name}[ARGS]{arguments}",
        registry.Llama3Json: text.replace('"arguments"', '"parameters"', 1),
        registry.Granite: f"<|tool_call|>[{text}]",
        OpenAI: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        registry.Phi4Mini: f"functools[{text}]", registry.Granite20b: f"<function_call> {text}",
    }[form]  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.__name__)
def test_enforced_calls_are_what_templates_write_and_schemas_allow(grammars: Grammars, form: type[CallFormat]) -> None:
    made = guide(grammars, form, free=False)
    for name, arguments in GOOD:
        text = template(form, name, arguments)
        assert allows(made(), text), text
        content, found = parsed(form, [text], {"f": SCHEMA, "now": NOW, "any": ANY})
        assert not content.strip() and [(n, json.loads(a)) for n, a in found] == [(name, arguments)]
    for name, arguments in BAD:
        assert not allows(made(), template(form, name, arguments)), (name, arguments)
    assert not allows(made(), "No.") and not allows(made(), "")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.__name__)
def test_strict_calls_follow_their_schemas_and_text_is_free(grammars: Grammars, form: type[CallFormat]) -> None:
    made = guide(grammars, form, free=True)
    written, more = "Let me [see] <x {}:\n", ""
    if form is OpenAI:
        written, more = "<|channel|>commentary<|message|>So<|end|><|start|>assistant", "<|channel|>final<|message|>"
    for text in ("Hello, func [1] <tool \n{} (f)", "", "a\n\n[1, 2]\n{'a'}"):
        assert allows(made(), more + text)
    for name, arguments in GOOD:
        text = template(form, name, arguments)
        assert allows(made(), written + text) and allows(made(), text), text
    for name, arguments in BAD:
        if name == "unknown" and isinstance(form, registry.Llama3Json | PythonShape):
            continue  # no mark says that it is a call
        call = template(form, name, arguments)
        if name in ("f", "now"):
            assert not allows(made(), written + call), call
    assert allows(made(), written + template(form, "any", {"whatever": "x", "n": 1}))
    second = template(form, "now", {}) + "\n" + template(form, "f", {"days": 3})
    assert form is OpenAI or not allows(made(), second)  # whose first call ends the answer
    if issubclass(form, PythonShape | registry.Llama3Json):
        other = '{"parameters": {"city": 1}, "name": "f"}' if form is registry.Llama3Json else "[ \nf(days=1)]"
        some = tools_of(
            given(True), {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": given(True)[1:]}}, None
        )
        assert some is not None and "f" not in some.schemas
        text = answer([calls_of(some, form, json.dumps, True)], "calls", None, "tools")
        assert not allows(Followed.of(grammars, text), template(form, "f", {"city": "a"}))
        assert not allows(made(), other) and not allows(made(), f"so\n{other}") and allows(made(), '{"a": 1}')


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.__name__)
def test_any_walk_through_a_grammar_is_read_as_calls_of_the_schema(grammars: Grammars, form: type[CallFormat]) -> None:
    made, draw = guide(grammars, form, free=False), random.Random(form.name)
    for _ in range(3):
        follow, tokens, left = made(), list[int](), 400
        while True:
            ids = [token for token in range(TOK.vocab_size) if has(follow.mask(), token)]
            left -= 1
            closing = [t for t in ids if TOK.token_text(t)[:1] in ("<", "/", "p", ">", "]", ")", "}", '"')]
            token = draw.choice(closing or ids) if left < 300 else draw.choice(ids)
            if token == END or left < 0:
                break
            tokens.append(token)
            if follow.accept(token):
                break
        content, calls = parsed(
            form, [TOK.decode(tokens, skip_special_tokens=False)], {"f": SCHEMA, "now": NOW, "any": ANY}
        )
        assert left < 0 or (calls and not content.strip())
        for name, arguments in calls if left >= 0 else ():
            found = json.loads(arguments)
            assert (name == "f" and isinstance(found["city"], str)) or (name, found) == ("now", {}) or name == "any"
            assert type(found.get("days", 1)) is int or name == "any"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.__name__)
def test_random_calls_that_the_grammar_admits_are_read_back(grammars: Grammars, form: type[CallFormat]) -> None:
    made, draw = guide(grammars, form, free=False), random.Random(form.name)
    for _ in range(8):
        arguments = {
            "city": "".join(draw.choices("aé 1[]{}(),'=<>", k=draw.randrange(9))), "days": draw.randrange(10),
            "on": draw.random() < 0.5, "kind": draw.choice(["red", "blue", 1, None]),
            "more": {"a": draw.choices(range(-5, 5), k=draw.randrange(4))}, "code": f"AB-{draw.randrange(99)}",
        }  # fmt: skip
        arguments = {key: value for key, value in arguments.items() if key == "city" or draw.random() < 0.7}
        text = template(form, "f", arguments)
        assert allows(made(), text), text
        content, found = parsed(form, list(text), {"f": SCHEMA, "now": NOW, "any": ANY})
        assert not content.strip() and [(n, json.loads(a)) for n, a in found] == [("f", arguments)], text


PYTHONIC = (registry.Pythonic, registry.Llama4Pythonic, registry.Lfm2)


@pytest.mark.parametrize("form", PYTHONIC, ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    ("schema", "admitted"),
    [
        ({"enum": ["a", None, True]}, ("None", "null", "True", "true", '"a"')),
        ({"enum": [1, 0]}, ("1", "0")),
        ({"const": False}, ("False", "false")),
        ({"const": None}, ("None", "null")),
        ({"type": "string", "enum": ["a", None]}, ('"a"',)),
        ({"type": ["string", "null"], "enum": ["a", None]}, ('"a"', "None", "null")),
        ({"anyOf": [{"const": True}, {"type": "integer"}]}, ("True", "true", "1", "0")),
        ({"enum": [True, False, None], "allOf": [{"type": "boolean"}]}, ("true", "false")),
        ({"type": "boolean"}, ("True", "False")),
        ({}, ("None", "null", "True", "true", "False", "false", '"a"', "1", "0")),
    ],
)
def test_pythonic_grammars_admit_the_constants_of_python_that_a_schema_lists(
    grammars: Grammars, form: type[CallFormat], schema: dict[str, Any], admitted: tuple[str, ...]
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    tools = tools_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required", None)
    assert tools is not None
    text = answer([calls_of(tools, form, OutputFormats(form, None, (), TOK).marker, False)], "calls", None, "tools")
    for value in ("None", "null", "True", "true", "False", "false", '"a"', "1", "0"):
        call = f"[f(x={value})]"
        call = form.markers[0] + call + form.markers[1] if form is registry.Lfm2 else call
        assert allows(Followed.of(grammars, text), call) == (value in admitted), value
        content, [(name, arguments)] = parsed(form, [call], {"f": parameters})
        spelled = {"None": "null", "True": "true", "False": "false"}.get(value, value)
        assert (content, name, arguments) == ("", "f", f'{{"x": {spelled}}}')


def test_the_error_names_what_a_form_cannot_enforce() -> None:
    for schema, words in (
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"), ({"minProperties": 1, "properties": {"a": {}}}, "minProperties"),
        ({"properties": {"a": {}}, "required": ["b"]}, "'b'"), ({"properties": {"a b<": {}}}, "'a b<'"),
        ({"properties": {"x": {"type": "string", "enum": ["</parameter>"]}}}, "'x'"), ({"allOf": [{}]}, "allOf"),
        ({"properties": {"x": {"type": "string", "anyOf": [{"pattern": "a"}]}}}, "anyOf for the property 'x'"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match="Try: ") as error:
            registry.Qwen3Coder.arguments("r", {"type": "object", **schema}, json.dumps, True)
        assert error.value.param == "tools" and words in error.value.message and "qwen3_coder" in error.value.message
        assert registry.Qwen3Coder.arguments("r", {"type": "object", **schema}, json.dumps, False)
    one = {"allOf": [{"$ref": "#/$defs/one"}]}
    assert tagged_args.alternatives(one, {"$defs": {"one": {"enum": ["a"]}}}) == [{"enum": ["a"]}]
    with pytest.raises(ApiError, match="'a b'"):
        registry.Pythonic.arguments("r", {"properties": {"a b": {}}}, json.dumps, True)
    assert tagged_args.patterns_of({"pattern": "a|b/", "minLength": 2}) == ["(?s:.{2,})", "(?s:.*)(a|b\\/)(?s:.*)"]


PART = st.recursive(
    st.sampled_from([True, None, 3, -1, "string", "x", {"$ref": "#/$defs/a"}, {"$ref": "#"}, {"type": "string"},
    "#/$defs/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4), max_leaves=9,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@drawn(st.dictionaries(st.sampled_from(KEYS), PART, max_size=4), PART, PART)
def test_any_schema_has_a_grammar_or_is_refused_and_types_its_values(schema: Any, one: Any, other: Any) -> None:
    circle = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, other]}
    schema = {**schema, "$defs": {"a": circle}, "properties": {"a": one, "b": {"$ref": "#/$defs/a"}}}
    for form in (registry.Qwen3Coder, registry.Pythonic):
        try:
            assert form.arguments("r", schema, json.dumps, True)
        except ApiError as e:
            assert e.param == "tools"
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b>x</parameter></function></tool_call>"
    content, [(name, arguments)] = parsed(registry.Qwen3Coder, [text], {"f": schema})
    assert (content, name) == ("", "f") and json.loads(arguments).keys() == {"a", "b"}


@pytest.mark.parametrize("form", [Hermes, Qwen3Coder, Pythonic], ids=lambda f: f.name)
def test_a_format_that_no_grammar_follows_is_refused(form: type[CallFormat]) -> None:
    """Of an integer within the arguments, in each shape."""
    items = {"type": "array", "items": {"type": "integer", "format": "unix-time"}}
    schema = {"type": "object", "properties": {"times": items}, "required": ["times"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(ApiError, match=r"the parameters of f cannot be enforced: .*'unix-time'") as e:
        calls_of(tools_of([tool], "required", None), form, json.dumps, False)
    assert e.value.param == "tools"
