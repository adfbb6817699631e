"""Load shedding: refuses a request from its head alone, before its body is read, when none of its key is admitted.

There are two ways in. `answer` takes the bytes of a plain head and makes the whole answer, past the HTTP parser and all
middleware: most refusals under overload. `refuse` is the same check in the middleware, for heads that `answer` leaves
to the parser (chunked bodies, `Expect`, HTTP/1.0, heads in several pieces). Both check host, headers and key first.
"""

from __future__ import annotations

import http
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Scope

from llmc_runtime.server.errors import ApiError
from llmc_runtime.server.guard import REQUEST_ID
from llmc_runtime.server.logs import Record, Refusals, request_line
from llmc_runtime.server.rooted import tidy

if TYPE_CHECKING:
    from llmc_runtime.server.serving import Serving

PATHS = ("/v1/completions", "/v1/chat/completions")
MOST_SKIPPED = 64 << 10  # bytes of a refused body that are read and dropped, so that the connection can be kept
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIELDS = re.compile(rb"(?:%b:[ \t]*[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?[ \t]*\r\n)+" % _TOKEN)
_LENGTH = re.compile(rb"[0-9]{1,10}")
_LEFT = frozenset({b"transfer-encoding", b"expect", b"upgrade"})  # heads with these go to the parser
_ONCE = frozenset({b"content-length", b"host", b"authorization", b"connection", b"x-request-id"})


@dataclass(frozen=True)
class Answer:
    """A whole answer, the bytes of the request's body, and whether the connection ends with it."""

    data: bytes
    length: int
    closes: bool


class Shed:
    """Refuses requests to generate. `root_path`: as `application` has it. `check` is Guard's; without it `answer`
    leaves every request to the parser."""

    check: Callable[[Any, dict[bytes, bytes]], None] | None = None

    def __init__(self, serving: Serving, root_path: str = "", refusals: Refusals | None = None) -> None:
        self._serving, self.refusals = serving, refusals or Refusals(False)
        paths = [path + end for path in PATHS for end in ("", "/")]
        self._paths = frozenset(paths)
        spelled = [(f"POST {root}{path} HTTP/1.1".encode(), path) for root in {"", tidy(root_path)} for path in paths]
        self._lines = dict(spelled)

    @property
    def active(self) -> bool:
        """Whether a request could be refused now."""
        return self.check is not None and self._serving.busy

    def refuse(self, scope: Scope) -> None:
        """ApiError where the request, whose key was checked, is not admitted whatever its body says."""
        if scope["method"] != "POST" or scope["path"] not in self._paths:
            return
        try:
            self._serving.check_least(scope["llmc.key"])
        except ApiError as e:
            if any(name == b"expect" for name, _ in scope["headers"]):  # the client may send the body or not
                e.headers["Connection"] = "close"
            raise

    def answer(self, head: bytes, common: Iterable[tuple[bytes, bytes]]) -> Answer | None:
        """The refusal of the request with this head, which ends with an empty line; `common`: headers of every answer.
        None where the request may be admitted, or its head is not a plain one."""
        line, _, rest = head.partition(b"\r\n")
        path, fields = self._lines.get(line), rest[:-2]
        if path is None or self.check is None or _FIELDS.fullmatch(fields) is None:
            return None
        raw = [(name.lower(), value.strip(b" \t")) for name, _, value in map(_split, fields[:-2].split(b"\r\n"))]
        names = [name for name, _ in raw]
        headers = dict(reversed(raw))
        length = headers.get(b"content-length", b"0")
        if not _LEFT.isdisjoint(names) or sum(name in _ONCE for name in names) != len(_ONCE & headers.keys()):
            return None
        if _LENGTH.fullmatch(length) is None or b"host" not in headers:
            return None
        began = time.monotonic()
        scope: dict[str, Any] = {"method": "POST", "path": path, "raw_path": path.encode(), "headers": raw}
        try:
            self.check(scope, headers)
            self._serving.check_least(scope["llmc.key"])
            return None
        except ApiError as e:
            error = e
        return self._answer(error, path, headers, int(length), common, began)

    def _answer(
        self, error: ApiError, path: str, headers: dict[bytes, bytes], length: int,
        common: Iterable[tuple[bytes, bytes]], began: float,
    ) -> Answer:  # fmt: skip
        closes = headers.get(b"connection", b"").lower() not in (b"", b"keep-alive") or "Connection" in error.headers
        closes = closes or length > MOST_SKIPPED
        given = headers.get(b"x-request-id", b"")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        body = msgspec.json.encode(error.body())
        lines = [b"HTTP/1.1 %d %b" % (error.status, http.HTTPStatus(error.status).phrase.encode())]
        lines += [b"%b: %b" % one for one in common]
        lines += [f"{k.lower()}: {v}".encode() for k, v in error.headers.items() if k != "Connection"]
        lines += [b"content-length: %d\r\ncontent-type: application/json\r\nx-request-id: %b" % (len(body), name)]
        if closes:
            lines.append(b"connection: close")
        self._record(error, path, name.decode(), began)
        return Answer(b"\r\n".join((*lines, b"", body)), length, closes)

    def _record(self, error: ApiError, path: str, name: str, began: float) -> None:
        """The line in the log that the middleware would write."""
        if self.refusals.lines and (error.reason is None or self.refusals.take(error.reason)):
            record = Record(began=began)
            record.status, record.complete = error.status, True
            record.fail(error.code, error.reason)
            request_line({"path": path, "method": "POST", "llmc.id": name}, record)


def _split(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")
