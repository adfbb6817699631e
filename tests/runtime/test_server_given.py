"""Requests in the forms that clients of other servers send: integers as floats, null contents, other names of parts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx

from tests.runtime.served import TOK, Served, served

CHAT = [{"role": "user", "content": "What is a river?"}]
FIXED: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one
        one.rest()


def ask(server: Served, path: str = "/v1/completions", **body: Any) -> Any:
    reply = httpx.post(server.url + path, json=body, timeout=30)
    return reply.json() if reply.status_code == 200 else reply.json()["error"]


def chat(server: Served, messages: Any, **body: Any) -> Any:
    return ask(server, "/v1/chat/completions", messages=messages, **(FIXED | body))


def stream(server: Served, path: str, **body: Any) -> list[Any]:
    text = httpx.post(server.url + path, json={**body, "stream": True}, timeout=30).text
    events = [line[6:] for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_whole_numbers_may_be_written_as_floats(server: Served) -> None:
    ids = [random.randrange(10, 400) for _ in range(5)]
    usual = ask(server, prompt=ids, **FIXED, n=1, seed=3, stop_token_ids=[0])["choices"]
    floats = {"max_tokens": 9.0, "temperature": 0, "ignore_eos": True, "n": 1.0, "seed": 3.0, "stop_token_ids": [0.0]}
    assert ask(server, prompt=[float(i) for i in ids], **floats)["choices"] == usual
    for name, value in (("max_tokens", 9.5), ("max_tokens", 1e300), ("seed", 2.0**70), ("stop_token_ids", [1.5])):
        assert ask(server, **{"prompt": ids, **FIXED, name: value})["param"].startswith(name)
    assert ask(server, prompt=[20.5, 30])["param"] == "prompt"


def test_no_name_of_a_model_is_the_first_one(server: Served) -> None:
    assert ask(server, prompt="x", model="", **FIXED)["model"] == "toy"
    unknown = ask(server, prompt="x", model=" ", **FIXED)
    assert unknown["code"] == "model_not_found" and unknown["message"].endswith("Try: toy, other")


def test_contents_that_are_missing(server: Served) -> None:
    """The model's messages may lack content, which is empty then; those of others have to have it."""
    empty = chat(server, [{"role": "assistant", "content": ""}, *CHAT])
    for message in ({"content": None}, {}):
        assert chat(server, [{"role": "assistant", **message}, *CHAT])["choices"] == empty["choices"]
        for role in ("user", "system", "developer", "tool"):
            assert chat(server, [*CHAT, {"role": role, **message}])["param"] == f"messages[{len(CHAT)}].content"
    assert chat(server, [{"content": "x"}])["param"] == "messages[0].role"
    for role in ({"a": "user"}, ["user"], 5):  # without content, too
        assert chat(server, [*CHAT, {"role": role}])["param"] == f"messages[{len(CHAT)}].role"
    for value in (5, True, {"type": "text", "text": "x"}):
        refused = chat(server, [{"role": random.choice(("user", "assistant")), "content": value}])
        assert refused["param"] == "messages[0].content" and "a text, or a list of parts" in refused["message"]


def test_parts_that_are_text_under_any_name(server: Served) -> None:
    usual = chat(server, [{"role": "user", "content": [{"type": "text", "text": "a river"}]}])["choices"]
    parts: list[Any] = ["a river", {"type": "input_text", "text": "a river"}, {"type": "refusal", "refusal": "a river"}]
    image = {"type": "image_url", "image_url": {"url": "file:///etc"}}
    for part in [*parts, {"type": "output_text", "text": "a river", "annotations": []}]:
        assert chat(server, [{"role": "user", "content": [part]}])["choices"] == usual
    parts = [None, 3, {}, {"type": "text"}, {"type": "text", "text": None}, {"type": ["text"]}, {"text": "x"}]
    for part in [*parts, {"type": "refusal", "text": "x"}, image]:
        refused = chat(server, [*CHAT, {"role": "user", "content": ["x", part]}])
        assert refused["param"] == "messages[1].content"
        assert ("'image_url' are not supported" in refused["message"]) == (part == image)


def test_defaults_that_clients_spell_out(server: Served) -> None:
    assert "choices" in chat(server, CHAT, top_logprobs=0, logprobs=False, n=1, stop=[], logit_bias={}, tools=[])
    assert chat(server, CHAT, top_logprobs=1)["param"] == "top_logprobs"


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"echo": True, "logprobs": 0}])
def test_token_ids_of_completions(server: Served, more: dict[str, Any]) -> None:
    prompts = ["a river", "the sea of"]
    body = {"prompt": prompts, **FIXED, **more, "return_token_ids": True}
    whole = ask(server, **body)["choices"]
    found: list[list[int]] = [[], []]
    for chunk in stream(server, "/v1/completions", **body):
        (choice,) = chunk["choices"]
        assert ("prompt_token_ids" in choice) == (not found[choice["index"]])
        found[choice["index"]] += choice["token_ids"]
    for one, prompt, ids in zip(whole, prompts, found):
        assert one["prompt_token_ids"] == TOK.encode(prompt) and one["token_ids"] == ids and len(ids) == 9
    assert "token_ids" not in ask(server, **(body | {"return_token_ids": None}))["choices"][0]


