"""LLM: a compiled model opened in this process, for lists of prompts, chats and streams.

Any number of threads may use one LLM: the requests of `generate` and of open streams share the engine's steps.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc_runtime.api.model_api import fit_prompt, open_tokenizer
from llmc_runtime.api.output_stream import ProgressBar, Stream
from llmc_runtime.api.pooling_api import PoolingAPI
from llmc_runtime.defaults import generation_of
from llmc_runtime.engine.core import EngineCore
from llmc_runtime.engine.input_processor import bad_word_tokens, prepare
from llmc_runtime.engine.open_model import open_model
from llmc_runtime.engine.output_processor import OutputProcessor
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.engine_options import to_stderr as to_stderr
from llmc_runtime.fair_lock import FairLock
from llmc_runtime.format.errors import LlmcError, llm_closed
from llmc_runtime.format.names import GENERATE, is_artifact
from llmc_runtime.gc_pause import lasting_objects
from llmc_runtime.metrics import Metric, as_metrics
from llmc_runtime.outputs import RequestOutput, RequestState
from llmc_runtime.pooling_params import require_task
from llmc_runtime.prompts import (
    Prompt,
    as_params,
    as_priorities,
    as_prompt,
    as_prompts,
    numbered,
    refuse_adapter,
    refuse_tokenization,
    template_variables,
)
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc_runtime.engine.engine import Engine
    from llmc_runtime.grammar import GrammarGuide, Grammars, Opening
    from llmc_runtime.sched.scheduler_config import SchedulerConfig

_frozen_by = weakref.WeakSet[Any]()  # open LLMs, for which objects are left out of garbage collections


class LLM(PoolingAPI):
    """A compiled model.

    model:    an artifact, or a Hugging Face folder or id (owner/name), which is compiled first. The result is kept
              under `cache_dir`; this needs the extra "compile"
    say:      called with each log line; by default they are printed to stderr
    options:  the fields of EngineOptions (see docs/running.md). Limits among them apply to the compilation, or lower
              those of an artifact

    Objects that exist when it is open are left out of garbage collections (gc.freeze), which would delay a step by tens
    of milliseconds, until the last LLM that was opened in this way is closed (gc.unfreeze). Garbage is collected before
    it is opened, and not meanwhile.

    Raises LlmcError E1xx (artifact), E2xx (memory and limits), E64x (compilation).
    """

    def __init__(self, model: str | Path, *, say: Callable[[str], None] | None = None, **options: Any) -> None:
        self._say = say or to_stderr
        args = EngineOptions.of_keywords(model, options, self._say)
        if args.data_parallel_size > 1:
            cause = f"data_parallel_size = {args.data_parallel_size}, and LLM runs one engine, in this process"
            raise LlmcError("E201", cause, "use AsyncLLM or llmc-serve, or an LLM in each of several processes")
        path = resolve(model, args.compile_options, Path(args.cache_dir) if args.cache_dir else None, self._say)
        self._say(args.opening_line(path))
        with lasting_objects():
            self._open(path, args)
        _frozen_by.add(self)

    def _open(self, path: Path, args: EngineOptions) -> None:
        with open_model(path, args) as artifact:
            from llmc_runtime.engine.loader import open_engine  # with numpy: the GPU is initialized meanwhile

            args.check_artifact(artifact.manifest)
            generation = generation_of(
                artifact.manifest.generation, args.generation_config, args.override_generation_config
            )
            self.model = str(path)
            tokenizer, eos = open_tokenizer(artifact.tokenizer_dir, artifact.manifest)
            opened = open_engine(artifact, args, eos)
        self._close = weakref.finalize(self, opened.close)
        self._close.atexit = False  # at exit daemon threads may still run, and the system frees everything
        self.trace = opened.trace
        self._say(opened.summary)
        self._start(opened.engine, tokenizer, generation, args.chat_template)
        if args.prepare and tokenizer is not None and (failure := self._core.prepare()):
            self._say(failure)

    @classmethod
    def over(
        cls,
        engine: Engine,
        tokenizer: Tokenizer | None = None,
        generation: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> LLM:
        """Return an LLM over an open engine, such as one with a simulated device."""
        self = cls.__new__(cls)
        self.model, self._say, self.trace = "", to_stderr, None
        self._close = weakref.finalize(self, lambda: None)
        self._start(engine, tokenizer, generation or {}, chat_template)
        return self

    def _start(
        self, engine: Engine, tokenizer: Tokenizer | None, generation: Mapping[str, Any], template: str | None
    ) -> None:
        super().__init__(tokenizer, generation)
        self.engine = engine
        self.pooling = engine.scheduler.config.pooling
        self._chat_template = template
        config = engine.scheduler.config

        def grammars() -> Grammars | None:
            if tokenizer is None:
                return None
            from llmc_runtime.grammar import Grammars  # few requests have a grammar

            return Grammars(tokenizer, config.vocab_size, config.eos_token_ids)

        self._core = EngineCore(engine, grammars)
        self._outputs = OutputProcessor(self._core.abort)
        self._ids = itertools.count()
        self._lock = FairLock()

    @property
    def config(self) -> SchedulerConfig:
        """The limits in force: max_model_len, max_num_seqs, the size of the KV cache, the vocabulary."""
        return self.engine.scheduler.config

    def fitted(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """Return `params` with its default max_tokens reduced to what fits into context and cache after `prompt`."""
        return fit_prompt(params, prompt, self.config)

    def _params(self, params: Any, prompts: list[Prompt], max_tokens: int | None) -> list[SamplingParams]:
        """Return the parameters of each prompt: the argument, or the model's defaults with this default max_tokens.

        Raises LlmcError E616 if the model does not generate.
        """
        require_task(self.pooling, GENERATE)
        if params is not None:
            return as_params(params, len(prompts))
        default = self.get_default_sampling_params(max_tokens=max_tokens)
        return [self.fitted(default, prompt) for prompt in prompts]

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Continue one or several prompts. Return their outputs in the same order.

        prompts:          a text, a list of token ids, {"prompt": TEXT}, {"prompt_token_ids": IDS}, or a list of these
        sampling_params:  for all prompts, or one for each. Default: the model's, with 16 tokens unless it sets more
        use_tqdm:         show a progress bar on stderr
        lora_request:     None: adapters are not supported
        tokenization_kwargs:  None or empty: prompts are tokenized whole, with special tokens
        priority:         of each prompt; smaller runs first under the scheduling policy "priority"

        Raises LlmcError E6xx if a prompt or its parameters are refused; then none of them runs.
        """
        refuse_adapter(lora_request)
        refuse_tokenization(tokenization_kwargs)
        ready = as_prompts(prompts, self.tokenizer)
        params = self._params(sampling_params, ready, 16)
        return self._run(ready, params, use_tqdm, as_priorities(priority, len(ready)))

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role": ..., "content": ...}, or a list of conversations.

        `template` holds the chat template's variables: tools, add_generation_prompt, continue_final_message,
        chat_template (a name or a text) and the model's own, which may also be in chat_template_kwargs. Without
        sampling_params an answer may fill the context. Raises LlmcError as `generate`, and E630 to E634 from the
        template.
        """
        refuse_adapter(lora_request)
        several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        chats = list(messages) if several else [messages]
        ready = []
        for i, conversation in enumerate(chats):
            try:
                ready.append(self.chat_prompt(conversation, **template))
            except LlmcError as e:
                raise numbered(e, i, len(chats)) from e
        params = self._params(sampling_params, ready, None)
        return self._run(ready, params, use_tqdm, [0] * len(ready))

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Stream:
        """Continue one prompt. The result is an iterator over the pieces of the output. Raises LlmcError E6xx."""
        return self._stream(as_prompt(prompt, self.tokenizer), sampling_params, 16)

    def stream_chat(self, messages: Any, sampling_params: SamplingParams | None = None, **template: Any) -> Stream:
        """Answer one conversation as a stream; `template` as in `chat`. Raises LlmcError E6xx."""
        return self._stream(self.chat_prompt(messages, **template), sampling_params, None)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works without the argument chat_template."""
        return bool(self._chat_template or (self.tokenizer and self.tokenizer.chat_templates))

    def chat_prompt(self, messages: Any, *, chat_template: str | None = None, **template: Any) -> Prompt:
        """Render `messages` with the chat template and tokenize them. Raises LlmcError E620, E630 to E634, E648."""
        tokenizer = self.get_tokenizer()
        rendered = tokenizer.render_chat(messages, chat_template or self._chat_template, **template_variables(template))
        return Prompt(tokenizer.encode(rendered, add_special_tokens=False), rendered)

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters and gauges by name, such as num_steps and kv_cache_usage_perc."""
        with self._lock:
            return {**self.engine.counters.as_dict(), **self.engine.stats()}

    def get_metrics(self) -> list[Metric]:
        """Return `stats` as metrics with vLLM's names, such as vllm:num_requests_running."""
        return list(as_metrics(self.stats()))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while a page is in use."""
        with self._lock:
            return self.engine.scheduler.reset_prefix_cache()

    def encode(self, *args: Any, **kwargs: Any) -> None:
        """Raise LlmcError E648: hidden states of single tokens are not returned. So does reward."""
        remedy = "use embed, classify or score, with PoolingParams(use_activation=False) for plain numbers"
        raise LlmcError("E648", "encode and reward are not supported", remedy)

    reward = encode

    def beam_search(self, *args: Any, **kwargs: Any) -> None:
        """Raise LlmcError E648: beam search is not supported."""
        raise LlmcError("E648", "beam search is not supported", "use generate with SamplingParams(n=N, temperature=1)")

    def close(self) -> None:
        """Free memory, threads and processes. Open streams end with the finish reason "abort"."""
        if self._lock.forked:  # everything belongs to the parent process
            self._close.detach()
            return
        with self._lock:
            self._outputs.drop_all()
            self.engine.end(llm_closed())
            self._close()
            self._core.close()
        if self in _frozen_by:
            _frozen_by.discard(self)
            if not _frozen_by:
                gc.unfreeze()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool, priorities: list[int]
    ) -> list[RequestOutput]:
        """Submit all prompts, and run steps until each is finished; other threads may take turns between steps.

        Raises the LlmcError of the first prompt that is refused, before any of them runs, or that fails.
        """
        states: list[RequestState] = []
        try:
            self._submit_all(states, prompts, params, priorities)
            self._finish(states, use_tqdm)
        finally:
            with self._lock:
                for state in states:
                    self._outputs.drop(state)
        for state in states:
            if state.error is not None:
                raise state.error
        return [state.output() for state in states]

    def _submit_all(
        self, states: list[RequestState], prompts: list[Prompt], params: list[SamplingParams], priorities: list[int]
    ) -> None:
        """Submit prompts, and append the state of each to `states`. Grammars are compiled concurrently.

        Raises the LlmcError of the first prompt that is refused; it names the prompt's number.
        """
        openings: list[Opening | None] = []
        try:
            openings.extend(self._open_grammar(sampling) for sampling in params)
            for prompt, sampling, priority, opening in zip(prompts, params, priorities, openings):
                guides = self._guides(opening)
                with self._lock:
                    states.append(self._submit(prompt, sampling, priority, guides))
        except BaseException as e:
            for opening in openings[len(states) :]:
                if opening is not None:
                    self._core.grammars().cancel(opening)
            if isinstance(e, LlmcError):
                refused = len(openings) if len(openings) < len(params) else len(states)
                raise numbered(e, refused, len(prompts)) from e
            raise

    def _finish(self, states: list[RequestState], use_tqdm: bool) -> None:
        """Run steps until each request is finished."""
        with ProgressBar(len(states), use_tqdm) as bar:
            for state in states:
                while not state.finished:
                    with self._lock:
                        self._outputs.process(self.engine.step())
                    bar.show(states)
            bar.show(states, last=True)

    def _stream(self, prompt: Prompt, sampling_params: SamplingParams | None, max_tokens: int | None) -> Stream:
        (params,) = self._params(sampling_params, [prompt], max_tokens)
        guides = self._guides(self._open_grammar(params))
        with self._lock:
            return Stream(self._submit(prompt, params, 0, guides), self._lock, self.engine, self._outputs, self)

    def _submit(
        self, prompt: Prompt, params: SamplingParams, priority: int, guides: Sequence[GrammarGuide]
    ) -> RequestState:
        """Submit a request. The lock is held."""
        try:
            words = bad_word_tokens(params, self.tokenizer)
            request = prepare(prompt, params, words, self.config.vocab_size, priority=priority)
            state = RequestState(str(next(self._ids)), prompt.text, prompt.ids, request.params, self.tokenizer)
        except BaseException:
            for guide in guides:
                guide.close()
            raise
        self._outputs.add(request, state)
        try:
            self._core.submit(request, guides)
        except BaseException:
            self._outputs.drop(state)
            raise
        return state

    def _open_grammar(self, params: SamplingParams) -> Opening | None:
        """Start the compilation of a grammar. Other threads may use the engine meanwhile."""
        if params.structured_outputs is None:
            return None
        with self._lock:  # raises E609 in a forked process, since the grammar processes belong to the parent
            return self._core.open_grammar(params)

    def _guides(self, opening: Opening | None) -> Sequence[GrammarGuide]:
        return () if opening is None else self._core.grammars().wait(opening)


def resolve(model: str | Path, options: Mapping[str, str], root: Path | None, say: Callable[[str], None]) -> Path:
    """Return the path of an artifact. A Hugging Face folder, or a model of a hub (`owner/name` or
    `owner/name@revision`, which is downloaded), is compiled into the cache `root` with the compile options `options`.

    Raises LlmcError E101 if `model` is none of these, E64x from compilation and cache.
    """
    path = Path(model)
    try:
        compiled, exists = is_artifact(path), path.exists()
    except OSError as e:
        raise LlmcError("E101", f"{path!s:.200} cannot be opened: {e.strerror}", "check the path") from e
    if compiled:
        return path
    from llmc_runtime import compile_cache  # not needed for an artifact

    root = root or compile_cache.default_root()
    if compile_cache.is_source(path):
        return compile_cache.compiled(path, options, root, say)
    if not exists:
        if compile_cache.is_id(model):
            return compile_cache.fetched(str(model), options, root, say)
        cause, remedy = f"there is no folder {path}", "check the path, or name a model of a hub as owner/name"
    else:
        cause = f"{path} is neither an artifact (manifest.json) nor a Hugging Face folder (config.json)"
        remedy = "give a folder written by llmc compile, or the folder of a model"
    raise LlmcError("E101", cause, remedy)
