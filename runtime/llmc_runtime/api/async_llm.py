"""AsyncLLM: a compiled model for asyncio, its engine in a separate process.

Prompts are tokenized and outputs detokenized in this process, long prompts in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llmc_runtime.api.async_front import Front, compiled, read_front
from llmc_runtime.api.async_pooling import AsyncPoolingAPI
from llmc_runtime.api.async_request import OUTPUT_KINDS, AsyncRequestState, check_timeout
from llmc_runtime.api.llm import to_stderr
from llmc_runtime.api.model_api import fit_prompt
from llmc_runtime.defaults import generation_of
from llmc_runtime.engine.control_rpc import MAX_SECONDS, RECORD, RESET
from llmc_runtime.engine.input_processor import EngineRequest, bad_word_tokens, prepare
from llmc_runtime.engine.instances import Instances
from llmc_runtime.engine.messages import Ready
from llmc_runtime.engine.supervisor import DEAD, READY, STARTING, Supervisor
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import GENERATE
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.pooling_params import require_task
from llmc_runtime.prompts import Prompt, as_params, as_prompt, refuse_adapter
from llmc_runtime.sched.parameter_type import refused
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.trace import Row

_INLINE, _INLINE_BAD_WORDS = 4096, 512  # characters of a prompt and of bad words that are tokenized without a thread


class AsyncLLM(AsyncPoolingAPI):
    """A compiled model for asyncio. `options` are the fields of EngineArgs; `say` is called with each log line.

        async with AsyncLLM("model.llmc") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50), "request-1"):
                print(output.outputs[0].text)

    `start`, entering the context, or the first request starts the engine process. If it ends or hangs, every open
    request fails with LlmcError E661 or E662, and the process is replaced.

    `text_turn` returns a context in which the long bad words of a tenant are tokenized: servers limit how many are at
    a time. `output_pause` returns how many seconds outputs of the engine may wait to be read, while no reader of a
    request gets each of them at once.
    """

    def __init__(self, model: str | Path, *, say: Callable[[str], None] | None = None, **options: Any) -> None:
        super().__init__(None, {})
        self._say = partial(_say_safely, say or to_stderr)
        self.args = EngineArgs.of_keywords(model, options, self._say)
        self._front: Front | None = None
        self._text: asyncio.Task[Any] | None = None  # loads the tokenizer, while the engine opens
        self.digest = ""  # the artifact's digest, once it is opened
        self._supervisor: Supervisor | Instances | None = None
        self._started = self._stopped = False
        self._starting: asyncio.Task[Ready] | None = None  # the start that requests wait for
        self.text_turn: Callable[[str], AbstractAsyncContextManager[None]] = lambda tenant: contextlib.nullcontext()
        self.output_pause: Callable[[], float] = lambda: 0.0
        self._num_streams = 0  # open requests whose readers get each output at once
        self._waiting_for_bad_words = 0
        self._recent_bad_words: tuple[Any, asyncio.Task[list[list[int]]]] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, say: Callable[[str], None] | None = None) -> AsyncLLM:
        """Return AsyncLLM(engine_args.model, ...) with these options."""
        self = cls(engine_args.model, say=say)
        self.args = engine_args
        return self

    @classmethod
    def over(cls, front: Front, *, say: Callable[[str], None] | None = None, **options: Any) -> AsyncLLM:
        """Return an AsyncLLM with another engine program, such as one with a simulated device."""
        self = cls("", say=say, **options)
        self._front, self.tokenizer = front, front.tokenizer
        return self

    def compile(self) -> None:
        """Compile a model that is not an artifact now instead of in `start`. Raises LlmcError as LLM does.

        In the main thread a signal ends the compilation and leaves no files.
        """
        if self._front is None:
            self.args = replace(self.args, model=compiled(self.args, self._say))

    async def start(self) -> Ready:
        """Open the model and return the limits in force. Can be called once.

        Raises LlmcError as LLM does, and E660 to E664.
        """
        if self._started:
            raise LlmcError("E660", "AsyncLLM was started before", "create another one")
        self._started = True
        if self._front is None:
            self._front = await asyncio.to_thread(read_front, self.args, self._say)
        front, args = self._front, self.args
        self.tokenizer, self.pooling, self.digest = front.tokenizer, front.pooling, front.opening.digest
        self.generation = generation_of(front.generation, args.generation_config, args.override_generation_config)
        step_timeout = args.step_timeout or front.step_timeout

        async def eos() -> list[int]:
            self._text = self._text or asyncio.create_task(asyncio.to_thread(front.read_text))
            self.tokenizer, token_ids = await asyncio.shield(self._text)
            return token_ids

        kind = Supervisor if args.data_parallel_size == 1 else Instances
        self._supervisor = kind(front.command, front.opening, args, step_timeout, self._say, eos)
        for engine in self._supervisor.engines:
            engine.pause = lambda: 0.0 if self._num_streams else self.output_pause()
        if self._stopped:
            await self._supervisor.stop(0.0)
        ready = await self._supervisor.start()
        self._say(ready.summary)
        return ready

    async def ensure_started(self) -> None:
        """Start the engine unless `start` was called, and wait until it is ready. Raises LlmcError as `start` does."""
        if self._starting is None and not self._started:
            self._starting = asyncio.create_task(self.start())
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        timeout: float | None = None,
        output_kind: str = "cumulative",
        interval: float = 0.0,
        visible: frozenset[int] = frozenset(),
        on_end: Callable[[int], object] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt (see LLM.generate). Leaving the iterator, or cancelling its task, aborts the request.

        sampling_params:  None for the model's defaults
        lora_request:     None: adapters are not supported
        priority:         smaller runs first under the scheduling policy "priority"
        cache_salt:       prefixes are shared among requests with the same salt only
        tenant:           tenants get equal service when capacity is short
        timeout:          seconds until the request fails with E666
        output_kind:      "cumulative" (each output holds everything so far), "delta" (what is new) or "final_only". A
                          slow reader gets fewer and larger outputs
        interval:         minimum seconds between two outputs, except the last one and errors
        visible:          special tokens that are part of the text even if skip_special_tokens is set
        on_end:           called with the number of generated tokens once the engine has completed the request; a slow
                          reader gets the last output later

        Raises LlmcError E6xx if the request is refused, E660 to E664 if the engine process is not available.
        """
        refuse_adapter(lora_request)
        await self.ensure_started()
        require_task(self.pooling, GENERATE)
        if output_kind not in OUTPUT_KINDS:
            raise refused("output_kind", output_kind, f"one of {', '.join(OUTPUT_KINDS)}")
        check_timeout(timeout)
        self.require_running()
        ready, config = await self._prompt(prompt), self.config
        if sampling_params is None:
            params = fit_prompt(self.get_default_sampling_params(), ready, config)
        else:
            (params,) = as_params(sampling_params, 1)
        bad_words, size = await self._bad_words(params, tenant), config.vocab_size
        request = prepare(ready, params, bad_words, size, priority=priority, cache_salt=cache_salt, tenant=tenant)
        state = AsyncRequestState(
            output_kind, interval, request_id, ready.text, ready.ids, request.params, self.tokenizer, visible
        )
        if on_end is not None:
            state.on_end = lambda: on_end(state.num_tokens)
        with self._opened(request, state, timeout):
            while (output := await state.next()) is not None:
                yield output

    @contextlib.contextmanager
    def _opened(self, request: EngineRequest, state: AsyncRequestState, timeout: float | None) -> Iterator[None]:
        """Submit a request for the block, after which it is closed."""
        engine, timer = self._running().route(request), None
        outputs = engine.outputs
        outputs.add(request, state)
        self._num_streams += state.streams
        try:
            if timeout is not None:
                timer = asyncio.get_running_loop().call_later(timeout, outputs.expire, state, timeout)
            engine.add(request)
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._num_streams -= state.streams
            outputs.drop(state)

    async def abort(self, request_id: str) -> int:
        """Abort the requests with this id; their readers get a last output with the finish reason "abort".

        Return their number.
        """
        return self._running().outputs.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while a page is in use.

        Of several engines, those with a page in use are left out.
        """
        return (await self._running().call(RESET)).done

    async def record(self, seconds: float) -> list[Row]:
        """Record the engine's loop for `seconds`, at most 60, and return the rows for `trace.document`.

        Of several engines, the first one that is ready is recorded.

        Raises LlmcError E660 if a recording is running.
        """
        reply = await self._running().call(RECORD, min(seconds, MAX_SECONDS))
        if not reply.done:
            raise LlmcError("E660", "the engine's loop is being recorded already", "wait until that recording ends")
        return reply.rows

    def open_requests(self) -> list[dict[str, Any]]:
        """Return the open requests in order of arrival, without texts: `id`, `prompt_tokens`, `output_tokens`,
        `outputs` (those not complete) and `age` in seconds."""
        return self._running().outputs.describe()

    async def restart(self, drain: float = 30.0, engine: int | None = None) -> None:
        """Replace the engine process by a new one, or those of several engines one after the other.

        drain:   seconds for the requests of each process to end; those that are open then fail with E660
        engine:  number of the only engine to restart

        New requests go to the other engines, or fail with E660 if there are none. Raises LlmcError E201 if there is no
        such engine, and E660 to E664 if one is not ready before or afterwards.
        """
        engines = self.engines
        if engine is not None and not 0 <= engine < len(engines):
            raise LlmcError("E201", f"engine = {engine}: there are {len(engines)}", f"use 0 to {len(engines) - 1}")
        await (self._running() if engine is None else engines[engine]).restart(drain)

    async def shutdown(self, drain: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain` seconds for open ones, fail the rest (E663), end the process."""
        self._started = self._stopped = True
        if self._supervisor is not None:
            await self._supervisor.stop(drain)

    @property
    def state(self) -> str:
        """ "starting", "ready", "draining" or "dead"."""
        return STARTING if self._supervisor is None else self._supervisor.state

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted now."""
        return self.state == READY

    @property
    def errored(self) -> bool:
        """Whether no request will be accepted any more."""
        return self.state == DEAD

    @property
    def dead_error(self) -> LlmcError | None:
        """The last failure of the engine process."""
        return None if self._supervisor is None else self._supervisor.error

    @property
    def restarts(self) -> int:
        """The number of engine processes that were replaced."""
        return 0 if self._supervisor is None else self._supervisor.restarts

    @property
    def failures(self) -> int:
        """The number of times that the engine process ended or failed to open in the hour before the last failure."""
        return 0 if self._supervisor is None else self._supervisor.failures

    @property
    def retry_in(self) -> float | None:
        """Seconds until the next engine process is started, after more than `max_restarts` failures within an hour with
        `max_restart_delay` set; else None."""
        return None if self._supervisor is None else self._supervisor.retry_in

    @property
    def gave_up(self) -> bool:
        """Whether the engine has failed too often and is not restarted."""
        return self._supervisor is not None and self._supervisor.gave_up.is_set()

    async def wait_given_up(self) -> None:
        """Wait until the engine has failed too often and is not restarted. Raises LlmcError E660 before `start`."""
        await self._running().gave_up.wait()

    @property
    def engine_pid(self) -> int | None:
        """The process id of the engine, None if there is none."""
        return None if self._supervisor is None else self._supervisor.pid

    @property
    def engines(self) -> tuple[Supervisor, ...]:
        """The engine processes, in the order of their numbers. Raises LlmcError E660 before `start`."""
        return self._running().engines

    @property
    def config(self) -> Ready:
        """The limits in force. Raises LlmcError E660 before they are known."""
        ready = self._running().ready
        if ready is None:
            raise LlmcError("E660", "the engine is starting", "wait for start()")
        return ready

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary. Raises LlmcError E660 before it is known."""
        return self.config.vocab_size

    async def check_health(self) -> None:
        """Raise LlmcError E660 to E664 if no request would be accepted now."""
        self.require_running()

    def require_running(self) -> None:
        """The same, without awaiting."""
        self._running().require()

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters and gauges, at most a heartbeat old, `restarts` and `num_requests_open`."""
        return _stats_of(self._running())

    def stats_by_engine(self) -> list[dict[str, Any]]:
        """Return `stats` of each engine process."""
        return list(map(_stats_of, self.engines))

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait in the engine, at most a heartbeat ago."""
        beats = [engine.heartbeat for engine in self.engines if engine.heartbeat is not None]
        return sum(int(beat.stats.get("num_requests_waiting", 0)) for beat in beats)  # type: ignore[arg-type, misc]

    @property
    def startup(self) -> dict[str, float]:
        """Durations of the last start of the engine in seconds: "total", "process" (until it began to open the
        artifact), and each part of opening it."""
        return dict(self._running().startup)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def _running(self) -> Supervisor | Instances:
        if self._supervisor is None:
            raise LlmcError("E660", "the engine was not started", "await start(), or use: async with AsyncLLM(...)")
        return self._supervisor

    async def _prompt(self, prompt: Any) -> Prompt:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > _INLINE:
            return await asyncio.to_thread(as_prompt, prompt, self.tokenizer)
        return as_prompt(prompt, self.tokenizer)

    async def _bad_words(self, params: SamplingParams, tenant: str) -> list[list[int]]:
        """Tokenize the bad words: many of them in a thread, and once for all prompts that share the parameters."""
        bad_words = params.bad_words
        if sum(map(len, bad_words or ())) <= _INLINE_BAD_WORDS:
            return bad_word_tokens(params, self.tokenizer)
        if self._recent_bad_words is None or self._recent_bad_words[0] is not bad_words:
            self._recent_bad_words = bad_words, asyncio.create_task(self._bad_words_in_turn(params, tenant))
        task = self._recent_bad_words[1]
        if not task.done():
            before, self._waiting_for_bad_words = self._waiting_for_bad_words, self._waiting_for_bad_words + 1
            try:
                await asyncio.wait([task])
            finally:
                self._waiting_for_bad_words -= 1
            for _ in range(before // 4):  # let a few prompts continue in each iteration of the event loop
                await asyncio.sleep(0)
        return task.result()

    async def _bad_words_in_turn(self, params: SamplingParams, tenant: str) -> list[list[int]]:
        async with self.text_turn(tenant):
            return await asyncio.to_thread(bad_word_tokens, params, self.tokenizer)


def _stats_of(engine: Supervisor | Instances) -> dict[str, Any]:
    return {**engine.stats(), "restarts": engine.restarts, "num_requests_open": len(engine.outputs)}


def _say_safely(say: Callable[[str], None], line: str) -> None:
    """Call `say`. Its exceptions are ignored, since they must not stop the supervision of the engine."""
    with contextlib.suppress(Exception):
        say(line)
