"""LongCat-Flash as its publisher stores it: experts that return what they read have no weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from models.kit import eager_logits, fails, ir_logits, prompts, relative_error, save
from models.recent_cases import RECENT
from safetensors.torch import load_file, save_file

from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace

CASE = next(c for c in RECENT if c.name == "longcat_flash")
ROUTED = CASE.config["n_routed_experts"]
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up)_proj")
# Entries of the published config.json that transformers' own does not write, and those that it writes otherwise.
PUBLISHED = {
    "attention_method": "MLA",
    "auto_map": {"AutoModelForCausalLM": "modeling_longcat_flash.LongcatFlashForCausalLM"},
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "rope_theta": 10000000.0,
    "router_bias": False,
    "torch_dtype": "float32",
    "zero_expert_type": "identity",
}


def write(folder: Path, experts: int) -> torch.nn.Module:
    """A published checkpoint whose gates are stored for so many experts; answers the model."""
    model = save(CASE, folder)
    stored = load_file(folder / "model.safetensors")
    kept = {n: x for n, x in stored.items() if not (m := EXPERT.search(n)) or int(m[1]) < experts}
    assert len(kept) < len(stored)
    kept["model.mtp.layers.0.eh_proj.weight"] = torch.ones(2, 2)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    dropped = ("dtype", "rope_parameters", "num_key_value_heads", "qk_head_dim", "transformers_version")
    config = {k: x for k, x in config.items() if k not in dropped} | PUBLISHED
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_gates_only_of_experts_with_weights(tmp_path: Path) -> None:
    model = write(tmp_path, ROUTED)
    traced = trace(tmp_path)
    tokens, positions = prompts(CASE.lengths, 320)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(len(tokens)))
        (stack,) = [n for n in checkpoint.names if n.endswith("gate_up_proj")]
        assert checkpoint.shape(stack)[0] == ROUTED
    assert relative_error(got, eager_logits(model, tokens, CASE.lengths)) <= 1e-4


@pytest.mark.parametrize("experts", [ROUTED - 1, ROUTED + 1])
def test_another_number_of_gates_is_refused(experts: int, tmp_path: Path) -> None:
    write(tmp_path, experts)
    fails("E325", "gate_up_proj", do=lambda: Checkpoint(trace(tmp_path)))
