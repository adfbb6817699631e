"""An engine process over the simulated device, for tests: `fake_core.py SECONDS_A_STEP PARENT FOLDER HEARTBEAT`.

A prompt that begins with CRASH kills the process, one that begins with HANG hangs the step, and one that begins with
FAIL makes the executor raise an exception. None of them is a prompt that a test of random messages makes by chance.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.engine_process import main
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.session import Session
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar import Grammars
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.text.tokenizer import Tokenizer

from tests.runtime.fake_executor import FakeExecutor

VOCAB, PAGE, PAGES, ROWS, LENGTH, TOKENS = 428, 4, 512, 16, 256, 64
CRASH, HANG, FAIL = [1, 2, 1, 3], [2, 3, 2, 1], [3, 1, 3, 2]


class Mischief:
    """The simulated device with a minimum time per step; some prompts make it fail."""

    def __init__(self, inner: FakeExecutor, pace: float) -> None:
        self.inner, self.pace = inner, pace
        self.depth, self.guide, self.wait, self.settle = inner.depth, inner.guide, inner.wait, inner.settle

    def launch(self, step: Any) -> Any:
        for init in step.inits:
            if list(init.tokens[:4]) == CRASH:
                os.kill(os.getpid(), signal.SIGKILL)
            if list(init.tokens[:4]) == HANG:
                time.sleep(3600)
            if list(init.tokens[:4]) == FAIL:
                raise RuntimeError("the device fell off")
        time.sleep(self.pace)
        return self.inner.launch(step)


def build(pace: float, depth: int = 2) -> Engine:
    """Return an engine over the simulated device."""
    config = SchedulerConfig(PAGES, PAGE, LENGTH, ROWS, TOKENS, VOCAB, eos_token_ids=(VOCAB - 1,))
    fake = FakeExecutor(ROWS, PAGES, PAGE, VOCAB, LENGTH, TOKENS, depth, random.Random(3))
    return Engine(Scheduler(config, lambda: 11), Mischief(fake, pace))


def grammars() -> Grammars:
    """Return the grammars of the tests' byte-level tokenizer."""
    sys.path.append(str(Path(__file__).parents[1]))
    import textkit

    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Grammars(Tokenizer(textkit.byte_level(bos=True), names, {}), VOCAB, [VOCAB - 1])


def opener(pace: float) -> Callable[[Open, Callable[[str], None]], Session]:
    """Return the engine process's function for opening an artifact; the path "missing" fails."""

    def open_fake(wanted: Open, say: Callable[[str], None]) -> Session:
        say(f"opening {wanted.path}")
        if wanted.path == "missing":
            raise LlmcError("E101", "artifact 'missing' does not exist", "give another")
        if wanted.path != "ok":
            try:
                open(wanted.path, "x").close()  # it can be opened only once, also by processes that start together
            except FileExistsError:
                raise LlmcError("E106", f"{wanted.path} was opened before", "give another") from None
        return Session(build(pace), "the simulated device", grammars, lambda: None)

    return open_fake


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], opener(float(sys.argv[1]))))
