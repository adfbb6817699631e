"""How much may be open at a time: sequences, tokens, shares of keys, seconds of waiting; nothing once it drains.

It counts; it queues nothing and knows no request. Places are taken before a prompt is tokenized, with a guess of its
tokens, and corrected after: who is refused costs next to nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from llmc_runtime.server.errors import ApiError, retry_after, unavailable
from llmc_runtime.server.pace import Pace

SOONEST, LATEST = 1.0, 60.0  # seconds after which a refused client may be told to try again
REASONS = ("draining", "engine", "queue_full", "queue_wait", "deadline", "key_limit", "key_share", "too_large",
           "connections", "texts", "bodies", "answer_bytes")  # fmt: skip
_SHARE = 4  # a key may hold so many times what is free
_NEW = 0.1  # weight of the newest answer in the mean length


@dataclass
class Admission:
    """`sequences` and `tokens` (prompts and what may be generated) bound what is open, waiting and running; `rows` of
    the sequences run at a time, or fewer where `backlog` says that the engine has some waiting. `per_key` bounds the
    sequences of one API key; where there are several `keys`, none of them can take all. Who would wait longer than
    `most_wait` seconds is refused. `refused` is told why somebody was."""

    sequences: int
    tokens: int
    per_key: int | None = None
    refused: Callable[[str], None] = lambda reason: None
    rows: int = 0
    keys: int = 1
    most_wait: float = math.inf
    backlog: Callable[[], int] = lambda: 0
    pace: Pace = field(default_factory=Pace)
    draining: bool = False
    open_sequences: int = 0
    open_tokens: int = 0
    waiting_sequences: int = 0  # of places that found a queue and have not begun
    work: dict[str, float] = field(default_factory=dict)  # tokens that these are expected to take, by key
    by_key: Counter[str] = field(default_factory=Counter)
    tokens_by_key: Counter[str] = field(default_factory=Counter)
    mean_output: float = math.inf  # tokens of an output, lately
    answers: int = 256 << 20  # bytes of answers with log-probabilities or ids, all together; a key has half of them
    answer_bytes: Counter[str] = field(default_factory=Counter)  # those that are open, by key

    @property
    def full(self) -> bool:
        """Whether one more sequence would be refused."""
        return self.open_sequences >= self.sequences or self.open_tokens >= self.tokens

    @property
    def queued(self) -> bool:
        """Whether a new sequence would find a queue."""
        return self.open_sequences >= self.rows or self.backlog() > 0

    def wait(self, key: str | None = None) -> float | None:
        """Seconds that a new sequence is expected to wait for a row, behind all that wait now, or as one of `key`:
        behind those of its own, and as much of each other key's; None where nothing is known yet."""
        if not self.waiting_sequences or not self.queued:
            return 0.0
        ahead = whole = sum(self.work.values())
        if key is not None:
            mine = self.work.get(key, 0.0) + whole / self.waiting_sequences
            ahead = sum(min(work, mine) for work in self.work.values())
        seconds = self.pace.seconds(whole, self.waiting_sequences)
        return None if seconds is None else seconds * ahead / whole

    @property
    def retry(self) -> float:
        """Seconds after which another try makes sense: half of those waiting now will have begun."""
        return min(max((self.wait() or 0.0) / 2, SOONEST), LATEST)

    def check_open(self) -> None:
        """ApiError 503 while the server drains, or is full."""
        if self.draining:
            raise self.turn_away("draining", "the server is shutting down", "shutting_down")
        if self.full:
            raise self.turn_away("queue_full", "the server's queue is full")

    def check_wait(self, key: str | None = None, within: float = math.inf) -> None:
        """ApiError 503 where a new sequence would wait too long, for the server or for itself."""
        wait = self.wait(key)
        if wait is None or wait <= min(within, self.most_wait):
            return
        words = f"the request would wait about {wait:.0f} s"
        if wait > self.most_wait:
            raise self.turn_away("queue_wait", words)
        raise self.turn_away("deadline", f"{words}, longer than it may take")

    def turn_away(
        self, reason: str, words: str, code: str = "server_overloaded", seconds: float | None = None
    ) -> ApiError:
        """The refusal, counted; `seconds` after which another try makes sense, where the queue does not decide that."""
        return self._refusal(reason, unavailable(words, code, self.retry if seconds is None else max(seconds, SOONEST)))

    def _refusal(self, reason: str, error: ApiError) -> ApiError:
        self.refused(reason)
        error.reason = reason
        return error

    @property
    def busy(self) -> bool:
        """Whether `check_least` could refuse anybody."""
        if self.draining or self.queued or self.full:
            return True
        half = 2 * self.open_sequences >= self.sequences or 2 * self.open_tokens >= self.tokens
        return (self.keys > 1 and half) or (self.per_key is not None and self.open_sequences >= self.per_key)

    def check_least(self, key: str) -> None:
        """ApiError as `place` for the smallest request there is: a refusal before anything else is known of it."""
        self.check_open()
        self._check_key(1, 2, key)
        self.check_wait(key)

    def place(self, sequences: int, prompts: int, outputs: int, key: str, within: float = math.inf) -> Place:
        """Room for so many sequences, tokens of prompts and most tokens of all outputs, to be closed at the end; it has
        to begin `within` seconds. ApiError 429 where the key has too much open, 400 what never fits, 503 where there is
        too little room now."""
        tokens = prompts + outputs
        self.check_size(sequences, tokens)
        self._check_key(sequences, tokens, key)
        if self.open_sequences + sequences > self.sequences or self.open_tokens + tokens > self.tokens:
            raise self.turn_away("queue_full", "the server's queue is full")
        self.check_wait(key, within)
        return Place(self, key, sequences, prompts, outputs)

    def answer(self, key: str, nbytes: int) -> AnswerRoom:
        """Room for an answer of so many bytes, to be closed when it was sent. ApiError 429 where the key has too much
        open, 503 where all keys have. One answer alone always has room."""
        mine, all_keys = self.answer_bytes[key], self.answer_bytes.total()
        if mine and self.keys > 1 and mine + nbytes > self.answers // 2:
            words = f"this API key has answers of {mine:,} bytes open; with this one of {nbytes:,} bytes"
            raise self._too_many("answer_bytes", f"{words} they pass {self.answers // 2:,}")
        if all_keys and all_keys + nbytes > self.answers:
            raise self.turn_away("answer_bytes", "the answers that are open take too much memory")
        return AnswerRoom(self, key, nbytes)

    def check_size(self, sequences: int, tokens: int) -> None:
        """ApiError 400 for what never fits."""
        if sequences > self.sequences or tokens > self.tokens:
            self.refused("too_large")
            cause = f"the request asks for {sequences} sequences and {tokens} tokens, with its prompts"
            raise ApiError(f"{cause}; the server takes {self.sequences} and {self.tokens} at a time", param="n")

    def _check_key(self, sequences: int, tokens: int, key: str) -> None:
        held = self.by_key[key] if key in self.by_key else 0
        if self.per_key is not None and held + sequences > self.per_key:
            cause = f"this API key has {held} sequences open, of {self.per_key} allowed"
            raise self._too_many("key_limit", cause)
        if self.keys > 1 and held:
            free = self.sequences - self.open_sequences - sequences, self.tokens - self.open_tokens - tokens
            if held + sequences > _SHARE * free[0] or self.tokens_by_key[key] + tokens > _SHARE * free[1]:
                raise self._too_many("key_share", f"this API key has {held} sequences open, and the rest is for others")

    def _too_many(self, reason: str, cause: str) -> ApiError:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
        return self._refusal(reason, ApiError(cause, status=429, kind=kind, code=code, headers=retry_after(self.retry)))

    def count(self, place: Place, sign: int) -> None:
        """A place is taken, or given back."""
        self.open_sequences += sign * place.sequences
        self.open_tokens += sign * place.tokens
        for counts, number in ((self.by_key, place.sequences), (self.tokens_by_key, place.tokens)):
            counts[place.key] += sign * number
            if not counts[place.key]:
                del counts[place.key]
        self.pace.queue(self.waiting_sequences > 0)

    def learn(self, tokens: float) -> None:
        """An output had so many tokens."""
        known = tokens if math.isinf(self.mean_output) else self.mean_output
        self.mean_output = known + _NEW * (tokens - known)


