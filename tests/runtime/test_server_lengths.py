"""Limits on lengths of fields: longer values are refused before their contents are checked."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime import LlmcError, SamplingParams
from llmc_runtime.engine.input_processor import bad_word_tokens, token_mask, with_mask
from llmc_runtime.engine.messages import params_message, params_of
from llmc_runtime.sched.sampling_params import MAX_ALLOWED, MAX_BAD_WORD_BYTES
from llmc_runtime.sched.structured_outputs import MAX_BYTES, StructuredOutputsParams, is_over
from llmc_runtime.sched.token_guide import Bans, TokenMask, mask_of, mask_size
from llmc_runtime.server.http.errors import ApiError, unavailable
from llmc_runtime.server.requests.messages_request import CountRequest, MessagesRequest
from llmc_runtime.server.requests.parse import OF_CHARACTERS, OF_ITEMS, check_lengths, limits_of, parse
from llmc_runtime.server.requests.request_fields import MAX_CALLS, ChatRequest, CompletionRequest, TokenizeRequest
from llmc_runtime.server.requests.responses_request import ResponsesRequest
from llmc_runtime.server.tool_calls.history import for_template
from llmc_runtime.text.template_analysis import TemplateFeatures

from tests.runtime.served import Served, served

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
KINDS = (ChatRequest, CompletionRequest, TokenizeRequest, ResponsesRequest, MessagesRequest, CountRequest)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one
        one.rest()


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_fields_at_their_lengths_and_over_them(kind: type[Any]) -> None:
    limits = [(path, most, [{}]) for path, most in limits_of(kind, *OF_ITEMS).items()]
    limits += [(path, most, "x") for path, most in limits_of(kind, OF_CHARACTERS).items()]
    assert len(limits) > 3
    for path, most, one in limits:
        check_lengths(nested(path, one * most), kind)
        with pytest.raises(ApiError, match=f"{path}: up to {most}") as error:
            check_lengths(nested(path, one * (most + 1)), kind)
        assert error.value.param == path and error.value.status == 400
        assert path.partition(".")[0] in kind.__struct_fields__  # a name that no request has would never be checked
        required = {"prompt": "x", "input": "x", "messages": CHAT, "max_tokens": 1}
        body = {name: value for name, value in required.items() if name in kind.__struct_fields__}
        body |= nested(path, one * (most + 1))
        with pytest.raises(ApiError, match=f"{path}: up to {most}"):
            parse(json.dumps(body).encode(), kind, lambda n: None)


def test_the_server_names_the_field_that_is_too_long(server: Served) -> None:
    for path, value in (
        ("cache_salt", "x" * 257), ("stop", ["x"] * 17), ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("allowed_token_ids", [1] * 65_537), ("bad_words", ["x" * 1000] * 17), ("documents", [{}] * 1025),
        ("chat_template_kwargs", {f"v{i}": 1 for i in range(65)}), ("tools", [{}] * 129),
        ("messages", [{"role": "user", "content": ["x"] * 2100}] * 2),
    ):  # fmt: skip
        body = {"messages": CHAT, "max_tokens": 2, path: value}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == path, reply.text[:300]


def test_allowed_ids_of_a_request_are_the_only_ones(server: Served) -> None:
    ids = list(range(40, 60))
    body = {"prompt": "x", "max_tokens": 8, "temperature": 1, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{server.url}/v1/completions", json={**body, "allowed_token_ids": ids}).json()
    assert set(reply["choices"][0]["token_ids"]) <= set(ids)
    size = server.serving.llm.config.vocab_size
    for bad in ([], [-1], [size], [2**32], [2**70], ["x"], [1.5], [True]):
        response = httpx.post(f"{server.url}/v1/completions", json={**body, "allowed_token_ids": bad})
        assert response.status_code == 400 and "allowed_token_ids" in response.json()["error"]["param"], bad


def test_masks_of_ids_and_their_way_to_the_engine() -> None:
    draw = random.Random(3)
    for size in (1, 31, 32, 33, 5000):
        ids = [draw.randrange(size) for _ in range(200)]
        mask = token_mask(ids, size).mask
        assert mask == mask_of(ids, size) and len(mask) == mask_size(size)
        params = with_mask(SamplingParams(allowed_token_ids=ids), size)
        assert params.allowed_token_ids == TokenMask(mask) and with_mask(params, size) is params
        assert params_of(params_message(params)).allowed_token_ids == TokenMask(mask)
    plain = SamplingParams(allowed_token_ids=[3, 1, 2])
    assert params_of(params_message(plain)).allowed_token_ids == plain.allowed_token_ids
    for bad in ([5000], [0] * (MAX_ALLOWED + 1), []):
        with pytest.raises(LlmcError, match="E601"):
            token_mask(bad, 5000)


def test_bad_words_have_a_limit_together() -> None:
    SamplingParams(bad_words=["x" * 128] * (MAX_BAD_WORD_BYTES // 128))
    with pytest.raises(LlmcError, match="E601"):
        SamplingParams(bad_words=["x" * 128] * (MAX_BAD_WORD_BYTES // 128) + ["x"])


def test_bans_behind_long_words() -> None:
    draw, full = random.Random(5), mask_of(None, 64)
    words = [[draw.randrange(3) for _ in range(draw.randrange(2, 9))] for _ in range(30)]
    bans = Bans(full, words, full)
    for _ in range(300):
        past = [draw.randrange(3) for _ in range(draw.randrange(10))]
        want = {
            word[-1] for word in words if len(word) - 1 <= len(past) and past[len(past) - len(word) + 1 :] == word[:-1]
        }
        mask = bans.after(past[-bans.window :])
        assert {i for i in range(64) if not mask[i >> 3] >> (i & 7) & 1} == want


def test_the_size_of_json_is_known_before_it_is_written() -> None:
    draw = random.Random(7)

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth < 4 else 3)
        if kind < 3:
            return draw.choice([None, True, 1, -2.5, "", "word" * draw.randrange(5)])
        if kind == 3:
            return [value(depth + 1) for _ in range(draw.randrange(5))]
        return {f"k{i}": value(depth + 1) for i in range(draw.randrange(5))}

    for _ in range(300):
        one = value(0)
        length = len(json.dumps(one, separators=(",", ":"), ensure_ascii=False))
        assert not is_over(one, length + 4)  # what is said to be over is over
    for large in (
        {"a": "x" * 70_000},
        {"a": [0] * 40_000},
        {f"k{i}": {} for i in range(9000)},
        {"a": {"b" * 70_000: 1}},
    ):
        assert is_over(large, MAX_BYTES)
        with pytest.raises(LlmcError, match="E601"):
            StructuredOutputsParams(json=large)
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(LlmcError, match="E601"):
        StructuredOutputsParams(json={"a": ring})


def test_parts_and_calls_are_counted_over_all_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    features = TemplateFeatures(parts=False, tools=True, calls=True, arguments_as_text=False)
    message = {"role": "assistant", "tool_calls": [call] * 128}
    assert len(for_template([message] * (MAX_CALLS // 128), features, False)) == MAX_CALLS // 128
    with pytest.raises(ApiError, match=f"up to {MAX_CALLS} tool calls"):
        for_template([message] * (MAX_CALLS // 128 + 1), features, False)


def test_bad_words_of_many_prompts_are_tokenized_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(params: SamplingParams, tokenizer: Any) -> Any:
        made.append(params.bad_words)
        return bad_word_tokens(params, tokenizer)

    monkeypatch.setattr("llmc_runtime.api.async_llm.bad_word_tokens", counted)
    words = [f"{'y' * 60}{i:04}" for i in range(100)]
    body = {"prompt": ["one", "two"] * 32, "max_tokens": 2, "temperature": 1, "seed": 3}
    plain = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert len(made) == 64 and not any(made)  # nothing to tokenize
    made.clear()
    banned = httpx.post(f"{server.url}/v1/completions", json={**body, "bad_words": words}, timeout=60).json()["choices"]
    assert made == [tuple(words)]
    assert [one["text"] for one in banned] == [one["text"] for one in plain]


def test_long_bad_words_are_tokenized_in_the_turn_of_their_key(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Any] = []

    @asynccontextmanager
    async def turn(tenant: str) -> AsyncIterator[None]:
        turns.append(tenant)
        yield
        turns.append("end")

    monkeypatch.setattr(server.serving.llm, "text_turn", turn)
    long = [f"{'y' * 60}{i:04}" for i in range(100)]
    for words in (["short"], long):
        body = {"prompt": "one", "max_tokens": 2, "bad_words": words}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert len(turns) == 2 and turns[1] == "end", turns


def test_long_bad_words_without_a_turn_are_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def full(tenant: str) -> AsyncIterator[None]:
        raise unavailable("too many texts", "texts")
        yield

    monkeypatch.setattr(server.serving.llm, "text_turn", full)
    body = {"prompt": "one", "max_tokens": 2, "bad_words": [f"{'z' * 60}{i:04}" for i in range(100)]}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 503 and "retry-after" in answer.headers, answer.text


def test_copies_with_other_values_have_all_the_others() -> None:
    params = SamplingParams(n=3, seed=5, stop=["x"], bad_words=["y"], logit_bias={1: 2}, min_tokens=2, temperature=0.7)
    assert params.changed() == params and params.changed(n=1, max_tokens=4) == replace(params, n=1, max_tokens=4)
