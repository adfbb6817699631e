"""Tensors that transformers reads though the index lacks them, and attention windows that it cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from models.cases import LISTED, SMALL
from models.kit import fails, save
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from llmc.diagnostics import Diagnostic
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import Traced, trace

FILE = "model.safetensors"
LOST = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("llama")
    save(next(case for case in LISTED if case.name == "llama"), folder)
    return trace(folder)


def written(saved: Traced, folder: Path, listed: Callable[[str], bool], second: float | None = None) -> Path:
    """The checkpoint in two files, with an index of the `listed` names. The second file has LOST plus `second`, too."""
    tensors = dict(load_file(saved.source.folder / FILE))
    names = [LOST, *sorted(tensors.keys() - {LOST})]
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, half in halves.items():
        kept = {name: tensors[name] for name in half}
        if file == "a.safetensors":
            kept["unused.weight"] = np.ones(3, np.float32)
        elif second is not None:
            kept[LOST] = (tensors[LOST] + second).astype(tensors[LOST].dtype)
        save_file(kept, folder / file, {"format": "pt"})
    listing = {name: file for file, half in halves.items() for name in half if listed(name)}
    (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listing}))
    (folder / "config.json").write_bytes((saved.source.folder / "config.json").read_bytes())
    return folder


def test_tensors_that_the_index_lacks_are_read(saved: Traced, tmp_path: Path) -> None:
    """Others that the model does not have are ignored."""
    cases: tuple[Callable[[str], bool], ...] = (lambda n: n != LOST, lambda n: "layers.1" not in n, lambda n: True)
    for listed in cases:
        folder = written(saved, tmp_path, listed)
        with Checkpoint(saved, folder) as found, Checkpoint(saved) as wanted:
            assert set(found.names) == set(wanted.names)
            for name in found.names:
                np.testing.assert_array_equal(found.read(name), wanted.read(name))
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict()[LOST]
            np.testing.assert_array_equal(theirs.numpy(), wanted.read(LOST).astype(np.float32))


def test_a_tensor_in_two_files_is_read_if_both_are_equal(saved: Traced, tmp_path: Path) -> None:
    folder = written(saved, tmp_path, lambda n: n != LOST, 0)
    with Checkpoint(saved, folder) as found, Checkpoint(saved) as wanted:
        np.testing.assert_array_equal(found.read(LOST), wanted.read(LOST))
    with pytest.raises(Diagnostic, match="and they differ") as e:
        Checkpoint(saved, written(saved, tmp_path, lambda n: n != LOST, 1))
    assert e.value.code == "E322"


@pytest.mark.parametrize("width", [0, -1])
@pytest.mark.parametrize(("kind", "field"), [("mistral", "sliding_window"), ("gpt_neo", "window_size")])
def test_a_window_of_no_tokens_is_refused(kind: str, field: str, width: int, tmp_path: Path) -> None:
    own = {"attention_types": [[["local"], 2]], "num_layers": 2, "num_heads": 4} if kind == "gpt_neo" else {}
    entries = {"model_type": kind, **SMALL, **own}
    (tmp_path / "config.json").write_text(json.dumps({**entries, field: width}))
    with pytest.raises(Diagnostic, match=f"a sliding window of {width} tokens") as e:
        trace(tmp_path, max_tokens=128)
    assert e.value.code == "E305"
    (tmp_path / "config.json").write_text(json.dumps({**entries, field: 4}))
    nodes = [n for n in trace(tmp_path, max_tokens=128).module.graphs["main"].nodes if n.op.name == "attention"]
    assert nodes and all(n.attrs["window"] == 4 for n in nodes)


def test_layers_with_a_window_that_is_switched_off(tmp_path: Path) -> None:
    """Qwen2-MoE's config ignores the width unless use_sliding_window is true; the error names that key."""
    window = {"sliding_window": 8, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_moe", **SMALL, **experts, **window}))
    fails("E305", "window of 0 tokens", "use_sliding_window", do=lambda: trace(tmp_path, max_tokens=128))
