"""The responses of models that pool: embeddings, classes, scores and ranked documents."""

from __future__ import annotations

import asyncio
import base64
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import EMBED
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.pooled_outputs import pooled_values, similarity
from llmc_runtime.pooling_params import NO_OUTPUT, PoolingParams
from llmc_runtime.prompts import Prompt
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.errors import ApiError, to_api_error
from llmc_runtime.server.http.lazy_json import SLICE_SECONDS, Lazy
from llmc_runtime.server.http.request_log import Record
from llmc_runtime.server.openai.generation_response import Usage
from llmc_runtime.server.operations.metrics_exporter import RequestMetrics
from llmc_runtime.server.pooled_prompts import PooledPrompts, require_pooled
from llmc_runtime.server.requests.pooling_request import (
    BASE64,
    MAX_INPUTS,
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    RerankRequest,
    ScoreRequest,
    activation_of,
    check_pooled,
    count_of,
)
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.pool import OffloadedJob
from llmc_runtime.server.updates import end_tasks

# Bytes of a number: as text, in base64, and as the engine returns it; and of an item around them.
_NUMBER, _BASE64, _FLOAT, _ITEM = 24, 6, 4, 128
MAX_OPEN = 64  # prompts of one request that wait or run at a time


class PooledResponse:
    """One request to an endpoint of a model that pools. If the body was large, `job` has its prompts."""

    def __init__(self, serving: Serving, request: Pooled, call: Call, job: OffloadedJob | None = None) -> None:
        self._serving, self._request, self._call, self._job = serving, request, call, job

    async def complete(self) -> dict[str, Any]:
        """Return the JSON of the response. Raises ApiError."""
        request, serving, call = self._request, self._serving, self._call
        check_pooled(request)
        serving.check_model(request.model)
        try:
            pooling = require_pooled(request, serving.llm.pooling)
            params = PoolingParams(getattr(request, "dimensions", None), activation_of(request))
            params.check(pooling)
        except LlmcError as e:
            raise to_api_error(e, call.prompt_param) from None
        serving.check_ready()
        count = count_of(request)
        if count > 2 * MAX_INPUTS:
            raise ApiError(f"{call.prompt_param}: at most {MAX_INPUTS} a request", param=call.prompt_param)
        self._reserve_response(count, pooling, params)
        reserve_slot(serving, call, count)
        prompts = [prompt.packed() for prompt in await self._prompts(pooling)]
        salt = call.cache_salt(request.cache_salt)
        outputs = await run_prompts(serving, prompts, request.priority or 0, salt, call)
        if isinstance(request, EmbeddingRequest):
            return self._list(outputs, Lazy(_embeddings(request, pooling, params, outputs), small=False))
        if isinstance(request, ClassifyRequest):
            return self._list(outputs, Lazy(_classes(pooling, params, outputs), small=False))
        scores = await self._scores(pooling, params, outputs)
        if isinstance(request, ScoreRequest):
            data = ({"index": i, "object": "score", "score": score} for i, score in enumerate(scores))
            return self._list(outputs, Lazy(data))
        assert isinstance(request, RerankRequest)
        return {
            "id": call.id, "model": serving.names[0], "usage": _usage(outputs),
            "results": Lazy(_ranked(request, scores, prompts[-len(scores) :]), small=False),
        }  # fmt: skip

    async def _prompts(self, pooling: Pooling) -> list[Prompt]:
        texts = isinstance(self._request, RerankRequest) and self._request.return_documents is not False
        if self._job is not None:
            prompts = await self._job.prompts(-1 if texts else self._call.logged_characters)
            if texts:
                self._reserve_texts(prompts)
            return prompts
        serving = self._serving
        readers = PooledPrompts(serving.prompting, pooling, serving.admission.tokens)
        return await serving.text_threads.run(self._call.key, list, readers.of(self._request))

    def _reserve_texts(self, prompts: Sequence[Prompt]) -> None:
        """Reserve the memory of a large body's documents too, which the response repeats. Raises ApiError 429, 503."""
        resources, admission = self._call.resources, self._serving.admission
        assert resources.response_memory is not None
        size = resources.response_memory.nbytes + sum(sys.getsizeof(prompt.text) for prompt in prompts)
        resources.response_memory.close()
        resources.response_memory = admission.reserve_response(self._call.key, size)

    def _reserve_response(self, count: int, pooling: Pooling, params: PoolingParams) -> None:
        """Reserve the memory of the response. Raises ApiError 400 if it would be too large."""
        request, width = self._request, params.dimensions or pooling.width
        item_bytes = _ITEM
        if isinstance(request, EmbeddingRequest | ClassifyRequest):
            item_bytes += width * (_BASE64 if getattr(request, "encoding_format", None) == BASE64 else _NUMBER)
        else:
            item_bytes += width * _FLOAT  # kept until all scores are known
        size = count * item_bytes
        if size > self._serving.max_answer:
            cause = f"{count} results of {width} numbers are more than {self._serving.max_answer} bytes"
            raise ApiError(f"{cause}; send several requests, or encoding_format: base64", param=self._call.prompt_param)
        self._call.resources.response_memory = self._serving.admission.reserve_response(self._call.key, size)

    async def _scores(self, pooling: Pooling, params: PoolingParams, outputs: Sequence[RequestOutput]) -> list[float]:
        """Return the scores of the pairs, and let the event loop serve others after each millisecond of computing."""
        scores, encoding = list[float](), self._serving.encoding.of(self._call.key)
        until = time.perf_counter() + SLICE_SECONDS
        for score in _scored(self._request, pooling, params, outputs):
            scores.append(score)
            if time.perf_counter() > until:
                await encoding.pause()
                until = time.perf_counter() + SLICE_SECONDS
        return scores

    def _list(self, outputs: Sequence[RequestOutput], data: Any) -> dict[str, Any]:
        return {
            "id": self._call.id, "object": "list", "created": int(time.time()), "model": self._serving.names[0],
            "data": data, "usage": _usage(outputs),
        }  # fmt: skip


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    cached = {index: output.num_cached_tokens for index, output in enumerate(outputs)}
    return Usage(sum(len(output.prompt_token_ids) for output in outputs), cached=cached).as_json()


