"""The text of one request while it grows: detokenizer and stop strings together; it knows no engine.

Invariants: `text` never contains half a character; after a stop string completed nothing is added; what `take`
has given out is a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.text.stops import StopStrings
from llmc_runtime.text.stream import Detokenizer
from llmc_runtime.text.tokenizer import Tokenizer


class OutputText:
    """Text after a prompt, fed id by id.

    `min_tokens`: a stop string counts only if it completes in the text of later tokens. `stop` needs a tokenizer.
    `visible` special tokens are in the text even where others are skipped.
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
        self._text = ""  # where there are stop strings, which are looked for in it; else it is in pieces:
        self._told: list[str] = []  # given out
        self._fresh: list[str] = []  # not yet
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
        """Take the next id; the stop string that completed with it, if one did."""
        if self._detokenizer is None or self.stopped_by is not None:
            return self.stopped_by
        piece = self._detokenizer.push(token_id)
        if not self._stops.stops:
            self._fresh.append(piece)
            return None
        self._count += 1
        return self._append(piece)

    def finish(self) -> str | None:
        """No more ids come: what was held back joins the text; the stop string that this completed, if one did."""
        if self._detokenizer is None or self.stopped_by is not None:
            return self.stopped_by
        return self._append(self._detokenizer.flush())

    @property
    def text(self) -> str:
        """All of it so far."""
        if self._stops.stops:
            return self._text
        self._told[:] = ["".join(self._told)]  # it is asked for with every token
        return "".join((*self._told, *self._fresh))

    def take(self, *, final: bool = False) -> str:
        """The text not given out yet; before the final call less what could become part of a stop string."""
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
