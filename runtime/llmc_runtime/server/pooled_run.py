"""Runs the prompts of a request to a model that pools, a limited number of them at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing

from llmc_runtime.outputs import RequestOutput
from llmc_runtime.pooling_params import ONE
from llmc_runtime.prompts import Prompt
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.request_log import Record
from llmc_runtime.server.operations.metrics_exporter import RequestMetrics
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.updates import end_tasks

MAX_OPEN = 64  # prompts of one request that wait or run at a time


def reserve(serving: Serving, call: Call, count: int) -> None:
    """Reserve an admission slot for `count` prompts before they are tokenized.

    Raises the ApiErrors of Admission.reserve. The caller releases the call's slot if `run` is not reached.
    """
    remaining = math.inf if call.resources.remaining is None else call.resources.remaining
    call.resources.slot = serving.admission.reserve(_open(serving, count), count, 0, call.key, remaining)


async def run(serving: Serving, prompts: Sequence[Prompt], priority: int, salt: str, call: Call) -> list[RequestOutput]:
    """Return the outputs of the prompts, in the same order. `call` holds a slot, which is released at the end.

    The first error ends all prompts. Raises ApiError.
    """
    record, slot = call.record or Record(), call.resources.slot
    assert slot is not None
    record.begin(call.id, prompts, call.request_id)
    serving.meters.count_for_key(call.key, "key_requests")
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
    meter: RequestMetrics = serving.meters.begin(len(prompt.ids), ONE, call.key)
    source = serving.llm.pool(
        prompt, name, priority=priority, cache_salt=salt, tenant=call.key, timeout=call.resources.remaining
    )
    async with aclosing(serving.watched(source, call, meter)) as items:  # type: ignore[type-var]
        return (await anext(items))[1]


def _open(serving: Serving, count: int) -> int:
    """Return how many of `count` prompts wait or run at a time: at most what the queue accepts of one key."""
    admission = serving.admission
    return min(count, MAX_OPEN, admission.sequences, admission.per_key or MAX_OPEN)
