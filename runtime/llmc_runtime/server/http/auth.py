"""Checks on the raw request before routing: API keys, hosts, headers and the size of bodies.

If API keys are set, every path requires one except those in KEY_SCOPES. These are compared with the raw bytes of the
path, so that a path that a router normalizes is never an exception. A browser sends the key for PAGE with HTTP Basic,
which is accepted for no other path: credentials that a browser sends automatically give access only to the page, which
contains no data and changes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc_runtime.server.http.body_budget import STEP_BYTES, STEP_SECONDS, Body, BodyBudget
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.probes import PROBES
from llmc_runtime.server.http.replies import as_error, record_error

PAGE = "/"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")  # 0.0.0.0 also reaches the local machine from itself
REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_READS = frozenset({"GET", "HEAD"})
_AUTHORIZATION = re.compile(rb"\r\n(authorization|x-api-key):([^\r\n]*)", re.IGNORECASE)
_SINGLE = frozenset({b"authorization", b"x-api-key", b"content-type", b"content-encoding", b"x-request-timeout"})
_API_KEY = b"x-api-key"  # the Messages API's header for the key, which is read if there is no Authorization
_METRICS = ("/metrics", "/metrics/")
_OUTSIDE_V1 = ("/", *(path + end for path in ("/version", "/openapi.json", "/tokenizer_info") for end in ("", "/")))
_TOKENIZING = ("/tokenize", "/tokenize/", "/detokenize", "/detokenize/")


def _open(*reads: str, posts: Sequence[str] = ()) -> Mapping[str, frozenset[str]]:
    return MappingProxyType(dict.fromkeys(reads, _READS) | dict.fromkeys(posts, frozenset({"POST"})))


# The paths and methods that need no API key, by --api-key-scope. Paths under /admin/ are never included.
KEY_SCOPES: Mapping[str, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "all": _open(*PROBES),
        "all-but-metrics": _open(*PROBES, *_METRICS),
        "v1": _open(*PROBES, *_METRICS, *_OUTSIDE_V1, posts=_TOKENIZING),
    }
)


@dataclass(frozen=True)
class Limits:
    """Limits on one request: bytes and counts, and the seconds in which its body must arrive."""

    body: int = 8 << 20
    headers: int = 32 << 10
    header_count: int = 100
    body_seconds: float = 30.0


def key_id(key: str) -> str:
    """Return an identifier of a key, which does not reveal it."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


class Keys:
    """API keys, stored as digests with a secret of this process. Without keys, every request is accepted.

    A key is looked up by its digest, so that thousands of keys cost a request no time. Without the secret, the time of
    a look-up reveals nothing about keys.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._names = {self._digest(key.encode()): key_id(key) for key in keys}

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, authorization: bytes) -> str | None:
        """Return an identifier, which does not reveal the key, of an Authorization header's key; None if unknown."""
        scheme, _, token = authorization.partition(b" ")
        name = self._names.get(self._digest(token.strip()))
        return name if scheme.lower() == b"bearer" else None

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()


