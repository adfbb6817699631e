"""One model being served: requests become jobs of the engine, watched, counted and ended early; no JSON, no routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from llmc_runtime.core.async_llm import AsyncLLM
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.prompts import Prompt, fitted
from llmc_runtime.sched.params import SamplingParams
from llmc_runtime.server.admission import Admission
from llmc_runtime.server.errors import ApiError, internal, not_found, told, unavailable
from llmc_runtime.server.fields import Generation
from llmc_runtime.server.logs import Record
from llmc_runtime.server.meters import Meters
from llmc_runtime.server.prompting import Prompting

MAX_SALT = 256  # characters
MAX_CHOICES = 256  # outputs of one request, all prompts together
_THREADS = 4  # that tokenize

News = AsyncIterator[tuple[int, RequestOutput]]


@dataclass(frozen=True)
class Call:
    """One HTTP request: its id, whose key it brought ("" for none), the field that holds the prompt, and for the log
    its record and the id that the client knows."""

    id: str
    key: str
    prompt_param: str
    record: Record | None = None
    request_id: str = ""


class Serving:
    """A started AsyncLLM under `names`, the first of which answers carry; `template`: another chat template."""

    def __init__(
        self, llm: AsyncLLM, names: Sequence[str], admission: Admission, meters: Meters, template: str | None = None
    ) -> None:
        self.llm, self.names = llm, tuple(names)
        self.admission, self.meters = admission, meters
        self.created = int(time.time())
        self._pool = ThreadPoolExecutor(_THREADS, "llmc-text")
        self.prompting = Prompting(llm.tokenizer, llm.config.vocab_size, template, self._pool)

    def close(self) -> None:
        """Tokenize nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 where it is not served here."""
        if name is not None and name not in self.names:
            raise not_found(f"the model {name[:80]!r} is not served here", "model", "model_not_found")

    def check_ready(self) -> None:
        """ApiError 503 where nothing can be generated now."""
        if not self.admission.draining and not self.llm.is_running:
            raise unavailable("the engine is not there now", "engine_unavailable")
        self.admission.check_open()

    def run(self, prompts: list[Prompt], params: SamplingParams, asked: Generation, call: Call) -> News:
        """(index of the prompt, what is new of its outputs) as it comes. Raises ApiError, before the first item where
        a prompt cannot be served."""
        given = asked.max_tokens if asked.max_tokens is not None else getattr(asked, "max_completion_tokens", None)
        if given is None:
            config = self.llm.config
            room = min(config.max_model_len, config.num_pages * config.page_size + 1)
            each = [fitted(params, room - len(prompt.ids)) for prompt in prompts]
        else:
            each = [params] * len(prompts)
        if params.n * len(prompts) > MAX_CHOICES:
            cause = f"{len(prompts)} prompts with n = {params.n} are more than {MAX_CHOICES} outputs"
            raise ApiError(f"{cause}; send several requests", param="n")
        if asked.cache_salt is not None and len(asked.cache_salt) > MAX_SALT:
            raise ApiError(f"cache_salt: up to {MAX_SALT} characters", param="cache_salt")
        if asked.priority is not None and not -(2**31) <= asked.priority < 2**31:
            raise ApiError("priority: an integer of 32 bits; smaller runs first", param="priority")
        jobs = list(zip(prompts, each))
        return self._admitted(jobs, asked.priority or 0, f"{call.key}/{asked.cache_salt or ''}", call)

    async def _admitted(self, jobs: list[tuple[Prompt, SamplingParams]], priority: int, salt: str, call: Call) -> News:
        self.check_ready()
        tokens = sum(len(prompt.ids) + (params.max_tokens or 0) * params.n for prompt, params in jobs)
        sequences = sum(params.n for _, params in jobs)
        record = call.record or Record()
        record.begin(call.id, [prompt for prompt, _ in jobs], call.request_id)
        with self.admission.place(sequences, tokens, call.key):
            news = [
                self._watched(prompt, params, f"{call.id}-{i}", priority, salt, call.prompt_param)
                for i, (prompt, params) in enumerate(jobs)
            ]
            try:
                async with aclosing(_merged(news)) as merged:  # type: ignore[type-var]
                    async for item in merged:
                        record.take(item[1])
                        yield item
            except ApiError as e:
                record.fail(e.code)
                raise

    async def _watched(
        self, prompt: Prompt, params: SamplingParams, name: str, priority: int, salt: str, prompt_param: str
    ) -> AsyncIterator[RequestOutput]:
        """One job, metered; errors as ApiError."""
        meter = self.meters.begin(len(prompt.ids), params)
        try:
            generated = self.llm.generate(prompt, params, name, priority=priority, cache_salt=salt, output_kind="delta")
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    meter.take(output)
                    if any(one.finish_reason == "abort" for one in output.outputs):
                        raise unavailable("the request was ended by the server", "aborted")
                    yield output
        except LlmcError as e:
            raise told(e, prompt_param) from None
        except (ApiError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as e:
            raise internal() from e
        finally:
            meter.end()


async def _merged(sources: list[AsyncIterator[RequestOutput]]) -> News:
    """The items of all sources as they come, with the index of each; the first error ends all."""
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def follow(index: int) -> None:
        try:
            async with aclosing(sources[index]) as source:  # type: ignore[type-var]
                async for item in source:
                    queue.put_nowait((index, item))
            queue.put_nowait((index, None))
        except Exception as e:
            queue.put_nowait((index, e))

    tasks = [asyncio.ensure_future(follow(i)) for i in range(len(sources))]
    left = len(tasks)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def begun(news: News) -> News:
    """The same items, the first of which is there already: what cannot be served has been told by then."""
    first = await anext(news)

    async def rest() -> News:
        async with aclosing(news) as items:  # type: ignore[type-var]
            yield first
            async for item in items:
                yield item

    return rest()
