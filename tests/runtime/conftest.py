"""Fixtures of tests of the runtime: handmade artifacts, written once per session, servers, and counts of plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import textkit
from artifact import tiny
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation

from llmc.artifact.write import write_artifact

if TYPE_CHECKING:
    from tests.runtime.parrots import Ask, Servers


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


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """The servers of the module `parrots`."""
    from tests.runtime.parrots import parrots

    with parrots() as found:
        yield found


@pytest.fixture(scope="module")
def ask(servers: Servers) -> Ask:
    """Return the response of the server `name` whose model outputs `text`."""
    from tests.runtime.parrots import client, say

    def asked(name: str, text: str, **more: Any) -> Any:
        given = {"model": "parrot", "messages": [say(text)], "temperature": 0, "seed": 1, "max_tokens": 400} | more
        return client(servers, name).chat.completions.create(**given)

    return asked


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an item for each plan that is not idle."""
    rows, begin = list[int](), Speculation.begin

    def counted(self: Speculation, running: Sequence[Request], room: int) -> None:
        rows.append(len(running))
        begin(self, running, room)

    monkeypatch.setattr(Speculation, "begin", counted)
    return rows
