"""AsyncLLM: an open model for the programs of one event loop, its engine in a process of its own; it serves no network.

Text is made here, tokens there: prompts are encoded and answers decoded in this process, long prompts in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmc_runtime.api.llm import resolve, to_stderr
from llmc_runtime.defaults import default_params, generation_of
from llmc_runtime.engine.allowed_tokens import masked
from llmc_runtime.engine.client import default_command
from llmc_runtime.engine.client_requests import KINDS
from llmc_runtime.engine.control_rpc import LONGEST, RECORD, RESET
from llmc_runtime.engine.messages import Add, Open, Ready, params_of
from llmc_runtime.engine.request_table import words_of
from llmc_runtime.engine.supervisor import DEAD, READY, STARTING, Supervisor
from llmc_runtime.engine_options import EngineArgs, quoted
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.prompts import TOKENIZE, Prompt, as_params, as_prompt, fitted
from llmc_runtime.sched.parameter_type import refused
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.tokenizer import TOKENIZER_FILE, Tokenizer
from llmc_runtime.trace import Row

_MOST_DEFAULTS = 16
_LONGEST_TIMEOUT = 1_000_000  # seconds
_INLINE, _INLINE_WORDS = 4096, 512  # characters of a prompt and of bad words that are encoded without a thread
_GPU_STEP, _CPU_STEP = 30.0, 300.0  # seconds that a step may take


@dataclass(frozen=True)
class Front:
    """What the front needs to know of a model: its engine's command and first message, and the text side."""

    command: Sequence[str]
    opening: Open
    tokenizer: Tokenizer | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    step_timeout: float = _CPU_STEP


