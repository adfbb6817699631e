"""Structured outputs on a compiled model: every text matches its grammar, and other requests do not change."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, SamplingParams, StructuredOutputsParams
from llmc_runtime.grammar import GrammarGuide

from llmc.driver import compile_model
from llmc.options import Options

llguidance = pytest.importorskip("llguidance")
pytest.importorskip("msgspec")
from llmc_runtime.prompts import Prompt  # noqa: E402
from llmc_runtime.server.requests.request_fields import ChatRequest  # noqa: E402
from llmc_runtime.server.tool_calls.call_format import CallFormat  # noqa: E402
from llmc_runtime.server.tool_calls.message import MessageParser  # noqa: E402
from llmc_runtime.server.tool_calls.parser_select import select_formats  # noqa: E402
from llmc_runtime.server.tool_calls.reasoning import THINK  # noqa: E402
from llmc_runtime.server.tool_calls.registry import FORMATS  # noqa: E402
from llmc_runtime.server.tool_calls.response_plan import plan_of  # noqa: E402
from llmc_runtime.text.chat_template import ChatTemplate  # noqa: E402

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo-model-small"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]+$"},
        "size": {"type": "integer", "minimum": -9, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue \u00e9"]}, "maxItems": 3},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "perhaps not", "\u00fcber \U0001f600", 'a "quoted" one\n']
GBNF = 'root ::= sum "."\nsum ::= num (" + " num){1,3}\nnum ::= [0-9]{1,3}'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The small demonstration model, with the kernels of test_speculation.py."""
    folder = tmp_path_factory.mktemp("grammars")
    limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "speculate": 4}
    compile_model(DEMO, folder / "model.llmc", Options(cache=CACHE, reuse=False, dtype="float32", **limits))
    with LLM(folder / "model.llmc", say=lambda line: None) as opened:
        yield opened


def is_schema(text: str) -> bool:
    found = json.loads(text)
    assert set(found) <= set(SCHEMA["properties"]) and {"name", "size"} <= set(found)
    assert re.fullmatch("[a-z]{1,8}", found["name"]) and -9 <= found["size"] <= 120
    return set(found.get("tags", [])) <= {"red", "green", "blue \u00e9"}


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA, "disable_any_whitespace": True}, is_schema),
    ({"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}, is_schema),
    ({"regex": "[A-Z][a-z]{2,9}( [a-z]{1,5}){0,4}\\."}, re.compile("[A-Z][a-z]{2,9}( [a-z]{1,5}){0,4}\\.").fullmatch),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"grammar": GBNF}, re.compile(r"\d{1,3}( \+ \d{1,3}){1,3}\.").fullmatch),
    ({"grammar": 'start: /[ab]{3}/ "-" /[0-9]/'}, re.compile("[ab]{3}-[0-9]").fullmatch),
]  # fmt: skip


