"""The config.json of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), in either published format.

SafeAILab's, which vLLM and SGLang read too, is that of a Llama model of one layer with the key draft_vocab_size. That
of the library speculators has the decoder layer's part below transformer_layer_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.frontend.model_folder import read_config

EAGLE = "eagle:"  # prefix of the option --draft
ANOTHER = "use an EAGLE-3 head that was made for this model"
_KEY = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS = "transformer_layer_config"


@dataclass(frozen=True)
class HeadConfig:
    """The contents of an EAGLE-3 head's config.json.

    decoder: the config of its decoder layer, a Llama's. draft_vocab: number of tokens that it can draft. aux: numbers
    of the model's layers whose inputs it reads; empty for the usual ones. norm_before_residual: whether the residual
    stream begins after the norm of the hidden state.
    """

    folder: Path
    decoder: Mapping[str, Any]
    draft_vocab: int
    aux: tuple[int, ...]
    norm_before_residual: bool

    def aux_layers(self, total: int) -> tuple[int, ...]:
        """Return the numbers of the layers whose inputs the head reads, of a model with `total` layers.

        Raises Diagnostic E360 if the model has no such layers.
        """
        numbers = self.aux or (2, total // 2, total - 3)
        if len(numbers) != 3 or not all(0 <= n < total for n in numbers):
            cause = f"the head {self.folder} reads the inputs of layers {list(numbers)}; {total} layers are compiled"
            raise Diagnostic("E360", cause, ANOTHER)
        return numbers


def is_head(folder: Path) -> bool:
    """Return whether a folder's config.json is that of an EAGLE-3 head. Raises Diagnostic E302 if it cannot be read."""
    return _is_count(_draft_vocab(read_config(folder)))


def _draft_vocab(config: Mapping[str, Any]) -> Any:
    decoder = config.get(_SPECULATORS, config)
    return config.get("draft_vocab_size", decoder.get("draft_vocab_size") if isinstance(decoder, Mapping) else None)


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
        raise Diagnostic("E360", cause, ANOTHER)
    for key in ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"):
        if not _is_count(decoder.get(key)):
            raise Diagnostic("E360", f"{folder / 'config.json'} has no {key}", "download the file again")
    before = config.get("norm_before_residual") is True
    return HeadConfig(folder, decoder, int(vocab), _aux(folder, config), before)


def _aux(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the layers whose inputs are read. Below eagle_config, layers are named by outputs."""
    nested = config.get("eagle_config")
    nested_numbers = nested.get(_KEY) if isinstance(nested, Mapping) else None
    numbers = config.get(_KEY) if nested_numbers is None else nested_numbers
    if numbers is None:
        return ()
    if not isinstance(numbers, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise Diagnostic("E360", f"{folder / 'config.json'}: {_KEY} is {numbers!r:.60}", "give three layer numbers")
    return tuple(n + (nested_numbers is not None) for n in numbers)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