class AsyncLLM:
    """A compiled model for asyncio; `options` are those of EngineArgs, `say` gets a line for each thing that happens.

        async with AsyncLLM("model.llmc") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50), "request-1"):
                print(output.outputs[0].text)

    The engine process is opened by `start`, or on entering the context. Where it ends or hangs, every open request
    ends with LlmcError E661 or E662, and it is replaced.
    """

    def __init__(self, model: str | Path, *, say: Callable[[str], None] | None = None, **options: Any) -> None:
        self.args = EngineArgs(model, **options)
        self._say = partial(_tell, say or to_stderr)
        self._front: Front | None = None
        self._supervisor: Supervisor | None = None
        self._started = self._stopped = False
        self.generation: Mapping[str, Any] = {}  # defaults of sampling, by their names in generation_config.json
        self._waiting_for_words = 0
        self._recent_words: tuple[Any, asyncio.Task[list[list[int]]]] | None = None
        self._made_defaults: dict[int | None, SamplingParams] = {}  # by max_tokens: servers ask for the same ones again

    @classmethod
    def over(cls, front: Front, *, say: Callable[[str], None] | None = None, **options: Any) -> AsyncLLM:
        """An AsyncLLM over an engine program of another make: a simulated device, a test."""
        self = cls("", say=say, **options)
        self._front = front
        return self

    def compile(self) -> None:
        """Have a model that is no artifact compiled now, not at the start: in the main thread a signal ends that, and
        leaves nothing of it. LlmcError as LLM's."""
        if self._front is None:
            self.args = replace(self.args, model=_artifact(self.args, self._say))

    async def start(self) -> Ready:
        """Open the model; the limits in force. LlmcError as LLM's, E660 to E664. Once."""
        if self._started:
            raise LlmcError("E660", "AsyncLLM was started before", "make another one")
        self._started = True
        if self._front is None:
            self._front = await asyncio.to_thread(_read, self.args, self._say)
        front, args = self._front, self.args
        self.generation = generation_of(front.generation, args.generation_config, args.override_generation_config)
        limit = self.args.step_timeout or front.step_timeout
        self._supervisor = Supervisor(front.command, front.opening, self.args, limit, self._say)
        if self._stopped:
            await self._supervisor.stop(0.0)
        ready = await self._supervisor.start()
        self._say(ready.summary)
        return ready

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        timeout: float | None = None,
        output_kind: str = "cumulative",
        visible: frozenset[int] = frozenset(),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt (see LLM.generate); each output is what is known when it is asked for.

        `output_kind`: "cumulative" (everything so far), "delta" (of each output what is new) or "final_only". A reader
        that is slow gets fewer and larger ones. `visible` special tokens are in the text even where others are skipped.
        Leaving the iterator, or cancelling its task, ends the request, and so do `timeout` seconds: E666. Tenants get
        equal service where there is too little for all. Without parameters the model's defaults count.
        LlmcError: E6xx where it cannot run, E660 to E664 from the process.
        """
        _check(output_kind, priority, cache_salt, tenant, timeout)
        supervisor = self._running()
        supervisor.require()
        ready, tokenizer = await self._prompt(prompt), self.tokenizer
        params = self._defaults(ready) if sampling_params is None else as_params(sampling_params, 1)[0]
        params, words = masked(params, self.config.vocab_size), await self._words(params)
        requests = supervisor.requests
        reader = requests.open(request_id, ready, params, tokenizer, output_kind, visible)
        timer = None
        try:
            if timeout is not None:
                timer = asyncio.get_running_loop().call_later(timeout, requests.expire, reader, timeout)
            supervisor.add(Add(reader.first, ready.ids, params_of(params), priority, cache_salt, words, tenant))
            while (output := await reader.next()) is not None:
                yield output
        finally:
            if timer is not None:
                timer.cancel()
            requests.drop(reader)

    async def abort(self, request_id: str) -> int:
        """End the requests of this id; their readers get a last output, of finish reason "abort". How many."""
        return self._running().requests.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while a page is in use."""
        return (await self._running().ask(RESET)).done

    async def record(self, seconds: float) -> list[Row]:
        """The engine's loop from now on, for `seconds` (60 at most), for `trace.document`. LlmcError E660 where another
        recording is under way."""
        reply = await self._running().ask(RECORD, min(seconds, LONGEST))
        if not reply.done:
            raise LlmcError("E660", "the engine's loop is being recorded already", "wait for the end of that")
        return reply.rows

    def open_requests(self) -> list[dict[str, Any]]:
        """What is open: `id`, `prompt_tokens`, `output_tokens`, `outputs` (not ended), `age` in seconds; no text."""
        return self._running().requests.describe()

    async def shutdown(self, drain: float = 0.0) -> None:
        """Take nothing new, let open requests go on for `drain` seconds, tell the rest (E663), end the process."""
        self._started = self._stopped = True
        if self._supervisor is not None:
            await self._supervisor.stop(drain)

    @property
    def state(self) -> str:
        """ "starting", "ready", "draining" or "dead"."""
        return STARTING if self._supervisor is None else self._supervisor.state

    @property
    def is_running(self) -> bool:
        """Whether requests are taken now."""
        return self.state == READY

    @property
    def errored(self) -> bool:
        """Whether nothing will be taken any more."""
        return self.state == DEAD

    @property
    def dead_error(self) -> LlmcError | None:
        """The last failure of the engine process."""
        return None if self._supervisor is None else self._supervisor.error

    @property
    def restarts(self) -> int:
        """Engine processes that were replaced."""
        return 0 if self._supervisor is None else self._supervisor.restarts

    @property
    def failures(self) -> int:
        """Times that the engine process has ended, or not opened, within the hour before the last of them."""
        return 0 if self._supervisor is None else self._supervisor.failures

    @property
    def retry_in(self) -> float | None:
        """Seconds until the next engine process is started, once more than `max_restarts` have failed within an hour
        and `max_restart_delay` has it try on; else None."""
        return None if self._supervisor is None else self._supervisor.retry_in

    @property
    def gave_up(self) -> bool:
        """Whether the engine has failed too often and is not started again."""
        return self._supervisor is not None and self._supervisor.gave_up.is_set()

    async def wait_given_up(self) -> None:
        """Return when the engine has failed too often and is not started again. LlmcError E660 before start()."""
        await self._running().gave_up.wait()

    @property
    def engine_pid(self) -> int | None:
        """The process id of the engine."""
        return None if self._supervisor is None else self._supervisor.pid

    @property
    def config(self) -> Ready:
        """The limits in force. LlmcError E660 before they are known."""
        ready = self._running().ready
        if ready is None:
            raise LlmcError("E660", "the engine is starting", "wait for start()")
        return ready

    @property
    def vocab_size(self) -> int:
        """The token ids that the model has. LlmcError E660 before they are known."""
        return self.config.vocab_size

    async def check_health(self) -> None:
        """LlmcError where no request would be taken now."""
        self._running().require()

    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges, at most a heartbeat old; `restarts`, and requests that are open here."""
        supervisor = self._running()
        mine = {"restarts": supervisor.restarts, "num_requests_open": len(supervisor.requests)}
        return {**supervisor.stats(), **mine}

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine, a heartbeat ago at most."""
        pulse = self._running().pulse
        return 0 if pulse is None else int(pulse.stats.get("num_requests_waiting", 0))  # type: ignore[arg-type]

    @property
    def startup(self) -> dict[str, float]:
        """Seconds of the last start of the engine: "total", "process" (until it began to open the artifact), and of
        each part of opening it."""
        return dict(self._running().startup)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None where there is none or the model is not open yet."""
        return None if self._front is None else self._front.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. LlmcError E620 where the artifact has none."""
        if self.tokenizer is None:
            raise LlmcError("E620", "the artifact has no tokenizer.json", TOKENIZE)
        return self.tokenizer

    def get_default_sampling_params(self, *, max_tokens: int | None = 16) -> SamplingParams:
        """What is used where none are given: the model's generation_config.json, as transformers reads it."""
        if max_tokens not in self._made_defaults:
            made = default_params(self.generation, max_tokens=max_tokens)
            if len(self._made_defaults) >= _MOST_DEFAULTS:
                return made
            self._made_defaults[max_tokens] = made
        return self._made_defaults[max_tokens]

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise LlmcError("E660", "the engine was not started", "await start(), or use: async with AsyncLLM(...)")
        return self._supervisor

    async def _prompt(self, given: Any) -> Prompt:
        text = given.get("prompt") if isinstance(given, Mapping) else given
        if isinstance(text, str) and len(text) > _INLINE:
            return await asyncio.to_thread(as_prompt, given, self.tokenizer)
        return as_prompt(given, self.tokenizer)

    async def _words(self, params: SamplingParams) -> list[list[int]]:
        """The bad words as token ids; many are tokenized in a thread, once for all prompts of a request, which share
        them."""
        words = params.bad_words
        if sum(map(len, words or ())) <= _INLINE_WORDS:
            return words_of(params, self.tokenizer)
        if self._recent_words is None or self._recent_words[0] is not words:
            self._recent_words = words, asyncio.create_task(asyncio.to_thread(words_of, params, self.tokenizer))
        task = self._recent_words[1]
        if not task.done():
            before, self._waiting_for_words = self._waiting_for_words, self._waiting_for_words + 1
            try:
                await asyncio.wait([task])
            finally:
                self._waiting_for_words -= 1
            for _ in range(before // 4):  # a few prompts go on in each turn of the event loop
                await asyncio.sleep(0)
        return task.result()

    def _defaults(self, prompt: Prompt) -> SamplingParams:
        config = self.config
        room = min(config.max_model_len, config.num_pages * config.page_size + 1) - len(prompt.ids)
        return fitted(self.get_default_sampling_params(), room)


def _artifact(args: EngineArgs, say: Callable[[str], None]) -> Path:
    return resolve(args.model, args.compile_options, Path(args.cache_dir) if args.cache_dir else None, say)


def _read(args: EngineArgs, say: Callable[[str], None]) -> Front:
    """The text side of the artifact, and what its engine is told. LlmcError E1xx, E64x from compiling."""
    path = _artifact(args, say)
    folder = Folder(path)
    manifest = folder.manifest()
    for error in folder.check_small(manifest.files):
        raise error
    has_text = f"tokenizer/{TOKENIZER_FILE}" in manifest.tokenizer
    tokenizer = Tokenizer.open(path / "tokenizer") if has_text else None
    end = None if tokenizer is None else tokenizer.eos_token_id
    opening = Open(quoted(path), args.message(), [] if end is None else [end], manifest.digest)
    step = _CPU_STEP if manifest.target.name.startswith("cpu") else _GPU_STEP
    return Front(default_command(), opening, tokenizer, manifest.generation, step)


def _check(kind: object, priority: object, salt: object, tenant: object, timeout: object) -> None:
    """What a request brings beside prompt and parameters. LlmcError E601: a message of other types is no request."""
    if kind not in KINDS:
        raise refused("output_kind", kind, f"one of {', '.join(KINDS)}")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise refused("priority", priority, "an integer; smaller runs first")
    for name, value in (("cache_salt", salt), ("tenant", tenant)):
        if not isinstance(value, str):
            raise refused(name, value, "a string; an empty one is none")
    if timeout is not None and not (isinstance(timeout, int | float) and 0 <= timeout <= _LONGEST_TIMEOUT):
        raise refused("timeout", timeout, f"none, or seconds, 0 to {_LONGEST_TIMEOUT}")


def _tell(say: Callable[[str], None], line: str) -> None:
    """Nobody who cannot hear it keeps an engine from being looked after."""
    with contextlib.suppress(Exception):
        say(line)
