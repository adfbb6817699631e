"""Fixtures of tests of the runtime: handmade artifacts, written once per session, and counts of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import textkit
from artifact import tiny
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation

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


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an item for each plan that is not idle."""
    rows, begin = list[int](), Speculation.begin

    def counted(self: Speculation, running: Sequence[Request], room: int) -> None:
        rows.append(len(running))
        begin(self, running, room)

    monkeypatch.setattr(Speculation, "begin", counted)
    return rows
