"""Random EAGLE-3 heads in both published formats, and a plain torch implementation that drafts from scratch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

WIDTH, HEADS, GROUPS, SIZE, INNER = 64, 4, 2, 16, 96
AUX = (0, 1, 1)  # layers of a model of two layers
EPS, THETA = 1e-5, 10000.0
CONFIG: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": SIZE, "rms_norm_eps": EPS,
    "rope_theta": THETA, "max_position_embeddings": 64, "vocab_size": 320, "hidden_act": "silu",
}  # fmt: skip


def tensors(draft_vocab: int, hidden: int = WIDTH, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors in the names of SafeAILab's heads."""
    torch.manual_seed(seed)
    shapes = {
        "fc.weight": (WIDTH, 3 * hidden), "lm_head.weight": (draft_vocab, WIDTH), "norm.weight": (WIDTH,),
        "midlayer.input_layernorm.weight": (WIDTH,), "midlayer.hidden_norm.weight": (WIDTH,),
        "midlayer.post_attention_layernorm.weight": (WIDTH,),
        "midlayer.self_attn.q_proj.weight": (HEADS * SIZE, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": (GROUPS * SIZE, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": (GROUPS * SIZE, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        "midlayer.mlp.gate_proj.weight": (INNER, WIDTH), "midlayer.mlp.up_proj.weight": (INNER, WIDTH),
        "midlayer.mlp.down_proj.weight": (WIDTH, INNER),
    }  # fmt: skip
    out = {name: torch.randn(shape) * 0.15 + (len(shape) == 1) for name, shape in shapes.items()}
    vocab = int(CONFIG["vocab_size"])
    if draft_vocab < vocab:
        ids = torch.sort(torch.randperm(vocab)[:draft_vocab]).values
        out["d2t"] = ids - torch.arange(draft_vocab)
        out["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return out


def save_head(folder: Path, found: dict[str, Tensor], **config: Any) -> None:
    """Write a head in SafeAILab's format."""
    folder.mkdir(parents=True)
    values = {**CONFIG, "draft_vocab_size": len(found["lm_head.weight"]), **config}
    values.setdefault("eagle_aux_hidden_state_layer_ids", list(AUX))
    (folder / "config.json").write_text(json.dumps(values))
    save_file(found, folder / "model.safetensors")


def save_speculators(folder: Path, found: dict[str, Tensor], **config: Any) -> None:
    """Write the same head in the format of the library speculators, whose config.json has no model_type."""
    folder.mkdir(parents=True)
    values = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "target_hidden_size": None,
        "transformer_layer_config": dict(CONFIG), "norm_before_fc": False,
        "draft_vocab_size": len(found["lm_head.weight"]), "eagle_aux_hidden_state_layer_ids": list(AUX), **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    save_file({n.replace("midlayer.", "layers.0."): x for n, x in found.items()}, folder / "model.safetensors")


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [heads, T, SIZE] at positions 0, 1, ..."""
    angles = torch.outer(torch.arange(x.shape[1]).float(), THETA ** -(torch.arange(0, SIZE, 2).float() / SIZE))
    cos, sin = (torch.cat((a, a), -1) for a in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def layer(w: dict[str, Tensor], embedding: Tensor, hidden: Tensor, before: bool) -> Tensor:
    """The decoder layer on all positions [T, WIDTH]."""
    normed = norm(hidden, w["midlayer.hidden_norm.weight"])
    x = torch.cat((norm(embedding, w["midlayer.input_layernorm.weight"]), normed), -1)
    q, k, v = (
        (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(x), -1, SIZE).transpose(0, 1) for name in "qkv"
    )
    k, v = (a.repeat_interleave(HEADS // GROUPS, 0) for a in (rotated(k), v))
    out = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True).transpose(0, 1).reshape(len(x), -1)
    x = (normed if before else hidden) + out @ w["midlayer.self_attn.o_proj.weight"].T
    y = norm(x, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T


@torch.no_grad()
def drafted(
    model: Any,
    w: dict[str, Tensor],
    tokens: list[int],
    count: int,
    bias: Mapping[int, float],
    before: bool = False,
    normed: bool = False,
) -> tuple[list[int], list[float]]:
    """Return the greedy drafts after `tokens`, all but the last of which the model has run, and their probabilities.

    `before` and `normed` are norm_before_residual and norm_output in config.json.
    """
    states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    parts = [states[n][0] for n in AUX]
    if "fc_norm.0.weight" in w:
        parts = [norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
    joined = torch.cat(parts, -1)
    if "input_norm.weight" in w:
        joined = norm(joined, w["input_norm.weight"])
    hidden = joined @ w["fc.weight"].T + w.get("fc.bias", 0.0)
    table, known, out, chances = model.get_input_embeddings().weight, list(tokens), list[int](), list[float]()
    for _ in range(count):
        x = layer(w, table[torch.tensor(known[1:])], hidden, before)
        x_normed = norm(x[-1:], w["norm.weight"])
        logits = x_normed[0] @ w["lm_head.weight"].T
        full = torch.full((int(CONFIG["vocab_size"]),), -torch.inf)
        ids = torch.arange(len(logits)) + w.get("d2t", torch.zeros(len(logits), dtype=torch.long))
        full[ids] = logits
        for token, value in bias.items():
            full[token] += value
        out.append(int(full.argmax()))
        chances.append(float(full.softmax(-1).max()))
        known.append(out[-1])
        hidden = torch.cat((hidden, x_normed if normed else x[-1:]))
    return out, chances
