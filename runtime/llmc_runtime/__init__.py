"""The runtime: opens an artifact, generates text with it and serves it. It does not need the compiler or torch.

    from llmc_runtime import LLM, SamplingParams
    llm = LLM("model.llmc")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)

Names are imported on first use, so that `import llmc_runtime` is fast.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc_runtime.api.async_llm import AsyncLLM
    from llmc_runtime.api.async_llm import AsyncLLM as AsyncLLMEngine
    from llmc_runtime.api.llm import LLM
    from llmc_runtime.engine_args import EngineArgs
    from llmc_runtime.engine_args import EngineArgs as AsyncEngineArgs
    from llmc_runtime.format.errors import LlmcError
    from llmc_runtime.outputs import CompletionOutput, Logprob, Piece, RequestOutput
    from llmc_runtime.pooled_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from llmc_runtime.pooling_params import PoolingParams
    from llmc_runtime.prompts import TextPrompt, TokensPrompt
    from llmc_runtime.sched.sampling_params import SamplingParams
    from llmc_runtime.sched.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_MODULES = MappingProxyType(
    {
        "LLM": "llmc_runtime.api.llm",
        "AsyncLLM": "llmc_runtime.api.async_llm",
        "EngineArgs": "llmc_runtime.engine_args",
        "SamplingParams": "llmc_runtime.sched.sampling_params",
        "StructuredOutputsParams": "llmc_runtime.sched.structured_outputs",
        "TextPrompt": "llmc_runtime.prompts",
        "TokensPrompt": "llmc_runtime.prompts",
        "RequestOutput": "llmc_runtime.outputs",
        "CompletionOutput": "llmc_runtime.outputs",
        "Logprob": "llmc_runtime.outputs",
        "Piece": "llmc_runtime.outputs",
        "LlmcError": "llmc_runtime.format.errors",
        "PoolingParams": "llmc_runtime.pooling_params",
        **dict.fromkeys(
            ("ClassificationRequestOutput", "EmbeddingRequestOutput", "PoolingRequestOutput", "ScoringRequestOutput"),
            "llmc_runtime.pooled_outputs",
        ),
    }
)

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "ClassificationRequestOutput", "CompletionOutput",
    "EmbeddingRequestOutput", "EngineArgs", "LlmcError", "Logprob", "Piece", "PoolingParams", "PoolingRequestOutput",
    "RequestOutput", "SamplingParams", "ScoringRequestOutput", "StructuredOutputsParams", "TextPrompt",
    "TokensPrompt",
]  # fmt: skip

_ALIASES = MappingProxyType({"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"})  # vLLM's names
# Names of vLLM that are not here, and what to do instead.
_ELSEWHERE = MappingProxyType({
    "LLMEngine": "use LLM, or AsyncLLM",
    "LoRARequest": "adapters are not supported; merge them into the weights, and compile",
    "GuidedDecodingParams": "use StructuredOutputsParams",
    "BeamSearchParams": "beam search is not supported; use SamplingParams(n=N, temperature=1)",
    "ModelRegistry": "models are traced from transformers by llmc compile",
    "EmbedsPrompt": "prompts are text or token ids",
    "RequestOutputKind": "AsyncLLM.generate has output_kind",
})  # fmt: skip


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _ELSEWHERE:  # an AttributeError would reach `from llmc_runtime import NAME` without its message
        raise ImportError(f"llmc_runtime has no {name}: {_ELSEWHERE[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'llmc_runtime' has no attribute {name!r}")
    from llmc_runtime.gc_pause import paused_collections

    try:
        with paused_collections():
            return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as e:
        if e.name not in ("msgspec", "zmq"):
            raise
        from llmc_runtime.format.errors import LlmcError
        from llmc_runtime.format.install_command import install_command

        cause = f"{name} needs the package {e.name}, which is not installed"
        raise LlmcError("E665", cause, install_command("serve")) from None


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
