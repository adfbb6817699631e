"""Text that a Llama of `model.py` generates, many sequences at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from chat import BOS, EOS, SPECIAL_TOKENS, SYSTEM, USER
from model import Attention, Llama, rotate
from torch import Tensor
from torch.nn import functional as F

BOS_ID, EOS_ID, SYSTEM_ID, USER_ID = (SPECIAL_TOKENS.index(token) for token in (BOS, EOS, SYSTEM, USER))
ENDLESS = 0.5  # share of the sequences beginning with prose that are one document
VARIED, HOT = 2, 2.0  # first tokens of prose, and their temperature, so that documents of every kind begin
OPENING = 12  # first tokens of a greedy sequence, which are sampled at temperature 0.7


@dataclass(frozen=True)
class Shares:
    """The shares of sequences that begin with prose, are greedy, and are at temperature 0.7; the others are at 1."""

    prose: float = 0.75
    greedy: float = 0.4
    cool: float = 0.3


class Cache:
    """The keys and values of one layer, f32[batch, heads, length, width]."""

    def __init__(self, batch: int, length: int, attention: Attention, device: torch.device) -> None:
        config = attention.config
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device) for _ in range(2))

    def attend(self, attention: Attention, x: Tensor, at: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend with the token at position `at`, x f32[batch, 1, width], to all before it."""
        config, split = attention.config, (len(x), 1, -1, attention.config.head_dim)
        q = rotate(attention.q_proj(x).view(split).transpose(1, 2), cos, sin)
        self.keys[:, :, at : at + 1] = rotate(attention.k_proj(x).view(split).transpose(1, 2), cos, sin)
        self.values[:, :, at : at + 1] = attention.v_proj(x).view(split).transpose(1, 2)
        group = config.num_attention_heads // config.num_key_value_heads
        q = q.view(len(x), config.num_key_value_heads, group, config.head_dim)
        out = F.scaled_dot_product_attention(q, self.keys[:, :, : at + 1], self.values[:, :, : at + 1])
        return attention.o_proj(out.reshape(len(x), 1, -1))


@torch.no_grad()
def generated(
    model: Llama, count: int, length: int, generator: torch.Generator, shares: Shares
) -> tuple[Tensor, Tensor]:
    """Sequences that the model generates, i64[count, length], each beginning with <|bos|>, and which are greedy."""
    device = model.model.embed_tokens.weight.device
    draw = torch.rand(2, count, 1, generator=generator, device=device)
    prose, endless, kind = draw[0] < shares.prose, draw[0] < shares.prose * ENDLESS, draw[1]
    greedy = kind < shares.greedy
    temperature = torch.where(greedy, 0.0, torch.where(kind < shares.greedy + shares.cool, 0.7, 1.0))
    ids = torch.full((count, length), BOS_ID, device=device)
    caches = [Cache(count, length, layer.self_attn, device) for layer in model.model.layers]
    every = torch.arange(model.config.vocab_size, device=device)
    chat = (every == USER_ID) | (every == SYSTEM_ID)
    for at in range(length - 1):
        logits = _next(model, caches, ids[:, at : at + 1], at)
        if at == 0:
            logits = logits.masked_fill(chat == prose, float("-inf"))
        logits[:, EOS_ID] = torch.where(endless[:, 0], float("-inf"), logits[:, EOS_ID])
        warm = temperature if at >= OPENING else temperature.clamp(min=0.7)
        warm = torch.where(prose, HOT, warm) if at < VARIED else warm
        gumbel = -torch.log(torch.empty_like(logits).exponential_(generator=generator))
        ids[:, at + 1] = (logits + warm * gumbel).argmax(-1)
    return ids, greedy[:, 0]


def _next(model: Llama, caches: list[Cache], ids: Tensor, at: int) -> Tensor:
    """Logits of the token after position `at`, f32[batch, vocabulary]."""
    x = model.model.embed_tokens(ids)
    cos, sin = model.cos[at : at + 1], model.sin[at : at + 1]
    for layer, cache in zip(model.model.layers, caches, strict=True):
        x = x + cache.attend(layer.self_attn, layer.input_layernorm(x), at, cos, sin)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return F.linear(model.model.norm(x), model.model.embed_tokens.weight)[:, 0]
