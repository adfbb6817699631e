"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) for a Llama of `model.py`, in the published checkpoint format.

The head drafts tokens.  At position i it joins the embedding of token i + 1 with
a hidden state of position i, and predicts token i + 2: first from three layers
of the model, joined by ``fc``, then from its own last hidden state.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from model import MLP, Llama, RMSNorm, hugging_face_config, rotate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

INTERMEDIATE = 512  # width of the head's feed-forward network


def aux_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are joined: low, middle, and the last one."""
    return layers // 4, layers // 2 + 1, layers - 1


@torch.no_grad()
def features(model: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of the three layers, side by side, and the logits of the token after every position."""
    x = model.model.embed_tokens(ids)
    cos, sin = model.cos[: ids.shape[1]], model.sin[: ids.shape[1]]
    wanted, found = aux_layers(model.config.num_hidden_layers), []
    for number, layer in enumerate(model.model.layers):
        if number in wanted:
            found.append(x)
        x = layer(x, cos, sin)
    return torch.cat(found, -1), F.linear(model.model.norm(x), model.model.embed_tokens.weight)


class WideAttention(nn.Module):
    """Attention over the embedding and the hidden state, side by side.

    In training, a pass after the first one simulates one more drafted token: a
    position attends to the first pass's keys up to the position at which it
    began to draft, and to one key of each later pass.
    """

    def __init__(self, model: Llama) -> None:
        super().__init__()
        config = model.config
        self.heads, self.groups, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        size = 2 * config.hidden_size
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(size, self.groups * self.width, bias=False)
        self.v_proj = nn.Linear(size, self.groups * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, passes: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend; the keys and values of this pass are appended to `passes`."""
        batch, length, _ = x.shape
        split, repeat = (batch, length, -1, self.width), self.heads // self.groups
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin) * self.width**-0.5
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin).repeat_interleave(repeat, dim=1)
        v = self.v_proj(x).view(split).transpose(1, 2).repeat_interleave(repeat, dim=1)
        passes.append((k, v))
        behind = len(passes) - 1
        first, values = passes[0]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1 - behind)
        scores = [(q @ first.mT).masked_fill(hidden, float("-inf"))]
        later = [(_shift(k, behind - n), _shift(v, behind - n)) for n, (k, v) in enumerate(passes) if n]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in later]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :length] @ values
        for n, (_, v) in enumerate(later):
            out = out + weights[..., length + n, None] * v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def _shift(x: Tensor, count: int) -> Tensor:
    """Move every position `count` places back: position i gets what i - count had."""
    return F.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :] if count else x


class MidLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        width, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.self_attn = WideAttention(model)
        self.mlp = MLP(replace(model.config, intermediate_size=INTERMEDIATE))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (RMSNorm(width, eps) for _ in range(3))

    def forward(
        self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, passes: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the next hidden state, before the final norm."""
        joined = torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), -1)
        x = hidden + self.self_attn(joined, cos, sin, passes)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """The head, begun with the model's last attention, reading the highest of the three hidden states.

    kept: the ids of the draft vocabulary, ascending.
    """

    def __init__(self, model: Llama, kept: Tensor) -> None:
        super().__init__()
        config, last = model.config, model.model.layers[-1]
        width = config.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = MidLayer(model)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(kept), bias=False)
        self.kept, self.shape = kept, config
        with torch.no_grad():
            self.fc.weight.zero_()[:, 2 * width :] = torch.eye(width)
            attention, layer = self.midlayer.self_attn, self.midlayer
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(attention, name).weight[:, width:] = getattr(last.self_attn, name).weight
            attention.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
            layer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
            layer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
            self.norm.load_state_dict(model.model.norm.state_dict())
            self.lm_head.weight.copy_(model.model.embed_tokens.weight[kept])

    @classmethod
    def read(cls, path: Path, model: Llama) -> Head:
        """Read a head that `export` wrote."""
        tensors = load_file(path / "model.safetensors", device=str(model.cos.device))
        head = cls(model, tensors.pop("t2d").nonzero()[:, 0])
        del tensors["d2t"]
        head.load_state_dict(tensors)
        return head

    def export(self, out: Path) -> None:
        """Write config.json and model.safetensors (bf16, and the maps d2t and t2d)."""
        out.mkdir(parents=True, exist_ok=True)
        config = {
            **hugging_face_config(self.shape),
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "intermediate_size": INTERMEDIATE,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.kept),
            "eagle_aux_hidden_state_layer_ids": list(aux_layers(self.shape.num_hidden_layers)),
        }
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in self.state_dict().items()}
        kept = self.kept.cpu()
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(self.shape.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
