"""The requests to models that pool: embeddings, classification, scores of pairs, and reranking.

Names are OpenAI's for embeddings, vLLM's for classification and scores, and Jina's for reranking. Fields that would
change the response and are not supported are refused with an error that names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec

from llmc_runtime.format.pooling import MAX_WIDTH
from llmc_runtime.sched.parameter_type import MAX_INT
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.parse import SMALL_BODY
from llmc_runtime.server.requests.request_fields import (
    Name,
    Priority,
    Salt,
    TruncateTo,
    check_priority,
    prompts_schema,
    schema_of,
)

MAX_INPUTS = 2048  # texts or lists of token ids in one request, the limit of OpenAI's API
FLOAT, BASE64 = "float", "base64"


def _documents() -> Any:
    text = {"type": "string"}
    document = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    return schema_of(minItems=1, maxItems=MAX_INPUTS, items={"anyOf": [text, document]})


Inputs = Annotated[list[Any], prompts_schema(MAX_INPUTS)]
Texts = Annotated[list[str], schema_of(minItems=1, maxItems=MAX_INPUTS)]
Documents = Annotated[list[Any], _documents()]
Encoding = Annotated[str, schema_of(enum=[FLOAT, BASE64], maxLength=16)]
Dimensions = Annotated[int, schema_of(minimum=1, maximum=MAX_WIDTH)]
Top = Annotated[int, schema_of(minimum=1, maximum=MAX_INPUTS)]


class Pooled(msgspec.Struct, kw_only=True):
    """The fields that all requests share."""

    model: Name | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: TruncateTo | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class EmbeddingRequest(Pooled, kw_only=True):
    """POST /v1/embeddings. `input`: a text, texts, token ids, or lists of token ids."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "messages": "send texts as input", "task": "write it into the input",
            "embed_dtype": "embeddings are float32", "endianness": "base64 is little-endian",
            "chunked_processing": "split long texts",
        }
    )  # fmt: skip

    input: str | Inputs
    encoding_format: Encoding | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None  # the earlier name of use_activation in vLLM
    add_special_tokens: bool | None = None


class ClassifyRequest(Pooled, kw_only=True):
    """POST /classify. `input`: a text, texts, token ids, or lists of token ids."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType({"messages": "send texts as input"})

    input: str | Inputs
    add_special_tokens: bool | None = None


class ScoreRequest(Pooled, kw_only=True):
    """POST /v1/score: a text compared with one or several, or pairs from two lists of the same length."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("queries", "documents", "items", "data_1", "data_2"), "use text_1 and text_2")
    )

    text_1: str | Texts
    text_2: str | Texts


class RerankRequest(Pooled, kw_only=True):
    """POST /v1/rerank. A document is a text, or an object with a `text`. The best `top_n` are returned."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "rank_fields": "send each document as one text", "max_chunks_per_doc": "split long documents",
            "max_tokens_per_doc": "use truncate_prompt_tokens",
        }
    )  # fmt: skip

    query: str
    documents: Documents
    top_n: Top | None = None
    return_documents: bool | None = None


def activation_of(request: Pooled) -> bool | None:
    """Return whether embeddings are normalised or the activation is applied; None: as the model does."""
    if request.use_activation is None and isinstance(request, EmbeddingRequest):
        return request.normalize
    return request.use_activation


def documents_of(request: RerankRequest) -> list[str]:
    """Return the texts of the documents. Raises ApiError 400."""
    if not request.documents:
        raise ApiError(f"documents: 1 to {MAX_INPUTS} of them, not 0", param="documents")
    texts: list[str] = []
    for i, item in enumerate(request.documents):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise ApiError(f'documents[{i}]: a text, or {{"text": TEXT}}', param=f"documents[{i}]")
        texts.append(text)
    return texts


def count_of(request: Pooled) -> int:
    """Return the number of prompts at most that a request may need, before they are checked."""
    if isinstance(request, EmbeddingRequest | ClassifyRequest):
        value = request.input
        return 1 if isinstance(value, str) or not value or isinstance(value[0], int) else len(value)
    if isinstance(request, RerankRequest):
        return 1 + len(request.documents)
    assert isinstance(request, ScoreRequest)
    return sum(1 if isinstance(text, str) else len(text) for text in (request.text_1, request.text_2))


def check_pooled(request: Pooled) -> None:
    """Raise ApiError 400 for values that are not allowed, naming the field."""
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep <= MAX_INT:
        cause = "truncate_prompt_tokens: the maximum number of tokens of a prompt, at least 1; -1 for as many as fit"
        raise ApiError(cause, param="truncate_prompt_tokens")
    check_priority(request.priority)
    if isinstance(request, EmbeddingRequest):
        if request.encoding_format not in (None, FLOAT, BASE64):
            raise ApiError(f"encoding_format: {FLOAT} or {BASE64}", param="encoding_format")
        if request.dimensions is not None and request.dimensions < 1:
            raise ApiError("dimensions: at least 1", param="dimensions")
    if isinstance(request, RerankRequest) and request.top_n is not None and request.top_n < 1:
        raise ApiError("top_n: at least 1", param="top_n")


def repeats(request: Pooled) -> bool:
    """Return whether repeated texts, which belong to several pairs, make more work than a small body is allowed to."""
    if isinstance(request, RerankRequest):
        return len(request.query) * len(request.documents) > SMALL_BODY
    if isinstance(request, ScoreRequest) and isinstance(request.text_1, str):
        return len(request.text_1) * (1 if isinstance(request.text_2, str) else len(request.text_2)) > SMALL_BODY
    return False


def without_texts(request: Pooled) -> Pooled:
    """Return a request without its texts, but with their number."""
    if isinstance(request, RerankRequest):
        return msgspec.structs.replace(request, query="", documents=[""] * len(request.documents))
    if isinstance(request, ScoreRequest):
        empty = {
            name: text and "" if isinstance(text := getattr(request, name), str) else [""] * len(text)
            for name in ("text_1", "text_2")
        }
        return msgspec.structs.replace(request, **empty)
    return msgspec.structs.replace(request, input="")
