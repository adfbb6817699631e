"""The config.json of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), in either published format.

SafeAILab's, which vLLM and SGLang read too, is that of a Llama model of one layer with the key draft_vocab_size. That
of the library speculators has the decoder layer's part below transformer_layer_config, and often no model_type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.frontend.model_folder import read_config

EAGLE = "eagle:"  # prefix of the option --draft
MATCHING_HEAD = "use an EAGLE-3 head that was made for this model"
_COUNT = "correct it to a whole number above 0, or download the file again"
_KEY = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS, _NESTED = "transformer_layer_config", "eagle_config"
_SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True)
class HeadConfig:
    """The contents of an EAGLE-3 head's config.json.

    decoder: the config of its decoder layer, a Llama's. draft_vocab: number of tokens that it can draft. aux: numbers
    of the model's layers whose inputs it reads; empty for the usual ones. norm_before_residual: whether the residual
    stream begins after the norm of the hidden state. norm_before_fc, fc_norm: whether the three hidden states are
    normalized before they are joined, together or separately. norm_output: whether the hidden state for the next draft
    is normalized.
    """

    folder: Path
    decoder: Mapping[str, Any]
    draft_vocab: int
    aux: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def eps(self) -> float:
        """The number that norms add to the mean of squares; if config.json has none, that of transformers' Llama."""
        return float(self.decoder.get("rms_norm_eps", 1e-6))

    def aux_layers(self, total: int) -> tuple[int, ...]:
        """Return the numbers of the layers whose inputs the head reads, of a model with `total` layers.

        Raises Diagnostic E360 if the model has no such layers.
        """
        numbers = self.aux or (2, total // 2, total - 3)
        if len(numbers) != 3 or not all(0 <= n < total for n in numbers):
            cause = f"the head {self.folder} reads the inputs of layers {list(numbers)}; {total} layers are compiled"
            raise Diagnostic("E360", cause, MATCHING_HEAD)
        return numbers


def is_head(folder: Path) -> bool:
    """Return whether a folder's config.json is that of an EAGLE-3 head. Raises Diagnostic E302 if it cannot be read."""
    return describes_head(read_config(folder))


def describes_head(config: Mapping[str, Any]) -> bool:
    """Return whether the contents of a config.json are those of an EAGLE-3 head's."""
    return _is_count(_draft_vocab(config))


def _draft_vocab(config: Mapping[str, Any]) -> Any:
    """Return the number of tokens that a head can draft; if config.json does not have it, all of the vocabulary."""
    decoder = config.get(_SPECULATORS, config)
    inner = decoder if isinstance(decoder, Mapping) else {}
    size = config.get("draft_vocab_size", inner.get("draft_vocab_size"))
    named = config.get("architectures")
    is_named = isinstance(named, list) and any("Eagle3" in str(name) for name in named)
    return inner.get("vocab_size") if size is None and is_named else size


def read_head(folder: Path) -> HeadConfig:
    """Read a head's config.json. Raises Diagnostic E302 if it cannot be read, and E360 if it is another model's."""
    config = read_config(folder)
    decoder, vocab = config.get(_SPECULATORS, config), _draft_vocab(config)
    if not isinstance(decoder, Mapping) or not _is_count(vocab):
        cause = f"{folder / 'config.json'} is not that of an EAGLE-3 head: it has no draft_vocab_size"
        raise Diagnostic("E360", cause, "use --draft MODEL for a draft model, or an EAGLE-3 head")
    kind, layers = decoder.get("model_type"), decoder.get("num_hidden_layers", 1)
    if kind != "llama" or layers != 1:
        cause = f"the head {folder} has {layers} layers of {kind}; one layer of llama is supported"
        raise Diagnostic("E360", cause, MATCHING_HEAD)
    for key in (*_SIZES, *(key for key in _OPTIONAL_SIZES if decoder.get(key) is not None)):
        if not _is_count(decoder.get(key)):
            raise Diagnostic("E360", f"{folder / 'config.json'}: {key} is {decoder.get(key)!r:.60}", _COUNT)
    if _nested(config).get("use_aux_hidden_state") is False:
        cause = f"the head {folder} reads one hidden state, as the first versions of EAGLE do"
        raise Diagnostic("E360", cause, MATCHING_HEAD)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    head = HeadConfig(folder, decoder, int(vocab), _aux(folder, config), *(_flag(folder, config, f) for f in flags))
    if head.norm_before_fc and head.fc_norm:
        raise Diagnostic("E360", f"the head {folder} has both norm_before_fc and fc_norm", "set one of them to false")
    return head


def _flag(folder: Path, config: Mapping[str, Any], key: str) -> bool:
    """Return whether a variant of the architecture is selected, which may also be below eagle_config."""
    value = _nested(config).get(key, config.get(key))
    if value is not None and not isinstance(value, bool):
        raise Diagnostic("E360", f"{folder / 'config.json'}: {key} is {value!r:.60}", "use true or false")
    return value is True


def _aux(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the layers whose inputs are read. Below eagle_config, layers are named by outputs."""
    numbers = _nested(config).get(_KEY)
    shift = 1  # a hidden state is the output of layer i and the input of layer i + 1
    if numbers is None:
        numbers, shift = config.get(_KEY), 0
    if numbers is None:
        return ()
    if not isinstance(numbers, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise Diagnostic("E360", f"{folder / 'config.json'}: {_KEY} is {numbers!r:.60}", "give three layer numbers")
    return tuple(n + shift for n in numbers)


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get(_NESTED)
    return nested if isinstance(nested, Mapping) else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
