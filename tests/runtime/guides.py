"""A guide for simulations: the next mask is a hash of the output. It sometimes ends or fails, and masks may be late.

`allowed` computes the same from the whole output, without the runtime's own guides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request

END, FAIL = 23, 61  # one output in so many ends the request, or fails it


class Wandering:
    """A Guide that allows id i if (i + state) % 3 is not 0; the state is a hash of the output.

    `delay` returns how often each mask is requested before it is available.
    """

    def __init__(self, vocab_size: int, delay: Callable[[], int] = lambda: 0) -> None:
        self.vocab_size, self.state, self._delay = vocab_size, 0, delay
        self.left, self.closed = 0, False
        self.begun = False
        self.drafts: list[int] = []
        self.shown = self.late = 0  # masks after drafts that are known, and how often the next one is requested in vain

    def mask(self) -> bytes | None:
        """Return a mask of two thirds of the vocabulary."""
        assert not self.closed
        if self.left:
            self.left -= 1
            return None
        if self.begun and self.state % FAIL == 0:
            raise LlmcError("E652", "the guide lost its way", "start again")
        return b"" if self.begun and self.state % END == 0 else wander(self.state % 3, self.vocab_size)

    def accept(self, token: int) -> None:
        """Accept a token."""
        assert not self.left and not self.closed, "its mask was not known"
        known = self.shown > 0 and self.drafts[0] == token
        self.state, self.left, self.begun = follow(self.state, token), 0 if known else self._delay(), True
        self.drafts, self.shown = (self.drafts[1:], self.shown - 1) if known else ([], 0)

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Follow drafts."""
        assert not self.closed
        self.drafts, self.shown, self.late = list(drafts), 0, self._delay()

    def masks_ahead(self) -> list[bytes]:
        """Return the masks for the tokens after the first drafts."""
        return self._all()[: self.shown]

    def is_looking_ahead(self) -> bool:
        """Sometimes return another mask for the tokens after drafts."""
        if self.left or self.shown >= len(self._all()):
            return False
        self.late -= 1
        if self.late < 0:
            self.shown, self.late = self.shown + 1, self._delay()
        return self.shown < len(self._all())

    def _all(self) -> list[bytes]:
        """Return the masks for the tokens after all allowed drafts."""
        state, found = self.state, []
        for token in self.drafts:
            if (token + state) % 3 == 0:
                break
            state = follow(state, token)
            if state % FAIL == 0:
                break
            found.append(b"" if state % END == 0 else wander(state % 3, self.vocab_size))
            if not found[-1]:
                break
        return found

    def close(self) -> None:
        """Release the output; may be called once."""
        assert not self.closed
        self.closed = True


def follow(state: int, token: int) -> int:
    """Return the state after a token."""
    return hash((state, token)) & 0xFFFF


@lru_cache(maxsize=64)
def wander(residue: int, vocab_size: int) -> bytes:
    """Return the mask of states with this residue."""
    return bits({i for i in range(vocab_size) if (i + residue) % 3}, vocab_size)


def bits(ids: Iterable[int], vocab_size: int) -> bytes:
    """Return a mask, computed independently of the runtime."""
    value = sum(1 << i for i in set(ids))
    return value.to_bytes(-(-vocab_size // 32) * 4, "little")


def state_of(output: Sequence[int]) -> int:
    """Return the guide's state after an output."""
    state = 0
    for token in output:
        state = follow(state, token)
    return state


def ends(output: Sequence[int]) -> str | None:
    """Return how a Wandering guide ends a request after this output, or None."""
    state = state_of(output)
    return "error" if state % FAIL == 0 else "stop" if state % END == 0 else None


def allowed(request: Request, guided: bool, output: Sequence[int], vocab_size: int) -> bytes:
    """Return the mask of the token after `output`; empty if there is no restriction."""
    wanted, words = request.params.allowed_token_ids, [list(word) for word in request.bad_words]
    if not guided and wanted is None and not words:
        return b""
    ids = set(range(vocab_size) if wanted is None else wanted)
    for word in words:
        if list(output[len(output) - len(word) + 1 :]) == word[:-1] or len(word) == 1:
            ids.discard(word[-1])
    if guided:
        state = state_of(output)
        ids = {i for i in ids if (i + state) % 3}
    return bits(ids, vocab_size)
