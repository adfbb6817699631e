"""The endpoints of models that pool: embeddings, classification, scores and reranking."""

from __future__ import annotations

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


class PoolingRoutes(Endpoint):
    """Routes of one served model. Those that do not fit the model reply 400."""

    @catch_errors
    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        return await self._pooled(request, EmbeddingRequest, EMBEDDING, "embd-")

    @catch_errors
    async def classify(self, request: Request) -> Response:
        """POST /classify."""
        return await self._pooled(request, ClassifyRequest, CLASSIFY, "classify-")

    @catch_errors
    async def score(self, request: Request) -> Response:
        """POST /v1/score and /score."""
        return await self._pooled(request, ScoreRequest, SCORE, "score-")

    @catch_errors
    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank, /v2/rerank and /rerank."""
        return await self._pooled(request, RerankRequest, RERANK, "rerank-")

    async def _pooled(self, request: Request, kind: type[Pooled], name: bytes, prefix: str) -> Response:
        async with self._read(request, kind, name, _repeats) as (fields, job):
            call = self._call(request, prefix, PROMPT_PARAM[kind])
            return await self._reply(request, PooledResponse(self.serving, fields, call, job), call)


def _repeats(request: Pooled) -> bool:
    """Return whether a text that belongs to several pairs makes more work than a small body may."""
    if isinstance(request, RerankRequest):
        return len(request.query) * len(request.documents) > SMALL_BODY
    if isinstance(request, ScoreRequest) and isinstance(request.text_1, str):
        return len(request.text_1) * (1 if isinstance(request.text_2, str) else len(request.text_2)) > SMALL_BODY
    return False
