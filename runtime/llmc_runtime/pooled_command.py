"""`llmc-run --embed` and `--classify`: prints the embedding or the classification of a prompt as one line of JSON."""

from __future__ import annotations

import json

from llmc_runtime.api.llm import LLM
from llmc_runtime.pooling_params import PoolingParams


def embedding_line(llm: LLM, prompt: str, dimensions: int | None, with_tokens: bool) -> str:
    """Return the embedding as a list, or an object that also has the token ids. Raises LlmcError as LLM.embed."""
    (output,) = llm.embed(prompt, PoolingParams(dimensions), use_tqdm=False)
    embedding = output.outputs.embedding
    if not with_tokens:
        return json.dumps(embedding)
    return json.dumps({"embedding": embedding, "prompt_token_ids": output.prompt_token_ids})


def class_line(llm: LLM, prompt: str, with_tokens: bool) -> str:
    """Return an object from labels to probabilities, with the token ids if requested.

    Raises LlmcError as LLM.classify.
    """
    (output,) = llm.classify(prompt, use_tqdm=False)
    probs = output.outputs.probs
    labels = llm.pooling.labels if llm.pooling is not None else ()
    named = dict(zip(labels or map(str, range(len(probs))), probs))
    return json.dumps({"probs": named, "prompt_token_ids": output.prompt_token_ids} if with_tokens else named)