def test_every_text_has_its_form_beside_others_that_have_none(llm: LLM) -> None:
    """Greedy and sampled, several outputs, batched with plain requests, whose tokens do not change."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    jobs: list[tuple[str, SamplingParams, Any]] = []
    for fields, check in FORMS:
        wanted = StructuredOutputsParams(**fields)
        for temperature in (0.0, 0.9):
            n = 3 if temperature else 1
            params = SamplingParams(
                temperature=temperature, max_tokens=120, seed=rng.randrange(1 << 32), structured_outputs=wanted, n=n,
                top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 20)), ignore_eos=rng.random() < 0.3,
            )  # fmt: skip
            jobs.append(("The answer is", params, check))
    plain = SamplingParams(temperature=0.8, max_tokens=20, seed=5, ignore_eos=True)
    jobs += [(text, plain, None) for text in ("Once upon a time", "A river")]
    rng.shuffle(jobs)
    outputs = llm.generate([text for text, _, _ in jobs], [params for _, params, _ in jobs], use_tqdm=False)
    for (text, params, check), output in zip(jobs, outputs):
        for one in output.outputs:
            if check is None:
                assert one.token_ids == llm.generate(text, plain, use_tqdm=False)[0].outputs[0].token_ids
            else:
                assert one.finish_reason == "stop", (params.structured_outputs, one)
                assert check(one.text), (params.structured_outputs, one.text)


def test_any_object(llm: LLM) -> None:
    """Whatever was written so far is the beginning of an object, and what ended is one."""
    wanted = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    params = SamplingParams(temperature=0.7, n=4, seed=SEED, max_tokens=60, structured_outputs=wanted)
    (output,) = llm.generate("{", params, use_tqdm=False)
    for one in output.outputs:
        assert one.text.startswith("{")
        if one.finish_reason == "stop":
            assert isinstance(json.loads(one.text), dict)


def test_the_masks_are_llguidances_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every id that is drawn is one that a matcher of its own allows, after the same ids."""
    tokenizer, size = llm.get_tokenizer(), llm.config.vocab_size
    vocabulary = llguidance.LLTokenizer(
        tokenizer.backend.to_str(), n_vocab=size, eos_token=list(llm.config.eos_token_ids)
    )
    matcher = llguidance.LLMatcher(vocabulary, llguidance.grammar_from("regex", FORMS[2][0]["regex"]), log_level=0)
    given: list[bytes] = []
    right = GrammarGuide.accept

    def accept(self: GrammarGuide, token: int) -> None:
        mask = self.mask()
        assert mask is not None
        given.append(mask)
        right(self, token)

    monkeypatch.setattr(GrammarGuide, "accept", accept)
    wanted = StructuredOutputsParams(**FORMS[2][0])
    params = SamplingParams(temperature=1.0, seed=SEED, max_tokens=60, structured_outputs=wanted)
    (output,) = llm.generate("It was", params, use_tqdm=False)
    ids = output.outputs[0].token_ids
    assert len(given) == len(ids) > 2
    for token, sent in zip(ids, given):
        own = matcher.compute_bitmask()
        assert sent == own[: len(sent)] and not any(own[len(sent) :]) and sent[token >> 3] >> (token & 7) & 1
        assert matcher.consume_token(token)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"json": {"type": "what"}}, "E651"), ({"json": "[1"}, "E651"), ({"json": '"x"'}, "E651"),
        ({"regex": "(a"}, "E651"), ({"grammar": "start: nothing"}, "E651"), ({"grammar": "root ::= ("}, "E651"),
        ({"regex": "(a|b|c){1,900}[xyz]{900}(foo|bar.*){900}(u|v){900}(0|1.*){900}"}, None),
        ({"json": {"type": "string", "pattern": "(" * 500 + ")" * 500}}, None),
    ],
)  # fmt: skip
def test_a_bad_grammar_affects_only_its_request(llm: LLM, fields: dict[str, Any], code: str | None) -> None:
    """Refused with an error in bounded time, or served up to its limits; a concurrent stream continues."""
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    want = llm.generate("A river", plain, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream("A river", plain)
    got = list(next(stream).token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=3, structured_outputs=StructuredOutputsParams(**fields))
    began = time.monotonic()
    try:
        llm.generate("x", params, use_tqdm=False)
    except LlmcError as error:
        assert error.code == code or (code is None and error.code in ("E651", "E652")), str(error)
        assert len(str(error)) < 500
    else:
        assert code is None
    assert time.monotonic() - began < 20
    assert got + [t for piece in stream for t in piece.token_ids] == want


def test_bans_and_grammars_together(llm: LLM) -> None:
    digits = StructuredOutputsParams(regex="[0-9]{6}")
    params = SamplingParams(temperature=0.9, seed=SEED, max_tokens=12, structured_outputs=digits, bad_words=["7", "1"])
    for output in llm.generate(["a"] * 3, params, use_tqdm=False):
        assert re.fullmatch("[0-9]{6}", output.outputs[0].text)
        banned = {tuple(llm.get_tokenizer().encode(w, add_special_tokens=False)) for w in "71"}
        assert not {(t,) for t in output.outputs[0].token_ids} & banned
    never = SamplingParams(structured_outputs=digits, allowed_token_ids=llm.get_tokenizer().encode("x")[-1:])
    with pytest.raises(LlmcError) as caught:
        llm.generate("a", never, use_tqdm=False)
    assert caught.value.code == "E610"


def test_without_llguidance_it_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(LlmcError) as caught:
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="q+z")), use_tqdm=False)
    assert caught.value.code == "E650" and "[grammar]" in caught.value.remedy


TOOLS = [
    {"type": "function", "function": {"name": "describe", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize("form", FORMATS)
def test_enforced_calls_have_their_schemas(llm: LLM, form: type[CallFormat]) -> None:
    """Through a template with tools, after reasoning that is possible or has ended: calls are sampled, then parsed."""
    tokenizer = llm.get_tokenizer()
    template = (DEMO.parent / "tools" / "chat_template.jinja").read_text()
    formats = replace(select_formats(tokenizer, template), calls=form, reasoning=THINK)
    chat = [{"role": "user", "content": "What is a river?"}]
    request = ChatRequest(messages=chat, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    text = ChatTemplate(template, tokenizer.named_tokens).render(request.messages, tools=TOOLS)
    ended = 0
    for prompt in (text, text + "<think></think>"):
        plan = plan_of(request, formats).after(Prompt([], prompt), request)
        drawn = SamplingParams(temperature=0.8, seed=SEED, n=4, max_tokens=300)
        params = plan.constrained(drawn, "tools")
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        for one in output.outputs:
            parser = MessageParser(plan)
            message = parser.message(parser.take(one.text, one.token_ids, final=True))
            if one.finish_reason == "length":  # it thinks for as long as it likes
                continue
            ended += 1
            calls = [
                (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]
            ]
            assert calls and not message["content"] and parser.finish_reason("stop") == "tool_calls"
            for name, arguments in calls:
                assert is_schema(json.dumps(arguments)) if name == "describe" else (name, arguments) == ("stop", {})
    assert ended
