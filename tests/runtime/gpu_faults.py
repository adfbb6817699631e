"""What the tests of failures on the two GPU runtimes without a GPU share: libcuda/ and libamdhip64/."""

from __future__ import annotations

import pytest
from llmc_runtime.artifact import Artifact
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.loader import open_engine
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.step import RowInit, RowParams, Step, Work

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
