"""Structural tags: which texts they allow, with marks that are special tokens, and the requests that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("starlette")
import httpx
import llguidance
from llmc_runtime import LlmcError, SamplingParams, StructuredOutputsParams
from llmc_runtime.grammar.definition import Definition, Refused, compile_matcher
from llmc_runtime.grammar.host import build_vocabulary

from tests.runtime.served import served
from tests.runtime.test_llm import make

VOCABULARY = build_vocabulary(str(Path(__file__).parents[2] / "examples" / "demo-model"), 4096, [1])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
EARLIER = {
    "structures": [
        {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "object"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<|user|>"], "tags": tags, **more}


def allows(form: dict[str, Any], written: str) -> bool:
    """Whether a text follows a format, to its end."""
    document = form if "structures" in form else {"type": "structural_tag", "format": form}
    wanted = StructuredOutputsParams(structural_tag=document)
    matcher = compile_matcher(llguidance, VOCABULARY, Definition.decode(Definition.of(wanted).encode()))
    tokens = VOCABULARY.tokenize_str(written)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


USER = tag("<|user|>x", {"type": "json_schema", "json_schema": SCHEMA}, "<|end|>")
ANY = {"type": "any_text"}
THINK = {"type": "sequence", "elements": [tag("<t>", ANY, "</t>"), {"type": "or", "elements": [
    text("yes::=no"), {"type": "regex", "pattern": "[0-9]+::=/x"},
    {"type": "grammar", "grammar": 'start: "abc" z\nz: /z+/'}]}]}  # fmt: skip
LIST = {"type": "tags_with_separator", "separator": ", ", "tags": [
    tag("<a>", {"type": "regex", "pattern": "b*"}, ["</a>", "!"]), tag("<c>", text(""), "")]}  # fmt: skip


@pytest.mark.parametrize(
    "form, good, bad",
    [
        (EARLIER, ['x <function=f>{"a": 1}</function> y <function=g>{}</function>', "", "a < b <funct"],
         ['<function=f>{"b": 1}</function>', "<function=h>", '<function=f>{"a": 1}']),
        (triggered(USER), ['hi <|user|>x{"a":2}<|end|> bye', "hi", '<|user|>x{"a":2}<|end|><|user|>x{"a":3}<|end|>'],
         ['<|user|>y', '<|user|>x{"a":2}', "<|system|>"]),
        (triggered(USER, at_least_one=True), ['<|user|>x{"a":2}<|end|> bye'], ["hi", 'hi <|user|>x{"a":2}<|end|>']),
        (triggered(USER, stop_after_first=True), ['q<|user|>x{"a":2}<|end|>', "q"], ['<|user|>x{"a":2}<|end|>b']),
        (triggered(USER, excludes=["no"]), ["yes"], ["a no b", 'no<|user|>x{"a":2}<|end|>']),
        (THINK, ["<t>hm </x> < </t>yes::=no", "<t></t>12::=/x", "<t>a</t>abczz"], ["<t>a</t>12", "yes::=no"]),
        (LIST, ["<a>bb</a>, <a>!, <c>", ""], ["<a>b</a>, ", "<a>b</a> <a>!"]),
        (LIST | {"at_least_one": True, "stop_after_first": True}, ["<c>"], ["", "<c>, <c>"]),
        (ANY | {"excludes": ["secret"]}, ["", "a sec ret"], ["a secret b"]),
    ],
)  # fmt: skip
def test_texts(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for written in good:
        assert allows(form, written), written
    for written in bad:
        assert not allows(form, written), written


@pytest.mark.parametrize(
    "form, cause",
    [
        ({}, "format.type"),
        ({"type": "qwen_xml_parameter"}, "not supported; it is one of const_string"),
        ({"type": "sequence", "elements": [ANY, text("x")]}, "any_text is supported at the end"),
        ({"type": "sequence", "elements": [triggered(USER), text("x")]}, "triggered_tags are supported at the end"),
        ({"type": "sequence", "elements": []}, "at least one"),
        (triggered(tag("z", ANY, "!")), "starts with 0 of the triggers"),
        (triggered(USER) | {"triggers": [""]}, "none of them empty"),
        (triggered(USER) | {"triggers": ["<|us"]}, "ends within a special token"),
        (tag("a", ANY, 5), "format.end: a list of texts"),  # type: ignore[arg-type]
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "only json"),
        ({"type": "grammar", "grammar": "root ::= x"}, "GBNF"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "structures[0].schema: an object"),
    ],
)
def test_unsupported_formats_are_named(form: dict[str, Any], cause: str) -> None:
    with pytest.raises(Refused) as caught:
        allows(form, "")
    assert cause in str(caught.value)


def test_nesting_has_a_limit() -> None:
    form = text("x")
    for _ in range(20):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(Refused, match="nested more than 16 deep"):
        allows(form, "x")


def test_the_parameter() -> None:
    with pytest.raises(LlmcError, match="E601"):
        StructuredOutputsParams(structural_tag="{}", regex="a")
    with pytest.raises(LlmcError, match=r"E601.*65536 bytes"):
        StructuredOutputsParams(structural_tag={"format": text("x" * (64 << 10))})
    form = {"type": "or", "elements": [text("left"), text("right")]}
    wanted = StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    params = SamplingParams(max_tokens=30, seed=1, structured_outputs=wanted)
    assert make().generate(["x"], params, use_tqdm=False)[0].outputs[0].text in ("left", "right")


def test_requests() -> None:
    """Completions and chats, by response_format and by structured_outputs."""
    form = {"type": "or", "elements": [text("left"), text("right")]}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30}
    with served() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        for own in ({"response_format": {"type": "structural_tag", "format": form}},
                    {"structured_outputs": {"structural_tag": json.dumps({"format": form})}}):  # fmt: skip
            done = client.post("/v1/chat/completions", json=chat | own)
            assert done.json()["choices"][0]["message"]["content"] in ("left", "right"), done.text
        done = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, "response_format": {
            "type": "structural_tag", **EARLIER}})  # fmt: skip
        assert done.status_code == 200, done.text
        wrong = client.post("/v1/completions", json={"prompt": "x", "response_format": {"type": "structural_tag"}})
        assert wrong.status_code == 400 and "format" in wrong.json()["error"]["message"], wrong.text
