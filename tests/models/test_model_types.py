"""Every model type of the installed transformers is compiled or refused by a code, never by a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from llmc.console import Quiet
from llmc.diagnostics import Diagnostic
from llmc.dry_run import dry_run
from llmc.frontend.export import quiet
from llmc.frontend.model_class import reads_audio, reads_images, text_part
from llmc.frontend.trace_model import trace
from llmc.options import Options

CAUSAL = sorted(CONFIG_MAPPING_NAMES.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
WITH_IMAGES = sorted(n for n in CONFIG_MAPPING_NAMES if reads_images(n))
WITH_AUDIO = sorted(n for n in CONFIG_MAPPING_NAMES if reads_audio(n) or text_part(n))
REFUSALS = ("E302", "E303", "E305", "E306", "E310", "E311", "E312", "E430", "E435")
SMALL = Options(target="cpu:portable", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, cache=None)


def planned(folder: Path, layers: int | None) -> None:
    """Trace the model and plan its programs: all of a compile except building kernels."""
    options = Options(**{**vars(SMALL), "layers": layers})
    dry_run(folder, options, None, Quiet())


def write_config(name: str, folder: Path) -> None:
    """The default config of a type; only its name if transformers has no default, as for musicgen."""
    try:
        with quiet():
            text = CONFIG_MAPPING[name]().to_json_string(use_diff=False)
    except Exception:  # transformers raises many types for a config that lacks a required part
        text = json.dumps({"model_type": name})
    (folder / "config.json").write_text(text)


@pytest.mark.drawn
@pytest.mark.parametrize("name", sorted({*CAUSAL, *WITH_IMAGES, *WITH_AUDIO}))
def test_a_causal_type_with_its_default_config(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    try:
        planned(tmp_path, 1)
    except Diagnostic as e:
        if e.code != "E312":
            assert e.code in REFUSALS
            return
        try:
            planned(tmp_path, None)  # a model of one layer, or one that cannot be cut
        except Diagnostic as whole:
            assert whole.code in REFUSALS


@pytest.mark.parametrize("name", ["gemma4_assistant", "gemma4_unified_assistant", "blt"])
def test_types_without_plain_layers_are_refused(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    with pytest.raises(Diagnostic, match=rf"E305.*{name}.*no num_hidden_layers"):
        trace(tmp_path)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("t5", "an encoder and a decoder"),
        ("bart", "an encoder and a decoder"),
        ("prophetnet", "an encoder and a decoder"),
        ("whisper", "recognizes speech"),
    ],
)
def test_encoder_decoders_are_refused(name: str, what: str, tmp_path: Path) -> None:
    """Also those whose decoder transformers can build alone: it would ignore what the encoder read."""
    write_config(name, tmp_path)
    with pytest.raises(Diagnostic, match=rf"E303.*{name}.*{what}"):
        trace(tmp_path)


@pytest.mark.parametrize(
    "name", ["xlnet", "reformer", "cpmant", "qwen4_exp_text", "qwen4_exp", "deepseek_v4", "zaya", "inkling_text"]
)
def test_attention_of_other_kinds_is_refused_by_name(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    with pytest.raises(Diagnostic, match=rf"E305.*{name}.* is not supported: its "):
        trace(tmp_path)


def test_all_other_types_are_refused_by_name(tmp_path: Path) -> None:
    others = sorted(CONFIG_MAPPING_NAMES.keys() - set(CAUSAL) - set(WITH_IMAGES) - set(WITH_AUDIO))
    assert len(others) > 250
    for name in others:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(Diagnostic, match=r"E30[35]") as e:
            trace(tmp_path)
        assert name in e.value.cause
