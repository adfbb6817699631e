"""Requests of web pages from other origins: allowed origins, preflights, readable headers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.config import options_of, read

from tests.runtime.served import served

KEY = "first-secret-key"
PAGE = "https://page.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def headers(reply: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control")}


def test_no_origin_is_allowed_by_default() -> None:
    with served() as server:
        reply = httpx.get(f"{server.url}/v1/models", headers={"Origin": PAGE})
        assert reply.status_code == 200 and not headers(reply)
        reply = httpx.options(f"{server.url}/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert reply.status_code == 405 and not headers(reply)


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_pages_of_allowed_origins_ask_first_without_a_key(origins: tuple[str, ...]) -> None:
    with served(keys=(KEY,), origins=origins) as server:
        url = f"{server.url}/v1/completions"
        ask = httpx.options(url, headers={"Origin": PAGE, **PREFLIGHT})
        allowed = headers(ask)
        assert ask.status_code == 200 and allowed["access-control-allow-origin"] in (PAGE, "*")
        assert "POST" in allowed["access-control-allow-methods"]
        assert "authorization" in allowed["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in allowed
        for key, status in ((KEY, 200), ("another", 401)):
            head = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            reply = httpx.post(url, json={"prompt": "x", "max_tokens": 1}, headers=head)
            assert reply.status_code == status
            assert headers(reply)["access-control-allow-origin"] in (PAGE, "*")
            assert "x-request-id" in headers(reply)["access-control-expose-headers"]


def test_a_stream_is_readable_by_an_allowed_page_and_by_no_other() -> None:
    with served(origins=(PAGE,)) as server:
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        for origin, seen in ((PAGE, PAGE), ("https://other.example", None), ("null", None)):
            reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Origin": origin})
            assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
            assert headers(reply).get("access-control-allow-origin") == seen
            ask = httpx.options(f"{server.url}/v1/completions", headers={"Origin": origin, **PREFLIGHT})
            assert (ask.status_code == 200) == (seen is not None)


def origins_of(*words: str) -> Any:
    return options_of(read(["m", "--allowed-origins", *words]).args, {}, None).origins


@pytest.mark.parametrize("words", [("https://a.example", "http://localhost:3000"),
                                   ('["https://a.example", "http://localhost:3000"]',)])  # fmt: skip
def test_origins_are_given_one_by_one_or_as_vllm_takes_them(words: tuple[str, ...]) -> None:
    assert origins_of(*words) == ("https://a.example", "http://localhost:3000")


@pytest.mark.parametrize("value", ["a.example", "https://a.example/path", '["a"', "[1]", "https://", '{"a": 1}'])
def test_values_that_are_no_origins_are_refused(value: str) -> None:
    with pytest.raises(LlmcError, match="origin") as error:
        origins_of(value)
    assert error.value.code == "E648"


def test_pages_may_delete_stored_responses_and_send_the_other_key_header() -> None:
    with served(origins=[PAGE], keys=[KEY], store=1 << 20) as server:
        asked = {"Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": "x-api-key"}
        reply = httpx.options(f"{server.url}/v1/responses/x", headers={"Origin": PAGE, **asked})
        assert reply.status_code == 200 and "DELETE" in headers(reply)["access-control-allow-methods"]
        assert "x-api-key" in headers(reply)["access-control-allow-headers"].lower()
        known = {"Origin": PAGE, "x-api-key": KEY}
        name = httpx.post(f"{server.url}/v1/responses", json={"input": "x"}, headers=known).json()["id"]
        reply = httpx.delete(f"{server.url}/v1/responses/{name}", headers=known)
        assert reply.json() == {"id": name, "object": "response", "deleted": True}
        assert headers(reply)["access-control-allow-origin"] == PAGE
