"""openai-python: synchronous, asynchronous, streams, structured outputs, errors; the texts are the model's own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from kit import CHAT, QUESTIONS, TEXTS, Server, joined, user
from pydantic import BaseModel, Field

Truth = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=120) as one:
        yield one


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_a_chat_whole_and_streamed(client: openai.OpenAI, truth: Truth) -> None:
    for question in QUESTIONS:
        true = truth(messages=user(question), max_tokens=40)
        whole = client.chat.completions.create(
            model="demo", messages=user(question), max_completion_tokens=40, temperature=0
        )
        assert whole.choices[0].message.content == true["text"]
        assert whole.choices[0].finish_reason == true["finish_reason"]
        assert whole.usage and whole.usage.completion_tokens == len(true["token_ids"])
        assert whole.usage.prompt_tokens == len(true["prompt_token_ids"])
        chunks = list(
            client.chat.completions.create(
                model="demo", messages=user(question), max_tokens=40, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert joined([c.choices[0].delta.content for c in chunks[:-1]]) == true["text"]
        assert chunks[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )


def test_the_helper_for_streams(client: openai.OpenAI, truth: Truth) -> None:
    with client.chat.completions.stream(model="demo", messages=CHAT, temperature=0, max_tokens=200) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    text = truth(messages=CHAT, max_tokens=200)["text"]
    assert joined(pieces) == text == final.choices[0].message.content


def test_completions_of_several_prompts(client: openai.OpenAI, truth: Truth) -> None:
    answer = client.completions.create(model="demo", prompt=list(TEXTS), max_tokens=24, temperature=0)
    assert [c.text for c in answer.choices] == [truth(prompt=text, max_tokens=24)["text"] for text in TEXTS]
    options = {"model": "demo", "prompt": TEXTS[0], "max_tokens": 24, "temperature": 1, "seed": 5, "n": 2}
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in client.completions.create(**options).choices] and texts[0] != texts[1]


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    assert all(one.logprob == max(top.logprob for top in one.top_logprobs) for one in content)
    assert all(len(one.top_logprobs) == 3 for one in content)


def test_many_at_once(server: Server, truth: Truth) -> None:
    async def ask(client: openai.AsyncOpenAI, question: str, stream: bool) -> str:
        request = client.chat.completions.create(
            model="demo", messages=user(question), max_tokens=32, temperature=0, stream=stream
        )
        if not stream:
            return str((await request).choices[0].message.content)
        return joined([chunk.choices[0].delta.content async for chunk in await request])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client, q, stream) for q in QUESTIONS for stream in (True, False)))

    texts = asyncio.run(all_of_them())
    assert texts == [truth(messages=user(q), max_tokens=32)["text"] for q in QUESTIONS for _ in range(2)]


class Animal(BaseModel):
    """The structured output."""

    kind: Literal["cat", "dog", "horse"]
    legs: int = Field(ge=0, le=9)
    names: list[Literal["Anna", "Tom"]] = Field(min_length=1, max_length=2)


def test_structured_output(server: Server, truth: Truth) -> None:
    sent: list[dict[str, Any]] = []
    http = httpx.Client(event_hooks={"request": [lambda r: sent.append(json.loads(r.content))]}, timeout=120)
    with openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0, http_client=http) as client:
        answer = client.chat.completions.parse(
            model="demo", messages=CHAT, response_format=Animal, temperature=0, max_tokens=500
        )
        message = answer.choices[0].message
        true = truth(messages=CHAT, max_tokens=500, schema=sent[0]["response_format"]["json_schema"]["schema"])
        assert message.content == true["text"] and answer.choices[0].finish_reason == "stop"
        assert message.parsed == Animal.model_validate_json(true["text"])
        with client.chat.completions.stream(
            model="demo", messages=CHAT, response_format=Animal, temperature=0, max_tokens=500
        ) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.parsed == message.parsed


def test_errors_have_their_kinds(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=CHAT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=CHAT, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="the " * 4000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="generates text"):
        client.embeddings.create(model="demo", input="a")
    stranger = client.with_options(api_key="sk-another-key")
    with pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key" and refused.value.request_id


def test_tokens_come_as_they_are_made(slow_server: Server) -> None:
    options = {"model": "toy", "messages": CHAT, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=slow_server.v1, api_key="none", max_retries=0, timeout=120) as client:
        stream = client.chat.completions.create(**options, stream=True)
        pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    assert len(pieces) > 2


def test_a_stream_that_is_left_ends(client: openai.OpenAI, server: Server) -> None:
    before = server.figure("request_disconnects_total")
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    while server.figure("request_disconnects_total") == before:
        time.sleep(0.1)
    server.rest()
