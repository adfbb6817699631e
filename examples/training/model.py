"""A Llama decoder for fast training, with the parameter names of transformers.

``Llama.state_dict`` loads into ``LlamaForCausalLM`` unchanged (the output head
is tied to the embedding).  ``export`` writes the Hugging Face checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """Shape of the network; the names are those of config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 4096
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


CONFIGS = {
    "main": Config(256, 8, 8, 2, 640),
    "small": Config(128, 3, 4, 2, 384),
}


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        scaled = x.float()
        scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * scaled).to(x.dtype)


def rotary_tables(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, in the half-rotation layout."""
    half = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    positions = torch.arange(config.max_position_embeddings, device=device).float()
    angles = torch.outer(positions, config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over the earlier positions of each sequence."""
        batch, length, width = x.shape
        split = (batch, length, -1, self.config.head_dim)
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated network."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention then feed-forward, each added to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The language model; ``forward`` returns logits."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                depth = (2 * config.num_hidden_layers) ** -0.5
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 * (depth if last else 1.0))
        self.to(device)
        self.cos, self.sin = rotary_tables(config, device)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token after every position."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def hugging_face_config(config: Config) -> dict[str, object]:
    """The contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": config.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


GENERATION_CONFIG = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
}


def export(model: Llama, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16)."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (("config", hugging_face_config(model.config)), ("generation_config", GENERATION_CONFIG)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def load(path: Path, config: Config, device: torch.device) -> Llama:
    """Read an exported checkpoint back."""
    model = Llama(config, device)
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model
