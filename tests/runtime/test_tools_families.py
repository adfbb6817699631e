"""Calls in the formats of many families: arguments have the types of their schema, for any division into pieces."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("starlette")
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc_runtime.server.server_options import serve_options
from llmc_runtime.server.tool_calls import registry
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.json_shape import JsonShape
from llmc_runtime.server.tool_calls.parser_select import select_formats
from llmc_runtime.server.tool_calls.python_shape import PythonShape
from llmc_runtime.server.tool_calls.reasoning import FORMATS as REASONING
from llmc_runtime.server.tool_calls.registry import FORMATS, OpenAI
from llmc_runtime.server.tool_calls.text_values import json_of, types_of

from tests.runtime.test_tools_text import Parsed, check_pieces, cut, parsed
from tests.runtime.test_tools_text import written as text_written

TOOLS: Mapping[str, Any] = {
    "f": {
        "properties": {
            "text": {"type": "string"}, "size": {"type": "integer"}, "share": {"type": "number"},
            "on": {"type": "boolean"}, "list": {"type": "array"}, "more": {"$ref": "#/$defs/more"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "kind": {"enum": ["red", "1", 2]},
        },
        "$defs": {"more": {"properties": {"a": {"type": "string"}}}},
    },
    "get_weather": {"properties": {"city": {"type": "string"}}},
}  # fmt: skip
HOSTILE = (
    "{}", '"{}"', "{}'", "\n{}\n", "\n\n{}", "{}]", "[{}(a=1)]", "\\{}\\", "é🙂{}", "<tool_call>{}", "</tool_{}",
    "<arg_key>{}",
    "{}</", "<function={}>", "functools[{}]", "[TOOL_CALLS]{}", "``{}`", "null {}", " {} ", "{}\t\x7f",
    "<｜tool▁sep｜>{}", "</param{}",
)  # fmt: skip


class Words:
    """Texts that occur nowhere else."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.count = draw, 0

    def text(self) -> str:
        self.count += 1
        return self.draw.choice(HOSTILE).replace("{}", f"w{self.count}w")

    def value(self, depth: int = 0) -> Any:
        kind = self.draw.randrange(5 if depth < 3 else 3)
        if kind < 2:
            return self.text()
        if kind == 2:
            return self.draw.choice([True, False, None, 0, -7, 2.5, -1e-300, 10**30])
        if kind == 3:
            return [self.value(depth + 1) for _ in range(self.draw.randrange(3))]
        return {self.text(): self.value(depth + 1) for _ in range(self.draw.randrange(3))}

    def arguments(self) -> dict[str, Any]:
        draw = self.draw
        all_of = {
            "text": self.text(), "size": draw.randrange(-99, 99), "share": draw.choice([1, -0.5, 1e30]),
            "on": draw.random() < 0.5, "list": [self.value() for _ in range(draw.randrange(3))],
            "more": {"a": self.text(), "b": self.value()}, "maybe": draw.choice([None, self.text()]),
            "kind": draw.choice(["red", 2]),
        }  # fmt: skip
        return {key: all_of[key] for key in draw.sample(sorted(all_of), draw.randrange(len(all_of) + 1))}


def plain(value: Any, draw: random.Random) -> str:
    """A value between tags, as templates and models write it: strings bare, True or true."""
    if isinstance(value, str):
        return value
    return repr(value) if draw.random() < 0.3 else json.dumps(value, ensure_ascii=draw.random() < 0.5)


def named(kind: str, key: str, *, line: str) -> Callable[[str, Any, random.Random], str]:
    """One call, with tags that are the names of its parts."""

    def one(name: str, arguments: Any, draw: random.Random) -> str:
        fields = [f"{key.format(k)}{line}{plain(v, draw)}{line}</parameter>\n" for k, v in arguments.items()]
        return f"{kind.format(name)}\n{''.join(fields)}</{re.split('[ =]', kind[1:])[0]}>"

    return one


