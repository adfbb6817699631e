"""Handmade artifacts shared by tests of the runtime, written once per session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import textkit
from artifact import tiny

from llmc.artifact.write import write_artifact


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a tokenizer of 64 letters, a chat template and greedy defaults."""
    folder = tmp_path_factory.mktemp("toy")
    config = {"chat_template": textkit.TEMPLATE, "bos_token": None}
    files = textkit.write_folder(folder / "tokenizer", textkit.small(), config)
    parts = replace(tiny.parts(folder), tokenizer=sorted(files.iterdir()), generation={"do_sample": False})
    write_artifact(folder / "toy.llmc", parts)
    return folder / "toy.llmc"


@pytest.fixture(scope="session")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without a tokenizer."""
    folder = tmp_path_factory.mktemp("mute")
    write_artifact(folder / "mute.llmc", replace(tiny.parts(folder), tokenizer=()))
    return folder / "mute.llmc"
