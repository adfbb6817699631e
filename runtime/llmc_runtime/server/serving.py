"""The service of one model: submits requests to the engine, meters them, and ends them early if necessary."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from llmc_runtime.api.async_llm import AsyncLLM
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.prompts import Prompt, fitted
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.fair_slots import FairSlots
from llmc_runtime.server.http.body_budget import BodyBudget
from llmc_runtime.server.http.durations import seconds_of
from llmc_runtime.server.http.errors import OF_ENGINE, ApiError, internal, late, not_found, to_api_error, unavailable
from llmc_runtime.server.http.lazy_json import Encoding
from llmc_runtime.server.http.request_log import Record
from llmc_runtime.server.operations.admission import LATEST, SOONEST, Admission, AnswerRoom, Place
from llmc_runtime.server.operations.metrics_exporter import RequestMetrics, ServerMetrics
from llmc_runtime.server.prompting import Prompting
from llmc_runtime.server.requests.request_fields import Generation
from llmc_runtime.server.requests.response_size import MAX_ANSWER, SCORE_WEIGHT, check_size, cut, size_of
from llmc_runtime.server.text_pool.pool import TextPool
from llmc_runtime.server.text_pool.text_messages import Spec
from llmc_runtime.server.tool_calls.parser_select import AUTO, dialect_of

MAX_CHOICES = 256  # of one request, over all prompts
MAX_TEXTS = 32  # concurrent requests of one key to /tokenize and /detokenize
_THREADS = 4  # for tokenization
MOST_SECONDS = 1_000_000
_TOGETHER = 4  # prompts of one request that are started in one iteration of the loop

News = AsyncIterator[tuple[int, RequestOutput]]


@dataclass
class Hold:
    """The resources of a call until it is answered: its timeout in seconds, its deadline (time.monotonic) and its
    place.
    """

    seconds: float | None = None
    deadline: float | None = None
    place: Place | None = None
    answer: AnswerRoom | None = None

    @property
    def left(self) -> float | None:
        """The remaining seconds; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def release(self, tokens: int = 0) -> None:
        """Release the place after `tokens` generated tokens."""
        if self.place is not None:
            self.place.close(tokens)

    def sent(self) -> None:
        """Record that the response was sent or is no longer needed."""
        if self.answer is not None:
            self.answer.close()


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    `key` identifies the API key ("" for none), `prompt_param` the field that contains the prompt, and `request_id` the
    request in the log and for the client. The special tokens in `visible` appear in the response's text.
    """

    id: str
    key: str
    prompt_param: str
    record: Record | None = None
    request_id: str = ""
    visible: frozenset[int] = frozenset()
    hold: Hold = field(default_factory=Hold)

    @property
    def logged_characters(self) -> int:
        """How many characters of a prompt's text to log."""
        return 0 if self.record is None else self.record.prompt_characters


