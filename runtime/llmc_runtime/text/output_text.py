"""The generated text of one request: detokenization and stop strings.

Invariants: `text` never ends inside a character; nothing is added after a stop string was completed; what `take`
returns is always a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc_runtime.text.detokenizer import detokenizer
from llmc_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopHit:
    """A completed stop string: `string`, and `cut`, the length of the text to keep."""

    string: str
    cut: int


class StopStrings:
    """Finds the stop string that is completed first in a text fed piece by piece.

    With `include`, the stop string remains in the text, and no text has to be held back. Invariant: `safe` never
    decreases, and never exceeds the start of a stop string that is completed later.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(s for s in stops if s)
        self.include = include
        self.hold = 0 if include else max((len(s) for s in self.stops), default=1) - 1

    def check(self, text: str, new_from: int) -> StopHit | None:
        """Return the stop string completed first beyond the first `new_from` characters of `text`, or None.

        Of several that are completed by the same character, the longest one wins, so that no part of it remains in the
        text.
        """
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = text.find(stop, max(0, new_from + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        return StopHit(stop, end if self.include else start)

    def num_certain(self, text: str) -> int:
        """Return how many characters of an unfinished `text` may be output."""
        return max(0, len(text) - self.hold)


class OutputText:
    """The text after a prompt, fed token by token.

    A stop string counts only if it is completed after `min_tokens` tokens. `stop` requires a tokenizer. The special
    tokens in `visible` are part of the text even if others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._text = ""  # used if there are stop strings, which are searched in it; else the text is in pieces:
        self._returned_pieces: list[str] = []  # already returned by `take`
        self._new_pieces: list[str] = []  # not yet returned
        self.stopped_by: str | None = None
        self._stops = StopStrings(stop, include=include_stop)
        self._min = min_tokens
        self._count = self._gate = self._num_returned = 0
        self._detokenizer = (
            None
            if tokenizer is None
            else detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens, visible=visible)
        )

    def push(self, token_id: int) -> str | None:
        """Append the next token. Returns the stop string that this completed, or None."""
        if self._detokenizer is None or self.stopped_by is not None:
            return self.stopped_by
        piece = self._detokenizer.push(token_id)
        if not self._stops.stops:
            self._new_pieces.append(piece)
            return None
        self._count += 1
        return self._append(piece)

    def finish(self) -> str | None:
        """Append the text held back, as no more tokens follow. Returns the stop string that this completed, or None."""
        if self._detokenizer is None or self.stopped_by is not None:
            return self.stopped_by
        return self._append(self._detokenizer.flush())

    @property
    def text(self) -> str:
        """The whole text so far."""
        if self._stops.stops:
            return self._text
        self._returned_pieces[:] = ["".join(self._returned_pieces)]  # join once: this is read after every token
        return "".join((*self._returned_pieces, *self._new_pieces))

    def new_text(self, *, final: bool = False) -> str:
        """Return the text not returned before. Unless `final`, text that might become part of a stop string is held
        back.
        """
        if not self._stops.stops:
            self._returned_pieces.append(piece := "".join(self._new_pieces))
            self._new_pieces.clear()
            return piece
        end = len(self._text) if final or self.stopped_by is not None else self._stops.num_certain(self._text)
        piece = self._text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        return piece

    def _append(self, piece: str) -> str | None:
        if not self._stops.stops:
            self._new_pieces.append(piece)
            return None
        start = len(self._text)
        self._text += piece
        if self._count <= self._min:
            self._gate = len(self._text)
        hit = self._stops.check(self._text, max(start, self._gate)) if piece else None
        if hit is not None:
            self._text, self.stopped_by = self._text[: hit.cut], hit.string
        return self.stopped_by
