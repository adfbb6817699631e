"""The endpoints of models that pool: embeddings, classification, scores and reranking."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc_runtime.server.endpoint import Endpoint
from llmc_runtime.server.http.replies import catch_errors
from llmc_runtime.server.openai.pooled import PooledResponse
from llmc_runtime.server.pooled_prompts import PROMPT_PARAM
from llmc_runtime.server.requests.parse import SMALL_BODY
from llmc_runtime.server.requests.pooling_request import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    RerankRequest,
    ScoreRequest,
)
from llmc_runtime.server.text_pool.text_messages import CLASSIFY, EMBEDDING, RERANK, SCORE

_ROUTES: tuple[tuple[tuple[str, ...], type[Pooled], bytes, str], ...] = (
    (("/v1/embeddings",), EmbeddingRequest, EMBEDDING, "embd-"),
    (("/classify",), ClassifyRequest, CLASSIFY, "classify-"),
    (("/v1/score", "/score"), ScoreRequest, SCORE, "score-"),
    (("/v1/rerank", "/rerank", "/v2/rerank"), RerankRequest, RERANK, "rerank-"),
)


class PoolingRoutes(Endpoint):
    """Routes of one served model. Those that do not fit the model reply 400."""

    def handler(self, kind: type[Pooled], job_kind: bytes, prefix: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a route: `kind` is the type of its requests, `prefix` that of the ids of responses."""

        @catch_errors
        async def handle(self: PoolingRoutes, request: Request) -> Response:
            async with self._read(request, kind, job_kind, _repeats) as (fields, job):
                call = self._call(request, prefix, PROMPT_PARAM[kind])
                return await self._reply(request, PooledResponse(self.serving, fields, call, job), call)

        return partial(handle, self)

    def endpoints(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the method, the path and the handler of each route."""
        for paths, kind, job_kind, prefix in _ROUTES:
            handler = self.handler(kind, job_kind, prefix)
            yield from (("POST", path, handler) for path in paths)


def _repeats(request: Pooled) -> bool:
    """Return whether a text that belongs to several pairs makes more work than a small body may."""
    if isinstance(request, RerankRequest):
        return len(request.query) * len(request.documents) > SMALL_BODY
    if isinstance(request, ScoreRequest) and isinstance(request.text_1, str):
        return len(request.text_1) * (1 if isinstance(request.text_2, str) else len(request.text_2)) > SMALL_BODY
    return False
