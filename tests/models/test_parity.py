"""Logits of traced models through the reference interpreter equal transformers' own, for packed, odd-sized prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from models.cases import FURTHER, LISTED, ROPES, SEED, UNLISTED, Case, further
from models.kit import eager_logits, ir_logits, prompts, relative_error, save
from models.recent_cases import recent
from models.recurrent_cases import RECURRENT

from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace
from llmc.ir import text
from llmc.ir.ops import OPS
from llmc.ir.verify import verify

# One model of each kind of recurrence runs always; the others are drawn.
RECURRENCES = ("qwen3_5_text", "lfm2", "bamba", "minimax", "kimi_linear", "jamba")
ALWAYS = (*LISTED, *(c for c in RECURRENT if c.name in RECURRENCES))
DRAWN = (*UNLISTED, *ROPES, *further(6), *recent(4), *(c for c in RECURRENT if c.name not in RECURRENCES))
EVERY = (
    *(pytest.param(c, id=c.name) for c in ALWAYS),
    *(pytest.param(c, id=c.name, marks=pytest.mark.drawn) for c in DRAWN),
)


@pytest.mark.parametrize("case", EVERY)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    model = save(case, tmp_path)
    traced = trace(tmp_path, **case.trace)
    verify(traced.module)
    tokens, positions = prompts(case.lengths, 320)
    last = np.arange(0, len(tokens), 3)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, last)
    want = eager_logits(model, tokens, case.lengths)[last]
    assert got.shape == want.shape
    assert relative_error(got, want) <= 1e-4


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_config_that_asks_for_more_outputs(name: str, tmp_path: Path) -> None:
    """Checkpoints are published with these keys as they were trained; gates' logits are for a loss."""
    case = next(c for c in (*LISTED, *UNLISTED) if c.name == name)
    model = save(case, tmp_path)
    more = {"output_router_logits": True, "output_hidden_states": True, "output_attentions": True, "return_dict": False}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    traced = trace(tmp_path)
    tokens, positions = prompts((9, 5), 320)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(14))
    assert relative_error(got, eager_logits(model, tokens, (9, 5))) <= 1e-4


@pytest.mark.drawn
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in LISTED])
def test_packing_matters(case: Case, tmp_path: Path) -> None:
    """The test above can fail: without the restart of positions the second sequence sees the first."""
    save(case, tmp_path)
    traced = trace(tmp_path)
    tokens, positions = prompts(case.lengths, 320)
    with Checkpoint(traced) as checkpoint:
        last = np.array([case.lengths[0] + 2])
        packed = ir_logits(traced.module, traced, checkpoint, tokens, positions, last)
        joined = ir_logits(traced.module, traced, checkpoint, tokens, np.arange(len(tokens), dtype=np.int32), last)
    assert relative_error(packed, joined) > 1e-2


def test_values_wider_than_keys(tmp_path: Path) -> None:
    """Pages have values of at most the width of keys, so that keys and queries are padded."""
    case = next(c for c in UNLISTED if c.name == "minicpm3")
    model = save(dataclasses.replace(case, config=case.config | {"v_head_dim": 40, "num_hidden_layers": 1}), tmp_path)
    traced = trace(tmp_path)
    assert traced.facts.heads == ((4, 4, 40, 40),)
    tokens, positions = prompts(case.lengths, 320)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(len(tokens)))
    assert relative_error(got, eager_logits(model, tokens, case.lengths)) <= 1e-4


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "codegen", "qwen3_5_text", "lfm2", "bamba"])
def test_bfloat16_is_as_exact_as_transformers(name: str, tmp_path: Path) -> None:
    case = next(c for c in (*LISTED, *FURTHER, *RECURRENT) if c.name == name)
    low = save(case, tmp_path, dtype=torch.bfloat16)
    traced = trace(tmp_path)
    assert traced.facts.dtype == "bf16"
    tokens, positions = prompts(case.lengths, 320)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(len(tokens)))
    theirs = eager_logits(low, tokens, case.lengths)
    exact = eager_logits(low.float(), tokens, case.lengths)
    assert relative_error(got, exact) <= 1.5 * relative_error(theirs, exact)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_text_of_a_model_parses_back(name: str, tmp_path: Path) -> None:
    case = next(c for c in LISTED if c.name == name)
    save(case, tmp_path)
    shown = text.show(trace(tmp_path).module)
    assert text.show(text.parse(shown, OPS)) == shown


def test_phi_moe_has_factors_of_its_own(tmp_path: Path) -> None:
    """Beyond its original length, the frequencies and the factor of long sequences are used, as its publisher does."""
    case = next(c for c in ROPES if c.name == "rope-phimoe")
    save(case, tmp_path)
    rope = case.config["rope_parameters"]
    for longest, kind in ((64, "short"), (65, "long")):
        traced = trace(tmp_path, max_positions=longest)
        (tables,) = [n for n in traced.module.graphs["main"].nodes if n.op.name == "rope_tables"]
        assert tables.attrs["scaling"] == rope[f"{kind}_mscale"]
        (freq,) = [x for name, x in traced.buffers.items() if name.endswith("inv_freq")]
        width = 2 * len(rope["short_factor"])
        plain = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
        np.testing.assert_allclose(freq, plain / rope[f"{kind}_factor"], rtol=1e-6)
