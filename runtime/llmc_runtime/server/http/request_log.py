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
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc_runtime.format.errors import printable
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.http.probes import PROBES
from llmc_runtime.server.http.replies import CLIENT_CLOSED_REQUEST, code_location

log = logging.getLogger("llmc.request")
_FREQUENT = frozenset({*PROBES, "/metrics"})  # logged at level debug and not traced
MAX_WAITING = 10_000  # lines
_TEMPORARY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
MAX_PATH, _MAX_TEXT, _MAX_LINE = 200, 2000, 8000  # characters


def configure_logging(level: str, form: str) -> None:
    """Send the logs of llmc, uvicorn, asyncio and OpenTelemetry to stderr; `form` is "text" or "json"."""
    handler = ThreadedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("llmc", "uvicorn", "asyncio", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "llmc" else "WARNING")
    logging.getLogger("opentelemetry.trace").setLevel("ERROR")  # its warnings quote the headers of requests


def startup_printer(form: str) -> Callable[[str], None]:
    """Return a function that prints startup messages to stderr, regardless of the log level.

    After `configure_logging`, the log's thread prints them: engines end and are replaced while stderr may not be read.
    """

    def say(line: str) -> None:
        text = JsonFormatter().format(_message(line)) if form == "json" else f"llmc: {line}"
        if (handler := _log_handler()) is not None:
            handler.put(text)
        elif sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # stderr closed or full: not an error of the server
                print(text, file=sys.stderr, flush=True)

    return say


@contextlib.contextmanager
def written_log() -> Iterator[None]:
    """Context manager that waits at its end until the lines of the log are written, for at most a second."""
    try:
        yield
    finally:
        if (handler := _log_handler()) is not None:
            handler.flush()


def _log_handler() -> ThreadedHandler | None:
    """Return the handler that `configure_logging` has installed; None before."""
    return next((h for h in logging.getLogger("llmc").handlers if isinstance(h, ThreadedHandler)), None)


def _message(line: str) -> logging.LogRecord:
    return logging.LogRecord("llmc", logging.INFO, "", 0, line, None, None)


class ThreadedHandler(logging.Handler):
    """A handler that writes to `stream` from its own thread, so that a blocked reader does not block the server.

    Of the lines that wait meanwhile, those beyond MAX_WAITING are dropped; their number is logged when writing
    succeeds again.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream, self._waiting = stream, queue.Queue[str](MAX_WAITING)
        self._lost = 0
        threading.Thread(target=self._run, name="llmc-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record."""
        self.put(self.format(record))

    def put(self, line: str) -> None:
        """Queue a line."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def flush(self) -> None:
        """Wait until all lines are written, for at most a second."""
        until = time.monotonic() + 1.0
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.002)

    def _run(self) -> None:
        while True:
            text = f"{self._waiting.get()}\n"
            lost, self._lost = self._lost, 0
            if lost:
                text += f"{self.format(_message(f'{lost} lines were lost, as stderr was not read'))}\n"
            try:
                if self._stream is not None:
                    self._stream.write(text)
                    self._stream.flush()
            except (OSError, ValueError) as e:
                if getattr(e, "errno", None) in _TEMPORARY:
                    self._lost += lost + 1
                else:
                    self._stream = None
            finally:
                self._waiting.task_done()


class TextFormatter(logging.Formatter):
    """One line of printable characters: TIME LEVEL LOGGER: MESSAGE NAME=VALUE ..."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        local_time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        message = f"{record.getMessage()}{_exception(record)}"[:_MAX_LINE]
        return printable(f"{local_time} {record.levelname} {record.name}: {message}{fields}")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC, ISO 8601), level, logger, message, and further fields by name."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        utc = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = {"time": utc, "level": record.levelname.lower(), "logger": record.name}
        message = (record.getMessage() + _exception(record))[:_MAX_LINE]
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
        self.params: SamplingParams | None = None  # sampling parameters of the first prompt
        self.times: tuple[float, float] | None = None  # seconds in the queue and from there to the first token

    @property
    def prompt_characters(self) -> int:
        """The number of characters of each prompt to log."""
        return _MAX_TEXT if self._texts else 0

    def begin(
        self, name: str, prompts: Sequence[Prompt], request_id: str, params: SamplingParams | None = None
    ) -> None:
        """Record that the response `name` is computed for these prompts; `params` are those of the first one."""
        self._id, self._prompt = name, sum(len(prompt.ids) for prompt in prompts)
        self.params = params
        if self._texts:
            for prompt in prompts:
                text = prompt.text if prompt.text is not None else str(list(prompt.ids[:_MAX_TEXT]))
                fields = {"request_id": request_id, "id": name, "prompt": text[:_MAX_TEXT]}
                log.info("prompt", extra={"fields": fields})

    def take(self, output: RequestOutput) -> int:
        """Record an update of the response. Return the number of its tokens."""
        new = 0
        for completion in output.outputs:
            new += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._reasons[completion.finish_reason] = None
        if new and self._first is None:
            self._first, self.times = time.monotonic(), output.times
        self._output += new
        self._cached[output.request_id] = output.num_cached_tokens
        return new

    def fail(self, code: str | None, refusal: str | None = None) -> None:
        """Record an error code. `refusal` is the reason if the request was not admitted."""
        self._error, self.refusal = self._error or code or "error", refusal

    def fields(self) -> dict[str, Any]:
        """Return the fields known so far."""
        status = self.status if self.complete else CLIENT_CLOSED_REQUEST
        fields: dict[str, Any] = {"status": status, "duration_ms": _milliseconds(time.monotonic() - self._began)}
        if self._id is not None:
            fields |= {
                "id": self._id, "prompt_tokens": self._prompt, "cached_tokens": sum(self._cached.values()),
                "output_tokens": self._output, "finish_reason": ",".join(self._reasons) or None,
            }  # fmt: skip
        if self._first is not None:
            fields["ttft_ms"] = _milliseconds(self._first - self._began)
        return fields | {"error": self._error}


