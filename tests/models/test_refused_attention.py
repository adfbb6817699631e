"""Attention that is not causal, or not in transformers' interface, is refused before a program is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models.cases import SMALL
from models.kit import fails

from llmc.frontend import legacy_attention
from llmc.frontend.trace_model import trace


def test_attention_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain products over all packed tokens would let one prompt read another."""
    monkeypatch.setattr(legacy_attention, "METHODS", {})
    entries = {
        "model_type": "openai-gpt",
        "vocab_size": 320,
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(entries))
    fails("E305", "h.0.attn", "joins tokens", "[1, 4, T, T]", do=lambda: trace(tmp_path, max_tokens=128))


def test_prompts_that_read_ahead(tmp_path: Path) -> None:
    text = {"model_type": "gemma", **SMALL, "head_dim": 16}
    entries = {"model_type": "paligemma", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    fails("E305", "paligemma", "attend to later ones", do=lambda: trace(tmp_path))