class Serving:
    """Serves a started AsyncLLM under `names`; responses carry the first one.

    `template` is a chat template to use instead of the model's. `calls` and `thoughts` name the formats of tool calls
    and reasoning (see tools.dialect). `timeout` is the maximum time of a request in seconds, and `max_answer` the
    maximum size of a response in bytes. Raises LlmcError E601 for unknown formats.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        admission: Admission,
        meters: ServerMetrics,
        template: str | None = None,
        calls: str = AUTO,
        thoughts: str = AUTO,
        timeout: float | None = None,
        max_answer: int = MAX_ANSWER,
    ) -> None:
        self.max_answer = max_answer
        self.llm, self.names = llm, tuple(names)
        self.admission, self.meters, self.timeout = admission, meters, timeout
        self.created = int(time.time())
        self.encoding = Encoding()
        self._texts: Counter[str] = Counter()  # concurrent /tokenize and /detokenize requests by key
        self._pool = ThreadPoolExecutor(_THREADS, "llmc-text")
        self.dialect = dialect_of(llm.tokenizer, template, calls, thoughts)
        self.prompting = Prompting(llm.tokenizer, llm.config.vocab_size, template, self._pool, llm.config.max_model_len)
        spec = partial(_spec, llm, self.names, admission.tokens, template, calls, thoughts)
        self.bodies = BodyBudget(self._no_room)
        self.lanes = FairSlots(_THREADS, self._too_many_texts, reserved=1 if admission.keys > 1 else 0)
        self.offload = TextPool(spec, self._too_many_texts, meters.unknown, admission.keys)

    def close(self) -> None:
        """Stop tokenization."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.offload.close()

    def _no_room(self) -> ApiError:
        error = self.admission.turn_away("bodies", "too many bytes of request bodies are on their way")
        error.headers["Connection"] = "close"
        return error

    def _too_many_texts(self) -> ApiError:
        return self.admission.turn_away("texts", "too many texts are being tokenized")

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if the model is not served here. No name means the default model."""
        if name and name not in self.names:
            raise not_found(f"the model {name[:80]!r} is not served here", "model", "model_not_found")

    def check_ready(self) -> None:
        """Raise ApiError 503 if nothing can be generated now."""
        self._check_engine()
        self.admission.check_open()

    def check_least(self, key: str) -> None:
        """Raise ApiError if even the smallest request of this key would be refused now."""
        self._check_engine()
        self.admission.check_least(key)

    @property
    def busy(self) -> bool:
        """Whether `check_least` might refuse a request."""
        return self.admission.busy or not self.llm.is_running

    def _check_engine(self) -> None:
        if not self.admission.draining and not self.llm.is_running:
            words, seconds = self._absence()
            raise self.admission.turn_away("engine", words, "engine_unavailable", seconds)

    def _absence(self) -> tuple[str, float]:
        """Return why the engine is not running, and the seconds after which to retry.

        A restart is expected to take as long as the last start, but at most a minute.
        """
        start, ended = min(self.llm.startup.get("total", SOONEST), LATEST), self.llm.failures
        if self.llm.gave_up:
            return f"the engine ended {ended} times within an hour; the server is ending", start
        if (left := self.llm.retry_in) is not None:
            return f"the engine ended {ended} times within an hour; the next try is in {left:.0f} s", left + start
        return "the engine is not running", start

    @contextmanager
    def texts(self, key: str) -> Iterator[None]:
        """Limit concurrent tokenization by key, for the block. Raises ApiError 503 if the key has too many requests."""
        if self._texts[key] >= MAX_TEXTS:
            raise self._too_many_texts()
        self._texts[key] += 1
        try:
            yield
        finally:
            self._texts[key] -= 1
            if not self._texts[key]:
                del self._texts[key]

    def hold(self, asked: str | None) -> Hold:
        """Return the hold of a call.

        `asked` is the client's timeout in seconds, as text, limited by the server's own. Raises ApiError 400 if it is
        invalid.
        """
        seconds = self.timeout
        if asked is not None:
            given = seconds_of(asked, MOST_SECONDS)
            if given is None:
                cause = f"X-Request-Timeout: a number of seconds, above 0 and up to {MOST_SECONDS}"
                raise ApiError(cause, param="X-Request-Timeout")
            seconds = given if seconds is None else min(given, seconds)
        return Hold(seconds, None if seconds is None else time.monotonic() + seconds)

    def reserve(self, call: Call, params: SamplingParams, count: int = 1, known: int = 0) -> None:
        """Reserve a place for `count` prompts before they are tokenized; they have at least `known` tokens.

        Raises the ApiErrors of Admission.place, and 400 if the model can never serve the request. The caller releases
        the call's hold if `run` is not reached.
        """
        sequences, most = params.n * count, self.llm.config.max_model_len
        if known >= most and count == 1:
            raise _too_long(known, most, call)
        if (params.max_tokens or 0) >= most:
            cause = f"max_tokens ({params.max_tokens}) leaves a prompt no room, the model was compiled for {most}"
            raise to_api_error(LlmcError("E603", cause, f"a smaller max_tokens, at most {most - 1}"), call.prompt_param)
        if sequences > MAX_CHOICES:
            cause = f"{count} prompts with n = {params.n} are more than {MAX_CHOICES} outputs"
            raise ApiError(f"{cause}; send several requests", param="n")
        left = call.hold.left
        tokens = max(known, count), (params.max_tokens or 1) * sequences
        call.hold.place = self.admission.place(sequences, *tokens, call.key, math.inf if left is None else left)

    def run(self, prompts: list[Prompt], params: SamplingParams, asked: Generation, call: Call) -> News:
        """Generate, and yield (index of the prompt, update of its outputs) as they arrive.

        Raises ApiError, before the first item if a prompt cannot be served.
        """
        most = self.llm.config.max_model_len
        if (longest := max(len(prompt.ids) for prompt in prompts)) >= most:  # independent of the queue
            raise _too_long(longest, most, call)
        given = asked.max_tokens if asked.max_tokens is not None else getattr(asked, "max_completion_tokens", None)
        if given is None:
            config = self.llm.config
            room = min(config.max_model_len, config.num_pages * config.page_size + 1)
            each = [fitted(params, room - len(prompt.ids)) for prompt in prompts]
        else:
            each = [params] * len(prompts)
        each = self._sized(prompts, each, params, asked, call, given is None)
        if asked.priority is not None and not -(2**31) <= asked.priority < 2**31:
            raise ApiError("priority: an integer of 32 bits; smaller runs first", param="priority")
        if call.hold.place is None:
            self.reserve(call, params, len(prompts))
        jobs = list(zip(prompts, each, strict=True))
        return self._admitted(jobs, asked.priority or 0, f"{call.key}/{asked.cache_salt or ''}", call)

    def _sized(
        self,
        prompts: list[Prompt],
        each: list[SamplingParams],
        params: SamplingParams,
        asked: Generation,
        call: Call,
        open_end: bool,
    ) -> list[SamplingParams]:
        """Return the parameters for each prompt, and reserve memory for the response. Raises ApiError 400, 429, 503."""
        lengths, outputs = [len(prompt.ids) for prompt in prompts], params.n * len(prompts)
        most = self.llm.config.max_model_len  # the limit of an output without max_tokens

        def tokens() -> int:
            return sum((one.max_tokens or most - length) * one.n for one, length in zip(each, lengths))

        size = size_of(asked, params, lengths, tokens())
        if open_end and size.total > self.max_answer:
            each = [cut(one, size, self.max_answer, outputs) for one in each]
            size = replace(size, tokens=tokens())
        check_size(asked, size, self.max_answer)
        if size.held:
            call.hold.answer = self.admission.answer(call.key, size.total)
        return each

    async def _admitted(self, jobs: list[tuple[Prompt, SamplingParams]], priority: int, salt: str, call: Call) -> News:
        record, hold = call.record or Record(), call.hold
        record.begin(call.id, [prompt for prompt, _ in jobs], call.request_id)
        meters = [self.meters.begin(len(prompt.ids), params) for prompt, params in jobs]
        assert hold.place is not None  # reserved in `run`
        try:
            outputs = sum((params.max_tokens or 0) * params.n for _, params in jobs)
            hold.place.resize(sum(_weight(params) * len(prompt.ids) for prompt, params in jobs), outputs)
            news = [
                self._watched(prompt, params, f"{call.id}-{i}", priority, salt, call, meters[i])
                for i, (prompt, params) in enumerate(jobs)
            ]
            async with aclosing(_merged(news)) as merged:  # type: ignore[type-var]
                async for item in merged:
                    hold.place.begin()
                    record.take(item[1])
                    yield item
        except ApiError as e:
            record.fail(e.code)
            raise
        finally:
            hold.release(sum(meter.tokens for meter in meters))

    async def _watched(
        self, prompt: Prompt, params: SamplingParams, name: str, priority: int, salt: str, call: Call,
        meter: RequestMetrics,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """Run one job with metering, and convert its errors to ApiErrors."""
        rest = "error"  # the finish reason of outputs that have none
        try:
            generated = self.llm.generate(
                prompt, params, name, priority=priority, cache_salt=salt, tenant=call.key, timeout=call.hold.left,
                output_kind="delta", visible=call.visible,
            )  # fmt: skip
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    meter.take(output)
                    if any(one.finish_reason == "abort" for one in output.outputs):
                        raise unavailable("the request was ended by the server", "aborted")
                    yield output
        except LlmcError as e:
            if e.code == "E666":
                self.meters.late()
                raise late(call.hold.seconds or 0.0) from None
            if e.code in OF_ENGINE and not self.admission.draining:
                words, seconds = self._absence()
                raise unavailable(words, "engine_unavailable", max(seconds, SOONEST)) from None
            raise to_api_error(e, call.prompt_param) from None
        except (asyncio.CancelledError, GeneratorExit):
            rest = "abort"
            raise
        except ApiError:
            raise
        except Exception as e:
            raise internal() from e
        finally:
            meter.end(rest)


def _weight(params: SamplingParams) -> int:
    """Return the weight of a prompt token in admission."""
    return 1 if params.prompt_logprobs is None else SCORE_WEIGHT


def _spec(llm: AsyncLLM, names: tuple[str, ...], tokens: int, template: str | None, calls: str, thoughts: str) -> Spec:
    """Return the configuration for text processes."""
    tokenizer, config = llm.tokenizer, llm.config
    return Spec(
        None if tokenizer is None else tokenizer.backend.to_str(),
        {} if tokenizer is None else dict(tokenizer.named_tokens),
        {} if tokenizer is None else dict(tokenizer.chat_templates),
        template, calls, thoughts, list(names), config.vocab_size, config.max_model_len, tokens, dict(llm.generation),
    )  # fmt: skip


def _too_long(tokens: int, most: int, call: Call) -> ApiError:
    cause = f"the prompt is {tokens} tokens, the model was compiled for {most} with output"
    return to_api_error(LlmcError("E602", cause, f"shorten the prompt to {most - 1} tokens"), call.prompt_param)


async def _merged(sources: list[AsyncIterator[RequestOutput]]) -> News:
    """Yield the items of all sources as they arrive, with the source's index. The first error ends all of them."""
    if len(sources) == 1:  # updates that arrive between reads are merged into one item
        async with aclosing(sources[0]) as only:  # type: ignore[type-var]
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def follow(index: int) -> None:
        for _ in range(index // _TOGETHER):
            await asyncio.sleep(0)  # let others run between the starts of many prompts
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
    """Wait for the first item and return an equal stream, so that requests that cannot be served fail here."""
    first = await anext(news)

    async def rest() -> News:
        async with aclosing(news) as items:  # type: ignore[type-var]
            yield first
            async for item in items:
                yield item

    return rest()
