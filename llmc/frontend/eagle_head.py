"""Traces an EAGLE-3 head, and reads its weights by the names of its graph.

At each position, the head's graph takes a token, and the hidden state of the position before: the model's, or the
head's own. It returns the logits of the token that follows, and the head's hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from llmc.diagnostics import Diagnostic
from llmc.frontend import attention_interface, rope_interface
from llmc.frontend.convert import convert
from llmc.frontend.eagle_config import MATCHING_HEAD, HeadConfig
from llmc.frontend.export import Exported, export_head, quiet
from llmc.frontend.lowering import TORCH_DTYPE
from llmc.frontend.not_finite import NotFinite
from llmc.frontend.safetensors_reader import Stored, TensorFiles, shortened
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph
from llmc.ir.ops import OPS
from llmc.ir.types import Type, tensor

FC, FC_BIAS, EMBEDDING, VOCABULARY = "fc.weight", "fc.bias", "embed_tokens.weight", "vocabulary"
INPUT_NORM, FC_NORM = "input_norm.weight", "fc_norm.{}.weight"  # norms before fc, of all three hidden states or of each
D2T, T2D = "d2t", "t2d"  # draft id -> the model's id, less the draft id; the model's id -> whether it can be drafted
_MASKED_LOGIT = -1e30  # logit of tokens that the head cannot draft
# Tensors of the training, or of the model itself, in the files of heads made by the library speculators.
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", T2D, D2T, EMBEDDING)
_FLOATS, _INTEGERS = ("f16", "bf16", "f32", "f64"), ("i32", "i64")
_CHECKED = 1 << 24  # numbers of a weight that are checked at a time
_TABLE = "rotary_emb.inv_freq"  # suffix of the names of rotary tables, which are computed, not read


class WideAttention(LlamaAttention):
    """Llama's attention over embeddings and hidden states, side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self, name, wide)


class MidLayer(nn.Module):
    """The decoder layer of a head."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.before = norm_before_residual
        self.self_attn, self.mlp = WideAttention(config), LlamaMLP(config)
        norms = (LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms

    def forward(self, embedding: Tensor, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return the next hidden state. All but the tables are [1, T, hidden size]."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embedding), normed), -1)
        x = (normed if self.before else hidden) + self.self_attn(joined, tables)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(LlamaPreTrainedModel):
    """An EAGLE-3 head without the product that joins the three hidden states, which belongs to the model's steps."""

    def __init__(self, config: LlamaConfig, head: HeadConfig) -> None:
        super().__init__(config)
        self.norm_output = head.norm_output
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.midlayer = MidLayer(config, head.norm_before_residual)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, head.draft_vocab, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """ids and positions [1, T], rows [R], hidden states [1, T, H] -> logits [1, R, draft ids], states [1, T, H]."""
        embedding = self.embed_tokens(input_ids)
        tables = self.rotary_emb(embedding, position_ids)
        x = self.midlayer(embedding, hidden_states, tables)
        if self.norm_output:
            x = self.norm(x)
            return self.lm_head(x[:, logits_to_keep]), x
        return self.lm_head(self.norm(x[:, logits_to_keep])), x


def trace_head(head: HeadConfig, dtype: str, vocab: int, positions: int, tokens: int, rows: int) -> Exported:
    """Trace a head in `dtype` for sequences of up to `positions` tokens; `vocab` is the model's vocabulary size.

    Raises Diagnostic E302 if transformers refuses the config, and E306 for an unknown rope type.
    """
    rope_interface.check_config(dict(head.decoder))
    attention_interface.register()
    longest = max(positions, int(head.decoder.get("max_position_embeddings") or 0))
    values = {**head.decoder, "vocab_size": vocab, "max_position_embeddings": longest}
    with quiet():
        try:
            config = LlamaConfig.from_dict(values)
            config._attn_implementation = attention_interface.NAME
            with torch.device("meta"):
                model = Eagle3Head(config, head)
        except Exception as e:  # transformers raises many types; each means that it rejects this config.json
            reason = " ".join(str(e).split())[:200]
            raise Diagnostic("E302", f"{head.folder / 'config.json'}: {reason}", "download the file again") from e
        model.to(TORCH_DTYPE[dtype]).eval()
        computed = rope_interface.patch(model, positions)
        return export_head(model, TORCH_DTYPE[dtype], computed, tokens, rows)


def head_graph(exported_head: Exported, vocab: int) -> Graph:
    """Return the head's graph; it has logits for all `vocab` tokens, very low ones for tokens that it cannot draft."""
    graph: Graph = convert(exported_head).module.graphs["main"]
    logits, states = graph.outputs
    drafts = logits.type.shape[-1].const
    if drafts != vocab:
        b = Builder(graph, OPS, loc="lm_head")
        index = graph.input(VOCABULARY, tensor("i32", vocab), weight=True)
        low = b.broadcast(b.constant(_MASKED_LOGIT, logits.type.dtype), shape=[logits.type.shape[0], 1])
        logits = b.take_columns(b.concat(logits, low, axis=1), index)
    graph.outputs = [logits, states]
    return graph


