"""Shared code of the endpoints: reading a request, in the event loop or a text process, and sending its response."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llmc_runtime.server.api_routes import PostRoute
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.auth import Limits, read_body
from llmc_runtime.server.http.body_budget import Body
from llmc_runtime.server.http.errors import renamed
from llmc_runtime.server.http.replies import Events, JsonSlices, as_answer, as_json, catch_errors, while_connected
from llmc_runtime.server.openai.generation_response import GenerationResponse
from llmc_runtime.server.openai.pooled import PooledResponse
from llmc_runtime.server.requests.parse import SMALL_BODY, SMALL_TEXT, is_large, parse
from llmc_runtime.server.requests.sampling_fields import names_of_limit
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.pool import OffloadedJob

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[Request], Awaitable[Response]]
Offload = Callable[[Any], bool]  # whether a parsed request goes to a text process
ResponseFactory = Callable[[Serving, Any, Call, OffloadedJob | None], GenerationResponse[Any] | PooledResponse]
_SHORT_BYTES = 2 << 10  # bytes of a body that is parsed at once


def _never(fields: Any) -> bool:
    return False


class Endpoint:
    """Routes of one served model."""

    def __init__(self, serving: Serving, limits: Limits) -> None:
        self.serving, self.limits = serving, limits

    def handler(
        self, route: PostRoute, make_response: ResponseFactory, offload: Callable[[Request], Offload] | None = None
    ) -> Handler:
        """Return the handler of a route that runs the model; `make_response` makes its responses.

        `offload` returns a function that returns whether a text process has to read a request with a small body.
        """

        @catch_errors
        async def handle(self: Endpoint, request: Request) -> Response:
            with renamed(route.names):
                is_long = _never if offload is None else offload(request)
                async with self._read(request, route, is_long) as (fields, job):
                    call = self._call(request, route)
                    stream = route.generates and bool(fields.stream)
                    with renamed(names_of_limit(fields)):
                        response = make_response(self.serving, fields, call, job)
                        return await self._reply(request, response, call, stream=stream)

        return partial(handle, self)

    @asynccontextmanager
    async def _read(
        self, request: Request, route: PostRoute, offload: Offload
    ) -> AsyncIterator[tuple[Any, OffloadedJob | None]]:
        """Yield the parsed request. If its body is large, or if `offload` returns true for it, also the text process's
        job that has its prompts.
        """
        body = await read_body(request, self.limits, self.serving.bodies)
        if not is_large(body.data, SMALL_BODY):
            fields = await self._in_turn(body, route.request, request.scope["llmc.key"], offload)
            if fields is not None:
                yield fields, None
                return
        job = await while_connected(request.receive, self.serving.text_processes.begin(route.job, body))
        try:
            yield job.take_fields(route.request), job
        finally:
            job.close()

    async def _in_turn(self, body: Body, kind: type[T], key: str, offload: Offload) -> T | None:
        """Return `_small`. An iteration of the event loop parses at most one body of more than _SHORT_BYTES bytes.

        The request is made of it in another iteration.
        """
        turns = self.serving.parsing
        if len(body) <= _SHORT_BYTES:
            return self._small(body, kind, offload)
        try:
            await turns.acquire(key)
        except BaseException:
            body.drop()
            raise
        asyncio.get_running_loop().call_soon(turns.release, key)
        fields = self._small(body, kind, offload)
        if fields is not None:
            await asyncio.sleep(0)
        return fields

    def _small(self, body: Body, kind: type[T], offload: Offload) -> T | None:
        """Parse a body and drop it; return None, with the body kept, if `offload` returns true."""
        unknown, offloaded = list[int](), False
        try:
            fields = parse(body.data, kind, unknown.append)
            offloaded = offload(fields)
            return None if offloaded else fields
        finally:
            if not offloaded:
                body.drop()
                self.serving.metrics.unknown(sum(unknown))

    def text_handler(self, route: PostRoute, answer: Callable[..., dict[str, Any]]) -> Handler:
        """Return the handler of a route for tokenization; `answer` is its entry in jobs.ANSWERS."""

        @catch_errors
        async def handle(self: Endpoint, request: Request) -> Response:
            with renamed(route.names):
                return await self._text(request, route, answer)

        return partial(handle, self)

    async def _text(self, request: Request, route: PostRoute, answer: Callable[..., dict[str, Any]]) -> Response:
        """Run a request for tokenization. A text process handles a large body and makes its response, whose memory is
        reserved until it is sent.
        """
        serving, key = self.serving, request.scope["llmc.key"]
        body = await read_body(request, self.limits, serving.bodies)
        with serving.texts(key):
            if is_large(body.data, SMALL_TEXT):
                job = await while_connected(request.receive, serving.text_processes.begin(route.job, body))
                job.close()
                size = sum(map(len, job.response))
                return JsonSlices(job.response, serving.admission.reserve_response(key, size).close)
            fields: Any = await self._in_turn(body, route.request, key, _never)
            serving.check_model(fields.model)
            return as_json(await serving.text_threads.run(key, answer, serving.prompting, serving.formats, fields))

    def _call(self, request: Request, route: PostRoute) -> Call:
        return Call(
            f"{route.id_prefix}{uuid.uuid4().hex}",
            request.scope["llmc.key"],
            route.prompt_param,
            request.scope.get("llmc.record"),
            request.scope["llmc.id"],
            hold=request.scope.get("llmc.hold", Call.hold),
            resources=self.serving.call_resources(request.headers.get("x-request-timeout")),
        )

    async def _reply(
        self, request: Request, response: GenerationResponse[Any] | PooledResponse, call: Call, *, stream: bool = False
    ) -> Response:
        """Return the response, which ends early if the client disconnects.

        Generation releases the admission slot; it is released here if generation never starts.
        """
        encoding, on_disconnect = self.serving.encoding.of(call.key), self.serving.metrics.count_disconnect
        sent = call.resources.release_response

        async def complete() -> Response:
            return await as_answer(await response.complete(), encoding, on_disconnect, sent)

        try:
            if not stream or isinstance(response, PooledResponse):
                return await while_connected(request.receive, complete())
            chunks = await while_connected(request.receive, response.stream())
        except BaseException:
            call.resources.release_slot()
            sent()
            raise
        return Events(chunks, encoding, on_disconnect, sent, response.end, response.failed)
