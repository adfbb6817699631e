"""PoolingParams: how the result of a model that pools is finished, on the host. Fields have vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import CLASSIFY, EMBED, GENERATE
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.sched.parameter_type import refused
from llmc_runtime.sched.sampling_params import SamplingParams

# Sampling parameters of requests that end with their prompt.
NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
_USE = MappingProxyType(
    {
        GENERATE: "use generate or chat, or /v1/completions, /v1/chat/completions, /v1/responses or /v1/messages",
        EMBED: "use embed or score, or /v1/embeddings, /v1/score or /v1/rerank",
        CLASSIFY: "use classify or score, or /classify, /v1/score or /v1/rerank",
    }
)
_DOES = MappingProxyType({GENERATE: "generates text", EMBED: "embeds its prompts", CLASSIFY: "classifies its prompts"})


@dataclass(frozen=True)
class PoolingParams:
    """Raises LlmcError E601 for values that are not allowed.

    dimensions:      the first numbers of an embedding that are kept, before it is normalised; None: all of them
    use_activation:  whether an embedding is normalised, or the activation applied to logits; None: as the model does
    """

    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        value = self.dimensions
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise refused("dimensions", value, "none, or an integer of at least 1")
        if not isinstance(self.use_activation, bool | None):
            raise refused("use_activation", self.use_activation, "none, true or false")

    def check(self, pooling: Pooling) -> None:
        """Raise LlmcError E601 if the model's embeddings have fewer dimensions."""
        if self.dimensions is None:
            return
        if pooling.task != EMBED:
            raise refused("dimensions", self.dimensions, "none for a classifier")
        if self.dimensions > pooling.width:
            raise refused("dimensions", self.dimensions, f"1 to {pooling.width}, the size of the model's embeddings")


def require_task(pooling: Pooling | None, *tasks: str) -> None:
    """Raise LlmcError E616 unless the model is for one of these tasks. `pooling`: None if it generates."""
    task = GENERATE if pooling is None else pooling.task
    if task not in tasks:
        raise LlmcError("E616", f"the model {_DOES[task]}; this is a request to {' or '.join(tasks)}", _USE[task])


def require_pooling(pooling: Pooling | None, *tasks: str) -> Pooling:
    """Return the pooling of a model for one of these tasks, EMBED and CLASSIFY. Raises LlmcError E616 for others."""
    require_task(pooling, *tasks)
    assert pooling is not None  # since GENERATE is none of the tasks
    return pooling
