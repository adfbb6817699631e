"""The routes under /admin/: open requests, a trace of the engine's loop, and maintenance. Request texts are not
exposed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmc_runtime import __version__
from llmc_runtime.engine.control_rpc import MAX_SECONDS
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http.auth import Limits, read_body
from llmc_runtime.server.http.durations import seconds_of
from llmc_runtime.server.http.errors import ApiError, not_found, unavailable
from llmc_runtime.server.http.handler import told
from llmc_runtime.server.http.replies import as_error, as_json, while_connected
from llmc_runtime.server.requests.parse import parse
from llmc_runtime.server.serving import Serving
from llmc_runtime.trace import document

T = TypeVar("T", bound=msgspec.Struct)
MOST_OPEN = 1000  # maximum number of requests listed, oldest first
_MOST_BODY = 4 << 10  # bytes
_LEVELS = ("debug", "info", "warning", "error")
_SECONDS = 5.0  # default duration of a trace


class AbortRequest(msgspec.Struct):
    """The body of POST /admin/abort: the id of a response (cmpl-..., chatcmpl-...), as listed by /admin/state."""

    id: str


class LevelRequest(msgspec.Struct):
    """The body of POST /admin/log_level."""

    level: str


class Admin:
    """The routes under /admin/. The guard admits only admin keys to them; each route checks this again."""

    def __init__(self, serving: Serving, limits: Limits) -> None:
        self.serving, self.limits = serving, limits
        self._began = time.monotonic()

    def routes(self) -> list[Route]:
        """Return all routes."""
        get = {"/admin/state": self.state, "/admin/trace": self.trace}
        post = {"/admin/reset_prefix_cache": self.reset, "/admin/abort": self.abort, "/admin/log_level": self.log_level}
        routes = [Route(path, _for_admins(endpoint), methods=["GET"]) for path, endpoint in get.items()]
        return routes + [Route(path, _for_admins(endpoint), methods=["POST"]) for path, endpoint in post.items()]

    @told
    async def state(self, request: Request) -> Response:
        """GET /admin/state: the engine's statistics, and the open requests with id, tokens and age."""
        return as_json({**state_of(self.serving), "uptime": round(time.monotonic() - self._began, 3)})

    @told
    async def trace(self, request: Request) -> Response:
        """GET /admin/trace?seconds=N: record the engine's loop for N seconds, in the trace event format."""
        seconds = _seconds(request.query_params.get("seconds"))
        try:
            rows = await while_connected(request.receive, self.serving.llm.record(seconds))
        except LlmcError as e:
            if e.code == "E660" and self.serving.llm.is_running:
                raise ApiError(e.cause, status=409, code="already_recording") from None
            raise unavailable("the engine is not there now", "engine_unavailable") from None
        text = await anyio.to_thread.run_sync(lambda: json.dumps(document(rows)))
        headers = {"Content-Disposition": 'attachment; filename="llmc-trace.json"', "Cache-Control": "no-store"}
        return Response(text, headers=headers, media_type="application/json")

    @told
    async def reset(self, request: Request) -> Response:
        """POST /admin/reset_prefix_cache: empty the prefix cache; 409 while requests use pages."""
        try:
            done = await self.serving.llm.reset_prefix_cache()
        except LlmcError:
            raise unavailable("the engine is not there now", "engine_unavailable") from None
        if not done:
            raise ApiError("requests hold pages: try again when nothing runs", status=409, code="in_use")
        return as_json({"reset": True})

    @told
    async def abort(self, request: Request) -> Response:
        """POST /admin/abort: end a response; its client receives 503."""
        wanted = (await self._read(request, AbortRequest)).id
        names = {one["id"] for one in self.serving.llm.open_requests()}
        found = [name for name in names if wanted in (name, name.rpartition("-")[0])]
        ended = [await self.serving.llm.abort(name) for name in found]
        if not sum(ended):
            raise not_found("nothing of this id is open", "id")
        return as_json({"aborted": sum(ended)})

    @told
    async def log_level(self, request: Request) -> Response:
        """POST /admin/log_level: set the level of the log on stderr."""
        asked = await self._read(request, LevelRequest)
        if asked.level not in _LEVELS:
            raise ApiError(f"level: one of {', '.join(_LEVELS)}", param="level")
        logging.getLogger("llmc").setLevel(asked.level.upper())
        return as_json({"level": asked.level})

    async def _read(self, request: Request, kind: type[T]) -> T:
        body = await read_body(request, replace(self.limits, body=_MOST_BODY), self.serving.bodies)
        try:
            return parse(body.data, kind, self.serving.meters.unknown)
        finally:
            body.drop()


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
        "text_pids": serving.offload.pids,
        "open_sequences": admission.open_sequences,
        "open_tokens": admission.open_tokens,
        "stats": llm.stats(),
        "requests": requests[:MOST_OPEN],
        "requests_left_out": max(0, len(requests) - MOST_OPEN),
    }


def _for_admins(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        if request.scope.get("llmc.admin") is not True:
            return as_error(not_found("there is no such route"))
        return await endpoint(request)

    return guarded


def _seconds(text: str | None) -> float:
    seconds = _SECONDS if text is None else seconds_of(text, MAX_SECONDS)
    if seconds is None:
        raise ApiError(f"seconds: a number above 0, up to {MAX_SECONDS:g}", param="seconds")
    return seconds
