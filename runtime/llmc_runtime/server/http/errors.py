"""API errors: OpenAI's error object, an HTTP status, and the translation of the runtime's errors.

Messages about a client's own input are passed on. For internal errors, clients get a fixed text and never an
exception's message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec

from llmc_runtime.format.errors import LlmcError

INVALID, SERVER = "invalid_request_error", "server_error"
UNSUPPORTED = "unsupported_parameter"  # the code of errors that name a field as the request does
OF_ENGINE = frozenset({"E107", "E114", "E119", "E143", "E608", "E660", "E661", "E662", "E663", "E664"})
_TOO_LONG = frozenset({"E602", "E603", "E604"})
# The field that an error is about; None: the prompt's.
_FIELDS: Mapping[str, str | None] = MappingProxyType(
    dict.fromkeys(("E605", "E606", "E620", "E621", "E625"))
    | dict.fromkeys(("E630", "E631", "E632", "E633", "E634"), "messages")
    | dict.fromkeys(("E650", "E651", "E652"), "structured_outputs")
    | {"E610": "bad_words"}
)
MESSAGES_PATH = "/v1/messages"  # its errors, and those of paths below, have the format of its API
# The types of errors in the format of the Messages API, by status.
_MESSAGES_API_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
        429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
    }
)  # fmt: skip


class ApiError(Exception):
    """An HTTP status and the four fields of OpenAI's error object; `headers` are sent with the response.

    `reason` is the reason why a request was not admitted (one of admission.REASONS), or None for other errors.
    """

    reason: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = "invalid_value",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return {"error": {message, type, param, code}}."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def messages_api_body(error: ApiError) -> dict[str, Any]:
    """Return an error in the format of the Messages API: {"type": "error", "error": {type, message}}."""
    kind = _MESSAGES_API_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def body_of(error: ApiError, path: str) -> dict[str, Any]:
    """Return the body of an error in the format that clients of this path expect."""
    return messages_api_body(error) if path.startswith(MESSAGES_PATH) else error.body()


def to_api_error(error: LlmcError, prompt_param: str) -> ApiError:
    """Convert an error of the runtime for the client; `prompt_param` is the field that contained the prompt."""
    message = f"{error.cause}. Try: {error.remedy}" if error.remedy else error.cause
    if error.code == "E601":
        return ApiError(message, param=error.param or None)
    if error.code in _TOO_LONG:
        param = "max_tokens" if error.code == "E603" else prompt_param
        message = f"this model's maximum context length is exceeded: {message}"  # clients search for this phrase
        return ApiError(message, param=param, code="context_length_exceeded")
    if error.code == "E616":
        return ApiError(message, param="model", code="unsupported_task")
    if error.code in _FIELDS:
        return ApiError(message, param=_FIELDS[error.code] or prompt_param)
    if error.code == "E653":
        return unavailable(error.cause)
    if error.code in OF_ENGINE:
        return unavailable("the engine is not running", "engine_unavailable")
    return internal()


def internal() -> ApiError:
    """Return 500 for a bug of the server, with a fixed message."""
    return ApiError("the server failed on this request", status=500, kind=SERVER, code="internal_error")


def unsupported(message: str, param: str) -> ApiError:
    """Return 400 for a field or a value that is not supported; its message names the field as the request does."""
    return ApiError(message, param=param, code=UNSUPPORTED)


def late(seconds: float) -> ApiError:
    """Return 504 for a timeout; a retry would not have more time."""
    cause = f"the request did not end within its time limit of {seconds:g} s; request fewer tokens, or allow more time"
    return ApiError(cause, status=504, kind=SERVER, code="deadline_exceeded", headers={"x-should-retry": "false"})


def unavailable(message: str, code: str = "server_overloaded", seconds: float = 1.0) -> ApiError:
    """Return 503 with the time after which to retry."""
    return ApiError(message, status=503, kind=SERVER, code=code, headers=retry_after(seconds))


def retry_after(seconds: float) -> dict[str, str]:
    """Return both headers that clients honor: whole seconds and milliseconds."""
    return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(round(seconds * 1000))}


def not_found(message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    """Return 404."""
    return ApiError(message, status=404, param=param, code=code)


@contextmanager
def renamed(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Context manager that renames the fields in ApiErrors: `names` are pairs of a regular expression and its
    replacement, which apply at the start of a message and after colons."""
    try:
        yield
    except ApiError as e:
        for old, new in names if e.code != UNSUPPORTED else ():
            e.message = re.sub(rf"(?:^|(?<=: ))(?:{old})(?!\w)", new, e.message)
            e.param = e.param and re.sub(rf"^(?:{old})(?!\w)", new, e.param)
        raise


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
