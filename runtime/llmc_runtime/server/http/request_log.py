"""The server's log on stderr, one line per event, as text or JSON. Keys are never logged, prompts only on request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc_runtime.api.llm import to_stderr as say_on_stderr
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.server.http.replies import place

log = logging.getLogger("llmc.request")
_QUIET = frozenset({"/health", "/ready", "/metrics"})  # logged at level debug: frequent probes and scrapes
MOST_WAITING = 10_000  # lines
_FOR_NOW = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})  # may be temporary, such as a full disk
_GONE = 499  # the client disconnected before the response ended
_MOST_PATH, _MOST_TEXT, _MOST_LINE = 200, 2000, 8000  # characters


def to_stderr(level: str, form: str) -> None:
    """Send the logs of llmc, uvicorn and asyncio to stderr; `form` is "text" or "json"."""
    handler = Lines(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Text())
    for name in ("llmc", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "llmc" else "WARNING")


def teller(form: str) -> Callable[[str], None]:
    """Return a function that prints startup messages to stderr, regardless of the log level."""
    if form != "json":
        return say_on_stderr

    def say(line: str) -> None:
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # stderr closed or full: not an error of the server
                print(Json().format(_told(line)), file=sys.stderr, flush=True)

    return say


def _told(line: str) -> logging.LogRecord:
    return logging.LogRecord("llmc", logging.INFO, "", 0, line, None, None)


class Lines(logging.Handler):
    """A handler that writes to `stream` from its own thread, so that a blocked reader does not block the server.

    Of the lines that wait meanwhile, those beyond MOST_WAITING are dropped; their number is logged when writing
    succeeds again.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream, self._waiting = stream, queue.Queue[str](MOST_WAITING)
        self._lost = 0
        threading.Thread(target=self._write, name="llmc-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line."""
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1

    def flush(self) -> None:
        """Wait until all lines are written, for at most a second."""
        until = time.monotonic() + 1.0
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.002)

    def _write(self) -> None:
        while True:
            line = self._waiting.get()
            lost, self._lost = self._lost, 0
            try:
                if self._stream is not None:
                    self._stream.write(f"{line}\n")
                    if lost:
                        self._stream.write(f"{self.format(_told(f'{lost} lines were lost, as nobody read them'))}\n")
                    self._stream.flush()
            except (OSError, ValueError) as e:
                if getattr(e, "errno", None) in _FOR_NOW:
                    self._lost += lost + 1
                else:  # permanent
                    self._stream = None
            finally:
                self._waiting.task_done()


class Text(logging.Formatter):
    """One line of printable characters: TIME LEVEL LOGGER: MESSAGE NAME=VALUE ..."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        fields = "".join(f" {name}={_spelled(value)}" for name, value in _fields(record).items())
        message = f"{record.getMessage()}{_exception(record)}"[:_MOST_LINE]
        return _printable(f"{at} {record.levelname} {record.name}: {message}{fields}")


class Json(logging.Formatter):
    """One JSON object per line: time (UTC, ISO 8601), level, logger, message, and further fields by name."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        message = (record.getMessage() + _exception(record))[:_MOST_LINE]
        return json.dumps({**head, "message": message, **_fields(record)})


