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
    from llmc_runtime.api.llm import LLM
    from llmc_runtime.engine_options import EngineArgs
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
        "EngineArgs": "llmc_runtime.engine_options",
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
            (
                "ClassificationRequestOutput",
                "EmbeddingRequestOutput",
                "PoolingRequestOutput",
                "ScoringRequestOutput",
            ),
            "llmc_runtime.pooled_outputs",
        ),
    }
)

__all__ = [
    "LLM", "AsyncLLM", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingRequestOutput", "EngineArgs",
    "LlmcError", "Logprob", "Piece", "PoolingParams", "PoolingRequestOutput", "RequestOutput", "SamplingParams",
    "ScoringRequestOutput", "StructuredOutputsParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'llmc_runtime' has no attribute {name!r}")
    try:
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
