"""Passes keep the logits of real models, each pass compared with transformers; and norms and rotations get names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from models.cases import LISTED, SEED, Case, sample
from models.kit import eager_logits, ir_logits, prompts, relative_error, save

from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace
from llmc.ir.graph import Module
from llmc.passes.base import Ctx, Pass
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.targets.cpu_targets import portable

pytestmark = pytest.mark.drawn
# What of the serving pipeline also holds for a prompt graph.
PIPELINE = "canonicalize, fuse-norm, fuse-rope, fuse-linear, fold, fuse-pointwise, cse, dce"

# Architectures whose norms and rotations all have names afterwards.
NAMED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "granite", "smollm3", "gemma", "gemma3_text",
         "mixtral", "qwen3_moe", "glm4", "olmo2", "cohere")  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in (*LISTED, *sample(4))])
def test_each_pass_keeps_the_logits(case: Case, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    model = save(case, tmp_path, SEED)
    traced = trace(tmp_path, **case.trace)
    tokens, positions = prompts(case.lengths, 320)
    last = np.arange(0, len(tokens), 5)
    want = eager_logits(model, tokens, case.lengths)[last]
    registry = load()
    ctx = Ctx(registry.opset(), portable(), registry.kernels)
    with Checkpoint(traced) as checkpoint:

        def check(_: int, p: Pass, changes: int, seconds: float, m: Module) -> None:
            if changes:
                got = ir_logits(m, traced, checkpoint, tokens, positions, last)
                assert relative_error(got, want) <= 1e-4, p.name

        run_pipeline(traced.module, parse_pipeline(PIPELINE, registry.passes), ctx, check)
    if case.model_type in NAMED:
        left = Counter(n.op.name for n in traced.module.graphs["main"].nodes)
        assert left["rms_norm"] or left["layer_norm"] or left["fused"], left
        assert left["rope"] == 2 * rotated(case), left
        assert not left["rsqrt"] and not left["neg"], left


def rotated(case: Case) -> int:
    """Layers that rotate: a smollm3 layer may go without."""
    return sum(case.config.get("no_rope_layers", [1] * case.config["num_hidden_layers"]))
