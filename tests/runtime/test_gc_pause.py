"""Pauses of garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from llmc_runtime.engine import open_model
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.gc_pause import paused_collections


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_a_pause_ends_with_its_block() -> None:
    with paused_collections():
        assert not gc.isenabled()
        with paused_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), paused_collections():
        _ = 1 // 0
    assert gc.isenabled()


def test_disabled_collections_remain_disabled() -> None:
    gc.disable()
    with paused_collections():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_collections_are_paused_only_while_programs_are_read(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []

    def prepare(manifest: Manifest, number: int) -> None:
        enabled.append(gc.isenabled())

    monkeypatch.setattr(open_model, "prepare_device", prepare)
    with open_model.open_model(toy, EngineOptions(toy)):
        enabled.append(gc.isenabled())
    assert enabled == [False, True]
