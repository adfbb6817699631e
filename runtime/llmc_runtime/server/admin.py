"""Administration: the routes under /admin/, and diagnostics on SIGQUIT. Texts of requests are not exposed."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmc_runtime import __version__
from llmc_runtime.engine.control_rpc import MAX_SECONDS
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http.auth import Limits, read_body
from llmc_runtime.server.http.errors import ApiError, not_found, unavailable
from llmc_runtime.server.http.middleware import query_of, seconds_of
from llmc_runtime.server.http.replies import as_error, as_json, catch_errors, while_connected
from llmc_runtime.server.requests.parse import parse
from llmc_runtime.server.server_options import LOG_LEVELS
from llmc_runtime.server.serving import Serving
from llmc_runtime.trace import document

T = TypeVar("T", bound=msgspec.Struct)
MAX_LISTED = 1000  # maximum number of requests listed, oldest first
MAX_DRAIN_SECONDS = 3600.0
_MAX_BODY_BYTES = 4 << 10
_TRACE_SECONDS = 5.0  # default duration of a trace
_MAX_TASKS = 20  # kinds of tasks listed on SIGQUIT


class AbortRequest(msgspec.Struct):
    """The body of POST /admin/abort: the id of a response (cmpl-..., chatcmpl-...), as listed by /admin/state."""

    id: str


class LevelRequest(msgspec.Struct):
    """The body of POST /admin/log_level."""

    level: str


class RestartRequest(msgspec.Struct):
    """The body of POST /admin/restart: the number of one engine (default: all), and seconds for open requests."""

    engine: int | None = None
    drain: float = 30.0


class Admin:
    """The routes under /admin/. The guard admits only admin keys to them; each route checks this again."""

    def __init__(self, serving: Serving, limits: Limits) -> None:
        self.serving, self.limits = serving, limits
        self._began = time.monotonic()
        self._restart: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """Return all routes."""
        endpoints = (
            ("GET", "/admin/state", self.state), ("GET", "/admin/trace", self.trace),
            ("POST", "/admin/reset_prefix_cache", self.reset), ("POST", "/admin/abort", self.abort),
            ("POST", "/admin/log_level", self.log_level), ("POST", "/admin/restart", self.restart),
        )  # fmt: skip
        return [Route(path, _for_admins(endpoint), methods=[method]) for method, path, endpoint in endpoints]

    @catch_errors
    async def state(self, request: Request) -> Response:
        """GET /admin/state: the engine's statistics, and the open requests with id, tokens and age."""
        return as_json({**state_of(self.serving), "uptime": round(time.monotonic() - self._began, 3)})

    @catch_errors
    async def trace(self, request: Request) -> Response:
        """GET /admin/trace?seconds=N: record the engine's loop for N seconds, in the trace event format."""
        seconds = _trace_seconds(query_of(request).get("seconds"))
        try:
            rows = await while_connected(request.receive, self.serving.llm.record(seconds))
        except LlmcError as e:
            if e.code == "E660" and self.serving.llm.is_running:
                raise ApiError(e.cause, status=409, code="already_recording") from None
            raise unavailable("the engine is not running", "engine_unavailable") from None
        text = await asyncio.to_thread(lambda: json.dumps(document(rows)))
        headers = {"Content-Disposition": 'attachment; filename="llmc-trace.json"', "Cache-Control": "no-store"}
        return Response(text, headers=headers, media_type="application/json")

    @catch_errors
    async def reset(self, request: Request) -> Response:
        """POST /admin/reset_prefix_cache: empty the prefix cache; 409 while requests use pages."""
        try:
            done = await self.serving.llm.reset_prefix_cache()
        except LlmcError:
            raise unavailable("the engine is not running", "engine_unavailable") from None
        if not done:
            raise ApiError("requests are using pages: try again when none is running", status=409, code="in_use")
        return as_json({"reset": True})

    @catch_errors
    async def abort(self, request: Request) -> Response:
        """POST /admin/abort: end a response; its client receives 503."""
        requested, llm = (await self._read(request, AbortRequest)).id, self.serving.llm
        ids = {row["id"] for row in llm.open_requests()}
        aborted = sum([await llm.abort(id) for id in ids if requested in (id, id.rpartition("-")[0])])
        if not aborted:
            raise not_found("no open request has this id; GET /admin/state lists them", "id")
        return as_json({"aborted": aborted})

    @catch_errors
    async def restart(self, request: Request) -> Response:
        """POST /admin/restart: replace the engine processes one after the other; answers when the last one is ready.

        409 while another restart is running. It continues if the client disconnects.
        """
        body = await self._read(request, RestartRequest)
        if not 0 <= body.drain <= MAX_DRAIN_SECONDS:
            raise ApiError(f"drain: a number of seconds from 0 to {MAX_DRAIN_SECONDS:g}", param="drain")
        if self._restart is not None and not self._restart.done():
            raise ApiError("the engines are being restarted: try again when that has ended", status=409, code="in_use")
        llm = self.serving.llm
        before = [engine.pid for engine in llm.engines]
        self._restart = asyncio.create_task(llm.restart(body.drain, body.engine))
        try:
            await asyncio.shield(self._restart)
        except LlmcError as e:
            if e.code == "E201":
                raise ApiError(e.cause, param="engine") from None
            raise unavailable(e.cause, "engine_unavailable") from None
        changed = [i for i, engine in enumerate(llm.engines) if engine.pid != before[i]]
        return as_json({"restarted": changed})

    @catch_errors
    async def log_level(self, request: Request) -> Response:
        """POST /admin/log_level: set the level of the log on stderr."""
        level = (await self._read(request, LevelRequest)).level
        if level not in LOG_LEVELS:
            raise ApiError(f"level: one of {', '.join(LOG_LEVELS)}", param="level")
        logging.getLogger("llmc").setLevel(level.upper())
        return as_json({"level": level})

    async def _read(self, request: Request, kind: type[T]) -> T:
        body = await read_body(request, replace(self.limits, body=_MAX_BODY_BYTES), self.serving.bodies)
        try:
            return parse(body.data, kind, partial(_refuse_unknown, kind))
        finally:
            body.drop()


