"""The OpenAPI description of the server, from the types of its requests; it serves nothing."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from llmc_runtime import __version__
from llmc_runtime.server.requests.request_fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from llmc_runtime.server.serving import MAX_SECONDS

_POSTS = (
    ("/v1/completions", CompletionRequest, "Continue prompts", True),
    ("/v1/chat/completions", ChatRequest, "Answer a conversation", True),
    ("/tokenize", TokenizeRequest, "Token ids of a text or a conversation", False),
    ("/detokenize", DetokenizeRequest, "The text of token ids", False),
)
_GETS = (
    ("/v1/models", "The served models"),
    ("/v1/models/{name}", "One served model"),
    ("/tokenizer_info", "The tokens that have names"),
    ("/version", "The server's version"),
    ("/metrics", "Figures for Prometheus"),
    ("/openapi.json", "This description"),
    ("/", "A chat and figures, for a browser"),
)
_OPEN = (("/health", "Whether the engine lives"), ("/ready", "Whether a request would be admitted"))
_ERRORS = (400, 401, 404, 408, 413, 415, 421, 429, 431, 500, 503, 504)
_REF = "#/components/schemas/{name}"
_HEADERS = ("X-Request-Id", "Retry-After", "retry-after-ms", "x-should-retry", "WWW-Authenticate")
_WITH = MappingProxyType({401: (0, 4), 429: (0, 1, 2), 500: (0, 3), 503: (0, 1, 2), 504: (0, 3)})  # of _HEADERS


def description() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    kinds = [kind for _, kind, _, _ in _POSTS]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, Any] = {}
    for path, kind, words, streams in _POSTS:
        paths[path] = {"post": _post(kind.__name__, words, streams)}
        if streams:
            paths[path]["post"]["parameters"] = [{"$ref": "#/components/parameters/X-Request-Timeout"}]
    for path, words in _GETS:
        paths[path] = {"get": _get(path, words)}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    one = paths["/v1/models/{name}"]["get"]
    one["parameters"], one["responses"]["404"] = [name], _responses("", (404,))["404"]
    paths["/"]["get"]["security"] = [{}, {"bearer": []}, {"basic": []}]
    for path, words in _OPEN:
        paths[path] = {"get": {"summary": words, "security": [], "responses": _responses(words, (400, 421, 431, 503))}}
    told = _responses("", (400, 401, 404, 421, 431))
    del told["200"]
    paths["/v1/embeddings"] = {"post": {"summary": "Not served: 404", "responses": told}}
    for methods in paths.values():  # every route takes one
        for operation in methods.values():
            operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/X-Request-Id"})
    bearer = {scheme: {"type": "http", "scheme": scheme} for scheme in ("bearer", "basic")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc-serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _error()}, "securitySchemes": bearer,
            "parameters": _request_headers(), "headers": _response_headers(),
        },
        "security": [{}, {"bearer": []}],
    }  # fmt: skip


def _post(name: str, words: str, streams: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
    responses = _responses(words, _ERRORS)
    responses["200"]["content"] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        responses["200"]["content"]["text/event-stream"] = {}
    return {"summary": words, "requestBody": {"required": True, "content": content}, "responses": responses}


def _get(path: str, words: str) -> dict[str, Any]:
    text = {"/metrics": "text/plain", "/": "text/html"}.get(path)
    responses = _responses(words, (400, 401, 421, 431))
    responses["200"]["content"] = {text or "application/json": {"schema": {"type": "string" if text else "object"}}}
    return {"summary": words, "responses": responses}


def _responses(words: str, errors: tuple[int, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    told = {
        str(status): {"description": "An error", "content": content, "headers": _headers(status)} for status in errors
    }
    return {"200": {"description": words, "headers": _headers(200)}, **told}


def _headers(status: int) -> dict[str, Any]:
    return {_HEADERS[i]: {"$ref": f"#/components/headers/{_HEADERS[i]}"} for i in _WITH.get(status, (0,))}


def _request_headers() -> dict[str, Any]:
    """Of requests, those that mean something beside HTTP's own."""
    words = {
        "X-Request-Id": "Names the request in the log and in the answer, where it has 1 to 128 of A-Z a-z 0-9 _ . : -",
        "X-Request-Timeout": "Seconds that the request may take, waiting included; the server may have a lower limit",
    }
    schemas = {
        "X-Request-Id": {"type": "string"},
        "X-Request-Timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
    }
    return {
        name: {"name": name, "in": "header", "required": False, "description": told, "schema": schemas[name]}
        for name, told in words.items()
    }


def _response_headers() -> dict[str, Any]:
    words = {
        "X-Request-Id": ("string", "The request's own, or one that was made"),
        "Retry-After": ("integer", "Seconds after which another try makes sense"),
        "retry-after-ms": ("integer", "The same in milliseconds"),
        "x-should-retry": ("string", "false: another try would end the same"),
        "WWW-Authenticate": ("string", "How to bring a key"),
    }
    return {name: {"description": told, "schema": {"type": kind}} for name, (kind, told) in words.items()}


def _error() -> dict[str, Any]:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    inner = {"message": text, "type": text, "param": maybe, "code": maybe}
    error = {"type": "object", "properties": inner, "required": list(inner)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
