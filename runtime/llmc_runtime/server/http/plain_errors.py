"""Errors that are sent without the HTTP parser, as complete responses."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from llmc_runtime.server.http.errors import ApiError, unavailable


def closing_response(error: ApiError) -> bytes:
    """Return a complete response that closes the connection."""
    body, phrase = msgspec.json.encode(error.body()), HTTPStatus(error.status).phrase
    head = f"HTTP/1.1 {error.status} {phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def too_many_connections() -> ApiError:
    """Return the error of a connection over the limit."""
    return unavailable("the server has too many connections", "too_many_connections")


def head_timeout(seconds: float) -> bytes:
    """Return the response to a client that sent no head in time."""
    cause = f"the head of the request did not arrive within {seconds:g} s"
    return closing_response(ApiError(cause, status=408, code="timeout"))
