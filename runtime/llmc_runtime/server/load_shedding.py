"""Load shedding: refuses a request after its head, before the body is read, if its key would not be admitted.

The decision is made for each request and depends only on counters. The response is built once per key and reason, and
reused for _FRESH_SECONDS.

There are two paths. `answer` takes the bytes of a plain head and returns the complete response, bypassing the HTTP
parser and all middleware; it handles most refusals under overload. `refuse` performs the same check in the middleware,
for heads that `answer` leaves to the parser (chunked bodies, `Expect`, HTTP/1.0, heads in several pieces). In both
paths, host, headers and key are checked first.

Health probes need no key, so anyone can send thousands of them at the same time, and the one of an orchestrator may be
the last. `probe` answers them in the same way at all times: for a plain head the parser takes 20 times as long.
"""

from __future__ import annotations

import http
import logging
import random
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Scope

from llmc_runtime.server.api_routes import POST_ROUTES
from llmc_runtime.server.http.auth import REQUEST_ID
from llmc_runtime.server.http.errors import MESSAGES_PATH, ApiError, body_of
from llmc_runtime.server.http.light_requests import Answer
from llmc_runtime.server.http.middleware import normalize_root
from llmc_runtime.server.http.probes import PROBES, READY
from llmc_runtime.server.http.read_turns import HeadTurns
from llmc_runtime.server.http.request_log import Record, RefusalLog, log, log_request

if TYPE_CHECKING:
    from llmc_runtime.server.serving import Serving

MAX_SKIPPED = 64 << 10  # maximum bytes of a refused body that are discarded in order to keep the connection
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIELDS = re.compile(rb"(?:%b:[ \t]*[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?[ \t]*\r\n)+" % _TOKEN)
_MAX_CACHED, _MAX_CACHED_HEAD = 256, 2 << 10  # number of cached heads, and bytes of one
_STATUS: Mapping[int, str] = MappingProxyType({s.value: f"HTTP/1.1 {s.value} {s.phrase}" for s in http.HTTPStatus})
_CLOSE = b"\r\nconnection: close"
_FRESH_SECONDS = 0.05  # maximum age of a reused refusal, and so of its message and Retry-After
_PASS_SECONDS = 0.005  # approximate time from the check in the middleware to the request's reservation
_LOST_SECONDS = 1.0  # maximum time from passing a request on to that check; its client may have left
_LENGTH = re.compile(rb"[0-9]{1,10}")
_PARSER_ONLY = frozenset({b"transfer-encoding", b"expect", b"upgrade"})  # heads with these fields go to the parser
Lane = tuple[str | None, bool]  # a key, and whether errors have the format of /v1/messages
_SINGLE = frozenset({b"content-length", b"host", b"authorization", b"x-api-key", b"connection", b"x-request-id"})


@dataclass(frozen=True)
class _Prepared:
    """A refusal, or the answer to a probe, as bytes before and after the id of the request: `head` and `body`.

    It is reused until `until` (time.monotonic) or until `common`, the headers of every response, change.
    """

    error: ApiError | None
    common: Sequence[tuple[bytes, bytes]]
    until: float
    head: bytes
    body: bytes
    closes: bool

    @classmethod
    def of(cls, error: ApiError, path: str, common: Sequence[tuple[bytes, bytes]], until: float = 0.0) -> _Prepared:
        """Return the response for an error of a request to this path."""
        body = msgspec.json.encode(body_of(error, path))
        lines = [_STATUS[error.status], *(f"{k.decode('latin-1')}: {v.decode('latin-1')}" for k, v in common)]
        lines += [f"{k.lower()}: {v}" for k, v in error.headers.items() if k != "Connection"]
        lines.append(f"content-length: {len(body)}\r\ncontent-type: application/json\r\nx-request-id: ")
        head = "\r\n".join(lines).encode("latin-1")
        return cls(error, common, until, head, b"\r\n\r\n" + body, "Connection" in error.headers)

    @classmethod
    def empty(cls, status: int, common: Sequence[tuple[bytes, bytes]], until: float) -> _Prepared:
        """Return a response without a body."""
        lines = [_STATUS[status], *(f"{k.decode('latin-1')}: {v.decode('latin-1')}" for k, v in common)]
        head = "\r\n".join([*lines, "content-length: 0", "x-request-id: "]).encode("latin-1")
        return cls(None, common, until, head, b"\r\n\r\n", False)