class HeadWeights:
    """The weights of a head by the names of its graph. Use `close` when they are read."""

    kv_scales: Mapping[int, tuple[np.ndarray, np.ndarray]] = MappingProxyType({})

    def __init__(self, head: HeadConfig, hidden: int, vocab: int) -> None:
        """Open the files and check that they fit a model of this hidden and vocabulary size.

        Raises Diagnostic E320 to E322 for missing or damaged files, and E360 for a head of another model.
        """
        self.head, self._vocab = head, vocab
        self._files = TensorFiles(head.folder)
        self._stored = {_name(name): t for name, t in self._files.tensors.items()}
        self._buffers: dict[str, np.ndarray] = {}
        self._dtypes: dict[str, str] = {}
        self.not_finite = NotFinite()
        if len(self._stored) < len(self._files.tensors):
            raise self._damaged("has tensors both below midlayer and below layers.0")
        head_hidden = int(head.decoder["hidden_size"])
        if EMBEDDING not in self._stored and head_hidden != hidden:
            raise self._another(f"has a hidden size of {head_hidden}", f"one of {hidden}")
        if self._shape(FC) != (head_hidden, 3 * hidden):
            cause = f"reads three hidden states by {FC} {list(self._shape(FC))}"
            raise self._another(cause, f"needs {[head_hidden, 3 * hidden]}")
        if head.draft_vocab == vocab and D2T not in self._stored:
            return
        marks = self._shape(T2D) if T2D in self._stored else (int(head.decoder["vocab_size"]),)
        if marks != (vocab,):
            raise self._another(f"has a vocabulary of {'x'.join(map(str, marks))} tokens", f"one of {vocab}")
        self._buffers[VOCABULARY] = self._vocabulary()

    @property
    def embeds(self) -> bool:
        """Whether the head has an embedding of its own."""
        return EMBEDDING in self._stored

    @property
    def biased(self) -> bool:
        """Whether the product that joins the three hidden states has a bias."""
        return FC_BIAS in self._stored

    def serve(self, weights: Mapping[str, Type], buffers: Mapping[str, np.ndarray]) -> None:
        """Serve weights of these types, of which `buffers` are computed.

        Raises Diagnostic E360 if the checkpoint lacks one, has one of another shape or dtype or with numbers that are
        not finite, or has tensors that no head has.
        """
        self._buffers |= buffers
        self._dtypes |= {name: t.dtype for name, t in weights.items()}
        for name, t in weights.items():
            if name not in self._buffers:
                self._check(name, tuple(d.const for d in t.shape))
        unused = {*weights, *_UNUSED}
        if unknown := sorted(n for n in self._stored if n not in unused and not n.endswith(_TABLE)):
            cause = f"the head {self.head.folder} has {shortened(unknown)}, which an EAGLE-3 head of one layer has not"
            raise Diagnostic("E360", cause, MATCHING_HEAD)

    def _check(self, name: str, expected: tuple[int | None, ...]) -> None:
        """Raise Diagnostic E360 if a stored weight has another shape, is not of floats, or has NaN or infinity."""
        stored = self._tensor(name)
        if stored.shape != expected:
            cause = f"the head {self.head.folder}: {name} is {list(stored.shape)}, by config.json {list(expected)}"
            raise Diagnostic("E360", cause, "config.json and weights must be of one head")
        if stored.dtype not in _FLOATS:
            raise self._damaged(f"stores {name} as {stored.dtype}; {', '.join(_FLOATS)} are supported")
        step = max(1, _CHECKED // max(1, math.prod(stored.shape[1:])))
        for begin in range(0, stored.shape[0], step):
            self.not_finite.count(name, self.read(name, slice(begin, begin + step)), self._dtypes[name])
        if self.not_finite.note:
            raise self._damaged(f"cannot draft: {self.not_finite.note}")

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of a weight in the dtype of the graph."""
        dtype = DTYPES[self._dtypes[name]].np
        if name in self._buffers:
            return self._buffers[name][rows].astype(dtype)
        return self._files.read(self._stored[name].name, rows).astype(dtype)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def _tensor(self, name: str) -> Stored:
        if name not in self._stored:
            raise Diagnostic("E360", f"the head {self.head.folder} has no tensor {name}", MATCHING_HEAD)
        return self._stored[name]

    def _another(self, head: str, model: str) -> Diagnostic:
        return Diagnostic("E360", f"the head {self.head.folder} {head}, the model {model}", MATCHING_HEAD)

    def _damaged(self, what: str) -> Diagnostic:
        return Diagnostic("E360", f"the head {self.head.folder} {what}", "download or export the head again")

    def _vocabulary(self) -> np.ndarray:
        """Return the draft id of each of the model's ids; for those without one, the number of draft ids."""
        count, stored = self.head.draft_vocab, self._tensor(D2T)
        if stored.shape != (count,) or stored.dtype not in _INTEGERS:
            raise self._damaged(f"stores {D2T} as {stored.dtype} {list(stored.shape)}; {count} ids are needed")
        ids = self._files.read(stored.name, slice(None)).astype(np.int64) + np.arange(count)
        if ids.min() < 0 or ids.max() >= self._vocab or len(np.unique(ids)) != count:
            raise self._damaged(f"has ids in {D2T} that are repeated, or not of the {self._vocab} ids of the model")
        if count == self._vocab and (ids != np.arange(count)).any():
            raise self._damaged(f"has another order of all ids in {D2T}, which is not supported")
        index = np.full(self._vocab, count, np.int32)
        index[ids] = np.arange(count)
        return index


def _name(stored: str) -> str:
    """Return the name in the graph of a tensor of either published format."""
    name = stored.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
