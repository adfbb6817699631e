"""langchain-openai: invoke, stream, batch, log-probabilities, structured outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from kit import CHAT, QUESTIONS, TEXTS, Server, joined, user
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

Truth = Callable[..., dict[str, Any]]


class River(BaseModel):
    """The structured output."""

    size: Literal["small", "large"]
    flows_to: Literal["a lake", "the sea"]


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo", base_url=server.v1, api_key=SecretStr(server.key), temperature=0, max_completion_tokens=40,
        max_retries=0, timeout=120,
    )  # fmt: skip


def test_a_chat(chat: ChatOpenAI, truth: Truth) -> None:
    true = truth(messages=CHAT, max_tokens=40)
    whole = chat.invoke(CHAT)
    assert whole.content == true["text"] and whole.usage_metadata["output_tokens"] == len(true["token_ids"])
    chunks = list(chat.stream(CHAT, stream_usage=True))
    assert joined([str(chunk.content) for chunk in chunks]) == true["text"]
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == len(true["token_ids"])


def test_a_batch(chat: ChatOpenAI, truth: Truth) -> None:
    answers = [one.content for one in chat.batch([user(q) for q in QUESTIONS])]
    assert answers == [truth(messages=user(q), max_tokens=40)["text"] for q in QUESTIONS]


def test_log_probabilities(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(CHAT)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in content).removesuffix("<|eos|>") == answer.content


def test_a_completion(server: Server, truth: Truth) -> None:
    model = OpenAI(
        model="demo", base_url=server.v1, api_key=SecretStr(server.key), temperature=0, max_tokens=20, max_retries=0
    )
    assert model.invoke(TEXTS[1]) == truth(prompt=TEXTS[1], max_tokens=20)["text"]


def test_a_prompt_that_is_too_long(chat: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        chat.invoke("the " * 4000)


def test_structured_output(chat: ChatOpenAI) -> None:
    answer = chat.with_structured_output(River, method="json_schema").invoke(CHAT, max_completion_tokens=300)
    assert isinstance(answer, River)
