"""The service of one model: submits requests to the engine, measures them, and ends them early if necessary."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from llmc_runtime.api.async_llm import AsyncLLM
from llmc_runtime.api.async_request import MAX_UPDATE_TOKENS
from llmc_runtime.fair_queue import KeyCounts
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import GENERATE
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.pooling_params import require_task
from llmc_runtime.prompts import Prompt, fitted
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.call import Call, Resources
from llmc_runtime.server.fair_slots import FairSlots, TextThreads
from llmc_runtime.server.http.body_budget import BodyBudget
from llmc_runtime.server.http.errors import OF_ENGINE, ApiError, internal, late, to_api_error, unavailable
from llmc_runtime.server.http.lazy_json import Encoding
from llmc_runtime.server.http.middleware import seconds_of
from llmc_runtime.server.http.request_log import Record
from llmc_runtime.server.operations.admission import LATEST, SOONEST, Admission
from llmc_runtime.server.operations.metrics_exporter import RequestMetrics, ServerMetrics
from llmc_runtime.server.prompting import Prompting
from llmc_runtime.server.requests.parse import check_model
from llmc_runtime.server.requests.request_fields import Generation, check_priority
from llmc_runtime.server.requests.response_size import MAX_ANSWER, SCORE_WEIGHT, check_size, cut, size_of
from llmc_runtime.server.stored_responses import ResponseStore
from llmc_runtime.server.text_pool.pool import TextPool
from llmc_runtime.server.text_pool.text_messages import TextProcessConfig
from llmc_runtime.server.tool_calls.parser_select import AUTO, select_formats
from llmc_runtime.server.updates import Updates, merged

MAX_CHOICES = 256  # maximum choices per request, over all prompts
MAX_TEXTS = 32  # concurrent requests of one key to /tokenize and /detokenize
# Prompts of models that pool that are sent to the engine in an iteration of the event loop: about 1 ms.
_STARTS_PER_ITERATION = 4
MAX_SECONDS = 1_000_000  # maximum of a client's timeout
_LARGE_UPDATE = MAX_UPDATE_TOKENS // 2  # tokens; parsing and encoding more takes about as long as a slice of encoding


class Serving:
    """Serves a started AsyncLLM under `names`; responses carry the first one.

    `template` is a chat template to use instead of the model's. `calls` and `reasoning` name the formats of tool calls
    and reasoning (see parser_select). `timeout` is the maximum time of a request in seconds, `max_answer` the maximum
    size of a response in bytes, and `store_bytes` that of all stored responses. `variables` are default variables
    of the chat template. Raises LlmcError E601 for unknown formats.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        admission: Admission,
        metrics: ServerMetrics,
        template: str | None = None,
        calls: str = AUTO,
        reasoning: str = AUTO,
        timeout: float | None = None,
        max_answer: int = MAX_ANSWER,
        store_bytes: int = 0,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.max_answer = max_answer
        self.llm, self.names = llm, tuple(names)
        self.admission, self.metrics, self.timeout = admission, metrics, timeout
        self.created = int(time.time())
        self.fingerprint = f"fp_{llm.digest[:10]}" if llm.digest else None  # OpenAI's system_fingerprint
        self.encoding = Encoding()
        self._texts = KeyCounts()  # concurrent /tokenize and /detokenize requests by key
        self.formats = select_formats(llm.tokenizer, template, calls, reasoning)
        self.prompting = Prompting(
            llm.tokenizer, llm.config.vocab_size, template, llm.config.max_model_len, variables=variables
        )
        self.bodies = BodyBudget(self._too_many_bodies)
        self._too_many_texts = partial(admission.refuse, "texts", "too many texts are being tokenized")
        self.text_threads = TextThreads(admission.keys, self._too_many_texts)
        llm.text_turn = self.text_threads.slots.slot
        self.parsing = FairSlots(1, self._too_many_texts)  # slots for parsing bodies in the event loop
        # Slots for starting prompts of models that pool.
        self.starts = FairSlots(_STARTS_PER_ITERATION, self._too_many_texts)
        no_room = partial(admission.refuse, "answer_bytes", "responses that are to be stored take too much memory")
        self.stored = ResponseStore(store_bytes, admission.keys, no_room)
        self._options, self._variables = (template, calls, reasoning), dict(variables)
        self.text_processes = TextPool(self._text_process_config, self._too_many_texts, metrics.unknown, admission.keys)

    def close(self) -> None:
        """Stop tokenization."""
        self.text_threads.close()
        self.text_processes.close()

    def _text_process_config(self) -> TextProcessConfig:
        """Return the configuration of text processes."""
        tokenizer, config = self.llm.tokenizer, self.llm.config
        return TextProcessConfig(
            None if tokenizer is None else tokenizer.backend.to_str(),
            {} if tokenizer is None else dict(tokenizer.named_tokens),
            {} if tokenizer is None else dict(tokenizer.chat_templates),
            *self._options, list(self.names), config.vocab_size, config.max_model_len, self.admission.tokens,
            dict(self.llm.generation), self.stored.enabled, self.llm.pooling,
            self._variables,
        )  # fmt: skip

    def _too_many_bodies(self) -> ApiError:
        error = self.admission.refuse("bodies", "too many bytes of request bodies are being received")
        error.headers["Connection"] = "close"
        return error

    def too_many_requests(self) -> ApiError:
        """Count a refusal of a key whose open requests leave no connection to other keys; return its error."""
        error = self.admission.too_many("connections", "this API key has too many open requests")
        error.headers["Connection"] = "close"
        return error

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if the model is not served here. No name means the default model."""
        check_model(name, self.names)

    @property
    def is_alive(self) -> bool:
        """Whether the engine is running or the server is draining."""
        return self.llm.is_running or self.admission.draining

    def check_ready(self) -> None:
        """Raise ApiError 503 if nothing can be generated now."""
        if not self.admission.draining and not self.llm.is_running:
            raise self.blocked_error("engine", "")
        self.admission.check_open()

    def check_blocked(self, key: str) -> None:
        """Raise ApiError if every request of this key would be refused now."""
        if (reason := self.blocked_reason(key)) is not None:
            raise self.blocked_error(reason, key)

    def blocked_reason(self, key: str) -> str | None:
        """Return why every request of this key would be refused now (one of REASONS), or None."""
        absent = not self.admission.draining and not self.llm.is_running
        return "engine" if absent else self.admission.blocked_reason(key)

    def blocked_error(self, reason: str, key: str) -> ApiError:
        """Count a refusal and return its error; `reason` is a result of `blocked_reason` for this key."""
        if reason != "engine":
            return self.admission.blocked_error(reason, key)
        cause, seconds = self._absence()
        return self.admission.refuse(reason, cause, "engine_unavailable", seconds)

    @property
    def busy(self) -> bool:
        """Whether `check_blocked` might refuse a request."""
        return self.admission.busy or not self.llm.is_running

    def _absence(self) -> tuple[str, float]:
        """Return why the engine is not running, and the seconds after which to retry.

        A restart is expected to take as long as the last start, but at most a minute. If other engines are running,
        they take the request when it is sent again.
        """
        if self.llm.is_running:
            return "the engine ended while it computed the request", SOONEST
        start, ended = min(self.llm.startup.get("total", SOONEST), LATEST), self.llm.failures
        if self.llm.gave_up:
            return f"the engine ended {ended} times within an hour; the server is ending", start
        if (remaining := self.llm.retry_in) is not None:
            cause = f"the engine ended {ended} times within an hour; the next try is in {remaining:.0f} s"
            return cause, remaining + start
        return "the engine is not running", start

    @contextmanager
    def texts(self, key: str) -> Iterator[None]:
        """Limit concurrent tokenization by key, for the block. Raises ApiError 503 if the key has too many requests."""
        if self._texts[key] >= MAX_TEXTS:
            raise self._too_many_texts()
        self._texts.change(key, 1)
        try:
            yield
        finally:
            self._texts.change(key, -1)

    def call_resources(self, timeout: str | None) -> Resources:
        """Return the resources of a call, of which only the deadline is set.

        `timeout` is the client's timeout in seconds, as text, limited by the server's own. Raises ApiError 400 if it
        is invalid.
        """
        seconds = self.timeout
        if timeout is not None:
            requested = seconds_of(timeout, MAX_SECONDS)
            if requested is None:
                cause = f"X-Request-Timeout: a number of seconds, above 0 and up to {MAX_SECONDS}"
                raise ApiError(cause, param="X-Request-Timeout")
            seconds = requested if seconds is None else min(requested, seconds)
        return Resources(seconds, None if seconds is None else time.monotonic() + seconds)

    def reserve(self, call: Call, params: SamplingParams, count: int = 1, known: int = 0) -> None:
        """Reserve an admission slot for `count` prompts before they are tokenized; they have at least `known` tokens.

        Raises the ApiErrors of Admission.reserve, and 400 if the model can never serve the request. The caller releases
        the call's slot if `run` is not reached.
        """
        try:
            require_task(self.llm.pooling, GENERATE)
        except LlmcError as e:
            raise to_api_error(e, call.prompt_param) from None
        sequences, length = params.n * count, self.llm.config.max_model_len
        if known >= length and count == 1:
            raise self._too_long(known, call)
        if (params.max_tokens or 0) >= length:
            cause = (
                f"max_tokens ({params.max_tokens}) leaves no tokens for a prompt; the model was compiled for {length}"
            )
            raise to_api_error(LlmcError("E603", cause, f"use a max_tokens of at most {length - 1}"), call.prompt_param)
        if sequences > MAX_CHOICES:
            cause = f"{count} prompts with n = {params.n} are more than {MAX_CHOICES} outputs"
            raise ApiError(f"{cause}; send several requests", param="n")
        remaining = math.inf if call.resources.remaining is None else call.resources.remaining
        tokens = max(known, count), (params.max_tokens or 1) * sequences
        call.resources.slot = self.admission.reserve(sequences, *tokens, call.key, remaining)

    def run(self, prompts: list[Prompt], params: SamplingParams, request: Generation, call: Call) -> Updates:
        """Generate, and yield (index of the prompt, update of its outputs) as they arrive.

        Raises ApiError, before the first item if a prompt cannot be served.
        """
        config, lengths = self.llm.config, [len(prompt.ids) for prompt in prompts]
        if max(lengths) >= config.max_model_len:  # independent of the queue
            raise self._too_long(max(lengths), call)
        limited = request.max_tokens is not None or getattr(request, "max_completion_tokens", None) is not None
        prompt_params = [params] * len(prompts)
        if not limited:
            context = min(config.max_model_len, config.num_pages * config.page_size + 1)
            prompt_params = [fitted(params, context - length) for length in lengths]
        size = size_of(request, params, lengths, self._tokens(prompt_params, lengths), call.repeats)
        if not limited and size.total > self.max_answer:  # shorten the outputs
            prompt_params = [cut(p, size, self.max_answer, params.n * len(prompts)) for p in prompt_params]
            size = replace(size, tokens=self._tokens(prompt_params, lengths))
        check_size(request, size, self.max_answer)
        if size.reserved:
            call.resources.response_memory = self.admission.reserve_response(call.key, size.total)
        priority = check_priority(request.priority)
        if call.resources.slot is None:
            self.reserve(call, params, len(prompts))
        jobs = list(zip(prompts, prompt_params, strict=True))
        return self._admitted(jobs, priority, call.cache_salt(request.cache_salt), call)

    def _tokens(self, prompt_params: list[SamplingParams], lengths: list[int]) -> int:
        """Return the maximum number of tokens that may be generated after prompts of these lengths."""
        context = self.llm.config.max_model_len
        return sum((params.max_tokens or context - length) * params.n for params, length in zip(prompt_params, lengths))

    def _too_long(self, tokens: int, call: Call) -> ApiError:
        length = self.llm.config.max_model_len
        cause = f"the prompt has {tokens} tokens; the model was compiled for {length}, output included"
        return to_api_error(LlmcError("E602", cause, f"shorten the prompt to {length - 1} tokens"), call.prompt_param)

    async def _admitted(
        self, jobs: list[tuple[Prompt, SamplingParams]], priority: int, salt: str, call: Call
    ) -> Updates:
        record, resources, encoding = call.record or Record(), call.resources, self.encoding.of(call.key)
        record.begin(call.id, [prompt for prompt, _ in jobs], call.request_id, jobs[0][1])
        per_prompt = [self.metrics.begin(len(prompt.ids), params, call.key) for prompt, params in jobs]
        self.metrics.count_for_key(call.key, "key_requests")
        assert resources.slot is not None  # reserved in `run`
        try:
            outputs = sum((params.max_tokens or 0) * params.n for _, params in jobs)
            weights = (1 if params.prompt_logprobs is None else SCORE_WEIGHT for _, params in jobs)
            resources.slot.resize(sum(weight * len(job[0].ids) for weight, job in zip(weights, jobs)), outputs)
            generate = partial(
                self.llm.generate, priority=priority, cache_salt=salt, tenant=call.key, timeout=resources.remaining,
                output_kind="delta", interval=call.interval, visible=call.visible, on_end=call.end_prompt,
            )  # fmt: skip
            resources.running = len(jobs)
            updates = [
                self.watched(generate(prompt, params, f"{call.id}-{i}"), call, per_prompt[i], i)
                for i, (prompt, params) in enumerate(jobs)
            ]
            async with aclosing(merged(updates)) as items:  # type: ignore[type-var]
                async for item in items:
                    resources.slot.begin()
                    is_large = record.take(item[1]) > _LARGE_UPDATE
                    yield item
                    if is_large:
                        await encoding.pause()
        except ApiError as e:
            record.fail(e.code)
            raise
        finally:
            resources.release_slot(sum(metrics.tokens for metrics in per_prompt))

    async def watched(
        self, generated: AsyncGenerator[RequestOutput, None], call: Call, metrics: RequestMetrics, index: int = 0
    ) -> Updates:
        """Run prompt `index` of a request with metrics, and convert its errors to ApiErrors."""
        unfinished = "error"  # the finish reason of outputs that have none
        try:
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    metrics.take(output)
                    for choice in output.outputs:
                        if choice.finish_reason == "abort":
                            raise unavailable("the request was ended by the server", "aborted")
                    yield index, output
        except LlmcError as e:
            if e.code == "E666":
                self.metrics.count_timeout()
                raise late(call.resources.seconds or 0.0) from None
            if e.code in OF_ENGINE and not self.admission.draining:
                cause, seconds = self._absence()
                raise unavailable(cause, "engine_unavailable", max(seconds, SOONEST)) from None
            raise to_api_error(e, call.prompt_param) from None
        except (asyncio.CancelledError, GeneratorExit):
            unfinished = "abort"
            raise
        except ApiError:
            raise
        except Exception as e:
            raise internal() from e
        finally:
            metrics.end(unfinished)
