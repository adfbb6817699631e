"""Generate text with a Llama of `model.py`, many sequences at a time.

    python generate.py --model MODEL_DIR --out TEXT.npz --sequences 65536

The file has the arrays ``ids``, i16[sequences, length], ``temperature``,
f32[sequences], 0 for greedy ones, and ``prose``, bool[sequences]: whether a
sequence begins with prose, not with a chat.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from chat import BOS, EOS, SPECIAL_TOKENS, SYSTEM, USER
from model import CONFIGS, Attention, Llama, load, rotate
from torch import Tensor
from torch.nn import functional as F

BOS_ID, EOS_ID, SYSTEM_ID, USER_ID = (SPECIAL_TOKENS.index(token) for token in (BOS, EOS, SYSTEM, USER))
ENDLESS = 0.5  # share of the sequences beginning with prose that are one document
VARIED, HOT = 2, 2.0  # first tokens of prose, and their temperature, so that documents of every kind begin
OPENING = (4, 20)  # fewest and most first tokens of a greedy sequence, which are sampled at temperature 1
TOGETHER = 16384  # sequences that are generated at once


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


@dataclass(frozen=True)
class Text:
    """Generated sequences, each beginning with <|bos|>.

    ids: i16[count, length]. temperature: f32[count], 0 for greedy sequences. prose: bool[count], whether a sequence
    begins with prose.
    """

    ids: Tensor
    temperature: Tensor
    prose: Tensor

    def save(self, path: Path) -> None:
        """Write a file that `read` reads."""
        np.savez(path, **{name: x.cpu().numpy() for name, x in vars(self).items()})

    @classmethod
    def read(cls, path: Path, device: torch.device) -> Text:
        """Read a file that `save` wrote."""
        with np.load(path) as arrays:
            return cls(**{name: torch.from_numpy(arrays[name]).to(device) for name in arrays})


@torch.no_grad()
def generated(model: Llama, count: int, length: int, generator: torch.Generator, shares: Shares) -> Text:
    """Generate `count` sequences of `length` tokens."""
    device = model.model.embed_tokens.weight.device
    draw = torch.rand(3, count, 1, generator=generator, device=device)
    prose, endless, kind = draw[0] < shares.prose, draw[0] < shares.prose * ENDLESS, draw[1]
    temperature = torch.where(kind < shares.greedy + shares.cool, 0.7, 1.0)
    temperature = torch.where(kind < shares.greedy, 0.0, temperature)
    opening = OPENING[0] + (draw[2] * (OPENING[1] - OPENING[0] + 1)).long()
    ids = torch.full((count, length), BOS_ID, device=device)
    caches = [Cache(count, length, layer.self_attn, device) for layer in model.model.layers]
    every = torch.arange(model.config.vocab_size, device=device)
    chat = (every == USER_ID) | (every == SYSTEM_ID)
    for at in range(length - 1):
        logits = _next(model, caches, ids[:, at : at + 1], at)
        if at == 0:
            logits = logits.masked_fill(chat == prose, float("-inf"))
        logits[:, EOS_ID] = torch.where(endless[:, 0], float("-inf"), logits[:, EOS_ID])
        warm = torch.where((temperature == 0) & (at < opening), 1.0, temperature)
        warm = torch.where(prose, HOT, warm) if at < VARIED else warm
        gumbel = -torch.log(torch.empty_like(logits).exponential_(generator=generator))
        ids[:, at + 1] = (logits + warm * gumbel).argmax(-1)
    return Text(ids.short(), temperature[:, 0], prose[:, 0])


def _next(model: Llama, caches: list[Cache], ids: Tensor, at: int) -> Tensor:
    """Logits of the token after position `at`, f32[batch, vocabulary]."""
    x = model.model.embed_tokens(ids)
    cos, sin = model.cos[at : at + 1], model.sin[at : at + 1]
    for layer, cache in zip(model.model.layers, caches, strict=True):
        x = x + cache.attend(layer.self_attn, layer.input_layernorm(x), at, cos, sin)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return F.linear(model.model.norm(x), model.model.embed_tokens.weight)[:, 0]


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=65536, help="generated sequences")
    parser.add_argument("--length", type=int, default=320, help="tokens of a sequence")
    for name, share in vars(Shares()).items():
        parser.add_argument(f"--{name}", type=float, default=share, help="share of such sequences (see Shares)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device, began = torch.device(args.device), time.monotonic()
    model = load(args.model, CONFIGS["main"], device)
    generator, shares = torch.Generator(device).manual_seed(args.seed), Shares(args.prose, args.greedy, args.cool)
    sizes = [min(TOGETHER, args.sequences - at) for at in range(0, args.sequences, TOGETHER)]
    parts = [generated(model, size, args.length, generator, shares) for size in sizes]
    Text(*(torch.cat(each) for each in zip(*(vars(part).values() for part in parts), strict=True))).save(args.out)
    print(f"{args.sequences} sequences of {args.length} tokens in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
