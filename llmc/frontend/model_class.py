"""Decides by a model type whether transformers has a causal language model for it, and which class builds it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from llmc_runtime.format.nearest import did_you_mean
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)

from llmc.diagnostics import Diagnostic
from llmc.frontend import pooled_model, unsupported
from llmc.frontend.model_folder import KNOWN_TO_WORK, Source
from llmc.frontend.pooling_files import ENCODERS

# Why a model type has no causal language model, by transformers' own tables.
NOT_CAUSAL: tuple[tuple[Mapping[str, Any], str], ...] = (
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "it is an encoder and a decoder"),
    (MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES, "it generates audio"),
    (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "it recognizes speech"),
    (MODEL_FOR_MASKED_LM_MAPPING_NAMES, "it is an encoder"),
    (MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "it is a vision model"),
)


def reads_images(name: str) -> bool:
    """Whether a model type reads images and text, with one decoder for both.

    Without images, such a model is a causal language model.
    """
    return (
        name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and name not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )


def reads_audio(name: str) -> bool:
    """Whether a model type reads audio and text, with one decoder for both, which a part of its config describes.

    Without audio, such a model is a causal language model. transformers lists some of these types as encoder-decoders,
    which their configs are not.
    """
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or reads_images(name):
        return False
    if name not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES and name not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return False
    config = CONFIG_MAPPING[name]
    return "text_config" in config.sub_configs and not config.is_encoder_decoder


def _reads(part: Any) -> bool:
    """Whether the class of a part's config describes a language model with inputs other than text."""
    name = getattr(part, "model_type", "")
    return name in CONFIG_MAPPING_NAMES and (reads_images(name) or reads_audio(name))


def text_part(name: str) -> str:
    """Return the key of the part of a type's config that describes a language model; "" for other types.

    Models that answer in text and in speech have such parts, for example a thinker and a talker.
    """
    if name not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    parts = CONFIG_MAPPING[name].sub_configs
    if "text_config" in parts:
        return ""
    return next((key for key, part in parts.items() if _reads(part)), "")


def other_modalities(config: Any) -> str:
    """Return what a model reads besides text, such as `images and audio`; "" for nothing."""
    name = config.model_type
    if config.get_text_config() is config or not (reads_images(name) or reads_audio(name)):
        return ""
    modalities = ["images"] if reads_images(name) else []
    if reads_audio(name) or any("audio" in key for key in config.sub_configs):
        modalities.append("audio")
    return " and ".join(modalities)


def auto_class(name: str) -> Any:
    """Return the class of transformers whose `from_config` builds the language model of a type."""
    if reads_images(name):
        return transformers.AutoModelForImageTextToText
    if not reads_audio(name):
        return transformers.AutoModelForCausalLM
    multimodal = name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return transformers.AutoModelForMultimodalLM if multimodal else transformers.AutoModelForSeq2SeqLM


class Unbuilt(torch.nn.Module):
    """Stands for a tower for images or audio if a package that it needs is not installed.

    A language model is compiled without its towers, whose weights are not read.
    """


@contextmanager
def towers_optional() -> Iterator[None]:
    """Within this context, a tower that needs a missing package, such as timm, is built as `Unbuilt`."""
    build = transformers.AutoModel.from_config

    def from_config(*args: Any, **options: Any) -> Any:
        try:
            return build(*args, **options)
        except ImportError:
            return Unbuilt()

    with patch.object(transformers.AutoModel, "from_config", from_config):
        yield


def tower_weights(model: torch.nn.Module) -> Iterator[re.Pattern[str]]:
    """Yield patterns of the names of weights of towers that were not built."""
    for path, module in model.named_modules():
        if isinstance(module, Unbuilt):
            yield re.compile(rf"^{re.escape(path)}\.")


def weights_of_other_parts(name: str) -> Iterator[re.Pattern[str]]:
    """Yield patterns of the names of stored weights of the parts of a type other than the language model."""
    if part := text_part(name):
        others = (key.removesuffix("_config") for key in CONFIG_MAPPING[name].sub_configs if key != part)
        yield from (re.compile(rf"^{re.escape(other)}\.") for other in others)


def check_model_type(source: Source, pools: bool) -> None:
    """Raise Diagnostic E303, E304 or E313 for a model type that transformers does not have or that is not supported."""
    name = source.model_type
    in_transformers = name in CONFIG_MAPPING_NAMES
    inside = in_transformers and (reads_images(name) or reads_audio(name) or (not pools and bool(text_part(name))))
    alone = in_transformers and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not _has_encoder(source)
    if alone or inside or (in_transformers and pools and name in ENCODERS):
        return
    same = _same_architecture(source.config) if not in_transformers else ""
    if source.config.get("auto_map"):
        raise unsupported.refuse_code(f"model_type {name!r} is only in auto_map", same)
    if pools and in_transformers:
        raise Diagnostic("E313", f"model_type {name!r} is not supported for models that pool", pooled_model.SUPPORTED)
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    near = "" if in_transformers else did_you_mean(name, sorted(known), "")
    cause = f"model_type {name!r} {_why_not_causal(name)} ({transformers.__version__})"
    raise Diagnostic("E303", cause, same or f"{near} {KNOWN_TO_WORK}".lstrip())


def _has_encoder(source: Source) -> bool:
    """Whether a config describes an encoder and a decoder. A decoder without its encoder would ignore the input."""
    stated = source.config.get("is_encoder_decoder")
    return bool(CONFIG_MAPPING[source.model_type].is_encoder_decoder if stated is None else stated)


def _same_architecture(config: Mapping[str, Any]) -> str:
    """Return the remedy if config.json names a class of transformers for a model type that it lacks; else ""."""
    named = config.get("architectures")
    classes = ((cls, model_type) for model_type, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    match = next(((cls, model_type) for cls, model_type in classes if isinstance(named, list) and cls in named), None)
    if match is None:
        return ""
    return f'transformers has {match[0]}: if it is the same model, set "model_type": "{match[1]}" in config.json'


def _why_not_causal(name: str) -> str:
    """Explain why transformers has no causal language model for a type, as far as its tables show."""
    if name not in CONFIG_MAPPING_NAMES:
        return "is not part of the installed transformers"
    reason = next((description for table, description in NOT_CAUSAL if name in table), "")
    return f"has no causal language model: {reason}" if reason else "has no causal language model"