def _refuse_unknown(kind: type[msgspec.Struct], count: int) -> None:
    """Raise ApiError 400 for unknown fields: without a misspelled `engine`, a restart would be one of all engines."""
    if count:
        known = ", ".join(kind.__struct_fields__)
        raise ApiError(f"{count} unknown fields; there are: {known}", code="unknown_field")


def state_of(serving: Serving) -> dict[str, Any]:
    """Return the state of the server and its open requests, without their texts."""
    llm, admission = serving.llm, serving.admission
    requests = llm.open_requests()
    return {
        "version": __version__,
        "model": serving.names[0],
        "state": llm.state,
        "draining": admission.draining,
        "engine_pid": llm.engine_pid,
        **_engines_of(serving),
        "text_pids": serving.text_processes.pids,
        "open_sequences": admission.open_sequences,
        "open_tokens": admission.open_tokens,
        "stats": llm.stats(),
        "requests": requests[:MAX_LISTED],
        "requests_left_out": max(0, len(requests) - MAX_LISTED),
    }


def _engines_of(serving: Serving) -> dict[str, Any]:
    """Return the states of several engines; nothing for one."""
    engines = serving.llm.engines
    if len(engines) == 1:
        return {}
    states = [
        {
            "engine": i,
            "state": engine.state,
            "pid": engine.pid,
            "restarts": engine.restarts,
            "requests": len(engine.outputs),
        }
        for i, engine in enumerate(engines)
    ]
    return {"engines": states}


def _for_admins(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        if request.scope.get("llmc.admin") is not True:
            return as_error(not_found("there is no such route"), request.scope["path"])
        return await endpoint(request)

    return guarded


def _trace_seconds(text: str | None) -> float:
    seconds = _TRACE_SECONDS if text is None else seconds_of(text, MAX_SECONDS)
    if seconds is None:
        raise ApiError(f"seconds: a number above 0, up to {MAX_SECONDS:g}", param="seconds")
    return seconds


def dump_on_quit(loop: asyncio.AbstractEventLoop, serving: Serving) -> None:
    """Install a handler for SIGQUIT that writes diagnostics to stderr.

    It writes the stacks of all threads at once, even if the event loop hangs, then the server's state, and finally
    forwards the signal to the engine processes.
    """

    def write_state() -> None:
        state = json.dumps({**state_of(serving), "tasks": _tasks()})
        print(f"llmc: state at SIGQUIT: {state}", file=sys.stderr, flush=True)
        for engine in serving.llm.engines:
            if engine.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine.pid, signal.SIGQUIT)

    loop.add_signal_handler(signal.SIGQUIT, write_state)
    if sys.stderr is not None:
        faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)


def _tasks() -> dict[str, int]:
    """Count tasks by the place where they wait."""
    counts: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        coroutine: Any = task.get_coro()
        frames = task.get_stack(limit=1)
        at = f" at {Path(frames[0].f_code.co_filename).name}:{frames[0].f_lineno}" if frames else ""
        counts[f"{getattr(coroutine, '__qualname__', 'task')}{at}"] += 1
    return dict(counts.most_common(_MAX_TASKS))