class Record:
    """The log record of one HTTP request, filled in as it is processed. With `texts`, prompts are logged as well."""

    def __init__(self, texts: bool = False, began: float | None = None) -> None:
        self._texts, self._began = texts, time.monotonic() if began is None else began
        self.status, self.complete = 0, False
        self._id: str | None = None
        self._first: float | None = None
        self._prompt = self._output = 0
        self._cached: dict[str, int] = {}
        self._reasons: dict[str, None] = {}
        self._error: str | None = None
        self.refusal: str | None = None  # why the request was not admitted

    @property
    def prompt_characters(self) -> int:
        """The number of characters of each prompt to log."""
        return _MOST_TEXT if self._texts else 0

    def begin(self, name: str, prompts: Sequence[Prompt], request_id: str) -> None:
        """Record that the response `name` is generated for these prompts."""
        self._id, self._prompt = name, sum(len(prompt.ids) for prompt in prompts)
        if self._texts:
            for prompt in prompts:
                text = prompt.text if prompt.text is not None else str(prompt.ids[:_MOST_TEXT])
                fields = {"request_id": request_id, "id": name, "prompt": text[:_MOST_TEXT]}
                log.info("prompt", extra={"fields": fields})

    def take(self, output: RequestOutput) -> None:
        """Record an update of the response."""
        new = sum(len(one.token_ids) for one in output.outputs)
        if new and self._first is None:
            self._first = time.monotonic()
        self._output += new
        self._cached[output.request_id] = output.num_cached_tokens
        for one in output.outputs:
            if one.finish_reason is not None:
                self._reasons[one.finish_reason] = None

    def fail(self, code: str | None, refusal: str | None = None) -> None:
        """Record an error code. `refusal` is the reason if the request was not admitted."""
        self._error, self.refusal = self._error or code or "error", refusal

    def fields(self) -> dict[str, Any]:
        """Return the fields known so far."""
        told: dict[str, Any] = {"status": self.status if self.complete else _GONE}
        told["duration_ms"] = _ms(time.monotonic() - self._began)
        if self._id is not None:
            told |= {"id": self._id, "prompt_tokens": self._prompt, "cached_tokens": sum(self._cached.values())}
            told["output_tokens"] = self._output
            told["finish_reason"] = ",".join(self._reasons) or None
        if self._first is not None:
            told["ttft_ms"] = _ms(self._first - self._began)
        return told | {"error": self._error}


class Refusals:
    """Limits the log lines of refused requests.

    The first LINES of a second are logged individually, and the others in one line at its end, counted by reason.
    Without `lines`, none is logged.
    """

    LINES = 10

    def __init__(self, lines: bool = True) -> None:
        self.lines, self._left = lines, self.LINES
        self._more: Counter[str] = Counter()
        self._second: asyncio.TimerHandle | None = None

    def take(self, reason: str) -> bool:
        """Count a refusal and return whether to log it individually. Must be called in an event loop."""
        if not self.lines:
            return False
        if self._second is None:
            self._second = asyncio.get_running_loop().call_later(1.0, self._end)
        if self._left:
            self._left -= 1
            return True
        self._more[reason] += 1
        return False

    def _end(self) -> None:
        self._second, self._left = None, self.LINES
        if self._more:
            fields = {"requests": self._more.total(), **self._more}
            log.warning("more requests were refused", extra={"fields": fields})
            self._more = Counter()


class Logged:
    """The outermost ASGI middleware: logs a line for each request that has ended."""

    def __init__(self, app: ASGIApp, texts: bool = False, refusals: Refusals | None = None) -> None:
        self._app, self._texts, self._refusals = app, texts, refusals or Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and log it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope["llmc.record"] = Record(self._texts)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.complete = True

        try:
            await self._app(scope, receive, noted)
        finally:
            self._write(scope, record)

    def _write(self, scope: Scope, record: Record) -> None:
        if record.refusal is not None and not self._refusals.take(record.refusal):
            return
        request_line(scope, record)


def request_line(scope: Mapping[str, Any], record: Record) -> None:
    """Write the log line of a request that has ended."""
    path = scope["path"]
    fields = {"request_id": scope.get("llmc.id"), "method": scope["method"][:16], "route": path[:_MOST_PATH]}
    quiet = path in _QUIET and scope["method"] == "GET"
    log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": {**fields, **record.fields()}})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "fields", {})
    return {name: value for name, value in found.items() if value is not None}


def _exception(record: logging.LogRecord) -> str:
    """Return types and places of an exception, without its messages, which may quote a request."""
    return place(record.exc_info[1]) if record.exc_info and record.exc_info[1] is not None else ""


def _spelled(value: Any) -> str:
    plain = isinstance(value, int | float) or (value.isprintable() and not set(value) & set(' "=\\'))
    return str(value) if plain else json.dumps(value)


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
