"""ModelAPI: what LLM and AsyncLLM have in common, the text side of an open model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc_runtime.artifact import has_tokenizer
from llmc_runtime.defaults import default_params
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.prompts import Prompt, fitted, require_tokenizer
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc_runtime.engine.messages import Ready
    from llmc_runtime.sched.scheduler_config import SchedulerConfig

_MAX_CACHED_DEFAULTS = 16
# Attributes of vLLM's classes that are not here, and what to do instead.
_ELSEWHERE: Mapping[str, str] = MappingProxyType({
    "sleep": "close it; opening it again takes seconds",
    "wake_up": "open it again; that takes seconds",
    "start_profile": "open it with trace=FILE for a trace of the engine's steps",
    "stop_profile": "open it with trace=FILE for a trace of the engine's steps",
    "collective_rpc": "workers load no external code",
    "apply_model": "the runtime has no torch module",
    "llm_engine": "use its own methods: stats, get_metrics, config",
})  # fmt: skip


class ModelAPI:
    """`generation`: sampling defaults named as in generation_config.json. `pooling`: None if the model generates."""

    tokenizer: Tokenizer | None
    generation: Mapping[str, Any]
    pooling: Pooling | None = None

    def __init__(self, tokenizer: Tokenizer | None, generation: Mapping[str, Any]) -> None:
        self.tokenizer, self.generation = tokenizer, generation
        self._defaults: dict[int | None, SamplingParams] = {}  # by max_tokens

    if not TYPE_CHECKING:  # type checkers still report unknown attributes

        def __getattr__(self, name: str) -> Any:
            remedy = _ELSEWHERE.get(name)
            raise AttributeError(f"{type(self).__name__} has no {name}" + (f": {remedy}" if remedy else ""))

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises LlmcError E620 if the artifact has none."""
        return require_tokenizer(self.tokenizer)

    def get_default_sampling_params(self, *, max_tokens: int | None = 16) -> SamplingParams:
        """Return the parameters of requests without any: the model's generation_config.json as transformers reads it,
        or what replaces it (options generation_config and override_generation_config).

        `max_tokens` is the default of max_tokens, None for all that fits.
        """
        if max_tokens not in self._defaults:
            params = default_params(self.generation, max_tokens=max_tokens)
            if len(self._defaults) >= _MAX_CACHED_DEFAULTS:
                return params
            self._defaults[max_tokens] = params
        return self._defaults[max_tokens]


def fit_prompt(params: SamplingParams, prompt: Prompt, limits: SchedulerConfig | Ready) -> SamplingParams:
    """Return `params` with its default max_tokens reduced to what fits into context and KV cache after `prompt`."""
    room = min(limits.max_model_len, limits.num_pages * limits.page_size + 1) - len(prompt.ids)
    return fitted(params, room)


def open_tokenizer(folder: Path, manifest: Manifest) -> tuple[Tokenizer | None, list[int]]:
    """Return the tokenizer of an artifact, None if it has none, and its end-of-sequence token, if it has one."""
    if not has_tokenizer(manifest):
        return None, []
    tokenizer = Tokenizer.open(folder)
    return tokenizer, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
