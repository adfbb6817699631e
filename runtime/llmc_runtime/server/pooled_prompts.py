"""The prompts of requests to models that pool, as token ids, in threads or in a text process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import CLASSIFY, EMBED
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.pairs import paired, require_scores
from llmc_runtime.pooling_params import require_pooling
from llmc_runtime.prompts import Prompt
from llmc_runtime.server.api_routes import POOLED_ROUTES
from llmc_runtime.server.http.errors import to_api_error
from llmc_runtime.server.prompting import Prompting, check_ids, limited, listed
from llmc_runtime.server.requests.pooling_request import (
    MAX_INPUTS,
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    RerankRequest,
    ScoreRequest,
    documents_of,
)

# The field with the prompts, by the type of request.
_PROMPT_PARAM: Mapping[type[Any], str] = MappingProxyType(
    {route.request: route.prompt_param for route in POOLED_ROUTES}
)


def require_pooled(request: Pooled, pooling: Pooling | None) -> Pooling:
    """Return the pooling of a model that serves this type of request. Raises LlmcError E616 for others."""
    if isinstance(request, ScoreRequest | RerankRequest):
        return require_scores(pooling)
    return require_pooling(pooling, EMBED if isinstance(request, EmbeddingRequest) else CLASSIFY)


@dataclass(frozen=True)
class PooledPrompts:
    """Makes the prompts of requests. `limit` is the maximum number of tokens of all prompts of a request."""

    prompting: Prompting
    pooling: Pooling
    limit: int

    def of(self, request: Pooled) -> Iterator[Prompt]:
        """Yield the prompts: the inputs; the pairs of a cross-encoder, or the first texts and then the second ones.

        The text of a reranked document, or of its pair, is the document. Raises ApiError 400.
        """
        param = _PROMPT_PARAM[type(request)]
        try:
            yield from limited(self._prompts(request, param), self.limit, param)
        except LlmcError as e:
            raise to_api_error(e, param) from None

    def _prompts(self, request: Pooled, param: str) -> Iterator[Prompt]:
        keep = request.truncate_prompt_tokens
        keep = self.prompting.length if keep == -1 else keep
        if isinstance(request, EmbeddingRequest | ClassifyRequest):
            for item in listed(request.input, param, MAX_INPUTS):
                yield self._single(item, keep, add_special_tokens=request.add_special_tokens is not False)
            return
        pairs = _pairs(request)
        if self.pooling.task == CLASSIFY:
            self.prompting.check_length(pairs[0][0], keep)
            for first, second in pairs:
                yield self._pair(first, second, keep)
            return
        firsts, seconds = zip(*pairs)
        if len(set(firsts)) == 1:  # embedded once for all pairs
            firsts = firsts[:1]
        for text in (*firsts, *seconds):
            yield self._single(text, keep)

    def _single(self, text_or_ids: Any, keep: int | None, *, add_special_tokens: bool = True) -> Prompt:
        if isinstance(text_or_ids, str):
            self.prompting.check_length(text_or_ids, keep)
            ids = self.prompting.tokenizer.encode_kept(text_or_ids, keep, add_special_tokens=add_special_tokens)
            return Prompt(self._fitting(ids), text_or_ids)
        check_ids(text_or_ids, self.prompting.vocab_size, "input")
        return Prompt(self._fitting(text_or_ids[:keep]))

    def _pair(self, first: str, second: str, keep: int | None) -> Prompt:
        self.prompting.check_length(second, keep)
        size = self.prompting.vocab_size // self.pooling.segments if self.pooling.segments > 1 else 0
        return Prompt(self._fitting(self.prompting.tokenizer.encode_pair(first, second, size, keep)), second)

    def _fitting(self, ids: list[int]) -> list[int]:
        """Return the ids. Raises LlmcError E602 if they are more than the model was compiled for, E605 for none."""
        length = self.prompting.length
        if len(ids) > length:
            cause = f"the prompt is {len(ids)} tokens, the model was compiled for {length}"
            raise LlmcError("E602", cause, f"shorten it to {length} tokens, or send truncate_prompt_tokens: -1")
        if not ids:
            raise LlmcError("E605", "the prompt has no tokens", "send at least one token")
        return ids


def _pairs(request: Pooled) -> list[tuple[str, str]]:
    if isinstance(request, RerankRequest):
        return paired(request.query, documents_of(request))
    assert isinstance(request, ScoreRequest)
    return paired(request.text_1, request.text_2)
