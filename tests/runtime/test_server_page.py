"""The page at /: its content security policy, a key by HTTP Basic, and the ranges of the OpenAPI description."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.openapi import description

from tests.runtime.served import served

KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served(keys=[KEY]) as server, httpx.Client(base_url=server.url, timeout=30) as one:
        yield one


def basic(word: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(word.encode()).decode()}


def test_the_policy_names_what_stands_in_the_document(client: httpx.Client) -> None:
    reply = client.get("/", headers=basic(f"anybody:{KEY}"))
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    for tag, name in (("style", "style-src"), ("script type=module", "script-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", reply.text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["connect-src"] == "'self'"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\bstyle=|\bon\w+=|innerHTML|localStorage", reply.text)
    assert 'data-key="needed"' in reply.text and KEY not in reply.text


def test_a_password_opens_only_the_page(client: httpx.Client) -> None:
    assert client.get("/", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    assert client.head("/", headers=basic(f":{KEY}")).status_code == 200
    for headers in ({}, basic("anybody:wrong"), basic(KEY), {"Authorization": "Basic §"}, {"Authorization": "Basic"}):
        raw = {name: value.encode() for name, value in headers.items()}
        reply = client.get("/", headers=raw)
        assert reply.status_code == 401 and reply.headers["www-authenticate"].startswith("Basic ")
    for method, path in (("GET", "/v1/models"), ("GET", "/%2f"), ("POST", "/"), ("GET", "/metrics")):
        reply = client.request(method, path, headers=basic(f"anybody:{KEY}"))
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"


def limits() -> Iterator[tuple[str, Any, Any]]:
    """(field, the last value that is allowed, the next one), by the description, for numbers of a completion."""
    for name, field in description()["components"]["schemas"]["CompletionRequest"]["properties"].items():
        for variant in field.get("anyOf", ()):
            step = 1 if variant.get("type") == "integer" else 0.5
            unchecked = ("max_tokens", "top_logprobs", "max_completion_tokens", "min_tokens")
            if "minimum" in variant and name not in unchecked:
                yield name, variant["minimum"], variant["minimum"] - step
                yield name, variant["maximum"], variant["maximum"] + step


def test_the_description_tells_the_ranges_that_hold(client: httpx.Client) -> None:
    found = list(limits())
    assert len(found) >= 18
    for name, good, bad in found:
        body = {"prompt": "x", "max_tokens": 1, "temperature": 1.0, "n": 1}
        for value, status in ((good, 200), (bad, 400)):
            reply = client.post(
                "/v1/completions", json=body | {name: value}, headers={"Authorization": f"Bearer {KEY}"}
            )
            assert reply.status_code == status, (name, value, reply.text)
            assert status == 200 or reply.json()["error"]["param"] == name
