"""LLM: an open model as an object of a program, for prompts in lists, chats and streams; it serves no network.

Requests of open streams and of `generate`, from any thread, share the engine's steps; threads take turns.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc_runtime.api.output_stream import Stream
from llmc_runtime.api.progress_bar import Bar
from llmc_runtime.defaults import default_params, generation_of
from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.request_table import Live
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.fair_lock import Turns
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import NAME as MANIFEST
from llmc_runtime.grammar import GrammarGuide, Grammars, Opening
from llmc_runtime.outputs import Answer, RequestOutput
from llmc_runtime.prompts import (
    TOKENIZE,
    Prompt,
    as_params,
    as_priorities,
    as_prompt,
    as_prompts,
    fitted,
    numbered,
)
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.text.chat_template import ChatTemplate, choose_template
from llmc_runtime.text.tokenizer import TOKENIZER_FILE, Tokenizer

_MOST_TEMPLATES = 32  # kept compiled


class LLM:
    """A compiled model, opened.

    `model`: an artifact, or a Hugging Face folder or id (owner/name), which is compiled first (once; kept under
    `cache_dir`; needs the extra "compile"). `options` are the fields of EngineOptions, which docs/running.md lists; the
    limits among them are those of that compile, or lower an artifact's own. `say` gets one line for each thing that
    happens (by default printed to stderr).

    Raises LlmcError: E1xx artifact, E2xx memory and limits, E64x compiling.
    """

    def __init__(self, model: str | Path, *, say: Callable[[str], None] | None = None, **options: Any) -> None:
        from llmc_runtime.engine.loader import open_engine, open_model

        self._say = say or to_stderr
        args = EngineOptions(model, **options)
        path = resolve(model, args.compile_options, Path(args.cache_dir) if args.cache_dir else None, self._say)
        artifact = open_model(path, args)
        generation = generation_of(
            artifact.manifest.generation, args.generation_config, args.override_generation_config
        )
        self.model = str(path)
        has_text = f"{artifact.tokenizer_dir.name}/{TOKENIZER_FILE}" in artifact.manifest.tokenizer
        tokenizer = Tokenizer.open(artifact.tokenizer_dir) if has_text else None
        eos = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        opened = open_engine(artifact, args, eos)
        self._close = weakref.finalize(self, opened.close)
        self._close.atexit = False  # the process takes everything with it, and daemon threads may still run
        self.trace = opened.trace
        self._say(opened.summary)
        self._start(opened.engine, tokenizer, generation, args.chat_template)
        if args.prepare and self._grammars is not None and (why := self._grammars.prepare()):
            self._say(why)

    @classmethod
    def over(
        cls,
        engine: Engine,
        tokenizer: Tokenizer | None = None,
        generation: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> LLM:
        """An LLM over an engine made elsewhere: a simulated device, a test."""
        self = cls.__new__(cls)
        self.model, self._say, self.trace = "", to_stderr, None
        self._close = weakref.finalize(self, lambda: None)
        self._start(engine, tokenizer, generation or {}, chat_template)
        return self

    def _start(
        self, engine: Engine, tokenizer: Tokenizer | None, generation: Mapping[str, Any], template: str | None
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.generation = generation
        self._chat_template = template
        self._templates: dict[str, ChatTemplate] = {}
        self._live = Live(engine, tokenizer)
        config = engine.scheduler.config
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            self._grammars = Grammars(tokenizer, config.vocab_size, config.eos_token_ids)
            engine.pump = self._grammars.pump
        self._turns = Turns()

    @property
    def config(self) -> SchedulerConfig:
        """The limits in force: max_model_len, max_num_seqs, pool size, vocabulary."""
        return self.engine.scheduler.config

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. LlmcError E620 where the artifact has none."""
        if self.tokenizer is None:
            raise LlmcError("E620", "the artifact has no tokenizer.json", TOKENIZE)
        return self.tokenizer

    def get_default_sampling_params(self, *, max_tokens: int | None = 16) -> SamplingParams:
        """What is used where none are given: the model's generation_config.json, as transformers reads it, unless the
        LLM was told otherwise."""
        return default_params(self.generation, max_tokens=max_tokens)

    def fitted(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """`params` whose max_tokens, that nobody asked for, are cut to what model and KV cache hold after `prompt`."""
        config = self.config
        return fitted(params, min(config.max_model_len, config.pool_tokens + 1) - len(prompt.ids))

    def _params(self, given: Any, prompts: list[Prompt], most: int | None) -> list[SamplingParams]:
        """What was given, or the model's defaults, `most` tokens where they name no number."""
        if given is not None:
            return as_params(given, len(prompts))
        default = self.get_default_sampling_params(max_tokens=most)
        return [self.fitted(default, prompt) for prompt in prompts]

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or many prompts; the outputs in their order.

        A prompt is a text, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": IDS}. If any of them, or
        its parameters, cannot be served, LlmcError E6xx names it and nothing runs.
        """
        ready = as_prompts(prompts, self.tokenizer)
        params = self._params(sampling_params, ready, 16)
        return self._run(ready, params, use_tqdm, as_priorities(priority, len(ready)))

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"} dicts) or a list of them.

        `template` goes to the model's chat template: tools, add_generation_prompt, continue_final_message,
        chat_template (a name or a text), and variables of its own. Without parameters an answer may fill the context.
        """
        several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        chats = list(messages) if several else [messages]
        ready = []
        for i, one in enumerate(chats):
            try:
                ready.append(self.chat_prompt(one, **template))
            except LlmcError as e:
                raise numbered(e, i, len(chats)) from e
        params = self._params(sampling_params, ready, None)
        return self._run(ready, params, use_tqdm, [0] * len(ready))

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Stream:
        """Continue one prompt; iterate over the result for its pieces as they are known."""
        return self._stream(as_prompt(prompt, self.tokenizer), sampling_params, 16)

    def stream_chat(self, messages: Any, sampling_params: SamplingParams | None = None, **template: Any) -> Stream:
        """Answer one conversation, piece by piece; `template` as in `chat`."""
        return self._stream(self.chat_prompt(messages, **template), sampling_params, None)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used without giving a template."""
        return bool(self._chat_template or (self.tokenizer and self.tokenizer.chat_templates))

    def chat_prompt(self, messages: Any, *, chat_template: str | None = None, **template: Any) -> Prompt:
        """The prompt that the chat template makes of `messages`. LlmcError E620, E630 to E634."""
        tokenizer = self.get_tokenizer()
        wanted = chat_template or self._chat_template
        text = choose_template(tokenizer.chat_templates, wanted, template.get("tools"))
        if text not in self._templates:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            self._templates[text] = ChatTemplate(text, tokenizer.named_tokens)
        rendered = self._templates[text].render(messages, **template)
        return Prompt(tokenizer.encode(rendered, add_special_tokens=False), rendered)

    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges by name: steps, tokens, preemptions, prefix hits, pages in use ..."""
        with self._turns:
            return {**self.engine.counters.as_dict(), **self.engine.stats()}

    def close(self) -> None:
        """Give memory and threads back; open streams end here, and the LLM cannot be used afterwards."""
        if self._turns.elsewhere:  # they are the parent's
            self._close.detach()
            return
        with self._turns:
            self._live.drop_all()
            self.engine.end(LlmcError("E608", "the LLM is closed", "open another one: LLM(...)"))
            self._close()
            if self._grammars is not None:
                self._grammars.close()
            if self.trace is not None:
                self.trace.finish()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool, priorities: list[int]
    ) -> list[RequestOutput]:
        mine: list[Answer] = []
        openings = [self._open_grammar(one) for one in params]
        try:
            for i, (prompt, wanted, priority) in enumerate(zip(prompts, params, priorities)):
                try:
                    guides = self._guides(openings[i])
                    with self._turns:
                        mine.append(self._live.add(prompt, wanted, priority, guides))
                except LlmcError as e:
                    raise numbered(e, i, len(prompts)) from e
            with Bar(len(prompts), use_tqdm) as bar:
                for answer in mine:
                    while not answer.finished:
                        with self._turns:
                            self._live.step()
                        bar.show(mine)
                bar.show(mine, last=True)
        finally:
            with self._turns:
                for answer in mine:
                    self._live.drop(answer)
        _raise_first(mine)
        return [answer.output() for answer in mine]

    def _stream(self, prompt: Prompt, given: SamplingParams | None, most: int | None) -> Stream:
        (params,) = self._params(given, [prompt], most)
        guides = self._guides(self._open_grammar(params))
        with self._turns:
            return Stream(self._live.add(prompt, params, 0, guides), self._turns, self._live, self)

    def _open_grammar(self, params: SamplingParams) -> Opening | None:
        """Have the grammar of structured outputs compiled; other threads use the engine meanwhile."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            cause = "structured outputs need the tokenizer, which the artifact lacks"
            raise LlmcError("E620", cause, "use allowed_token_ids or logit_bias")
        with self._turns:  # in a forked process E609: the grammar processes are the parent's
            return self._grammars.open(params.structured_outputs, count=params.n)

    def _guides(self, opening: Opening | None) -> Sequence[GrammarGuide]:
        return () if opening is None or self._grammars is None else self._grammars.wait(opening)


def resolve(model: str | Path, options: Mapping[str, str], root: Path | None, say: Callable[[str], None]) -> Path:
    """The artifact that `model` is, or that it compiles to under the cache `root` (None: the default one); a model of a
    hub, `owner/name` or `owner/name@revision`, is fetched for that.

    LlmcError E101 where it is neither, E64x from the cache.
    """
    path = Path(model)
    try:
        compiled, source, there = (path / MANIFEST).is_file(), (path / "config.json").is_file(), path.exists()
    except OSError as e:
        raise LlmcError("E101", f"{path!s:.200} cannot be opened: {e.strerror}", "check the path") from e
    if compiled:
        return path
    if source:
        from llmc_runtime import compile_cache

        return compile_cache.compiled(path, options, root or compile_cache.default_root(), say)
    if not there:
        from llmc_runtime import compile_cache

        if compile_cache.is_id(model):
            return compile_cache.fetched(str(model), options, root or compile_cache.default_root(), say)
        cause, remedy = f"there is no folder {path}", "check the path, or name a model of a hub as owner/name"
    else:
        cause = f"{path} is neither an artifact (manifest.json) nor a Hugging Face folder (config.json)"
        remedy = "an artifact whose compile was killed has no manifest: llmc compile MODEL -o DIR again"
    raise LlmcError("E101", cause, remedy)


def _raise_first(answers: Iterable[Answer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise answer.error


def to_stderr(line: str) -> None:
    """Tell a person, where there is one: a stderr that is closed, full or read by nobody is no failure."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"llmc: {line}", file=sys.stderr, flush=True)
