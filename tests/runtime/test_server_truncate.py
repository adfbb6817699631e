"""`truncate_prompt_tokens` and `truncation_side`: the kept tokens, also of large bodies, and invalid values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.requests.request_fields import ChatRequest, CompletionRequest
from llmc_runtime.server.requests.sampling_fields import kept_tokens

from tests.runtime.served import TOK, Served, served

USER = "The kernel of an operating system. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one
        one.rest()


def tokens(server: Served, path: str, **body: Any) -> tuple[list[int], dict[str, Any]]:
    """The token ids of the prompt as it was generated from, and the response."""
    reply = httpx.post(server.url + path, timeout=60, json={"return_token_ids": True, "max_tokens": 1, **body})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"], answer


def test_the_last_tokens_of_a_completion_are_kept(server: Served) -> None:
    whole, _ = tokens(server, "/v1/completions", prompt=USER)
    for prompt in (USER, whole):
        kept, answer = tokens(server, "/v1/completions", prompt=prompt, truncate_prompt_tokens=5, echo=True)
        assert kept == whole[-5:] and answer["usage"]["prompt_tokens"] == 5
        assert answer["choices"][0]["text"].startswith(TOK.decode(whole[-5:]))
        assert tokens(server, "/v1/completions", prompt=prompt, truncate_prompt_tokens=len(whole))[0] == whole
        assert tokens(server, "/v1/completions", prompt=prompt, truncate_prompt_tokens=10**6)[0] == whole


def test_the_last_tokens_of_a_chat_are_kept(server: Served) -> None:
    chat = [{"role": "user", "content": USER}]
    whole, _ = tokens(server, "/v1/chat/completions", messages=chat)
    kept, answer = tokens(server, "/v1/chat/completions", messages=chat, truncate_prompt_tokens=7)
    assert kept == whole[-7:] and answer["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("words", (400, 20_000))  # parsed in the server, and in a text process
def test_minus_one_keeps_what_fits(server: Served, words: int) -> None:
    text = "kernel " * words
    length = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    chat = [{"role": "user", "content": text}]
    for path, prompt in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", {"messages": chat})):
        assert httpx.post(server.url + path, timeout=60, json={**prompt, "max_tokens": 3}).status_code == 400
        kept, _ = tokens(server, path, **prompt, max_tokens=3, truncate_prompt_tokens=-1)
        assert len(kept) == length - 3


@pytest.mark.parametrize("words", (40, 20_000))  # parsed in the server, and in a text process
def test_the_side_of_the_tokens_that_are_dropped(server: Served, words: int) -> None:
    text = " ".join(f"w{i}" for i in range(words))
    whole = TOK.encode(text)
    cut = {"truncate_prompt_tokens": 5, "prompt": text}
    kept, answer = tokens(server, "/v1/completions", **cut, truncation_side="right", echo=True)
    assert kept == whole[:5]
    assert answer["choices"][0]["text"].startswith(TOK.decode(whole[:5], skip_special_tokens=False))
    for side in ("left", None):
        assert tokens(server, "/v1/completions", **cut, truncation_side=side)[0] == whole[-5:]
    chat = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 7}
    start, end = (tokens(server, "/v1/chat/completions", **chat, truncation_side=side)[0] for side in ("right", "left"))
    assert len(start) == len(end) == 7 and start != end
    assert tokens(server, "/v1/completions", prompt=list(range(9)), truncate_prompt_tokens=3, truncation_side="right")[
        0
    ] == [0, 1, 2]


@pytest.mark.parametrize("side", ("middle", "", 5, ["left"]))
def test_other_sides_are_refused(server: Served, side: Any) -> None:
    body = {"prompt": "x", "truncate_prompt_tokens": 5, "truncation_side": side}
    reply = httpx.post(f"{server.url}/v1/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("truncation_side")


def test_token_ids_over_the_context_are_truncated(server: Served) -> None:
    kept, _ = tokens(server, "/v1/completions", prompt=[7] * 4000, truncate_prompt_tokens=4)
    assert kept == [7] * 4


def test_other_numbers_are_refused(server: Served) -> None:
    for value in (0, -2, 2**40, "5", True, 1.5):
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "truncate_prompt_tokens": value})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "truncate_prompt_tokens", value


def test_the_room_of_minus_one() -> None:
    assert kept_tokens(CompletionRequest(prompt="x"), 100) is None
    assert kept_tokens(CompletionRequest(prompt="x", truncate_prompt_tokens=-1), 100) == slice(-84, None)
    right = CompletionRequest(prompt="x", truncate_prompt_tokens=-1, truncation_side="right")
    assert kept_tokens(right, 100) == slice(84)
    echo = CompletionRequest(prompt="x", truncate_prompt_tokens=-1, max_tokens=0, echo=True)
    assert kept_tokens(echo, 100) == slice(-99, None)
    chat = ChatRequest(messages=[{}], truncate_prompt_tokens=-1)
    assert kept_tokens(chat, 100) == slice(-99, None)
    chat.max_completion_tokens = 200
    assert kept_tokens(chat, 100) == slice(-1, None)