class Guard:
    """ASGI middleware that checks requests. It sets `scope["llmc.key"]`, `scope["llmc.id"]` and `scope["llmc.admin"]`.

    The keys in `admin` give access to paths under /admin/ only, and no other key does. `key_scope` is a name of
    KEY_SCOPES. `refuse` raises ApiError for a request that is refused regardless of its body, which is then not read.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        limits: Limits,
        hosts: Sequence[str] | None,
        admin: Keys | None = None,
        key_scope: str = "all",
        refuse: Callable[[Scope], None] = lambda scope: None,
    ) -> None:
        self._app, self._keys, self._limits, self._refuse = app, keys, limits, refuse
        self._admin = admin or Keys(())
        self._open = KEY_SCOPES[key_scope]
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request and pass it on. WebSockets are closed."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        headers = dict(reversed(scope["headers"]))  # the first of several headers with a name is used
        request_id = headers.get(b"x-request-id", b"")
        scope["llmc.id"] = request_id.decode() if REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex

        async def with_request_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", scope["llmc.id"].encode())]
            await send(message)

        try:
            self.check(scope, headers)
            self._refuse(scope)
        except ApiError as e:
            record_error(scope, e)
            return await as_error(e, scope["path"])(scope, receive, with_request_id)
        return await self._app(scope, receive, with_request_id)

    def lane_of(self, head: bytes) -> str:
        """Return an identifier of the valid API key in the beginning of a head; "" if there is none."""
        if not len(self._keys):
            return ""
        pairs = _AUTHORIZATION.findall(head.partition(b"\r\n\r\n")[0])
        fields = {name.lower(): value.strip(b" \t") for name, value in reversed(pairs)}
        return self._keys.name_of(_authorization(fields)) or ""

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Check the host, headers and key, and set `llmc.key` and `llmc.admin` in the scope. Raises ApiError."""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        self._check_form(scope, headers, path)
        scope["llmc.key"], scope["llmc.admin"] = "", False
        authorization = _authorization(headers)
        if len(self._admin) and scope["path"].startswith("/admin/"):  # the path that the router sees
            self._check_admin(scope, authorization)
            return
        if not len(self._keys) or scope["method"] in self._open.get(path, ()):
            return
        page = path == PAGE and scope["method"] in _READS
        name = self._keys.name_of(_basic_to_bearer(authorization) if page else authorization)
        if name is None:
            raise _unknown_key('Basic realm="llmc: the password is an API key"' if page else "Bearer")
        scope["llmc.key"] = name

    def _check_form(self, scope: Scope, headers: dict[bytes, bytes], path: str) -> None:
        """Check the size and the form of the head, and the host. Raises ApiError."""
        raw_headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in raw_headers)
        if len(raw_headers) > self._limits.header_count or size > self._limits.headers:
            cause = f"send at most {self._limits.header_count} headers of {self._limits.headers} bytes together"
            raise ApiError(cause, status=431, code="headers_too_large")
        if not scope.get("http_version", "1.1").startswith("1."):
            close = {"Connection": "close"}
            raise ApiError("only HTTP/1.0 and HTTP/1.1 are supported", status=505, code="http_version", headers=close)
        if len(headers) < len(raw_headers):
            _check_single(raw_headers)
        if b"transfer-encoding" in headers and b"content-length" in headers:  # against request smuggling
            close = {"Connection": "close"}
            raise ApiError("send Content-Length or Transfer-Encoding, not both", code="invalid_http", headers=close)
        if not path.startswith("/") and path != "*":  # see NormalizeTarget, which rewrites the permitted forms
            cause = "the request target has to be a path, or a URL of this server without user information"
            raise ApiError(f"{cause}, whose host is that of the Host header", code="invalid_target")
        if b"host" in headers:  # absent in health checks of old load balancers, never in requests of browsers
            self._check_host(headers[b"host"].decode("latin-1"))

    def _check_admin(self, scope: Scope, authorization: bytes) -> None:
        admin, ordinary = self._admin.name_of(authorization), self._keys.name_of(authorization)
        if admin is None and ordinary is not None:
            cause = "this API key does not grant access to /admin/"
            raise ApiError(cause, status=403, code="admin_key_needed")
        if admin is None:
            raise _unknown_key()
        scope["llmc.admin"] = True

    def _check_host(self, host: str) -> None:
        """Check the Host header, against DNS rebinding: a page can point its name here, but cannot fake the header."""
        match = _HOST.fullmatch(host.lower())
        if match is None:
            raise ApiError("the Host header is not of the form NAME or NAME:PORT", code="invalid_host")
        if self._hosts is not None and match[1] not in self._hosts:
            cause = "the name in the Host header is not allowed; the server's --allowed-hosts adds names"
            raise ApiError(cause, status=421, code="invalid_host")


def _check_single(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ApiError 400 for two values of a header of which a proxy might read the other one."""
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _SINGLE and seen.setdefault(name, value) != value:
            close = {"Connection": "close"}
            raise ApiError(f"send one {name.decode()} header", code="invalid_http", headers=close)


def _authorization(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the Authorization header, or one with the key that is in a header of its own."""
    bearer = b"Bearer " + headers[_API_KEY] if _API_KEY in headers else b""
    return headers.get(b"authorization") or bearer


def _unknown_key(challenge: str = "Bearer") -> ApiError:
    # litellm recognizes a wrong key by the first words of the message, which are OpenAI's.
    cause = "Incorrect API key provided, or none: a valid one is needed, as in Authorization: Bearer KEY"
    return ApiError(cause, status=401, code="invalid_api_key", headers={"WWW-Authenticate": challenge})


def _basic_to_bearer(authorization: bytes) -> bytes:
    """Convert HTTP Basic credentials to a Bearer header with the password as the key. Other headers are unchanged."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def read_body(request: Request, limits: Limits, budget: BodyBudget) -> Body:
    """Read the body of a POST. Raises ApiError 408, 413, 415, or 503 if the budget has no room for it."""
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        raise ApiError(
            "Content-Encoding is not supported: send the body unencoded", status=415, code="unsupported_media_type"
        )
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError("Content-Type has to be application/json", status=415, code="unsupported_media_type")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and int(length[:19]) > limits.body:
        raise _too_large(limits)
    body, began = Body(budget, request.scope["llmc.key"]), time.monotonic()
    try:
        async with body.evictable(limits.body_seconds):
            async for part in request.stream():
                body.take(part)
                if len(body) > limits.body:
                    raise _too_large(limits)
    except BaseException as e:
        body.drop()
        if not isinstance(e, TimeoutError):
            raise
        cause = f"the body did not arrive within {limits.body_seconds:.0f} s"
        if time.monotonic() - began < limits.body_seconds - 1:
            cause = f"the body arrived slower than {STEP_BYTES / STEP_SECONDS:.0f} bytes per second"
        raise ApiError(cause, status=408, code="timeout", headers={"Connection": "close"}) from None
    return body


def _too_large(limits: Limits) -> ApiError:
    headers = {"Connection": "close"}
    cause = f"the body is larger than {limits.body} bytes (--max-body-bytes); send less in one request"
    return ApiError(cause, status=413, code="body_too_large", headers=headers)
