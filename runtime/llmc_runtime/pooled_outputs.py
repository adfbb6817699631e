"""The outputs of models that pool, with vLLM's names and fields, and the numbers in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np

from llmc_runtime.format.names import EMBED
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.pooling_params import PoolingParams

T = TypeVar("T")


@dataclass
class EmbeddingOutput:
    """An embedding, by default of the model's size."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """A number per label: a probability, or a logit where the model or the request applies no activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The relevance of two texts: the output of a cross-encoder, or the cosine similarity of two embeddings."""

    score: float


@dataclass
class PoolingRequestOutput(Generic[T]):
    """A request to a model that pools. `num_cached_tokens`: prompt tokens found in the prefix cache."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def of(cls, request: RequestOutput, outputs: T) -> Self:
        """Return the output of a request with these results."""
        return cls(request.request_id, outputs, request.prompt_token_ids, request.num_cached_tokens)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of a prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classification of a prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of two texts. The token ids are those of both."""


def pooled_values(pooled: bytes, pooling: Pooling, params: PoolingParams) -> np.ndarray:
    """Return the embedding, the probabilities or the logits of a prompt, f32[width or dimensions].

    `pooled` are the f32 numbers that the engine returned.
    """
    values = np.frombuffer(pooled, np.float32)
    active = params.use_activation
    if pooling.task == EMBED:
        values = values[: params.dimensions]
        normalizes = pooling.normalize if active is None else active
        return _normalized(values) if normalizes else values
    if active is False or pooling.activation == "none":
        return values
    if pooling.activation == "sigmoid":
        return (1 / (1 + np.exp(-values.astype(np.float64)))).astype(np.float32)
    powers = np.exp(values.astype(np.float64) - values.max())
    return (powers / powers.sum()).astype(np.float32)


def similarity(a: bytes, b: bytes, dimensions: int | None = None) -> float:
    """Return the cosine similarity of two embeddings that the engine returned, or of their first `dimensions`."""
    left, right = (_normalized(np.frombuffer(x, np.float32)[:dimensions].astype(np.float64)) for x in (a, b))
    return float(left @ right)


def _normalized(values: np.ndarray) -> np.ndarray:
    """Divide a vector by its length, as torch.nn.functional.normalize does."""
    return values / max(float(np.linalg.norm(values.astype(np.float64))), 1e-12)
