"""An engine process over a simulated device: every step takes a fixed time, and every token's text is a word.

python engine.py SECONDS_A_STEP DEPTH PARENT FOLDER HEARTBEAT, as AsyncLLM starts it.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.engine_process import main
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.session import Session
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.step import RowMasks, Step, StepOutput
from llmc_runtime.text.tokenizer import Tokenizer

from bench.serving.front import MODEL

ROWS, LENGTH, TOKENS, PAGE = 256, 4096, 8192, 16


class Paced:
    """A device that runs one step at a time, each in `pace` seconds; launching takes no host time."""

    def __init__(self, pace: float, depth: int, words: Sequence[int]) -> None:
        self.depth, self._pace = depth, pace
        self._words = itertools.cycle(words)
        self._under_way: deque[tuple[Step, float]] = deque()
        self._free = 0.0  # when the device is

    def launch(self, step: Step) -> None:
        """Launch a step that ends `pace` seconds after the previous one, or after now."""
        self._free = max(self._free, time.monotonic()) + self._pace
        self._under_way.append((step, self._free))

    def guide(self, ticket: None, masks: Sequence[RowMasks]) -> None:
        """Not supported: requests of this bench have no grammar."""
        raise AssertionError("the bench asks for no grammar")

    def wait(self, ticket: None) -> StepOutput:
        """Return the tokens of the oldest step once it has ended."""
        step, ready = self._under_way.popleft()
        if (remaining := ready - time.monotonic()) > 0:
            time.sleep(remaining)
        tokens = [next(self._words) if work.emit else None for work in step.work]
        return StepOutput(tokens, [None] * len(tokens))

    def settle(self) -> None:
        """Forget the steps in flight."""
        self._under_way.clear()


def opener(pace: float, depth: int) -> Callable[[Open, Callable[[str], None]], Session]:
    """Return the function that opens the engine in the engine process."""

    def opened(message: Open, say: Callable[[str], None]) -> Session:
        tokenizer = Tokenizer.open(MODEL)
        size = tokenizer.backend.get_vocab_size()
        words = [i for i in range(size) if (text := tokenizer.decode([i])).isascii() and text.strip().isalpha()]
        random.Random(5).shuffle(words)
        rows = message.options.get("max_num_seqs") or ROWS
        config = SchedulerConfig(ROWS * LENGTH // PAGE, PAGE, LENGTH, rows, TOKENS, size)
        engine = Engine(Scheduler(config, lambda: 11), Paced(pace, depth, words))
        return Session(engine, "the simulated device", lambda: None, lambda: None)

    return opened


if __name__ == "__main__":
    sys.exit(main(sys.argv[3:], opener(float(sys.argv[1]), int(sys.argv[2]))))