class RefusalLog:
    """Limits the log lines of refused requests.

    The first LINES of a second are logged individually, and the others in one line at its end, counted by reason.
    Without `lines`, none is logged.
    """

    LINES = 10

    def __init__(self, lines: bool = True) -> None:
        self.lines, self._lines_left = lines, self.LINES
        self._unlogged: Counter[str] = Counter()
        self._second_timer: asyncio.TimerHandle | None = None

    def take(self, reason: str) -> bool:
        """Count a refusal and return whether to log it individually. Must be called in an event loop."""
        if not self.lines:
            return False
        if self._second_timer is None:
            self._second_timer = asyncio.get_running_loop().call_later(1.0, self._end)
        if self._lines_left:
            self._lines_left -= 1
            return True
        self._unlogged[reason] += 1
        return False

    def _end(self) -> None:
        self._second_timer, self._lines_left = None, self.LINES
        if self._unlogged:
            fields = {"requests": self._unlogged.total(), **self._unlogged}
            log.warning("more requests were refused", extra={"fields": fields})
            self._unlogged = Counter()


class Tracer(Protocol):
    """Exports a span per request (see tracing.RequestTracer)."""

    def begin(self, scope: Mapping[str, Any]) -> Any:
        """Return the span of a request that begins."""

    def response_header(self, span: Any) -> tuple[bytes, bytes]:
        """Return the response header that names the span."""

    def end(self, span: Any, scope: Mapping[str, Any], record: Record) -> None:
        """End the span of a request that has ended."""


class RequestLog:
    """The outermost ASGI middleware: writes a line, and exports a span, for each request that has ended.

    Without `lines` there are no lines, and without `tracer` no spans.
    """

    def __init__(
        self,
        app: ASGIApp,
        texts: bool = False,
        refusals: RefusalLog | None = None,
        key_names: Mapping[str, str] = MappingProxyType({}),
        lines: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        self._app, self._texts, self._refusals = app, texts, refusals or RefusalLog()
        self._key_names, self._lines, self._tracer = key_names, lines, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and log it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        tracer = None if _is_frequent(scope) else self._tracer
        span = tracer and tracer.begin(scope)
        record = scope["llmc.record"] = Record(self._texts)

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if tracer and span:
                    message["headers"] = [*message.get("headers", ()), tracer.response_header(span)]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.complete = True

        try:
            await self._app(scope, receive, recorded)
        finally:
            if tracer and span:
                tracer.end(span, scope, record)
            if self._lines and (record.refusal is None or self._refusals.take(record.refusal)):
                log_request(scope, record, self._key_names.get(scope.get("llmc.key", "")))


def log_request(scope: Mapping[str, Any], record: Record, key: str | None = None) -> None:
    """Write the log line of a request that has ended, with the name of its API key."""
    path = scope["path"]
    fields = {"request_id": scope.get("llmc.id"), "method": scope["method"][:16], "route": path[:MAX_PATH]}
    fields["key"] = key
    level = logging.DEBUG if _is_frequent(scope) else logging.INFO
    log.log(level, "request", extra={"fields": {**fields, **record.fields()}})


def _is_frequent(scope: Mapping[str, Any]) -> bool:
    return scope["path"] in _FREQUENT and scope["method"] == "GET"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value is not None}


def _exception(record: logging.LogRecord) -> str:
    """Return types and code locations of an exception, without its messages, which may quote a request."""
    return code_location(record.exc_info[1]) if record.exc_info and record.exc_info[1] is not None else ""


def _quoted(value: Any) -> str:
    plain = isinstance(value, int | float) or (value.isprintable() and not set(value) & set(' "=\\'))
    return str(value) if plain else json.dumps(value)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
