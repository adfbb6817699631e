"""/v1/responses/input_tokens: the counts are those of the responses, also of long and stored inputs; bad requests."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
import httpx

from tests.runtime.parrots import Servers, say
from tests.runtime.served import served

TOOL = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}
INPUTS: list[dict[str, Any]] = [
    {"input": "Hello, you"},
    {"input": [say("Hello"), {"role": "assistant", "content": "Yes?"}, say("Go on")], "instructions": "Be brief."},
    {"input": "x", "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    {"input": "x", "reasoning": {"effort": "none"}, "text": {"format": {"type": "json_object"}}},
    {"input": "x", "chat_template_kwargs": {"enable_thinking": False}, "truncation": "disabled"},
    {"input": "word " * 30_000},
]


def post(servers: Servers, body: dict[str, Any], path: str = "/input_tokens") -> httpx.Response:
    return httpx.post(f"{servers[0]}/think/v1/responses{path}", json={"model": "parrot", **body}, timeout=60)


def count(servers: Servers, body: dict[str, Any]) -> int:
    reply = post(servers, body)
    assert reply.status_code == 200 and reply.json().keys() == {"object", "input_tokens"}, reply.text
    assert reply.json()["object"] == "response.input_tokens"
    found: int = reply.json()["input_tokens"]
    return found


@pytest.mark.parametrize("body", INPUTS)
def test_the_count_is_that_of_the_response(servers: Servers, body: dict[str, Any]) -> None:
    response = post(servers, {**body, "max_output_tokens": 1}, "").json()
    if "usage" in response:
        assert count(servers, body) == response["usage"]["input_tokens"]
    else:  # longer than the context: it is counted all the same
        assert response["error"]["code"] == "context_length_exceeded" and count(servers, body) > 30_000
    assert count(servers, {**body, "unknown": "x" * 40_000}) == count(servers, body)


@pytest.mark.parametrize("pad", ["", "x" * 40_000])
def test_a_stored_response_is_continued(servers: Servers, pad: str) -> None:
    first = post(servers, {"input": "Hello", "store": True, "max_output_tokens": 20}, "").json()
    item = first["output"][0]["id"]
    for more in (
        {"previous_response_id": first["id"], "input": "And now?"},
        {"previous_response_id": first["id"]},
        {"input": [{"type": "item_reference", "id": item}, say("And now?")]},
    ):
        response = post(servers, {**more, "max_output_tokens": 1, "store": False}, "").json()
        assert count(servers, {**more, "unknown": pad}) == response["usage"]["input_tokens"], response


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "input"),
    ({"input": "x", "conversation": "conv_1"}, 400, "conversation"),
    ({"input": "x", "truncation": "auto"}, 400, "truncation"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"input": [{"type": "message", "role": "nobody", "content": "x"}]}, 400, "input"),
    ({"input": "x", "previous_response_id": "resp_none"}, 404, "previous_response_id"),
    ({"input": [{"type": "item_reference", "id": "msg_none"}]}, 404, "input"),
    ({"input": "x", "model": "none"}, 404, "model"),
    ({"input": 7}, 400, "input"),
    ({"prompt": {"id": "p"}}, 400, "prompt"),
]


@pytest.mark.parametrize("pad", ["", "x" * 40_000])
@pytest.mark.parametrize(("body", "status", "param"), REFUSED)
def test_bad_requests(servers: Servers, body: dict[str, Any], status: int, param: str, pad: str) -> None:
    reply = post(servers, {**body, "unknown": pad})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_methods_keys_and_the_description() -> None:
    key = "first-secret-key"
    with served(keys=(key,)) as server:
        url, head = f"{server.url}/v1/responses/input_tokens", {"Authorization": f"Bearer {key}"}
        assert httpx.post(url, json={"input": "x"}).status_code == 401
        assert httpx.get(url, headers=head).status_code == 404  # no stored response has this id
        described = httpx.get(f"{server.url}/openapi.json", headers=head).json()
        schema = described["paths"]["/v1/responses/input_tokens"]["post"]["requestBody"]
        assert "InputTokensRequest" in str(schema)
        fields = described["components"]["schemas"]["InputTokensRequest"]["properties"]
        assert "input" in fields and "max_output_tokens" not in fields
