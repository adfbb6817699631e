"""Aborts of outputs whose grammars are being compiled."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("msgspec")
from llmc_runtime import SamplingParams, StructuredOutputsParams
from llmc_runtime.engine.engine_loop import EngineLoop
from llmc_runtime.engine.input_processor import EngineRequest
from llmc_runtime.engine.messages import Add, params_message
from llmc_runtime.grammar.guide import Opening
from llmc_runtime.sched.token_guide import mask_of

from tests.runtime.guides import Wandering
from tests.runtime.rig import Rig


class Compiler:
    """Stands for Grammars: compiles when `finish` is called."""

    def __init__(self) -> None:
        self.openings: list[Opening] = []
        self.cancelled: list[Opening] = []

    def open(self, outputs: Any, tenant: str, count: int) -> Opening:
        """Return an opening that is not done."""
        self.openings.append(Opening(count, (tenant, b"")))
        return self.openings[-1]

    def cancel(self, opening: Opening) -> None:
        """Note an opening that is not needed any more."""
        self.cancelled.append(opening)

    def pump(self, seconds: float = 0.0) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Let all openings be done."""
        for opening in self.openings:
            opening.add([_Guide(1000) for _ in range(opening.count)])  # type: ignore[misc]


class _Guide(Wandering):
    """A guide that is ready, and allows everything."""

    sent, error = 0.0, None

    def mask(self) -> bytes:
        """Return the mask of all tokens."""
        return mask_of(None, self.vocab_size)


def test_an_abort_looks_at_no_other_request_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait for a compilation when their clients leave; aborted outputs never start."""
    compiler, rig = Compiler(), Rig()
    loop = EngineLoop(rig.engine, lambda: compiler)  # type: ignore[arg-type, return-value]
    params = SamplingParams(n=2, max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
    for first in range(0, 40, 2):
        loop.add(Add(first, array("I", [1, 2, 3]).tobytes(), params_message(params), 0, "", []))
    looked = Counter[str]()
    right = EngineRequest.numbers.fget
    assert right is not None

    def numbers(self: EngineRequest) -> range:
        looked["numbers"] += 1
        return right(self)

    monkeypatch.setattr(EngineRequest, "numbers", property(numbers))
    loop.abort([*range(1, 40), 41])
    assert not looked["numbers"] and loop.compiling
    loop._take_compiled()
    assert compiler.cancelled == compiler.openings[1:], "the first request has an output that goes on"
    compiler.finish()
    loop._take_compiled()
    assert set(rig.scheduler.requests) == {"0"} and not loop.compiling
    assert loop._aborted == {41}, "one that may still arrive"
    loop.abort([1, 0])
    assert not rig.scheduler.requests and loop._aborted == {41}, "these have started, or ended"
