"""An executor that fails now and then."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.runtime.fake_executor import StepLike


class FaultyExecutor:
    """Wraps an executor and fails on average in one step of `every`, in launch or wait, before or after the call."""

    def __init__(self, inner: Any, rng: random.Random, every: int, fault: Callable[[], BaseException]) -> None:
        self.inner, self.rng, self.every, self.fault = inner, rng, every, fault

    @property
    def depth(self) -> int:
        """The wrapped executor's depth."""
        return int(self.inner.depth)

    def launch(self, step: StepLike) -> Any:
        """Launch the step, or fail."""
        return self._perhaps(self.inner.launch, step)

    def guide(self, ticket: Any, masks: Any) -> None:
        """Guide the step, or fail."""
        self._perhaps(lambda masks: self.inner.guide(ticket, masks), masks)

    def wait(self, ticket: Any) -> Any:
        """Return the ticket's output, or fail."""
        return self._perhaps(self.inner.wait, ticket)

    def settle(self) -> None:
        """Settle the wrapped executor."""
        self.inner.settle()

    def _perhaps(self, call: Callable[[Any], Any], what: Any) -> Any:
        strikes = self.rng.randrange(2 * self.every) == 0
        if strikes and self.rng.random() < 0.5:
            raise self.fault()
        done = call(what)
        if strikes:
            raise self.fault()
        return done