@dataclass
class _Request:
    """The content of a plain head. `key` is None until the key is checked."""

    path: str
    raw: list[tuple[bytes, bytes]]
    headers: dict[bytes, bytes]
    length: int
    key: str | None = None
    lane: Lane = (None, False)  # requests of a lane have the same refusal

    def __post_init__(self) -> None:
        request_id = self.headers.get(b"x-request-id", b"")
        self.id = request_id if REQUEST_ID.fullmatch(request_id) else None
        keeps_alive = self.headers.get(b"connection", b"").lower() in (b"", b"keep-alive")
        self.closes = not keeps_alive or self.length > MAX_SKIPPED
        self.of_messages_api = self.path.startswith(MESSAGES_PATH)


class LoadShedder:
    """Refuses requests for generation. `root_path` is as in `application`.

    `check` and `lane_of` are methods of Guard; without `check`, `answer` leaves all to the parser. `overloaded` returns
    whether requests are being refused at a high rate. Many requests are then handled in one batch, before any of them
    reserves a free slot; only as many as there are free slots are passed on to the parser.
    """

    check: Callable[[Any, dict[bytes, bytes]], None] | None = None
    lane_of: Callable[[bytes], str] = staticmethod(lambda head: "")
    waiting: Mapping[str, int] = MappingProxyType({})
    overloaded: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, serving: Serving, root_path: str = "", refusals: RefusalLog | None = None) -> None:
        self.serving, self.refusals = serving, refusals or RefusalLog(False)
        paths = [path + end for route in POST_ROUTES if route.generates for path in route.paths for end in ("", "/")]
        self._paths = frozenset(paths)
        roots = {"", normalize_root(root_path)}
        # Paths by the first lines of heads.
        self._lines = {f"POST {root}{path} HTTP/1.1".encode(): path for root in roots for path in paths}
        self._probe_lines = {
            f"GET {root}{path} HTTP/1.{minor}".encode(): path for root in roots for path in PROBES for minor in (0, 1)
        }
        self._probe_heads: dict[bytes, _Request] = {}  # parsed probes by head
        self.parsed_heads: dict[bytes, _Request] = {}  # parsed requests by head
        self._passed: deque[tuple[float, str]] = deque()  # times and keys of requests passed on to the parser
        self._checked: deque[tuple[float, str]] = deque()  # requests that the middleware has checked
        self._prepared: dict[tuple[str, str, bool], _Prepared] = {}  # by key, reason and the error's format

    @property
    def active(self) -> bool:
        """Whether a request might be refused now."""
        return self.check is not None and (self.serving.busy or bool(self.waiting))

    def attach(self, turns: HeadTurns) -> None:
        """Count the requests that wait for their turn as open requests, and refuse them if their key is refused."""
        turns.lane_of, turns.sheds, turns.refused = self.lane_of, self._may_refuse, self._take_passed
        turns.blocked = lambda key: self.serving.blocked_reason(key) is not None
        self.waiting = turns.waiting

    def _may_refuse(self, data: bytes) -> bool:
        """Return whether `data` begins with a whole request that `answer` may refuse.

        A request whose body has not arrived is left out: slow clients would use up the queue of their key.
        """
        end = data.find(b"\r\n\r\n") + 4
        request = self._request_of(data[:end]) if end >= 4 else None
        return request is not None and len(data) - end >= request.length

    def _take_passed(self, key: str) -> bool:
        """Forget the first request of this key that was passed on: it has reached the middleware, or is refused before.
        Return whether there was one.
        """
        for request in self._passed:
            if request[1] == key:
                self._passed.remove(request)
                return True
        return False

    def refuse(self, scope: Scope) -> None:
        """Raise ApiError if the request, whose key was checked, will be refused regardless of its body."""
        if scope["method"] != "POST" or scope["path"] not in self._paths:
            return
        try:
            if self._take_passed(scope["llmc.key"]):  # it reserves its capacity next
                self._checked.append((time.monotonic(), scope["llmc.key"]))
            self.serving.check_blocked(scope["llmc.key"])
        except ApiError as e:
            if any(name == b"expect" for name, _ in scope["headers"]):  # the client may or may not send the body
                e.headers["Connection"] = "close"
            raise

    def turn(self, common: Sequence[tuple[bytes, bytes]]) -> Turn:
        """Return `answer` for requests that are handled without returning to the event loop."""
        return Turn(self, common)

    def answer(
        self,
        head: bytes,
        common: Sequence[tuple[bytes, bytes]],
        refusals: dict[Lane, _Prepared] | None = None,
        last: bool = False,
    ) -> Answer | None:
        """Return the refusal of the request with this head, which ends with an empty line.

        `common` are the headers of every response. Returns None if the request may be admitted or its head is not
        plain. The response of a refused key is added to `refusals`. `last`: the connection is to be closed.
        """
        request = self._request_of(head)
        if request is None or self.check is None:
            return None
        now = time.monotonic()
        try:
            if request.key is None:
                self._check_head(head, request, "POST", self.parsed_heads)
        except ApiError as e:
            return self.response_to(_Prepared.of(e, request.path, common), request)
        key = request.key or ""
        reason = self.serving.blocked_reason(key) or self._crowded_reason(key, now)
        if reason is None:
            return None
        prepared = self._prepared.get((key, reason, request.of_messages_api))
        if prepared is not None and prepared.common is common and now < prepared.until:
            self.serving.admission.refused(reason)
        else:
            error = self.serving.blocked_error(reason, key)
            prepared = _Prepared.of(error, request.path, common, now + _FRESH_SECONDS)
            self._prepared[key, reason, request.of_messages_api] = prepared
        if refusals is not None:
            refusals[request.lane] = prepared
        return self.response_to(prepared, request, last)

    def probe(self, head: bytes, common: Sequence[tuple[bytes, bytes]]) -> Answer | None:
        """Return the answer to a health probe with this head; None for other requests, and heads that are not plain.

        None too if probes are logged. `common` are the headers of every response.
        """
        if not head.startswith(b"GET ") or self.check is None or log.isEnabledFor(logging.DEBUG):
            return None
        request = self._probe_heads.get(head) or self._parse_head(head, self._probe_lines)
        if request is None or b"origin" in request.headers:  # the middleware adds the headers of CORS
            return None
        try:
            if request.key is None:
                self._check_head(head, request, "GET", self._probe_heads)
        except ApiError as e:
            return self.response_to(_Prepared.of(e, request.path, common), request)._replace(is_probe=True)
        now, key = time.monotonic(), ("", request.path, False)
        prepared = self._prepared.get(key)
        if prepared is None or prepared.common is not common or now >= prepared.until:
            prepared = self._prepared[key] = self._probe_response(request.path, common, now + _FRESH_SECONDS)
        return self.response_to(prepared, request)._replace(is_probe=True)

    def _probe_response(self, path: str, common: Sequence[tuple[bytes, bytes]], until: float) -> _Prepared:
        try:
            if path == READY:
                self.serving.check_ready()
                self.serving.admission.check_wait()
            return _Prepared.empty(200 if path == READY or self.serving.is_alive else 503, common, until)
        except ApiError as e:
            return _Prepared.of(e, path, common, until)

    def _crowded_reason(self, key: str, now: float) -> str | None:
        """Return why a request is refused although a slot is free, or None, and record that it is passed on.

        Requests of the key that wait for their turn will use the free slots. Under overload, so will the other requests
        that were passed on before and have reserved nothing yet.
        """
        waiting = [key] * self.waiting.get(key, 0)
        if not self.overloaded():
            return self.serving.admission.crowded_reason(key, waiting) if waiting else None
        for requests, seconds in ((self._passed, _LOST_SECONDS), (self._checked, _PASS_SECONDS)):
            while requests and requests[0][0] <= now - seconds:
                requests.popleft()
        passed_keys = [passed_key for _, passed_key in (*self._passed, *self._checked)]
        reason = self.serving.admission.crowded_reason(key, [*waiting, *passed_keys])
        if reason is None:
            self._passed.append((now, key))
        return reason

    def _request_of(self, head: bytes) -> _Request | None:
        """Return the request with this head; None if it is not one for generation, or the head is not plain."""
        return self.parsed_heads.get(head) or self._parse_head(head, self._lines)

    def _parse_head(self, head: bytes, lines: Mapping[bytes, str]) -> _Request | None:
        """Parse a plain head that begins with one of `lines`; return None for any other."""
        line, _, rest = head.partition(b"\r\n")
        path, fields = lines.get(line), rest[:-2]
        if path is None or (fields and _FIELDS.fullmatch(fields) is None):
            return None
        parts = [part.partition(b":") for part in fields[:-2].split(b"\r\n")] if fields else []
        raw = [(name.lower(), value.strip(b" \t")) for name, _, value in parts]
        names = [name for name, _ in raw]
        headers = dict(reversed(raw))
        length = headers.get(b"content-length", b"0")
        repeats_single = sum(name in _SINGLE for name in names) != len(_SINGLE & headers.keys())
        if repeats_single or not _PARSER_ONLY.isdisjoint(names):
            return None
        old = line.endswith(b"1.0")
        if _LENGTH.fullmatch(length) is None or not (b"host" in headers or old):
            return None
        request = _Request(path, raw, headers, int(length))
        request.closes = request.closes or old
        return request

    def _check_head(self, head: bytes, request: _Request, method: str, cache: dict[bytes, _Request]) -> None:
        """Check host, headers and key. A head that passes is cached, as clients repeat the same head."""
        assert self.check is not None
        path, raw = request.path, request.raw
        scope: dict[str, Any] = {"method": method, "path": path, "raw_path": path.encode(), "headers": raw}
        self.check(scope, request.headers)
        request.key = scope["llmc.key"]
        request.lane = request.key, request.of_messages_api
        if len(head) <= _MAX_CACHED_HEAD:
            if len(cache) >= _MAX_CACHED:
                cache.clear()
            cache[head] = request

    def response_to(self, prepared: _Prepared, request: _Request, last: bool = False) -> Answer:
        """Return a refusal, or the answer to a probe, for this request."""
        closes = request.closes or prepared.closes or last
        name = request.id or b"%032x" % random.getrandbits(128)
        if self.refusals.lines and prepared.error is not None and request.path not in PROBES:
            self.record(prepared.error, request, name)
        data = b"%b%b%b%b" % (prepared.head, name, _CLOSE if closes else b"", prepared.body)
        return Answer(data, request.length, closes)

    def record(self, error: ApiError, request: _Request, name: bytes) -> None:
        """Write the log line that the middleware would write, for the request with the id `name`."""
        if error.reason is None or self.refusals.take(error.reason):
            record = Record(began=time.monotonic())
            record.status, record.complete = error.status, True
            record.fail(error.code, error.reason)
            key = self.serving.metrics.key_names.get(request.key or "")
            log_request({"path": request.path, "method": "POST", "llmc.id": name.decode()}, record, key)