def test_token_ids_of_chats(server: Served) -> None:
    whole = chat(server, CHAT, n=2, temperature=1, seed=5, return_token_ids=True)
    prompt = ask(server, "/tokenize", messages=CHAT)["tokens"]
    assert whole["prompt_token_ids"] == prompt and len(whole["choices"][0]["token_ids"]) == 9
    chunks = stream(
        server, "/v1/chat/completions", messages=CHAT, **(FIXED | {"n": 2, "temperature": 1, "seed": 5}),
        return_token_ids=True, stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    for choice in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [i for one in mine for i in one.get("token_ids", [])] == choice["token_ids"]
    assert chunks[0]["usage"]["completion_tokens"] == 0 and chunks[-1]["usage"]["completion_tokens"] == 18


def test_log_probabilities_may_name_tokens_by_their_ids(server: Served) -> None:
    body = {"prompt": [20, 30], **FIXED, "logprobs": 2, "return_token_ids": True, "echo": True}
    by_id, plain = (ask(server, **body, return_tokens_as_token_ids=wish)["choices"][0] for wish in (True, False))
    assert by_id["logprobs"]["tokens"] == [f"token_id:{i}" for i in [20, 30, *by_id["token_ids"]]]
    assert by_id["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert all(name.startswith("token_id:") for row in by_id["logprobs"]["top_logprobs"][1:] for name in row)
    one = chat(server, CHAT, logprobs=True, top_logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True)
    content = one["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in content] == [f"token_id:{i}" for i in one["choices"][0]["token_ids"]]
    assert all(
        top["token"].startswith("token_id:") and top["bytes"] is not None
        for row in content
        for top in row["top_logprobs"]
    )


def test_bytes_of_log_probabilities_are_those_of_the_text_where_tokens_are_parts_of_characters(server: Served) -> None:
    words = "漢" + "".join(random.choice("é漢🏳️‍🌈שa ") for _ in range(8))
    ids = TOK.encode(words, add_special_tokens=False)
    got = chat(server, CHAT, logprobs=True, top_logprobs=2, structured_outputs={"choice": [words]}, max_tokens=200)
    (choice,) = got["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == words and len(content) >= len(ids)
    assert any("\ufffd" in row["token"] for row in content)
    assert bytes(byte for row in content for byte in row["bytes"]).removesuffix(b"</s>") == words.encode()


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_places_in_the_text(server: Served, as_ids: bool) -> None:
    words = f"a river of {random.randrange(1000)} boats"
    body = {"prompt": words, **FIXED, "logprobs": 0, "echo": True, "return_tokens_as_token_ids": as_ids}
    (whole,) = ask(server, **body)["choices"]
    offsets, ids = whole["logprobs"]["text_offset"], TOK.encode(words)
    assert ids[0] == TOK.bos_token_id and offsets[:2] == [0, 0]  # the text begins after what the tokenizer put there
    for token, place in list(zip(ids, offsets))[1:]:
        assert whole["text"].startswith(TOK.token_text(token), place)
    assert offsets[len(ids)] == len(words)
    chunks = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in stream(server, "/v1/completions", **body)]
    assert [place for chunk in chunks for place in chunk] == offsets


def test_requests_beyond_the_context_are_refused_whatever_their_size(server: Served) -> None:
    most = server.llm.config.max_model_len
    for tokens in (most, random.randrange(most, 10**5), 10**6, 10**9, 2**31 - 1):
        for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})):
            for name in ("max_tokens", "max_completion_tokens")[: 1 + ("chat" in path)]:
                error = ask(server, path, **prompt, **{name: tokens})
                assert (error["code"], error["param"]) == ("context_length_exceeded", name), (tokens, error)
                assert f": {name} ({tokens}) " in error["message"] and str(most) in error["message"]
    for length in (most, 10**5, 10**6):
        error = ask(server, prompt=[9] * length, max_tokens=1)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt"), (length, error)
        assert str(length) in error["message"]
    assert ask(server, prompt=[9], max_tokens=most - 1, ignore_eos=True)["usage"]["total_tokens"] == most


def test_bodies_as_some_shells_and_editors_write_them(server: Served) -> None:
    words = json.dumps({"prompt": "x", **FIXED})
    kind = {"Content-Type": "application/json"}

    def send(body: bytes, **headers: str) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", content=body, headers={**kind, **headers})

    usual = send(words.encode()).json()["choices"]
    assert send(words.encode("utf-8-sig")).json()["choices"] == usual
    assert send(words.encode(), **{"Content-Encoding": ""}).json()["choices"] == usual
    for code in ("utf-16", "utf-16-be"):
        reply = send(words.encode(code))
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_json"
    assert "UTF-8" in send(words.encode("utf-16")).json()["error"]["message"]


def test_calls_of_the_old_kind_that_ask_for_nothing(server: Served) -> None:
    usual = chat(server, CHAT)["choices"]
    for choice in ("none", "auto", None, ""):
        assert chat(server, CHAT, functions=[], function_call=choice)["choices"] == usual
    for more in ({"functions": [{"name": "f"}]}, {"function_call": {"name": "f"}}, {"function_call": "f"}):
        assert chat(server, CHAT, **more)["code"] == "unsupported_parameter"


@pytest.mark.parametrize("tier", [None, "auto", "flex"])
def test_fingerprint_and_service_tier(server: Served, tier: str | None) -> None:
    """As OpenAI's: every object has the model's fingerprint, and the tier if the request names one."""
    asked: dict[str, Any] = {"max_tokens": 2, **({} if tier is None else {"service_tier": tier})}
    found = [
        chat(server, CHAT, **asked), *stream(server, "/v1/chat/completions", messages=CHAT, **asked),
        ask(server, prompt="x", **asked), *stream(server, "/v1/completions", prompt="x", **asked),
    ]  # fmt: skip
    assert len(found) >= 5 and {one["system_fingerprint"] for one in found} == {"fp_" + "5e" * 5}
    assert {one.get("service_tier", "absent") for one in found} == {"absent" if tier is None else "default"}
