"""The module of a model that pools: its forward returns what is pooled instead of the logits of a language model."""

from __future__ import annotations

import types
from typing import Any

import torch
import transformers
from llmc_runtime.format.names import EMBED, MEAN
from llmc_runtime.format.pooling import Pooling

from llmc.diagnostics import Diagnostic
from llmc.frontend import attention_interface
from llmc.frontend.pooling_files import ENCODERS, position_offset, segments_of

SUPPORTED = f"supported: decoders, and encoders of the types {', '.join(sorted(ENCODERS))}"


def build(config: Any, pooling: Pooling, **options: Any) -> Any:
    """Build the model and replace its forward by one that returns what is pooled, in float32.

    The new `forward(input_ids [1, T], position_ids [1, T], logits_to_keep [R])` returns the hidden states of all tokens
    [1, T, width] if they are averaged, else the embedding or the logits of the kept tokens, [R, width]. Raises
    Diagnostic E305 or E313.
    """
    model = _pooling_class(config, pooling).from_config(config, **options)
    base = model if pooling.task == EMBED else getattr(model, model.base_model_prefix)
    head = _head(model, base, pooling)
    inputs = _Inputs(config)
    plain = base.forward

    def forward(self: Any, input_ids: Any, position_ids: Any, logits_to_keep: Any) -> Any:
        hidden = plain(**inputs(input_ids, position_ids)).last_hidden_state
        if pooling.kind == MEAN:
            return hidden.float()
        return head(hidden[:, logits_to_keep]).float()

    if config.model_type in ENCODERS:
        attention_interface.mark_encoder(model)
    model.forward = types.MethodType(forward, model)
    return model


def _pooling_class(config: Any, pooling: Pooling) -> Any:
    """Return the class of transformers that builds the base model or the classifier of a config.

    Raises Diagnostic E313 if there is none: of some model types, the base model has a head, too.
    """
    embeds = pooling.task == EMBED
    owner = transformers.AutoModel if embeds else transformers.AutoModelForSequenceClassification
    cls = owner._model_mapping.get(type(config), None)
    if cls is None or (embeds and cls.__name__.endswith("ForConditionalGeneration")):
        kind = "base model without a head" if embeds else "classifier of texts"
        raise Diagnostic("E313", f"transformers has no {kind} of model_type {config.model_type!r}", SUPPORTED)
    return owner


class _Inputs:
    """The arguments of the base model: positions, and the segments that are coded in the ids."""

    def __init__(self, config: Any) -> None:
        self.segments, self.vocab = segments_of(config), int(config.get_text_config().vocab_size)
        self.encoder = config.model_type in ENCODERS
        self.first = position_offset(config)

    def __call__(self, input_ids: Any, position_ids: Any) -> dict[str, Any]:
        if not self.encoder:
            return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        kinds = torch.zeros_like(input_ids if self.segments > 1 else input_ids[:, :1])  # one for all tokens
        for segment in range(1, self.segments):
            kinds = kinds + (input_ids >= segment * self.vocab).long()
        ids = input_ids - kinds * self.vocab if self.segments > 1 else input_ids
        return {"input_ids": ids, "position_ids": position_ids + self.first, "token_type_ids": kinds}


def _head(model: Any, base: Any, pooling: Pooling) -> Any:
    """Return the function from the hidden states of kept tokens, [1, R, width], to the result [R, ...]."""
    if pooling.task == EMBED:
        return lambda rows: rows[0]
    if hasattr(model, "score"):
        return lambda rows: model.score(rows[0])
    classifier, pooler = getattr(model, "classifier", None), getattr(base, "pooler", None)
    if classifier is None or (pooler is None and not hasattr(classifier, "out_proj")):
        remedy = "supported: a module `score` of a decoder, and the heads of encoders of a supported type"
        raise Diagnostic("E305", f"{type(model).__name__} has no head that is known", remedy)
    if pooler is None:
        return lambda rows: classifier(rows.transpose(0, 1))
    return lambda rows: classifier(pooler(rows.transpose(0, 1)))