class Turn:
    """Refuses requests that are handled without returning to the event loop (see light_requests.Refuse).

    Meanwhile nothing is admitted and nothing ends, so that a key which was refused is refused again.
    """

    __slots__ = ("_common", "_count", "_parsed", "_refusals", "_shedder")

    def __init__(self, shedder: LoadShedder, common: Sequence[tuple[bytes, bytes]]) -> None:
        self._shedder, self._common, self._parsed = shedder, common, shedder.parsed_heads
        self._count = shedder.serving.admission.refused
        self._refusals: dict[Lane, _Prepared] = {}

    def __call__(self, head: bytes, last: bool) -> Answer | None:
        """See LoadShedder.answer."""
        request = self._parsed.get(head)
        prepared = None if request is None else self._refusals.get(request.lane)
        if request is None or prepared is None:
            return self._shedder.answer(head, self._common, self._refusals, last)
        assert prepared.error is not None
        self._count(prepared.error.reason or "")
        return self._shedder.response_to(prepared, request, last)

    def repeated(self, data: bytes) -> bytes | None:
        """See light_requests.Refuse."""
        end = data.find(b"\r\n\r\n") + 4
        request = self._parsed.get(data[:end])
        if request is None or request.closes or len(data) - end != request.length:
            return None
        prepared = self._refusals.get(request.lane)
        if prepared is None or prepared.closes:
            return None
        error = prepared.error
        assert error is not None
        self._count(error.reason or "")
        name = request.id or b"%032x" % random.getrandbits(128)
        if self._shedder.refusals.lines:
            self._shedder.record(error, request, name)
        return prepared.head + name + prepared.body
