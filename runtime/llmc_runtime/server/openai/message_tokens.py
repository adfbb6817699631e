"""The tokens of a message's text: log-probabilities of /v1/responses belong to messages, not to reasoning or calls."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc_runtime.logprobs import Logprob, LogprobRows, Row
from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.server.openai.generation_response import clamped, token_text
from llmc_runtime.server.prompting import Prompting
from llmc_runtime.server.tool_calls.message import Delta


@dataclass(frozen=True, eq=False)
class ScoredToken:
    """A generated token, with the place of its log-probabilities."""

    id: int
    rows: Sequence[Row | None]
    index: int

    @property
    def row(self) -> Row:
        """The candidates at this position by id, the token itself among them."""
        row = self.rows[self.index]
        assert row is not None  # generated tokens always have a row
        return row

    @property
    def own(self) -> Logprob:
        """The candidate that is the token itself."""
        own = self.rows.own(self.index) if isinstance(self.rows, LogprobRows) else self.row[self.id]
        assert own is not None
        return own


@dataclass(frozen=True)
class TokenScores:
    """Makes the JSON of the log-probabilities of tokens, `top` alternatives each; `as_id`: tokens are shown as ids.

    It does not refer to the response: one with log-probabilities that are made later would refer to itself, and be
    kept until a garbage collection.
    """

    prompting: Prompting
    top: int
    as_id: bool

    def content(self, tokens: Sequence[int], rows: Sequence[Row | None]) -> Iterator[dict[str, Any]]:
        """Yield the entries of generated tokens, which always have a row."""
        for token, row in zip(tokens, rows, strict=True):
            assert row is not None
            yield self.entry(token, row)

    def entry(self, token: int, row: Row) -> dict[str, Any]:
        """Return the entry of a token."""
        ranked = sorted(row.items(), key=lambda item: item[1].rank)
        top = [self._candidate(other, row) for other, item in ranked if item.rank <= self.top][: self.top]
        return {**self._candidate(token, row), "top_logprobs": top}

    def _candidate(self, token: int, row: Row) -> dict[str, Any]:
        item = row[token]
        raw = self.prompting.raw(token, token_text(token, item))
        return {"token": token_text(token, item, self.as_id), "logprob": clamped(item), "bytes": list(raw)}


@dataclass
class Piece:
    """A part of an output's text, and the tokens that it was decoded from."""

    text: str
    tokens: list[ScoredToken] = field(default_factory=list)


@dataclass(frozen=True)
class _Expected:
    """The text of tokens, to be found in the output; that of a special token may be left out."""

    text: str
    special: bool
    tokens: list[ScoredToken]


class TokenTexts:
    """Divides the text of an output into the texts of its tokens. Text may arrive later than its tokens.

    The tokens of one character form one piece. A special token that the text does not show has an empty piece.
    """

    def __init__(self, prompting: Prompting) -> None:
        self._prompting = prompting
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial: list[ScoredToken] = []  # tokens of an incomplete character
        self._expected = deque[_Expected]()
        self._text, self._at = "", 0  # the text that has arrived, and the end of its pieces so far

    def push(self, output: CompletionOutput) -> Iterator[Piece]:
        """Append an update of the output, and yield the pieces that are complete; with the last update, all."""
        self._text, self._at = self._text[self._at :] + output.text, 0
        for i, token in enumerate(output.token_ids):
            self._expect(ScoredToken(token, output.logprobs or [], i))
        final = output.finish_reason is not None
        while self._expected:
            first = self._expected[0]
            width = self._width(first)
            if width is None and not final:
                return
            self._expected.popleft()
            yield self._piece(len(self._text) - self._at if width is None else width, first.tokens)
        if final and (self._partial or self._at < len(self._text)):
            yield self._piece(len(self._text) - self._at, self._partial)

    def _expect(self, token: ScoredToken) -> None:
        shown = token_text(token.id, token.own)
        special = self._prompting.is_special(token.id)
        if special:
            text = shown
        else:
            text = self._decoder.decode(self._prompting.raw(token.id, shown))
        self._partial.append(token)
        if text:
            self._expected.append(_Expected(text, special, self._partial))
            self._partial = []

    def _width(self, first: _Expected) -> int | None:
        """Return how many of the next characters are the token's, or None if its text has not arrived."""
        rest = len(self._text) - self._at
        if self._text.startswith(first.text, self._at):
            return len(first.text)
        if rest < len(first.text) and first.text.startswith(self._text[self._at :]):
            return None
        if first.special:
            return 0
        bare = first.text.lstrip()  # the decoder may drop the space before the first word
        return len(bare) if self._text.startswith(bare, self._at) else min(rest, len(first.text))

    def _piece(self, width: int, tokens: list[ScoredToken]) -> Piece:
        begin, self._at = self._at, self._at + width
        return Piece(self._text[begin : self._at], tokens)


class MessageTokens:
    """Finds the tokens of a message's text, while a parser takes an output piece by piece."""

    def __init__(self) -> None:
        self._pending = deque[Piece]()  # neither reasoning, a message nor a call yet

    def take(self, piece: Piece, delta: Delta) -> list[ScoredToken]:
        """Return the tokens of `delta.content`. `delta` is the parser's result for the piece."""
        if piece.text:
            self._pending.append(piece)
        self._cut(delta.reasoning)
        tokens = self._cut(delta.content)
        if delta.calls:
            self._pending.clear()
        return tokens

    def _cut(self, text: str) -> list[ScoredToken]:
        """Drop the pending pieces up to the end of `text`, and return the tokens that overlap it."""
        if not text or not self._pending:
            return []
        begin = self._begin(text)
        end = begin + len(text)
        tokens: list[ScoredToken] = []
        at = 0  # the position of the first pending piece
        while self._pending and at < end:
            piece = self._pending.popleft()
            if at + len(piece.text) > begin:
                tokens += piece.tokens
            if at + len(piece.text) > end:
                self._pending.appendleft(Piece(piece.text[end - at :]))
            at += len(piece.text)
        return tokens

    def _begin(self, text: str) -> int:
        """Return the position of `text` in the text of all pending pieces.

        It begins with the first piece and reaches the last one, or lies within the last one, after markup and spaces.
        """
        pending_text = "".join(piece.text for piece in self._pending)
        last = self._pending[-1].text
        last_begin = len(pending_text) - len(last)
        if pending_text.startswith(text) and len(text) >= last_begin:
            return 0
        if text in last:
            return last_begin + last.find(text)
        return max(pending_text.rfind(text), 0)