def glm(name: str, arguments: Any, draw: random.Random) -> str:
    """One call of GLM."""
    line = draw.choice(["", "\n"])
    fields = [
        f"<arg_key>{k}</arg_key>{line}<arg_value>{plain(v, draw)}</arg_value>{line}" for k, v in arguments.items()
    ]
    return f"<tool_call>{name}{line}{''.join(fields)}</tool_call>"


def python(name: str, arguments: Any, draw: random.Random) -> str:
    """One call in Python, its values by repr or as JSON."""
    return (
        f"{name}({', '.join(f'{k}={repr(v) if draw.random() < 0.6 else json.dumps(v)}' for k, v in arguments.items())})"
    )


def dumped(name: str, arguments: Any, draw: random.Random) -> str:
    """One call as JSON."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=draw.random() < 0.5)


def section(form: type[JsonShape], head: str, tail: str) -> Callable[[list[tuple[str, Any]], random.Random], str]:
    """Calls within a section."""
    begin, end, call, middle, call_end = form.markers

    def written(calls: list[tuple[str, Any]], draw: random.Random) -> str:
        texts = [
            f"{call}{head.format(name=name, i=i, sep=middle)}{json.dumps(arguments)}{tail}{call_end}"
            for i, (name, arguments) in enumerate(calls)
        ]
        return begin + draw.choice(["", "\n"]).join(texts) + end

    return written


def written(form: type[CallFormat], calls: list[tuple[str, Any]], draw: random.Random) -> str:
    """The calls as a model of the family writes them."""
    sections = {
        registry.DeepSeekV3: section(registry.DeepSeekV3, "function{sep}{name}\n```json\n", "\n```"),
        registry.DeepSeekV31: section(registry.DeepSeekV31, "{name}{sep}", ""),
        registry.KimiK2: section(registry.KimiK2, "functions.{name}:{i}{sep}", ""),
    }
    if form in sections:
        return sections[form](calls, draw)
    if issubclass(form, registry.Glm45):
        return "\n".join(glm(*call, draw) for call in calls)
    tags = {
        registry.Qwen3Coder: named("<function={}>", "<parameter={}>", line="\n"),
        registry.SeedOss: named("<function={}>", "<parameter={}>", line=""),
        registry.MiniMaxM2: named('<invoke name="{}">', '<parameter name="{}">', line=""),
    }
    if form in tags:
        begin, end = form.markers[:2]
        if draw.random() < 0.3:
            return f"{begin}\n" + "\n".join(tags[form](*call, draw) for call in calls) + f"\n{end}"
        return "\n".join(f"{begin}\n{tags[form](*call, draw)}\n{end}" for call in calls)
    if issubclass(form, PythonShape):
        begin, end = draw.choice([("", ""), form.markers])
        return f"{begin}[{', '.join(python(*call, draw) for call in calls)}]{end}"
    if form is registry.Granite20b:
        return "\n".join(f"<function_call> {dumped(*call, draw)}" for call in calls)
    mark = draw.choice(form.markers).removesuffix("[")
    return f"{mark}[{', '.join(dumped(*call, draw) for call in calls)}]"


XMLS = (registry.Qwen3Coder, registry.SeedOss, registry.MiniMaxM2, registry.Glm45)
PYTHONS = (registry.Pythonic, registry.Llama4Pythonic, registry.Lfm2)
FORMS = (
    *XMLS, *PYTHONS, registry.DeepSeekV3, registry.DeepSeekV31, registry.KimiK2,
    registry.Granite, registry.Granite20b, registry.Phi4Mini,
)  # fmt: skip
ENDS = ("</parameter>", "</arg_value>")


def read(form: type[CallFormat], pieces: list[str]) -> Parsed:
    """See test_tools_text.parsed."""
    return parsed(form, pieces, TOOLS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(5))
def test_calls_are_parsed_and_incomplete_ones_stay_content(form: type[CallFormat], seed: int) -> None:
    draw = random.Random(f"{form.name} {seed}")
    words = Words(draw)
    calls = [("f", words.arguments()), ("get_weather", {"city": words.text()}), ("f", {})]
    calls = draw.sample(calls, draw.randrange(1, 4))
    output = draw.choice(["", "Let me see.\n", "Two things:\n\n"])
    text = output + written(form, calls, draw)
    content, found = read(form, cut(text, draw))
    assert (content, [(name, json.loads(arguments)) for name, arguments in found]) == (output.rstrip(), calls), text
    assert read(form, [text]) == read(form, list(text)) == (content, found)
    for _ in range(4):
        at = draw.randrange(len(text))
        broken = draw.choice(
            [text[:at], text[:at] + draw.choice("}{])x<'\"\n") + text[at:], text[:at] + text[at + 1 :]]
        )
        content, found = read(form, cut(broken, draw))
        kept = content + "".join(arguments for _, arguments in found)
        assert not [word for word in re.findall("w[0-9]+w", broken) if word not in kept], broken
        assert read(form, list(broken)) == (content, found)


@pytest.mark.parametrize("form", FORMS)
def test_pieces_joined_are_the_whole_whatever_comes(form: type[CallFormat]) -> None:
    marks = [*form.markers, *form.openers(), *getattr(form, "call", ()), *getattr(form, "field", ())]
    marks = [mark for mark in marks if isinstance(mark, str)]
    parts = (
        *marks, *(mark[: len(mark) // 2] for mark in marks), "f", "get_weather", "text", "city", "size", "=", "(",
        ")", "[", "]",
        "{", "}", '"', "'", ",", ":", "\\", "\n", " ", " " * 70, "null", "-1", "1e", "True", "é", "🙂", "\\u00",
        "'''", "x=", "functions.",
        '{"name": "f", "arguments": ', "[f(", "text='a", "```json", "```", "function", "Hello ",
    )  # fmt: skip

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.sampled_from(parts) | st.text(max_size=3), max_size=16), st.integers(0, 1 << 30))
    def check(drawn: list[str], seed: int) -> None:
        check_pieces(form, "".join(drawn), seed, TOOLS)

    check()


@pytest.mark.parametrize("form", [*FORMS, registry.Hermes, registry.Llama3Json, registry.Mistral, OpenAI])
def test_a_call_that_is_cut_off_leaves_no_markup_in_the_content(form: type[CallFormat]) -> None:
    draw = random.Random(form.name)
    calls = [("f", {"text": "one <two>", "size": 3, "list": [1, "a"]}), ("get_weather", {"city": "Bonn"})]
    calls = calls if form.several else calls[:1]
    output = "Let me see.\n"
    if form is OpenAI:
        end = f"<|constrain|>json<|message|>{json.dumps(calls[0][1])}"
        text = f"{output}<|start|>assistant<|channel|>commentary to=functions.f {end}"
    elif form in (registry.Hermes, registry.Llama3Json, registry.Mistral):
        text = output + text_written(form, calls, draw)
    else:
        text = output + written(form, calls, draw)
    marks = ("<|start|>assistant", "<|channel|>") if form is OpenAI else form.openers()
    bare = [one for one in (*marks, "{", "[") if len(one) == 1]
    for end in range(len(output), len(text)):
        content, found = parsed(form, cut(text[:end], draw), TOOLS, cut_off=True)
        rest = content.removeprefix(output.rstrip()).lstrip()
        opening = any(mark.startswith(rest) for mark in marks) or rest[:1] in bare
        assert content.startswith(output.rstrip()) and (not rest or (opening and not found)), (text[:end], content)
        assert len(rest) < 60 and not any(rest.startswith(mark) for mark in marks if mark not in bare), rest
        for (name, arguments), (wanted, values) in zip(found, calls):
            assert name == wanted and (json.dumps(values).startswith(arguments[:8]) or arguments)


def test_text_beside_calls_of_a_truncated_output_stays() -> None:
    for form, text in (
        (CODER, "a < b <tool_cal"), (PY, "see [1, 2"), (PY, "[1, 2"), (registry.Llama3Json, '{"city": "Bo'),
        (registry.Hermes, "no <b>call</b>"), (registry.Phi4Mini, "functools are [fine"),
    ):  # fmt: skip
        assert parsed(form, [text], TOOLS, cut_off=True) == (text, []), text


CODER, GLM, PY, V31 = registry.Qwen3Coder, registry.Glm45, registry.Pythonic, registry.DeepSeekV31
ALL = "<tool_call>\n<function=f>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"


def test_text_that_only_resembles_calls_is_content() -> None:
    for form, text in (
        (CODER, "<tool_call>oops</tool_call>"), (CODER, "<tool_call>\n<function=f"), (CODER,
        "<function=unknown>\n</function>"),
        (CODER, "<tool_call><function=no name></function></tool_call>"), (CODER,
        "<tool_call><function=f>text</function>"),
        (CODER, "<tool_call>\n<function=f>\n<parameter=size>\n12"), (CODER, "a < b <tool_cal"), (CODER,
        "<function=" + "f" * 999),
        (GLM, "<tool_call>oops</tool_call>"), (GLM, "<tool_call>f <arg_key>a</arg_key>b</tool_call>"), (GLM,
        "<tool_call>f"),
        (PY, "[f]"), (PY, "[f(1)]"), (PY, "[f(a=g())]"), (PY, "[unknown(a=1)]"), (PY, "see [f(text='x')]"), (PY,
        "[1, 2]"),
        (PY, "[f(__import__('os'))]"), (PY, "[f(size=__import__('os'))]"), (PY, "[f(size=1+1)]"), (PY, "[f(size=1"),
        (registry.Phi4Mini, "functools are [fine]"), (registry.Phi4Mini, "functools[1]"),
        (registry.Granite, "<|tool_call|>[]"),
        (V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no"), (V31, "<｜tool▁calls▁begin｜>"),
        (registry.DeepSeekV3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ):  # fmt: skip
        assert read(form, [text]) == read(form, list(text)) == (text, []), text


def test_calls_that_break_off_keep_their_output_and_the_rest_is_content() -> None:
    for form, text, want in (
        (CODER, "<tool_call><function=f><parameter=text>\nab\n", ("", [("f", '{"text": "ab')])),
        (CODER, "<tool_call><function=f><parameter=text>\na\n</parameter><parameter=size>\n1", (
            "<parameter=size>\n1", [("f", '{"text": "a"')])),
        (CODER, "<function=f>\n<parameter=size>\n3\n</parameter>\n</function> then", (" then", [("f", '{"size": 3}')])),
        (CODER, "<tool_call><function=f><parameter=text>\na</function>\n\n</function>\n</tool_call>b", (
            "b", [("f", '{"text": "a</function>\\n"}')])),
        (CODER, "<tool_call><function=f><parameter=size>\n1\n</function></tool_call>", ("", [("f", '{"size": 1}')])),
        (GLM, "<tool_call>f<arg_key>size</arg_key><arg_value>1</arg_value>oh</tool_call>", (
            "oh</tool_call>", [("f", '{"size": 1')])),
        (GLM, "<tool_call>g<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", ("", [("g", '{"x": 1}')])),
        (PY, "[f(text='ab\\u00", ("\\u00", [("f", '{"text": "ab')])),
        (PY, "[f(list=[1, 'a', oh])]", (", oh])]", [("f", '{"list": [1, "a"')])),
        (PY, "[f(text='a'), g()]", (", g()]", [("f", '{"text": "a"}')])),
        (V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1} so", (" so", [("f", '{"a": 1}')])),
    ):  # fmt: skip
        assert read(form, [text]) == read(form, list(text)) == want, text


def test_values_have_the_types_of_the_schema() -> None:
    cases = (
        ("text", "12", "12"), ("text", "null", "null"), ("text", "  a ", "  a "), ("text", "", ""), ("size", "12", 12),
        ("size", "twelve", "twelve"), ("size", "1.5", 1.5), ("share", "1", 1), ("share", " -2e3 ", -2000.0), ("on",
        "True", True),
        ("on", "false", False), ("on", "yes", "yes"), ("list", "[1, 'a', None]", [1, "a", None]), ("list", "a, b",
        "a, b"),
        ("more", '{"a": "b"}', {"a": "b"}), ("more", "{'a': True}", {"a": True}), ("maybe", "null", None), ("maybe",
        "None", None),
        ("maybe", "12", "12"), ("maybe", '"a"', '"a"'), ("kind", "2", 2), ("kind", "red", "red"), ("new", "12", 12),
        ("new", "[1]", [1]), ("new", '"a"', '"a"'), ("new", "007", "007"), ("new", "NaN", "NaN"), ("size", "1e999999",
        "1e999999"),
        ("list", "[" * 5000, "[" * 5000),
    )  # fmt: skip
    for key, text, want in cases:
        for form, whole in (
            (CODER, ALL.format(key, text)),
            (GLM, f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value></tool_call>"),
        ):
            content, calls = read(form, [whole])
            if text == "1e999999":  # a number that no float holds is passed on unchanged
                assert calls == [("f", '{"size": 1e999999}')]
                continue
            assert (content, [(n, json.loads(a)) for n, a in calls]) == ("", [("f", {key: want})]), (key, text)
    root = {"$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"const": 5}}}
    for schema, types in (
        ({"$ref": "#/$defs/a"}, set()), ({"$ref": "#/$defs/b"}, {"integer"}), ({"$ref": "http://x"}, set()), (True,
        set()),
        ({"type": ["string", "null"]}, {"string", "null"}), ({"type": "str"}, {"string"}), ({"type": "integer",
        "nullable": True},
        {"integer", "null"}), ({"oneOf": [{"type": "array"}, {}]}, set()), ({"allOf": [{}, {"type": "object"}]},
        {"object"}),
        ({"items": {}}, {"array"}), ({"type": {"a": 1}}, set()), ({"enum": []}, set()), ({"anyOf": "x"}, set()),
    ):  # fmt: skip
        assert types_of(schema, root) == types, schema
    assert json_of("é", frozenset()) == '"é"'


@pytest.mark.parametrize("form", (*XMLS[:1], *XMLS[3:4], PY))
def test_strings_are_emitted_as_they_come_and_other_values_when_complete(form: type[CallFormat]) -> None:
    text = {
        CODER: ALL.format("text", "x" * 40 + "\n\ny"),
        GLM: f"<tool_call>f<arg_key>text</arg_key><arg_value>{'x' * 40}\n\ny</arg_value></tool_call>",
        PY: f"[f(text='{'x' * 40}\\n\\ny')]",
    }[form]
    reader = form(TOOLS)
    result = ["".join(getattr(one, "arguments", "") for one in reader.push(char)) for char in text]
    assert result.count("x") == 40 and "".join(result) == json.dumps({"text": "x" * 40 + "\n\ny"})
    whole = written(form, [("f", {"list": [1, 2, 3], "size": 12})], random.Random(3))
    result = [getattr(one, "arguments", "") for one in form(TOOLS).push(whole)]
    assert "".join(result) == '{"list": [1, 2, 3], "size": 12}'


def test_the_names_of_the_flags_are_those_of_the_formats() -> None:
    flags = {one.spellings[0]: one.choices for one in serve_options().values()}
    assert set(flags["--reasoning-parser"] or ()) == {"auto", "none", *REASONING}
    aliases = dict(zip(("qwen3_xml", "mimo", "glm47", "granite4"), ("qwen3_coder", "qwen3_coder", "glm45", "hermes")))
    aliases["llama4_json"] = "llama3_json"
    names = {"auto", "none", *aliases, *(form.name for form in FORMATS)}
    assert set(flags["--tool-call-parser"] or ()) == names
    for name in names - {"none"}:
        found = select_formats(None, None, name).calls
        assert (found is None) == (name == "auto") and (found is None or found.name == aliases.get(name, name))


def test_long_and_deep_texts_take_no_time() -> None:
    for form, text in (
        (CODER, ALL.format("text", "<parameter=" * 20000)), (CODER, ALL.format("list", "[" * 50000)),
        (CODER, "<tool_call><function=f>" * 5000), (GLM, "<tool_call>f<arg_key>" * 5000), (PY,
        "[f(list=" + "[" * 50000),
        (PY, "[f(" * 20000), (PY, "[f(text='" + "\\u00" * 20000), (V31, "<｜tool▁calls▁begin｜>" * 5000),
    ):  # fmt: skip
        content, calls = read(form, [text])
        assert content or calls