class AnswerRoom:
    """Bytes of one answer that are accounted for until `close`."""

    def __init__(self, admission: Admission, key: str, nbytes: int) -> None:
        self._counts, self._key, self._bytes = admission.answer_bytes, key, nbytes
        self._counts[key] += nbytes

    def close(self) -> None:
        """The answer was sent, or is not wanted any more. Once, or again without effect."""
        self._counts[self._key] -= self._bytes
        self._bytes = 0
        if not self._counts[self._key]:
            del self._counts[self._key]


class Place:
    """Room that one request has, until it is closed."""

    def __init__(self, admission: Admission, key: str, sequences: int, prompts: int, outputs: int) -> None:
        self._admission, self.key, self.sequences = admission, key, sequences
        self.tokens, self._work, self._open = prompts + outputs, 0.0, True
        self._queued = admission.queued
        admission.count(self, 1)
        self._wait(self._expected(prompts, outputs))

    def resize(self, prompts: int, outputs: int) -> None:
        """The true tokens of the prompts, and most tokens of all outputs. ApiError as `Admission.place`."""
        admission, tokens = self._admission, prompts + outputs
        admission.check_size(self.sequences, tokens)
        if admission.open_tokens - self.tokens + tokens > admission.tokens:
            raise admission.turn_away("queue_full", "the server's queue is full")
        admission.count(self, -1)
        self.tokens = tokens
        admission.count(self, 1)
        self._wait(self._expected(prompts, outputs))

    def begin(self) -> None:
        """Its first token is there: it waits no more."""
        if self._queued:
            self._admission.pace.left(self._work)
            self._wait(0.0)
            self._queued = False

    def close(self, tokens: int = 0) -> None:
        """It is over, with so many tokens generated. Once, or again without effect."""
        if self._open:
            self._open = False
            self._wait(0.0)
            self._admission.count(self, -1)
            if tokens:
                self._admission.learn(tokens / self.sequences)

    def _expected(self, prompts: int, outputs: int) -> float:
        return prompts + min(outputs, self._admission.mean_output * self.sequences)

    def _wait(self, work: float) -> None:
        """So much work is expected of it while it waits; 0: it waits no more."""
        if not self._queued:
            return
        admission, key, before = self._admission, self.key, self._work
        admission.waiting_sequences += self.sequences * (bool(work) - bool(before))
        left = admission.work.get(key, 0.0) + work - before
        if left > 1e-6:
            admission.work[key] = left
        else:
            admission.work.pop(key, None)
        self._work = work
        admission.pace.queue(admission.waiting_sequences > 0)
