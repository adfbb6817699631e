"""The progress bar of `LLM.generate` on stderr: finished prompts, prompt and output tokens per second."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from llmc_runtime.outputs import RequestState


class ProgressBar:
    """A context manager for `total` prompts. Without `shown`, or without prompts, it prints nothing."""

    def __init__(self, total: int, shown: bool) -> None:
        self._done = 0
        self._began = self._shown = time.perf_counter()
        self._bar: Any = None
        if shown and total and sys.stderr is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="prompts", dynamic_ncols=True, file=sys.stderr)

    def show(self, states: Sequence[RequestState], *, last: bool = False) -> None:
        """Update the bar, at most ten times a second unless it is the `last` time."""
        now = time.perf_counter()
        if self._bar is None or (now - self._shown < 0.1 and not last):
            return
        self._shown = now
        done = sum(a.finished for a in states)
        seconds = max(now - self._began, 1e-9)
        read = sum(len(a.prompt_ids) for a in states if a.num_tokens)
        written = sum(a.num_tokens for a in states)
        speeds = f"in {read / seconds:.1f} tok/s, out {written / seconds:.1f} tok/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        with contextlib.suppress(OSError):  # stderr is closed
            self._bar.update(done - self._done)
        self._done = done

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
