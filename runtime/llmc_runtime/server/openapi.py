"""The OpenAPI description of the server, derived from the types of its requests."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from llmc_runtime import __version__
from llmc_runtime.server.api_routes import GET_ROUTES, POST_ROUTES, STORED, GetRoute, PostRoute
from llmc_runtime.server.http.errors import MESSAGES_PATH
from llmc_runtime.server.http.probes import PROBES
from llmc_runtime.server.requests.parse import check_lengths
from llmc_runtime.server.responses_routes import DEFAULT_LISTED, MAX_LISTED
from llmc_runtime.server.serving import MAX_SECONDS

_ERRORS = (400, 401, 404, 408, 413, 414, 415, 421, 429, 431, 500, 503, 504)
_REF = "#/components/schemas/{name}"
_HEADERS = ("X-Request-Id", "Retry-After", "retry-after-ms", "x-should-retry", "WWW-Authenticate")
_HEADERS_OF = MappingProxyType({401: (0, 4), 429: (0, 1, 2), 500: (0, 3), 503: (0, 1, 2), 504: (0, 3)})  # by status


def prepare_checks() -> None:
    """Read and cache the limits of all types of requests: the first request of a type would take 2 to 8 ms longer."""
    for route in POST_ROUTES:
        check_lengths({}, route.request)


def description() -> dict[str, Any]:
    """Return the document, in OpenAPI 3.1."""
    _, schemas = msgspec.json.schema_components([route.request for route in POST_ROUTES], ref_template=_REF)
    paths: dict[str, Any] = {path: {"post": _post(route)} for route in POST_ROUTES for path in route.paths}
    paths |= {path: {"get": _get(route)} for route in GET_ROUTES for path in route.paths}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    model = paths["/v1/models/{name}"]["get"]
    model["parameters"], model["responses"]["404"] = [name], _responses("", (404,))["404"]
    paths["/"]["get"]["security"] = [{}, {"bearer": []}, {"basic": []}]
    for path, summary in PROBES.items():
        responses = _responses(summary, (400, 421, 431, 503))
        paths[path] = {"get": {"summary": summary, "security": [], "responses": responses}}
    paths |= _of_stored()
    for methods in paths.values():  # every route accepts a request id
        for operation in methods.values():
            operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/X-Request-Id"})
    schemes: dict[str, Any] = {scheme: {"type": "http", "scheme": scheme} for scheme in ("bearer", "basic")}
    schemes["x-api-key"] = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmc-serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _error(), "NamedError": _named_error()}, "securitySchemes": schemes,
            "parameters": _request_headers(), "headers": _response_headers(),
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }  # fmt: skip


def _of_stored() -> dict[str, Any]:
    """Return the paths of stored responses."""
    path, text = STORED, {"type": "string"}
    methods: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        (path, "get", "A stored response", {"stream": {"enum": ["false"]}}),
        (path, "delete", "Delete a stored response", {}),
        (f"{path}/input_items", "get", "The input of a stored response", {
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
            "order": {"enum": ["asc", "desc"], "default": "desc"}, "after": text,
        }),
    )  # fmt: skip
    paths: dict[str, Any] = {}
    for where, method, summary, query in methods:
        responses = _responses(summary, (400, 401, 404, 421, 431))
        responses["200"]["content"] = {"application/json": {"schema": {"type": "object"}}}
        named = {"name": "response_id", "in": "path", "required": True, "schema": text}
        parameters = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        operation = {"summary": summary, "responses": responses, "parameters": [named, *parameters]}
        paths.setdefault(where, {})[method] = operation
    return paths


def _post(route: PostRoute) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(name=route.request.__name__)}}}
    error = "NamedError" if route.paths[0].startswith(MESSAGES_PATH) else "Error"
    responses = _responses(route.summary, _ERRORS, error)
    responses["200"]["content"] = {"application/json": {"schema": {"type": "object"}}}
    if route.generates:
        responses["200"]["content"]["text/event-stream"] = {}
    operation: dict[str, Any] = {
        "summary": route.summary, "requestBody": {"required": True, "content": content}, "responses": responses,
    }  # fmt: skip
    if route.id_prefix:  # it runs the model
        operation["parameters"] = [{"$ref": "#/components/parameters/X-Request-Timeout"}]
    return operation


def _get(route: GetRoute) -> dict[str, Any]:
    responses = _responses(route.summary, (400, 401, 421, 431))
    responses["200"]["content"] = {route.media: {"schema": {"type": route.kind}}}
    return {"summary": route.summary, "responses": responses}


def _responses(summary: str, errors: tuple[int, ...], error: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(name=error)}}}
    failed = {
        str(status): {"description": "An error", "content": content, "headers": _headers(status)} for status in errors
    }
    return {"200": {"description": summary, "headers": _headers(200)}, **failed}


def _headers(status: int) -> dict[str, Any]:
    return {_HEADERS[i]: {"$ref": f"#/components/headers/{_HEADERS[i]}"} for i in _HEADERS_OF.get(status, (0,))}


def _request_headers() -> dict[str, Any]:
    """Return the request headers that have a meaning beyond HTTP's own."""
    headers = {
        "X-Request-Id": (
            "Names the request in the log and the response, if it has 1 to 128 of A-Z a-z 0-9 _ . : -",
            {"type": "string"},
        ),
        "X-Request-Timeout": (
            "Maximum time of the request in seconds, with waiting; the server may have a lower limit",
            {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
        ),
    }
    return {
        name: {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, (text, schema) in headers.items()
    }


def _response_headers() -> dict[str, Any]:
    headers = {
        "X-Request-Id": ("string", "The request's own id, or a generated one"),
        "Retry-After": ("integer", "Seconds after which to retry"),
        "retry-after-ms": ("integer", "The same in milliseconds"),
        "x-should-retry": ("string", "false: a retry would fail in the same way"),
        "WWW-Authenticate": ("string", "How to send an API key"),
    }
    return {name: {"description": text, "schema": {"type": kind}} for name, (kind, text) in headers.items()}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _error() -> dict[str, Any]:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    return _object(error=_object(message=text, type=text, param=maybe, code=maybe))


def _named_error() -> dict[str, Any]:
    """Return the schema of an error in the format of the Messages API."""
    text = {"type": "string"}
    return _object(type={"const": "error"}, error=_object(type=text, message=text))
