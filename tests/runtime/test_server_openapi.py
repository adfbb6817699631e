"""The OpenAPI description compared with the server's behaviour: headers of requests and responses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.api_routes import GET_ROUTES, POST_ROUTES
from llmc_runtime.server.app import Endpoints
from llmc_runtime.server.http.auth import Limits
from llmc_runtime.server.http.probes import PROBES
from llmc_runtime.server.openapi import description
from llmc_runtime.server.page import page_route
from llmc_runtime.server.text_pool import text_messages

from tests.runtime.served import served

HTTP_OWN = {
    "date",
    "server",
    "content-length",
    "content-type",
    "cache-control",
    "transfer-encoding",
    "x-accel-buffering",
}
KEY = "first-secret-key"
STORED = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items")


def resolved(document: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the description, with a reference resolved."""
    for name in one.get("$ref", "#").split("/")[1:]:
        document = document[name]
    return document if "$ref" in one else one


def test_references_lead_somewhere_and_headers_are_in_every_answer() -> None:
    document = description()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert "X-Request-Id" in [resolved(document, one)["name"] for one in operation["parameters"]]
            for status, answer in operation["responses"].items():
                assert answer["headers"], f"{method} {path} {status}"
                assert all(resolved(document, one)["schema"] for one in answer["headers"].values())


def test_every_header_of_an_answer_is_described() -> None:
    document = description()
    head = {"Authorization": f"Bearer {KEY}"}
    with served(keys=(KEY, "other-secret-key"), sequences=4, per_key=2, timeout=30, pace=0.01) as server:
        ask = {"prompt": "x", "max_tokens": 2}

        def check(path: str, status: int, answer: httpx.Response) -> None:
            assert answer.status_code == status, answer.text
            method = answer.request.method.lower()
            known = {name.lower() for name in document["paths"][path][method]["responses"][str(status)]["headers"]}
            assert answer.headers.keys() - HTTP_OWN <= known and "x-request-id" in answer.headers.keys() & known

        url = f"{server.url}/v1/completions"
        check("/v1/completions", 200, httpx.post(url, json=ask, headers=head))
        check("/v1/completions", 200, httpx.post(url, json={**ask, "stream": True}, headers=head))
        check("/v1/completions", 401, httpx.post(url, json=ask))
        check("/v1/completions", 429, httpx.post(url, json={**ask, "n": 3}, headers=head))
        late = {**head, "X-Request-Timeout": "1e-6"}
        long = {**ask, "max_tokens": 200, "ignore_eos": True}
        check("/v1/completions", 504, httpx.post(url, json=long, headers=late))
        server.serving.admission.draining = True
        check("/v1/completions", 503, httpx.post(url, json=ask, headers=head))
        check("/ready", 503, httpx.get(f"{server.url}/ready"))
        check("/", 401, httpx.get(server.url))


def test_the_range_of_a_timeout_is_the_servers() -> None:
    document = description()
    found = [resolved(document, one) for one in document["paths"]["/v1/completions"]["post"]["parameters"]]
    schema = next(one["schema"] for one in found if one["name"] == "X-Request-Timeout")
    with served() as server:
        for given, good in (("1000000", 1), ("30.5", 1), ("0", 0), ("1e7", 0), ("-1", 0), ("soon", 0)):
            try:
                described = schema["exclusiveMinimum"] < float(given) <= schema["maximum"]
            except ValueError:
                described = False
            assert described == bool(good)
            head = {"X-Request-Timeout": given}
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers=head)
            assert answer.status_code == (200 if good else 400)
            assert good or answer.json()["error"]["param"] == "X-Request-Timeout"


def test_every_route_is_declared_once() -> None:
    frames = [value for value in vars(text_messages).values() if isinstance(value, bytes) and len(value) == 1]
    kinds = [*(route.job for route in POST_ROUTES), *frames]
    assert len(set(kinds)) == len(kinds), "a text process could not tell two frames apart"
    for method, declared in (("POST", POST_ROUTES), ("GET", GET_ROUTES)):
        paths = [path for route in declared for path in route.paths]
        assert len(set(paths)) == len(paths)
        described = {path for path, methods in description()["paths"].items() if method.lower() in methods}
        assert described - set(paths) == (set() if method == "POST" else {*PROBES, *STORED}), method
        assert set(paths) <= described
    with served() as server:
        routes = [*Endpoints(server.serving, Limits()).routes(), page_route(needs_key=False)]
        served_at = {(method, route.path.rstrip("/")) for route in routes for method in route.methods or ()}
    document = {
        (method.upper(), path.replace("{name}", "{name:path}").rstrip("/"))
        for path, methods in description()["paths"].items() for method in methods
    }  # fmt: skip
    assert {(method, path) for method, path in served_at if method != "HEAD"} == document
