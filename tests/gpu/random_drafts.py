"""A random Llama of two layers with 16 ids, a random draft model and a random EAGLE-3 head, and tasks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from models.eagle import save_head, tensors
from models.sampled_drafts import LENGTH, SETTINGS, Task

VOCABULARY, POSITIONS = 16, 64
RANDOM_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{name: SETTINGS[name] for name in ("cold", "plain", "top-p", "penalties")},
    "mask": {"temperature": 1.0, "allowed_token_ids": [0, 2, 3, 5, 8, 11, 12, 15]},
}


def random_task(setting: str) -> Task:
    """Return the task of a setting. Its prompt has all ids twice and ends two tokens before the end of a page."""
    orders = [Random(seed).sample(range(VOCABULARY), VOCABULARY) for seed in range(2)]
    prompt = [token for order in orders for token in order][:-2]
    return Task(prompt, {"max_tokens": LENGTH, "ignore_eos": True, **RANDOM_SETTINGS[setting]})


def make_random_models(folder: Path) -> dict[str, str]:
    """Write the model to the folder `model`, the draft model and the head beside it. Return the options --draft."""
    if not (folder / "head" / "model.safetensors").is_file():
        for seed, (name, layers) in enumerate({"model": 2, "draft": 1}.items()):
            save_llama(folder / name, layers, seed)
        head = tensors(VOCABULARY)
        del head["d2t"], head["t2d"]  # it has all ids of the model
        save_head(folder / "head", head, vocab_size=VOCABULARY)
    return {"draft": str(folder / "draft"), "eagle": f"eagle:{folder / 'head'}"}


def save_llama(folder: Path, layers: int, seed: int) -> None:
    """Write a model in float32 whose logits have a standard deviation of about two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, initializer_range=0.25,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
