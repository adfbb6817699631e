"""The outputs of models that pool, with vLLM's names and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from llmc_runtime.outputs import RequestOutput

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
