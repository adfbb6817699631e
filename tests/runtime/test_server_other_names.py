"""Fields of vLLM and OpenAI that the server does not have: refused with a remedy, or without an effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.api_routes import OTHER_FAMILIES, OTHER_POSTS, OTHER_ROUTES

from tests.runtime.served import Served, served
from tests.vllm_names import served_routes

PROMPT = {"prompt": "The kernel", "temperature": 0, "max_tokens": 4}
CHAT = [{"role": "user", "content": "x"}]
GUIDED = {
    "guided_json": {"type": "object"}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: /a/",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one
        one.rest()


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("watermarking", True), ("ec_transfer_params", {"a": 1}), ("return_prompt_text", True),
        ("kv_transfer_params", {"a": 1}), ("use_beam_search", True),
    ),
)  # fmt: skip
def test_fields_that_would_change_the_answer_are_refused(server: Served, name: str, value: Any) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", json={**PROMPT, name: value})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    plain = httpx.post(f"{server.url}/v1/completions", json={**PROMPT, name: None})
    assert plain.status_code == 200


OF_ROUTES = {
    "/v1/completions": (PROMPT, {"messages": [{}], "max_completion_tokens": 3, "top_logprobs": 2}),
    "/v1/chat/completions": ({"messages": CHAT}, {"prompt": "x"}),
    "/v1/responses": ({"input": "x"}, {**GUIDED, "return_token_ids": True, "continue_final_message": True}),
    "/v1/messages": ({"messages": CHAT, "max_tokens": 3}, {**GUIDED, "prompt": "x", "return_token_ids": True}),
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, (_, fields) in OF_ROUTES.items() for name in fields])
def test_fields_of_other_routes_are_refused(server: Served, path: str, name: str) -> None:
    body, fields = OF_ROUTES[path]
    reply = httpx.post(f"{server.url}{path}", json={**body, name: fields[name]})
    assert reply.status_code == 400 and f"{name} is not supported: use " in reply.json()["error"]["message"]


def unknown_fields(server: Served) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("llmc:request_unknown_fields_total")).split()[-1])


def test_fields_without_an_effect_are_known(server: Served) -> None:
    before = unknown_fields(server)
    text = httpx.post(f"{server.url}/v1/completions", json=PROMPT).json()["choices"][0]["text"]
    fields = {
        "length_penalty": 2.0, "stream_interval": 4, "session_id": "a", "mm_processor_kwargs": {"a": 1},
        "media_io_kwargs": {}, "prediction": {"type": "content", "content": "x"}, "request_id": "a",
    }  # fmt: skip
    for name, value in fields.items():
        reply = httpx.post(f"{server.url}/v1/completions", json={**PROMPT, name: value})
        assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == text, name
    assert unknown_fields(server) == before
    httpx.post(f"{server.url}/v1/completions", json={**PROMPT, "nobody_knows": 1})
    assert unknown_fields(server) == before + 1


@pytest.mark.parametrize("path", sorted(OTHER_ROUTES))
def test_other_routes_say_what_to_use(server: Served, path: str) -> None:
    for call in (httpx.get, httpx.post):
        reply = call(server.url + path)
        assert reply.status_code == 404 and reply.json()["error"]["message"].endswith(OTHER_ROUTES[path])


@pytest.mark.parametrize("path", sorted(OTHER_POSTS))
def test_routes_with_the_path_of_a_stored_response_say_what_to_use(server: Served, path: str) -> None:
    for route in (path, f"{path}/"):
        reply = httpx.post(server.url + route, json={"input": "x"})
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == f"there is no such route: {OTHER_POSTS[path]}"
    assert httpx.put(server.url + path, json={}).status_code == 405


@pytest.mark.parametrize("path", sorted(OTHER_FAMILIES))
def test_other_families_say_what_to_use(server: Served, path: str) -> None:
    for route in (path, f"{path}/", f"{path}/a/b"):
        message = httpx.get(server.url + route).json()["error"]["message"]
        assert message == f"there is no such route: {OTHER_FAMILIES[path]}"
    assert httpx.get(f"{server.url}{path}x").json()["error"]["message"] == "there is no such route"


@pytest.mark.parametrize(
    ("path", "says"),
    (
        ("/api/v1/chat/completions", "use /v1/chat/completions; to serve under a path in front"),
        ("/v1/tokenize", "use /tokenize, without /v1"),
        ("/chat/completions", "use /v1/chat/completions; "), ("/models", "use /v1/models; "),
        ("/v1/v1/chat/completions", "use /v1/chat/completions; the base URL has /v1 twice"),
        ("/v1/v1/messages/", "use /v1/messages; "),
    ),
)  # fmt: skip
def test_a_wrong_base_url_is_named(server: Served, path: str, says: str) -> None:
    reply = httpx.post(server.url + path, json=PROMPT)
    assert reply.status_code == 404 and says in str(reply.json()["error"]["message"])


@pytest.mark.parametrize("path", ("/v1", "/v1/", "/nothing", "/v1/v1", "//", "/v1/completions/x"))
def test_other_paths_are_just_unknown(server: Served, path: str) -> None:
    reply = httpx.get(server.url + path)
    assert reply.status_code == 404 and reply.json()["error"]["message"] == "there is no such route"


def test_no_other_route_is_served() -> None:
    assert not OTHER_ROUTES.keys() & served_routes()
