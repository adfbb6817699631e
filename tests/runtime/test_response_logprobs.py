"""Log-probabilities of /v1/responses: those of the message's tokens, whole and streamed, with openai-python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
import httpx  # noqa: E402
from openai.types.responses import Response, response_output_text, response_text_delta_event  # noqa: E402

from tests.runtime.families import DUMPED, FAMILIES, WRITTEN  # noqa: E402
from tests.runtime.parrots import Servers, client, say  # noqa: E402

INCLUDE = ["message.output_text.logprobs"]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
SAID = ("Hello, wörld! 🌍 日本", "<tag> & a < b", " spaced  out \n\n twice", "x")


def ask(servers: Servers, name: str) -> Any:
    return client(servers, name).responses


def post(servers: Servers, body: dict[str, Any], name: str = "bare") -> httpx.Response:
    whole = {"temperature": 0, "input": [say(SAID[0])], "include": INCLUDE, **body}
    return httpx.post(f"{servers[0]}/{name}/v1/responses", json=whole, timeout=60)


def text_of(logprobs: Sequence[Any]) -> str:
    return b"".join(bytes(one.bytes) for one in logprobs).decode()


def text_of_chat(logprobs: Sequence[dict[str, Any]]) -> str:
    return b"".join(bytes(one["bytes"]) for one in logprobs).decode()


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_a_message_without_its_reasoning_and_calls(servers: Servers, name: str) -> None:
    calls, thought = WRITTEN[name]
    for said in SAID:
        written = thought + said + "\n" + calls.replace("%s", DUMPED)
        given = {
            "model": "parrot", "input": [say(written)], "tools": TOOLS, "include": INCLUDE, "top_logprobs": 3,
            "temperature": 0, "store": False,
        }  # fmt: skip
        whole = ask(servers, name).create(**given)
        (message,) = [item for item in whole.output if item.type == "message"]
        (part,) = message.content
        assert whole.top_logprobs == 3 and isinstance(whole, Response)
        assert all(isinstance(one, response_output_text.Logprob) for one in part.logprobs)
        covered = text_of(part.logprobs)
        assert part.text in covered and len(covered) <= len(part.text) + 8, (part.text, covered)  # tokens of its ends
        for one in part.logprobs:
            ranked = [other.logprob for other in one.top_logprobs]
            assert len(ranked) == 3 and ranked == sorted(ranked, reverse=True) and one.logprob <= ranked[0] + 1e-6
        streamed: list[Any] = []
        with ask(servers, name).stream(**given) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    assert all(isinstance(one, response_text_delta_event.Logprob) for one in event.logprobs)
                    streamed += event.logprobs
                elif event.type == "response.output_text.done":
                    assert [one.to_dict() for one in event.logprobs] == [one.to_dict() for one in streamed]
            final = stream.get_final_response()
        (again,) = [item for item in final.output if item.type == "message"]
        assert again.content[0].logprobs == part.logprobs
        assert [one.token for one in streamed] == [one.token for one in part.logprobs]
        assert [[other.logprob for other in one.top_logprobs] for one in streamed] == [
            [other.logprob for other in one.top_logprobs] for one in part.logprobs
        ]


def test_they_are_those_of_a_chat(servers: Servers) -> None:
    for said in SAID:
        chat = {"messages": [say(said)], "logprobs": True, "top_logprobs": 20, "temperature": 0}
        reply = httpx.post(f"{servers[0]}/bare/v1/chat/completions", json=chat, timeout=60).json()
        wanted = reply["choices"][0]["logprobs"]["content"]
        (item,) = post(servers, {"input": [say(said)], "top_logprobs": 20}).json()["output"]
        found = item["content"][0]["logprobs"]
        assert len(found) > 0 and found == wanted[: len(found)]
        assert len(wanted) - len(found) <= 1 and text_of_chat(found) == said  # a chat also has the end of the turn
        alone = post(servers, {"input": [say(said)]}).json()["output"][0]["content"][0]["logprobs"]
        assert [one | {"top_logprobs": []} for one in found] == alone  # the default of top_logprobs is 0


def test_without_include_there_are_none(servers: Servers) -> None:
    body = post(servers, {"include": None}).json()
    assert body["output"][0]["content"][0]["logprobs"] == [] and body["top_logprobs"] == 0
    blocks = post(servers, {"include": [], "stream": True}).text.strip().split("\n\n")
    found = [json.loads(block.partition("data: ")[2]) for block in blocks]
    assert all(one.get("logprobs", []) == [] for one in found) and len(found) > 6
    refused = post(servers, {"include": [], "top_logprobs": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_logprobs"
    for count in (21, -1):
        refused = post(servers, {"top_logprobs": count})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_logprobs"


def test_events_keep_their_names_and_a_stored_response_has_none(servers: Servers) -> None:
    reply = post(servers, {"stream": True, "top_logprobs": 1, "input": [say("word " * 40)]})
    last = {}
    for block in reply.text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        last = json.loads(data.removeprefix("data: "))
        assert name == f"event: {last['type']}"
    response = last["response"]
    assert last["type"] == "response.completed" and len(response["output"][0]["content"][0]["logprobs"]) >= 40
    stored = httpx.get(f"{servers[0]}/bare/v1/responses/{response['id']}").json()
    assert stored["output"][0]["content"][0].pop("logprobs") == []
    del response["output"][0]["content"][0]["logprobs"]
    assert stored == response
    continued = {"input": [say("x")], "previous_response_id": response["id"]}
    assert post(servers, continued).json()["status"] == "completed"


def test_the_size_of_a_stream_counts_what_it_repeats(servers: Servers) -> None:
    serving = servers[1]["bare"]
    body = {"top_logprobs": 20, "input": [say("word " * 60)], "max_output_tokens": 64}
    limit, serving.max_answer = serving.max_answer, 64 * 22 * 105 * 2
    try:
        assert post(servers, body).status_code == 200
        refused = post(servers, {**body, "stream": True})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "answer_too_large"
        del body["max_output_tokens"]  # the limit shortens the output
        fitted = post(servers, {**body, "stream": True})
        assert fitted.status_code == 200 and len(fitted.content) <= serving.max_answer
    finally:
        serving.max_answer = limit
