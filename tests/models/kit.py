"""Shared by tests of models: random checkpoints, and logits computed by transformers and by the IR's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.cases import Case

from llmc.diagnostics import Diagnostic
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.export import quiet
from llmc.frontend.model_class import auto_class, towers_optional
from llmc.frontend.trace_model import Traced
from llmc.ir.graph import Module
from llmc.ir.interp import run


def build(case: Case, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model with weights drawn so that no part is degenerate."""
    torch.manual_seed(seed)
    with quiet(), towers_optional():
        config = transformers.AutoConfig.for_model(case.model_type, **copy.deepcopy(dict(case.config)))
        model = auto_class(case.model_type).from_config(
            config, attn_implementation=case.attention, experts_implementation="eager", dtype=torch.float32
        )
    for name, p in model.named_parameters():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        p.data.normal_(centre, 0.15)
    return model.eval().to(dtype)


def save(case: Case, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **kw: Any) -> Any:
    """Build and save a checkpoint; answers the model."""
    model = build(case, seed, dtype)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **kw)
    return model


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model that transformers loads from a checkpoint: weights in `dtype`, rotary frequencies in float32."""
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def prompts(lengths: tuple[int, ...], vocab: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, positions) of the sequences, packed into one flat axis."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, sum(lengths)).astype(np.int32)
    return tokens, np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)


def eager_logits(model: Any, tokens: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Return transformers' logits of every token, each sequence computed separately."""
    out, at = [], 0
    for n in lengths:
        ids = torch.from_numpy(tokens[at : at + n].astype(np.int64))[None]
        with torch.no_grad():
            out.append(model(input_ids=ids, use_cache=False).logits[0].float().numpy())
        at += n
    return np.concatenate(out)


def ir_logits(
    module: Module, traced: Traced, checkpoint: Checkpoint, tokens: np.ndarray, positions: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """@main's logits at the `last` tokens, by the reference interpreter."""
    graph = module.graphs["main"]
    fixed = {"tokens": tokens, "positions": positions, "last": last.astype(np.int32)}
    inputs = [checkpoint.read(v.name) if v.weight else fixed[v.name] for v in graph.inputs]
    (logits,) = run(graph, inputs)
    return logits


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def fails(code: str, *words: str, do: Callable[[], Any]) -> None:
    """Check that `do` raises this error, in at most three lines that contain the words and a remedy."""
    with pytest.raises(Diagnostic) as e:
        do()
    message = str(e.value)
    assert e.value.code == code and "\n  Try: " in message and len(message.splitlines()) <= 3, message
    assert all(w in message for w in words), message
