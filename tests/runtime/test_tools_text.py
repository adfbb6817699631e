"""Parsing of outputs into content, calls and reasoning: lossless, without exceptions, however divided into pieces."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("starlette")
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc_runtime.server.tool_calls.call_format import MAX_SPACE, CallFormat, CallPiece
from llmc_runtime.server.tool_calls.json_stream import JsonText
from llmc_runtime.server.tool_calls.reasoning import FORMATS as FORMATS_OF_REASONING
from llmc_runtime.server.tool_calls.reasoning import THINK, ReasoningFormat, ReasoningParser
from llmc_runtime.server.tool_calls.registry import Hermes, Llama3Json, Mistral, OpenAI

FORMATS = (Hermes, Llama3Json, Mistral)
NAMES: Mapping[str, Any] = {"f": {}, "get_weather": {}}
Parsed = tuple[str, list[tuple[str, str]]]
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>")
PARTS = (
    *MARKS, "<tool", "</tool_", "[TOOL", "[", "]", "{", "}", '"', ":", ",", ";", "\n", " ", "\\", "\\u00", "f", "null",
    "get_weather", " " * 70, '{"name": "f", ', '"arguments": {', '"parameters": {"a": 1}', '{"name": "get_weather"',
    '"x": [1, {"y": "z\\n"}]', "-0.5", "1e5", "}}", "é", "🙂", "true", '{"a": "</tool_call>"}', "Let me see. ",
    '"id": "abcdefghi"', "<|start|>assistant", "<|channel|>", "<|message|>", "commentary to=functions.f ", "<|end|>",
)  # fmt: skip


def cut(text: str, draw: random.Random) -> list[str]:
    """The text in pieces."""
    ends = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(len(text) + 1)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)])]


def parsed(
    form: type[CallFormat], pieces: list[str], tools: Mapping[str, Any] = NAMES, cut_off: bool = False
) -> Parsed:
    """(content, [(name, arguments)]) of a text that comes in pieces; cut_off: it ended before the model did."""
    reader, content, calls = form(tools), "", list[list[str]]()
    out = [item for piece in pieces for item in reader.push(piece)] + reader.finish(cut=cut_off)
    for item in out:
        if isinstance(item, CallPiece) and item.name is not None:
            assert item.index == len(calls)
            calls.append([item.name, item.arguments])
        elif isinstance(item, CallPiece):
            assert item.index == len(calls) - 1
            calls[-1][1] += item.arguments
        else:
            content += item
    return content, [(name, arguments) for name, arguments in calls]


def check_pieces(
    form: type[CallFormat], text: str, seed: int, tools: Mapping[str, Any] = NAMES, whole: bool = True
) -> None:
    """The text comes out the same however it is cut, arguments are JSON as far as they go. whole: without calls all of
    it is content."""
    content, calls = parsed(form, [text], tools)
    assert parsed(form, cut(text, random.Random(seed)), tools) == (content, calls)
    assert parsed(form, list(text), tools) == (content, calls)
    if not calls and whole:
        assert content == text
    for _, arguments in calls:
        scan = JsonText()
        assert scan.feed(arguments, 0) == len(arguments) and not scan.failed
        if scan.done:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("form", (*FORMATS, OpenAI))
def test_pieces_joined_are_the_whole_whatever_comes(form: type[CallFormat]) -> None:
    @settings(max_examples=250, deadline=None)
    @given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=14), st.integers(0, 1 << 30))
    def check(parts: list[str], seed: int) -> None:
        check_pieces(form, "".join(parts), seed, whole=form is not OpenAI)  # whose marks stand around content, too

    check()


def drawn(draw: random.Random, words: list[str], depth: int = 0) -> Any:
    """A JSON value whose texts are words that occur nowhere else."""
    kind = draw.randrange(4 if depth < 3 else 2)
    if kind == 0:
        return draw.choice([True, None, 1, -2.5, 1e300, 0])
    if kind == 1:
        words.append(f"w{len(words)}w")
        return draw.choice(["{} ", '"{}"', "{}\n", "</tool_call>{}", "\\{}", "é{}", "[TOOL_CALLS]{}"]).format(words[-1])
    if kind == 2:
        return [drawn(draw, words, depth + 1) for _ in range(draw.randrange(3))]
    return {f"k{i}": drawn(draw, words, depth + 1) for i in range(draw.randrange(3))}


def written(form: type[CallFormat], calls: list[tuple[str, Any]], draw: random.Random) -> str:
    """The calls as a model of the family writes them."""

    def dumps(value: Any) -> str:
        indent = draw.choice([None, None, 2])
        return json.dumps(value, indent=indent, ensure_ascii=draw.random() < 0.5)

    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if form is Hermes:
        space = draw.choice(["", "\n"])
        objects = [dict(draw.sample(list(one.items()), 2)) for one in objects]
        return "\n".join(f"<tool_call>{space}{dumps(one)}{space}</tool_call>" for one in objects)
    if form is Llama3Json:
        named = [{"type": "function", "name": name, "parameters": arguments} for name, arguments in calls]
        return "; ".join(draw.choice(["", "<|python_tag|>"]) + dumps(one) for one in named)
    if draw.random() < 0.5:
        return "[TOOL_CALLS] " + dumps([{**one, "id": "abcdefghi"} for one in objects])
    middle = draw.choice(["[ARGS]", "[CALL_ID]abcdefghi[ARGS]", ""])
    return "".join(f"[TOOL_CALLS]{name}{middle}{dumps(arguments)}" for name, arguments in calls)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("seed", range(25))
def test_calls_are_parsed_and_incomplete_ones_stay_content(form: type[CallFormat], seed: int) -> None:
    draw, words = random.Random(seed), list[str]()
    calls = [(draw.choice(sorted(NAMES)), {"x": drawn(draw, words), "y": drawn(draw, words)}) for _ in range(3)]
    calls = calls[: draw.randrange(1, 4)]
    output = draw.choice(["", "Let me see.\n", "Two things:\n\n"])
    text = output + written(form, calls, draw)
    content, found = parsed(form, cut(text, draw))
    assert (content, [(name, json.loads(arguments)) for name, arguments in found]) == (output.rstrip(), calls)
    at = draw.randrange(len(text))
    broken = draw.choice([text[:at], text[:at] + draw.choice("}{]x<\n") + text[at:], text[:at] + text[at + 1 :]])
    content, found = parsed(form, cut(broken, draw))
    kept = content + "".join(arguments for _, arguments in found)
    assert not [word for word in re.findall("w[0-9]+w", broken) if word not in kept]


def test_text_that_only_resembles_calls_is_content() -> None:
    for form, text in (
        (Hermes, "<tool_call>oops</tool_call>"), (Hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (Hermes, '<tool_call>{"name": "no name", "arguments": {}}</tool_call>'), (Hermes, '<tool_call>{"name": "f'),
        (Hermes, '<tool_call>{"name": "f", "arguments": {a: 1}}'), (Hermes, "a < b <tool_cal"), (Hermes, " \n"),
        (Llama3Json, '{"name": "Bob", "parameters": {"a": 1}}'), (Llama3Json, 'x = {"name": "f", "parameters": {}}'),
        (Llama3Json, '{"city": "Bonn"}'), (Llama3Json, '<|python_tag|>search.call(query="x")'),
        (Mistral, "[TOOL_CALLS] I will call"), (Mistral, "[TOOL_CALLS]f[ARGS]no"), (Mistral, "[TOOL_CALLS]"),
        (Mistral, "[TOOL_CALLS][]"),
    ):  # fmt: skip
        assert parsed(form, [text]) == (text, []), text


def test_calls_that_break_off_keep_their_output_and_the_rest_is_content() -> None:
    cases: tuple[tuple[type[CallFormat], str, Parsed], ...] = (
        (Hermes, 'a <tool_call>{"name": "f", "arguments": {"a": 1', ("a", [("f", '{"a": 1')])),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>b', ("b", [("f", '{"a": 1}')])),
        (
            Hermes,
            '<tool_call>{"name": "f", "arguments": {"a": 1 oh</tool_call>',
            ("oh</tool_call>", [("f", '{"a": 1 ')]),
        ),
        (Hermes, '<tool_call>{"name": "f"}</tool_call> b', (" b", [("f", "{}")])),
        (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', ("", [("f", '{"a": "x\\ny"}')])),
        (Mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {no}]', (", {no}]", [("f", "{}")])),
        (Llama3Json, '{"name": "f", "parameters": null}; and', ("; and", [("f", "{}")])),
    )
    for form, text, want in cases:
        assert parsed(form, [text]) == want and parsed(form, list(text)) == want


@pytest.mark.parametrize("form", FORMATS)
def test_names_come_with_the_beginning_of_arguments_which_come_as_they_are_written(form: type[CallFormat]) -> None:
    text = {
        Hermes: '<tool_call>\n{"name": "f", "arguments": {"a": "%s"}}', Mistral: '[TOOL_CALLS]f[ARGS]{"a": "%s"}',
        Llama3Json: '{"name": "f", "parameters": {"a": "%s"}}',
    }[form] % ("x" * 50)  # fmt: skip
    reader, begins = form(NAMES), text.index('{"a')
    for i, char in enumerate(text):
        result = [one.arguments for one in reader.push(char) if isinstance(one, CallPiece)]
        inside = begins + 1 < i < begins + text[begins:].index("}") + 1
        assert result == (["", '{"'] if i == begins + 1 else [char] if inside else []), i


def test_deep_and_long_arguments_end_a_call_and_take_no_time() -> None:
    deep = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000
    content, calls = parsed(Hermes, list(deep))
    assert len(calls) == 1 and (calls[0][1] + content).count("[") == 5000
    many = '<tool_call>{"name": "f", "arguments": {"a": "' + "<tool_call>{" * 20000
    assert len(parsed(Hermes, [many])[1]) == 1
    assert parsed(Hermes, ["<tool_call>{" * 20000])[0] == "<tool_call>{" * 20000


def split(form: ReasoningFormat, opened: bool, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningParser(form, opened)
    result = [splitter.push(piece) for piece in pieces] + [splitter.push("", final=True)]
    return "".join(a for a, _ in result), "".join(b for _, b in result)


def trimmed(text: str) -> str:
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]


def distinguished(form: ReasoningFormat, opened: bool, text: str) -> tuple[str, str]:
    """The same by another way."""
    bare = text.lstrip()
    begin = next((one for one in form.begins if bare.startswith(one)), "")
    if not opened and (not begin or len(text) - len(bare) > MAX_SPACE):
        return "", text
    inside = bare.removeprefix(begin)
    found = re.search("|".join(map(re.escape, (*form.ends, *form.until))), inside)
    if found is None:
        return trimmed(inside).lstrip(), ""
    rest = inside[found.start() if found[0] in form.until else found.end() :].lstrip()
    if form.frame is not None and rest.startswith(form.frame[0]):
        written, mark, more = rest.removeprefix(form.frame[0]).lstrip().partition(form.frame[1])
        rest = trimmed(written) + more if mark else written
    return trimmed(inside[: found.start()]).lstrip(), rest


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([*FORMATS_OF_REASONING.values()]), st.booleans(), st.integers(0, 1 << 30))
def test_reasoning_is_separated_however_the_text_is_cut(
    data: Any, form: ReasoningFormat, opened: bool, seed: int
) -> None:
    marks = (*form.marks, *form.until)
    parts = (
        *marks,
        *(mark[: len(mark) // 2] for mark in marks),
        "\n",
        " ",
        " " * 70,
        "hm",
        "Here is my ",
        "<think>",
        "</",
    )
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=9)))
    reasoning, answer = split(form, opened, [text])
    assert split(form, opened, cut(text, random.Random(seed))) == split(form, opened, list(text)) == (reasoning, answer)
    assert (reasoning, answer) == distinguished(form, opened, text), text


def test_where_reasoning_begins() -> None:
    always = ReasoningFormat(("<think>",), ("</think>",), always=True)
    for form, prompt, final, opened in (
        (THINK, "<|assistant|><think>\n", None, True), (THINK, "<|assistant|>", None, False),
        (THINK, "say <think> twice<|assistant|>", None, False), (always, "<|assistant|>", None, True),
        (always, "<|assistant|><think>\n\n</think>\n\n", None, False), (THINK, "", "<think>so", True),
        (THINK, "", "<think>so</think>But", False), (THINK, "", "So", False), (always, "", "So", True),
    ):  # fmt: skip
        assert form.opened(prompt, final) is opened, (prompt, final)
