"""The methods of LLM for models that pool: embed, classify and score.

They import the classes of their outputs, which models that generate do not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmc_runtime.api.model_api import ModelAPI
from llmc_runtime.format.names import CLASSIFY, EMBED
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.pairs import pair_prompts, paired, require_scores
from llmc_runtime.pooling_params import NO_OUTPUT, PoolingParams, require_pooling
from llmc_runtime.prompts import Prompt, as_prompts, refuse_adapter
from llmc_runtime.sched.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmc_runtime.pooled_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        ScoringRequestOutput,
    )
    from llmc_runtime.sched.scheduler_config import SchedulerConfig


class PoolingAPI(ModelAPI):
    """Requests to models that pool. A subclass runs them."""

    @property
    def config(self) -> SchedulerConfig:
        """The limits in force."""
        raise NotImplementedError

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool, priorities: list[int]
    ) -> list[RequestOutput]:
        raise NotImplementedError

    def embed(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of one or several prompts, in the same order.

        prompts:         as in LLM.generate. Texts are embedded as they are: instructions such as "query: " are part of
                         a text
        pooling_params:  for all prompts: dimensions to keep, and whether embeddings are normalised
        use_tqdm:        show a progress bar on stderr
        lora_request:    None: adapters are not supported

        Raises LlmcError E601 to E606 if a prompt or the parameters are refused, E616 if the model does not embed.
        """
        from llmc_runtime.pooled_outputs import EmbeddingOutput, EmbeddingRequestOutput

        refuse_adapter(lora_request)
        rows = self._pool(as_prompts(prompts, self.tokenizer), pooling_params, use_tqdm, EMBED)
        return [EmbeddingRequestOutput.of(o, EmbeddingOutput(values)) for o, values in rows]

    def classify(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return a number per label for one or several prompts; the arguments and errors are those of `embed`.

        LLM.pooling.labels are the names of the labels.
        """
        from llmc_runtime.pooled_outputs import ClassificationOutput, ClassificationRequestOutput

        refuse_adapter(lora_request)
        rows = self._pool(as_prompts(prompts, self.tokenizer), pooling_params, use_tqdm, CLASSIFY)
        return [ClassificationRequestOutput.of(o, ClassificationOutput(values)) for o, values in rows]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of a first and a second text; a single first text belongs to every second.

        A classifier with one label reads both texts as one prompt. The score of an embedding model is the cosine
        similarity of two embeddings, or of their first `pooling_params.dimensions`. Raises LlmcError E616 for other
        models, E620 without a tokenizer, and as `embed`.
        """
        from llmc_runtime.pooled_outputs import ScoringOutput, ScoringRequestOutput

        refuse_adapter(lora_request)
        pooling, pairs = require_scores(self.pooling), paired(text_1, text_2)
        if pooling.task == EMBED:
            return self._similarities(pairs, pooling_params or PoolingParams(), pooling, use_tqdm)
        prompts = pair_prompts(self.tokenizer, pairs, pooling, self.config.vocab_size)
        rows = self._pool(prompts, pooling_params, use_tqdm, CLASSIFY)
        return [ScoringRequestOutput.of(o, ScoringOutput(values[0])) for o, values in rows]

    def _similarities(
        self, pairs: list[tuple[str, str]], params: PoolingParams, pooling: Pooling, use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        """Return the similarities of pairs. Each text is embedded once."""
        from llmc_runtime.pooled_outputs import ScoringOutput, ScoringRequestOutput, similarity

        params.check(pooling)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        outputs = dict(zip(texts, self._run_pooled(as_prompts(texts, self.tokenizer), use_tqdm)))
        scores = []
        for a, b in ((outputs[a], outputs[b]) for a, b in pairs):
            score = similarity(a.pooled or b"", b.pooled or b"", params.dimensions)
            ids, cached = a.prompt_token_ids + b.prompt_token_ids, a.num_cached_tokens + b.num_cached_tokens
            scores.append(ScoringRequestOutput(b.request_id, ScoringOutput(score), ids, cached))
        return scores

    def _pool(
        self, prompts: list[Prompt], params: PoolingParams | None, use_tqdm: bool, task: str
    ) -> list[tuple[RequestOutput, list[float]]]:
        """Run prompts, and return each with its numbers."""
        from llmc_runtime.pooled_outputs import pooled_values

        pooling, params = require_pooling(self.pooling, task), params or PoolingParams()
        params.check(pooling)
        outputs = self._run_pooled(prompts, use_tqdm)
        return [(o, pooled_values(o.pooled or b"", pooling, params).tolist()) for o in outputs]

    def _run_pooled(self, prompts: list[Prompt], use_tqdm: bool) -> list[RequestOutput]:
        count = len(prompts)
        return self._run(prompts, [NO_OUTPUT] * count, use_tqdm, [0] * count)
