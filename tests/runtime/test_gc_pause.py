"""Pauses of garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from llmc_runtime import LLM
from llmc_runtime.engine import open_model
from llmc_runtime.format.errors import LlmcError
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


def test_an_llm_opens_without_collections(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected once, before, so that a dropped LLM frees its memory."""
    events: list[str] = []
    enabled: list[bool] = []
    collect = gc.collect

    def prepare(manifest: Manifest, number: int) -> None:
        events.append("open")
        enabled.append(gc.isenabled())

    def counted() -> int:
        events.append("collect")
        return collect()

    monkeypatch.setattr(open_model, "prepare_device", prepare)
    monkeypatch.setattr(gc, "collect", counted)
    with LLM(toy, say=lambda line: None):
        enabled.append(gc.isenabled())
    assert events == ["collect", "open"] and enabled == [False, True]


@pytest.mark.usefixtures("freezes")
def test_nothing_is_frozen_that_could_not_be_opened(toy: Path) -> None:
    before = gc.get_freeze_count()
    with pytest.raises(LlmcError, match="E204"):
        LLM(toy, say=lambda line: None, max_num_seqs=1000)
    assert gc.isenabled() and gc.get_freeze_count() == before
