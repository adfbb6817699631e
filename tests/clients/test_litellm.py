"""litellm: whole, streamed, asynchronous, structured outputs, errors as litellm's exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import litellm
import pytest
from kit import CHAT, QUESTIONS, TEXTS, Server, joined, user
from pydantic import BaseModel

Truth = Callable[..., dict[str, Any]]


class Season(BaseModel):
    """The structured output."""

    name: Literal["spring", "summer", "autumn", "winter"]
    warm: bool


@pytest.fixture
def asked(server: Server) -> dict[str, Any]:
    """Arguments of every call."""
    return {"api_base": server.v1, "api_key": server.key, "temperature": 0, "num_retries": 0, "timeout": 120}


def test_a_chat(asked: dict[str, Any], truth: Truth) -> None:
    true = truth(messages=CHAT, max_tokens=40)
    whole = litellm.completion("openai/demo", CHAT, max_tokens=40, **asked)
    assert whole.choices[0].message.content == true["text"]
    assert whole.usage.completion_tokens == len(true["token_ids"])
    stream = litellm.completion(
        "openai/demo", CHAT, max_completion_tokens=40, stream=True, stream_options={"include_usage": True}, **asked
    )
    chunks = list(stream)
    assert joined([c.choices[0].delta.content for c in chunks if c.choices]) == true["text"]
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [len(true["token_ids"])]


def test_several_at_once(asked: dict[str, Any], truth: Truth) -> None:
    async def ask(question: str) -> str:
        answer = await litellm.acompletion("openai/demo", user(question), max_tokens=30, **asked)
        return str(answer.choices[0].message.content)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(ask, QUESTIONS))

    assert asyncio.run(all_of_them()) == [truth(messages=user(q), max_tokens=30)["text"] for q in QUESTIONS]


def test_a_completion(asked: dict[str, Any], truth: Truth) -> None:
    answer = litellm.text_completion(model="text-completion-openai/demo", prompt=TEXTS[0], max_tokens=20, **asked)
    assert answer.choices[0].text == truth(prompt=TEXTS[0], max_tokens=20)["text"]


def test_structured_output(asked: dict[str, Any]) -> None:
    answer = litellm.completion("openai/demo", CHAT, max_tokens=300, response_format=Season, **asked)
    assert Season.model_validate_json(answer.choices[0].message.content)


def test_errors_have_their_kinds(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion("openai/demo", CHAT, **{**asked, "api_key": "sk-another-key"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion("openai/gpt-9", CHAT, **asked)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/demo", user("the " * 4000), **asked)
