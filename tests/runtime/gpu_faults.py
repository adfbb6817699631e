"""Shared by the tests of failures on both simulated GPU drivers, libcuda/ and libamdhip64/."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime.artifact import Artifact, open_artifact
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.loader import open_engine
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format import expr
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import RowInit, RowParams, Step, Work

from llmc.artifact.write import Parts, write_artifact

STEP = Step([RowInit(0, [1, 2, 3], 0, 3, RowParams(), [0])], [], [Work(0, 3, True)])
DECODE = Step([], [], [Work(0, 1, True)])


def opened(artifact: Artifact, code: str, words: str) -> None:
    """Check that opening a device and an executor, and an engine, raises this error."""
    with pytest.raises(LlmcError, match=rf"{code}.*{words}"):
        device = open_device(artifact, 2)
        try:
            Executor(artifact, device)
        finally:
            device.close()
    with pytest.raises(LlmcError, match=rf"{code}.*{words}"):
        open_engine(artifact, EngineOptions(""))


def too_little_memory_for_a_text(artifact: Artifact, driver: Any) -> None:
    """Check the error if a sequence of the maximum length does not fit."""
    big = replace(artifact.manifest, kv=replace(artifact.manifest.kv, bytes_per_page=1 << 30))
    driver.gpu(nbytes=1 << 28)
    with pytest.raises(LlmcError, match=r"E205.*256.0 MiB free; 8.0 GiB are needed.*\n.*--max-model-len"):
        open_engine(replace(artifact, manifest=big), EngineOptions(""))


def kv_cache_larger_than_what_is_left(artifact: Artifact, driver: Any) -> None:
    """Check the error for a KV cache that exceeds the GPU's memory."""
    driver.gpu(nbytes=64 << 20)
    big = replace(artifact.manifest, kv=replace(artifact.manifest.kv, bytes_per_page=2 << 20))
    with pytest.raises(LlmcError, match=r"E205.*needs 60.0 MiB; .* are left after .*\n.*enough for \d+ tokens"):
        open_engine(replace(artifact, manifest=big), EngineOptions("", kv_cache_memory_bytes=60 << 20))


def launches_of_no_kernel(parts: Parts, folder: Path) -> None:
    """Check that a launch of an entry that no kernel has is refused when the artifact is opened."""
    away = replace(parts.programs[0].launches[0], entry="nobody")
    lost = replace(parts.programs[0], launches=(away,))
    write_artifact(folder / "lost.llmc", replace(parts, programs=(lost, *parts.programs[1:])))
    opened(open_artifact(folder / "lost.llmc"), "E113", "launches nobody")


def refused_launch_says_where(artifact: Artifact, driver: Any, function: str, error: str) -> None:
    """Check that the error names the kernel whose launch by `function` is refused with 701, which is `error`."""
    executor = Executor(artifact, open_device(artifact, 2))
    driver.fail(function, 701, 1)
    with pytest.raises(LlmcError, match=rf"E114.*{error}.* at toy \(model.toy\)"):
        executor.run(STEP)
    executor.close()


def size_that_does_not_fit(parts: Parts, folder: Path) -> None:
    """Check that a size of a launch beyond 32 bits is refused."""
    step = parts.programs[2]
    wide = replace(step.launches[1], sizes=(*step.launches[1].sizes[:5], expr.parse("T*2147483647")))
    big = replace(step, launches=(step.launches[0], wide))
    write_artifact(folder / "wide.llmc", replace(parts, programs=(*parts.programs[:2], big)))
    artifact = open_artifact(folder / "wide.llmc")
    executor = Executor(artifact, open_device(artifact, 2))
    with pytest.raises(LlmcError, match=r"E113.*T\*2147483647 is negative or too large"):
        executor.run(STEP)
    executor.close()


def every_request_is_reported(artifact: Artifact, driver: Any, error: str) -> None:
    """Check that a failure amid steps ends every request with this error, and that no other is accepted. `driver` is
    reset: some drivers free nothing after such an error, with which a process ends.
    """
    opened = open_engine(artifact, EngineOptions(""))
    engine = opened.engine
    for i in range(3):
        engine.add(Request(str(i), [1 + i, 2, 3], SamplingParams(max_tokens=9, temperature=0.0), 0))
    result: dict[str, str] = {}
    engine.step()
    driver.fail("kernel", 719, 2)
    for _ in range(12):
        for delta in engine.step() if engine.error is None else ():
            if delta.finish_reason == "error":
                result[delta.id] = str(delta.error)
    assert sorted(result) == ["0", "1", "2"] and all(error in text for text in result.values())
    with pytest.raises(LlmcError, match="E114"):
        engine.add(Request("4", [1], SamplingParams(), 0))
    driver.lib.fake_reset()
    opened.close()
