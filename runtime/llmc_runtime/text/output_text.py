"""The generated text of one request: detokenization and stop strings.

Invariants: `text` never ends inside a character; nothing is added after a stop string was completed; what `new_text`
returned is always a prefix of the final text.
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

    With `include`, the stop string remains in the text. The last `hold` characters of an unfinished text may belong to
    a stop string that is completed later, and are not output yet. A stop string begins in the last `reach` characters
    of the text, or later.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(s for s in stops if s)
        self.include = include
        self.reach = max(map(len, self.stops), default=1) - 1
        self.hold = 0 if include else self.reach

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
        self._returned: list[str] = []  # pieces that `new_text` has returned
        self._new: list[str] = []  # pieces that it has not
        self._tail = ""  # the end of the text, in which a stop string may have begun
        self.stopped_by: str | None = None
        self._stops = StopStrings(stop, include=include_stop)
        self._min, self._count = min_tokens, 0
        self._detokenizer = (
            None
            if tokenizer is None
            else detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens, visible=visible)
        )

    def push(self, token_id: int) -> str | None:
        """Append the next token. Returns the stop string that this completed, or None."""
        if self._detokenizer is None or self.stopped_by is not None:
            return self.stopped_by
        self._count += 1
        return self._append(self._detokenizer.push(token_id))

    def finish(self) -> str | None:
        """Append the text held back, as no more tokens follow. Returns the stop string that this completed, or None."""
        if self._detokenizer is None or self.stopped_by is not None:
            return self.stopped_by
        return self._append(self._detokenizer.flush())

    @property
    def text(self) -> str:
        """The whole text so far."""
        self._returned[:] = ["".join(self._returned)]  # join once: this is read after every token
        return "".join((*self._returned, *self._new))

    def new_text(self, *, final: bool = False, later: int = 0) -> str:
        """Return the text not returned before. Unless `final`, possible parts of a stop string are held back.

        The last `later` pieces, one for each call of `push` or `finish`, are left for further calls.
        """
        end = max(0, len(self._new) - later)
        text, rest = "".join(self._new[:end]), self._new[end:]
        self._new.clear()
        if self._stops.hold and not final and self.stopped_by is None:
            end = max(0, len(text) - self._stops.hold)
            self._new.append(text[end:])
            text = text[:end]
        self._new += rest
        self._returned.append(text)
        return text

    def _append(self, piece: str) -> str | None:
        """Append decoded text, and return the stop string that it completes, or None."""
        self._new.append(piece)
        if self._stops.stops and piece:
            searched = self._tail + piece
            hit = self._stops.check(searched, len(self._tail)) if self._count > self._min else None
            if hit is not None:
                text = "".join(self._new)
                self._new, self.stopped_by = [text[: len(text) - (len(searched) - hit.cut)]], hit.string
            self._tail = searched[max(0, len(searched) - self._stops.reach) :]
        return self.stopped_by
