"""Checkpoints of old tools, whose quantisation is described by a file next to config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.kit import fails
from quant.test_decode import FIXTURES, decoder, opened

from llmc.frontend.model_folder import open_source

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def folder(source: str, to: Path, files: dict[str, dict[str, Any]], keep: bool) -> Path:
    """A copy of a fixture with these files only, and with its `quantization_config` if `keep`."""
    shutil.copytree(FIXTURES / source, to, ignore=shutil.ignore_patterns("quant*_config.json"))
    config = json.loads((to / "config.json").read_text())
    if not keep:
        del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (to / name).write_text(json.dumps(content))
    return to


GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "true_sequential": True, "damp_percent": 0.01}


@pytest.mark.parametrize(
    ("source", "name", "content"),
    [
        ("gptq-4bit", "quantize_config.json", GPTQ),
        ("awq-autoawq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_a_file_beside_config_json(source: str, name: str, content: dict[str, Any], tmp_path: Path) -> None:
    with opened(FIXTURES / source) as checkpoint:
        want, formats = checkpoint.read(WEIGHT), checkpoint.formats
    for keep in (False, True):
        at = folder(source, tmp_path / str(keep), {name: content}, keep)
        config = open_source(at).config["quantization_config"]
        if not keep:
            assert config == {**content, "quant_method": source.partition("-")[0]}
    with opened(tmp_path / "False") as checkpoint:
        assert checkpoint.formats == formats
        assert np.array_equal(checkpoint.read(WEIGHT), want)


@pytest.mark.parametrize(
    ("files", "code", "words"),
    [
        ({"quantize_config.json": GPTQ | {"bits": 8}}, "E340", ("quantize_config.json", "bits", "8", "4")),
        ({"quantize_config.json": GPTQ | {"group_size": 64}}, "E340", ("group_size", "64", "128")),
        ({"quantize_config.json": GPTQ | {"checkpoint_format": "gptq_v2"}}, "E340", ("checkpoint_format", "gptq_v2")),
        ({"quant_config.json": {"w_bit": 4, "q_group_size": 128}}, "E340", ("quant_config.json", "awq", "gptq")),
    ],
)
def test_contradictions(files: dict[str, Any], code: str, words: tuple[str, ...], tmp_path: Path) -> None:
    at = folder("gptq-4bit", tmp_path / "model", files, keep=True)
    fails(code, *words, do=lambda: open_source(at))


def test_synonyms_that_contradict_one_another(tmp_path: Path) -> None:
    """In one place, too: which of them counts differs between tools."""
    twice = GPTQ | {"checkpoint_format": "gptq_v2", "format": "gptq"}
    at = folder("gptq-4bit", tmp_path / "model", {"quantize_config.json": twice}, keep=False)
    fails("E340", "quantize_config.json has", "checkpoint_format", "and format", do=lambda: open_source(at))


def test_files_that_contradict_one_another(tmp_path: Path) -> None:
    files = {"quantize_config.json": GPTQ, "quantization_config.json": GPTQ | {"bits": 3}}
    at = folder("gptq-4bit", tmp_path / "model", files, keep=False)
    fails("E340", "quantization_config.json", "bits", "quantize_config.json has", do=lambda: open_source(at))


def test_text_in_place_of_a_number(tmp_path: Path) -> None:
    """An error shows what differs, quotation marks."""
    at = folder("gptq-4bit", tmp_path / "alone", {"quantize_config.json": GPTQ | {"bits": "4"}}, keep=False)
    fails("E340", "bits = '4', not an integer", do=lambda: decoder(at))
    at = folder("gptq-4bit", tmp_path / "both", {"quantize_config.json": GPTQ | {"bits": "4"}}, keep=True)
    fails("E340", "has bits = '4'", "has bits = 4", do=lambda: open_source(at))


def test_unreadable(tmp_path: Path) -> None:
    at = folder("gptq-4bit", tmp_path / "model", {}, keep=False)
    (at / "quantize_config.json").write_text("[4]")
    fails("E302", "quantize_config.json", "list", do=lambda: open_source(at))


def test_marlin_is_refused(tmp_path: Path) -> None:
    at = folder("gptq-4bit", tmp_path / "model", {"quantize_config.json": GPTQ | {"is_marlin_format": True}}, False)
    fails("E307", "is_marlin_format", do=lambda: decoder(at))
