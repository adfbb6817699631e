"""Traces an EAGLE-3 head, and reads its weights by the names of its graph.

At each position, the head's graph takes a token, and the hidden state of the position before: the model's, or the
head's own. It returns the logits of the token that follows, and the head's hidden state.
"""

from __future__ import annotations

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
from llmc.frontend.eagle_config import ANOTHER, HeadConfig
from llmc.frontend.export import Exported, export_head, quiet
from llmc.frontend.lowering import TORCH_DTYPE
from llmc.frontend.safetensors_reader import Stored, TensorFiles, shortened
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph
from llmc.ir.ops import OPS
from llmc.ir.types import Type, tensor

FC, FC_BIAS, EMBEDDING, VOCABULARY = "fc.weight", "fc.bias", "embed_tokens.weight", "vocabulary"
D2T, T2D = "d2t", "t2d"  # draft id -> the model's id, less the draft id; the model's id -> whether it can be drafted
_MASKED_LOGIT = -1e30  # logit of tokens that the head cannot draft
# Of training, or of the model itself, as heads made by the library speculators contain them.
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", T2D, D2T, EMBEDDING, "rotary_emb.inv_freq")


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

    def __init__(self, config: LlamaConfig, draft_vocab: int, norm_before_residual: bool) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.midlayer = MidLayer(config, norm_before_residual)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """ids and positions [1, T], rows [R], hidden states [1, T, H] -> logits [1, R, draft ids], states [1, T, H]."""
        embedding = self.embed_tokens(input_ids)
        tables = self.rotary_emb(embedding, position_ids)
        x = self.midlayer(embedding, hidden_states, tables)
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
                model = Eagle3Head(config, head.draft_vocab, head.norm_before_residual)
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
        self.head = head
        self._files = TensorFiles(head.folder)
        self._stored = {_name(name): t for name, t in self._files.tensors.items()}
        self._buffers: dict[str, np.ndarray] = {}
        self._dtypes: dict[str, str] = {}
        head_hidden = int(head.decoder["hidden_size"])
        if EMBEDDING not in self._stored and head_hidden != hidden:
            raise self._another(f"has a hidden size of {head_hidden}", f"one of {hidden}")
        if self._shape(FC) != (head_hidden, 3 * hidden):
            reads = self._shape(FC)[1] / 3
            raise self._another(f"reads hidden states of {reads:g} numbers", f"{hidden}")
        if head.draft_vocab == vocab and D2T not in self._stored:
            return
        marks = self._shape(T2D) if T2D in self._stored else (int(head.decoder["vocab_size"]),)
        if marks != (vocab,):
            raise self._another(f"has a vocabulary of {marks[0]} tokens", f"one of {vocab}")
        self._buffers[VOCABULARY] = self._vocabulary(vocab)

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

        Raises Diagnostic E360 if the checkpoint lacks one, has another shape, or has tensors that no head has.
        """
        self._buffers |= buffers
        for name, t in weights.items():
            expected = tuple(d.const for d in t.shape)
            if name not in self._buffers and self._shape(name) != expected:
                shapes = f"{list(self._shape(name))}, by config.json {list(expected)}"
                cause = f"the head {self.head.folder}: {name} is {shapes}"
                raise Diagnostic("E360", cause, "config.json and weights must be of one head")
            self._dtypes[name] = t.dtype
        if unknown := sorted(self._stored.keys() - weights.keys() - set(_UNUSED)):
            cause = f"the head {self.head.folder} has {shortened(unknown)}, which an EAGLE-3 head of one layer has not"
            raise Diagnostic("E360", cause, ANOTHER)

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
            raise Diagnostic("E360", f"the head {self.head.folder} has no tensor {name}", ANOTHER)
        return self._stored[name]

    def _another(self, head: str, model: str) -> Diagnostic:
        return Diagnostic("E360", f"the head {self.head.folder} {head}, the model {model}", ANOTHER)

    def _vocabulary(self, vocab: int) -> np.ndarray:
        """Return the draft id of each of the model's ids; for those without one, the number of draft ids."""
        count = self.head.draft_vocab
        if self._shape(D2T) != (count,):
            raise self._another(f"has {self._shape(D2T)[0]} draft ids in {D2T}", f"{count} by config.json")
        ids = self._files.read(self._tensor(D2T).name, slice(None)).astype(np.int64) + np.arange(count)
        if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != count:
            raise self._another(f"drafts ids that are not distinct ids below {vocab}", "has no others")
        index = np.full(vocab, count, np.int32)
        index[ids] = np.arange(count)
        return index


def _name(stored: str) -> str:
    """Return the name in the graph of a tensor of either published format."""
    name = stored.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
