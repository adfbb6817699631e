"""The generated text of one request: detokenization and stop strings.

Invariants: `text` never ends inside a character; nothing is added after a stop string was completed; what `take`
returns is always a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.text.detokenizer import Detokenizer
from llmc_runtime.text.stop_strings import StopStrings
from llmc_runtime.text.tokenizer import Tokenizer


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
        self._told: list[str] = []  # already returned by `take`
        self._fresh: list[str] = []  # not yet returned
        self.stopped_by: str | None = None
        self._stops = StopStrings(stop, include=include_stop)
        self._min = min_tokens
        self._count = self._gate = self._taken = 0
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens, visible=visible)
        )

    def push(self, token_id: int) -> str | None:
        """Append the next token. Returns the stop string that this completed, or None."""
        if self._detokenizer is None or self.stopped_by is not None:
            return self.stopped_by
        piece = self._detokenizer.push(token_id)
        if not self._stops.stops:
            self._fresh.append(piece)
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
        self._told[:] = ["".join(self._told)]  # join the pieces once: this property is read after every token
        return "".join((*self._told, *self._fresh))

    def take(self, *, final: bool = False) -> str:
        """Return the text not returned before. Unless `final`, text that might become part of a stop string is held
        back.
        """
        if not self._stops.stops:
            self._told.append(piece := "".join(self._fresh))
            self._fresh.clear()
            return piece
        end = len(self._text) if final or self.stopped_by is not None else self._stops.safe(self._text)
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _append(self, piece: str) -> str | None:
        if not self._stops.stops:
            self._fresh.append(piece)
            return None
        start = len(self._text)
        self._text += piece
        if self._count <= self._min:
            self._gate = len(self._text)
        hit = self._stops.check(self._text, max(start, self._gate)) if piece else None
        if hit is not None:
            self._text, self.stopped_by = self._text[: hit.cut], hit.string
        return self.stopped_by