def _embeddings(
    request: EmbeddingRequest, pooling: Pooling, params: PoolingParams, outputs: Sequence[RequestOutput]
) -> Iterator[dict[str, Any]]:
    encoded = request.encoding_format == BASE64
    for index, output in enumerate(outputs):
        values = pooled_values(output.pooled or b"", pooling, params)
        shown: Any = values.tolist()
        if encoded:
            shown = base64.b64encode(values.astype(np.dtype("<f4")).tobytes()).decode()
        yield {"object": "embedding", "index": index, "embedding": shown}


def _classes(pooling: Pooling, params: PoolingParams, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
    for index, output in enumerate(outputs):
        values = pooled_values(output.pooled or b"", pooling, params).tolist()
        best = max(range(len(values)), key=values.__getitem__)
        label = pooling.labels[best] if pooling.labels else None
        yield {"index": index, "label": label, "probs": values, "num_classes": len(values)}


def _scored(
    request: Pooled, pooling: Pooling, params: PoolingParams, outputs: Sequence[RequestOutput]
) -> Iterator[float]:
    """Yield the scores of the pairs: of one prompt each, or of the first texts and then the second ones."""
    pooled = [output.pooled or b"" for output in outputs]
    if pooling.task != EMBED:
        yield from (float(pooled_values(prompt, pooling, params)[0]) for prompt in pooled)
        return
    assert isinstance(request, ScoreRequest | RerankRequest)
    texts = request.documents if isinstance(request, RerankRequest) else request.text_2
    seconds = 1 if isinstance(texts, str) else len(texts)
    firsts = pooled[:-seconds]
    if len(firsts) == 1:
        firsts *= seconds
    yield from (similarity(a, b) for a, b in zip(firsts, pooled[-seconds:], strict=True))


def _ranked(request: RerankRequest, scores: Sequence[float], documents: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Yield the best documents, the best one first; among equals, the earlier one."""
    for i in sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n]:
        result: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
        if request.return_documents is not False:
            result["document"] = {"text": documents[i].text}
        yield result


def reserve_slot(serving: Serving, call: Call, count: int) -> None:
    """Reserve an admission slot for `count` prompts before they are tokenized.

    Raises the ApiErrors of Admission.reserve. The caller releases the call's slot if `run_prompts` is not reached.
    """
    remaining = math.inf if call.resources.remaining is None else call.resources.remaining
    call.resources.slot = serving.admission.reserve(_open(serving, count), count, 0, call.key, remaining)


async def run_prompts(
    serving: Serving, prompts: Sequence[Prompt], priority: int, salt: str, call: Call
) -> list[RequestOutput]:
    """Return the outputs of the prompts, in the same order. `call` holds a slot, which is released at the end.

    The first error ends all prompts. Raises ApiError.
    """
    record, slot = call.record or Record(), call.resources.slot
    assert slot is not None
    record.begin(call.id, prompts, call.request_id)
    serving.metrics.count_for_key(call.key, "key_requests")
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def work() -> None:
        for index in waiting:
            async with serving.starts.slot(call.key):
                await asyncio.sleep(0)  # keeps the slot for an iteration, so that few of many prompts start in it
            output = await _one(serving, prompts[index], f"{call.id}-{index}", priority, salt, call)
            slot.begin()
            record.take(output)
            outputs[index] = output

    tasks, failed = list[asyncio.Task[None]](), None
    try:
        slot.resize(sum(len(prompt.ids) for prompt in prompts), 0)
        tasks += [asyncio.ensure_future(work()) for _ in range(_open(serving, len(prompts)))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task for task in tasks if task.done() and task.exception() is not None), None)
        if failed is not None:
            failed.result()
    except Exception as error:
        record.fail(error.code if isinstance(error, ApiError) else None)
        raise
    finally:
        try:
            await end_tasks(tasks)
        finally:
            tasks.clear()
            failed = None  # its error refers to this frame
            call.resources.release_slot()
    return [output for output in outputs if output is not None]


async def _one(serving: Serving, prompt: Prompt, name: str, priority: int, salt: str, call: Call) -> RequestOutput:
    metrics: RequestMetrics = serving.metrics.begin(len(prompt.ids), NO_OUTPUT, call.key)
    source = serving.llm.pool(
        prompt, name, priority=priority, cache_salt=salt, tenant=call.key, timeout=call.resources.remaining
    )
    async with aclosing(serving.watched(source, call, metrics)) as items:  # type: ignore[type-var]
        return (await anext(items))[1]


def _open(serving: Serving, count: int) -> int:
    """Return how many of `count` prompts wait or run at a time: at most what the queue accepts of one key."""
    admission = serving.admission
    return min(count, MAX_OPEN, admission.sequences, admission.per_key or MAX_OPEN)
