"""The routes under /v1/responses."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llmc_runtime.server.api_routes import INPUT_TOKENS
from llmc_runtime.server.endpoint import Endpoint
from llmc_runtime.server.http.errors import ApiError, not_found, renamed, unsupported
from llmc_runtime.server.http.middleware import query_of
from llmc_runtime.server.http.replies import JsonSlices, as_json, catch_errors
from llmc_runtime.server.requests.parse import SMALL_BODY
from llmc_runtime.server.requests.responses_request import InputTokensRequest, references_of, to_responses_request
from llmc_runtime.server.stored_responses import StoredResponse, separated
from llmc_runtime.server.text_pool.jobs import continued, counted
from llmc_runtime.server.text_pool.pool import OffloadedJob

MAX_LISTED = 100  # items of one page of input items
DEFAULT_LISTED = 20  # the default


class ResponsesRoutes(Endpoint):
    """Counts the tokens of inputs, and returns stored responses."""

    @catch_errors
    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens: the number of tokens of the prompt of a response."""
        key = request.scope["llmc.key"]
        with renamed(INPUT_TOKENS.names), self.serving.texts(key):
            async with self._read(request, INPUT_TOKENS, self.is_long(request)) as (fields, job):
                count = await (self._count(key, fields) if job is None else self._count_job(key, fields, job))
        return as_json({"object": "response.input_tokens", "input_tokens": count})

    async def _count(self, key: str, fields: InputTokensRequest) -> int:
        """Return the number of tokens of a small input."""
        serving = self.serving
        serving.check_model(fields.model)
        request = to_responses_request(fields)
        stored = serving.stored.earlier(key, request.previous_response_id, references_of(request))
        chat, _ = continued(request, stored)
        arguments = counted(chat, serving.formats)
        return len(await serving.text_threads.run(key, serving.prompting.whole_ids, *arguments))

    async def _count_job(self, key: str, fields: InputTokensRequest, job: OffloadedJob) -> int:
        """Return the number of tokens of an input that a text process has read."""
        earlier = self.serving.stored.earlier(key, fields.previous_response_id, job.parsed.references)
        (prompt,) = await job.prompts(0, earlier)
        return len(prompt.ids)

    def is_long(self, request: Request) -> Callable[[InputTokensRequest], bool]:
        """Return whether a request is long with the stored items to which it refers, as a function of its fields."""
        key, store = request.scope["llmc.key"], self.serving.stored
        return lambda fields: store.length(key, fields.previous_response_id, references_of(fields)) > SMALL_BODY

    @catch_errors
    async def stored(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/ID."""
        name = request.path_params["response_id"]
        if request.method == "DELETE":
            self.serving.stored.delete(request.scope["llmc.key"], name)
            return as_json({"id": name, "object": "response", "deleted": True})
        if query_of(request).get("stream") not in (None, "false"):
            raise unsupported("stream: stored responses are not streamed", "stream")
        return self._sent(request, self._stored(request).document())

    @catch_errors
    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/ID/input_items: the response's own input, a page at a time."""
        query = query_of(request)
        limit = query.get("limit", str(DEFAULT_LISTED))
        order = query.get("order", "desc")
        after = query.get("after")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
            raise ApiError(f"limit: 1 to {MAX_LISTED}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError("order: asc or desc", param="order")
        response = self._stored(request)
        step = 1 if order == "asc" else -1
        items, ids = response.items[::step], response.ids[::step]
        begin = 0
        if after is not None:
            if after not in ids:
                raise not_found(f"after: the item {after[:80]!r} is not one of the response's input", "after")
            begin = ids.index(after) + 1
        end = begin + int(limit)
        page_ids = ids[begin:end]
        listed = {
            "object": "list",
            "first_id": page_ids[0] if page_ids else None,
            "last_id": page_ids[-1] if page_ids else None,
            "has_more": len(items) > end,
        }
        head = msgspec.json.encode(listed)[:-1] + b',"data":['
        return self._sent(request, [head, *separated(items[begin:end]), b"]}"])

    def _sent(self, request: Request, parts: list[bytes]) -> Response:
        """Return a JSON document in parts, whose memory is reserved until it is sent. Raises ApiError 429 or 503."""
        size = sum(map(len, parts))
        reserved = self.serving.admission.reserve_response(request.scope["llmc.key"], size)
        return JsonSlices(parts, reserved.close)

    def _stored(self, request: Request) -> StoredResponse:
        return self.serving.stored.get(request.scope["llmc.key"], request.path_params["response_id"])
