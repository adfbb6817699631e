"""Admission control: limits on open sequences and tokens, shares of API keys, and expected waiting times.

This module only counts; requests are queued in the engine. A slot is reserved before the prompt is tokenized, with an
estimate of its tokens that is corrected afterwards, so that refusing a request is cheap.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmc_runtime.fair_queue import KeyCounts
from llmc_runtime.server.http.errors import ApiError, retry_after, unavailable

SOONEST, LATEST = 1.0, 60.0  # limits, in seconds, of the retry delay sent to refused clients
REASONS = ("draining", "engine", "queue_full", "queue_wait", "deadline", "key_limit", "key_share", "too_large",
           "connections", "texts", "bodies", "answer_bytes")  # fmt: skip
_MAX_SHARE = 4  # a key may have this many times the free capacity open
_NEWEST_WEIGHT = 0.1  # weight of the newest output in the mean length
_WINDOW_SECONDS = 30.0  # seconds with a queue that an estimate covers
_MIN_SECONDS = 1.0  # seconds with a queue before there is an estimate
_SAMPLE_SECONDS = 0.5  # seconds between two samples


class Throughput:
    """Estimates the throughput of the queue: the work that left it, per second in which there was a queue.

    Time without a queue does not measure the engine's capacity. Work is measured in tokens; `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # start of the current queue; None: there is none
        self._busy = self._work = 0.0  # seconds with a queue; work that left the queue meanwhile
        self._samples: deque[tuple[float, float]] = deque([(0.0, 0.0)])  # pairs of these, since the start of the window

    def queue(self, waiting: bool) -> None:
        """Record whether there is a queue from now on."""
        now = self._clock()
        if self._since is not None:
            self._busy += now - self._since
        self._since = now if waiting else None

    def left(self, work: float) -> None:
        """Record that `work` left the queue."""
        if self._since is None:
            return
        self.queue(True)
        self._work += work
        if self._busy - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append((self._busy, self._work))

    def seconds(self, work: float, sequences: int) -> float | None:
        """Return the seconds until `work` of this many sequences has left the queue; None without enough data.

        If nothing has left the queue in the window, one sequence is assumed to leave it now.
        """
        if not sequences:
            return 0.0
        if self._since is not None:
            self.queue(True)
        while len(self._samples) > 1 and self._busy - self._samples[1][0] >= _WINDOW_SECONDS:
            self._samples.popleft()
        began, before = self._samples[0]
        busy, done = self._busy - began, self._work - before
        if busy < _MIN_SECONDS:
            return None
        return work * busy / (done or work / sequences)


@dataclass
class Admission:
    """The admission state of a server. Belongs to its event loop.

    sequences:  maximum number of open sequences, running or waiting
    tokens:     maximum number of their tokens: prompts, and the maximum of outputs
    per_key:    maximum number of open sequences of one API key; None: no limit
    refused:    called with the reason of every refusal, one of REASONS
    rows:       maximum number of sequences that run at a time
    keys:       number of API keys; if there are several, none of them can use everything
    max_wait:   seconds; a request with a longer expected wait is refused
    backlog:    returns the number of sequences that wait in the engine
    draining:   if set, no request is admitted
    """

    sequences: int
    tokens: int
    per_key: int | None = None
    refused: Callable[[str], None] = lambda reason: None
    rows: int = 0
    keys: int = 1
    max_wait: float = math.inf
    backlog: Callable[[], int] = lambda: 0
    throughput: Throughput = field(default_factory=Throughput)
    draining: bool = False
    open_sequences: int = 0
    open_tokens: int = 0
    waiting_sequences: int = 0  # sequences of slots that are queued and have not started
    work: dict[str, float] = field(default_factory=dict)  # their expected tokens, by key
    all_work: float = 0.0  # the sum of `work`
    by_key: KeyCounts = field(default_factory=KeyCounts)
    tokens_by_key: KeyCounts = field(default_factory=KeyCounts)
    mean_output: float = math.inf  # recent mean of the tokens per output
    answers: int = 256 << 20  # bytes of open responses with log-probabilities or ids; half per key if there are several
    answer_bytes: KeyCounts = field(default_factory=KeyCounts)  # bytes of open responses, by key

    @property
    def full(self) -> bool:
        """Whether another sequence would be refused."""
        return self.open_sequences >= self.sequences or self.open_tokens >= self.tokens

    @property
    def queued(self) -> bool:
        """Whether a new sequence would have to wait."""
        return self.open_sequences >= self.rows or self.backlog() > 0

    def wait(self, key: str | None = None) -> float | None:
        """Return the expected seconds until a new sequence gets a row.

        Without `key`, it waits for everything queued. With `key`, it waits for the key's own sequences, and at
        most as much work of each other key. Returns None if there is no estimate yet.
        """
        if not self.waiting_sequences or not self.queued:
            return 0.0
        seconds = self.throughput.seconds(self.all_work, self.waiting_sequences)
        if seconds is None or key is None:
            return seconds
        limit = self.work.get(key, 0.0) + self.all_work / self.waiting_sequences
        return seconds * sum(min(work, limit) for work in self.work.values()) / self.all_work

    def _too_long(self, key: str | None, within: float) -> float | None:
        """Return the expected seconds if a new sequence of the key would wait longer than `within` seconds, else None.

        The work of each key is looked at only if all of it takes that long: there may be thousands of keys.
        """
        if (self.wait() or 0.0) <= within:
            return None
        wait = self.wait(key)
        return wait if wait is not None and wait > within else None

    @property
    def retry(self) -> float:
        """Seconds after which to retry: half of the waiting sequences will have started by then."""
        return min(max((self.wait() or 0.0) / 2, SOONEST), LATEST)

    def check_open(self) -> None:
        """Raise ApiError 503 if the server is draining or full."""
        if self.draining:
            raise self.blocked_error("draining")
        if self.full:
            raise self.blocked_error("queue_full")

    def check_wait(self, key: str | None = None, within: float = math.inf) -> None:
        """Raise ApiError 503 if a new sequence would wait longer than the server allows, or than `within` seconds."""
        wait = self._too_long(key, min(within, self.max_wait))
        if wait is None:
            return
        message = f"the request would wait {_about(wait)}"
        if wait > self.max_wait:
            raise self.refuse("queue_wait", message)
        raise self.refuse("deadline", f"{message}, longer than its time limit")

    def refuse(
        self, reason: str, message: str, code: str = "server_overloaded", seconds: float | None = None
    ) -> ApiError:
        """Count a refusal and return its ApiError 503.

        `seconds` is the time after which to retry, if it does not depend on the queue.
        """
        return self._refusal(
            reason, unavailable(message, code, self.retry if seconds is None else max(seconds, SOONEST))
        )

    def _refusal(self, reason: str, error: ApiError) -> ApiError:
        self.refused(reason)
        error.reason = reason
        return error

    @property
    def busy(self) -> bool:
        """Whether `blocked_reason` might return a reason."""
        if self.draining or self.queued or self.full:
            return True
        half_used = 2 * self.open_sequences >= self.sequences or 2 * self.open_tokens >= self.tokens
        return (self.keys > 1 and half_used) or (self.per_key is not None and self.open_sequences >= self.per_key)

    def blocked_reason(self, key: str) -> str | None:
        """Return why every request of this key, however small, would be refused now (one of REASONS), or None.

        This does not count a refusal. A caller that refuses the request calls `blocked_error`, which counts it and
        makes the error, or calls `refused` if it reuses an earlier error.
        """
        if self.draining:
            return "draining"
        if self.full:
            return "queue_full"
        reason = self._key_reason(1, 2, key)
        if reason is not None or math.isinf(self.max_wait):
            return reason
        return None if self._too_long(key, self.max_wait) is None else "queue_wait"

    def crowded_reason(self, key: str, passed: Sequence[str]) -> str | None:
        """Return what `blocked_reason` would return if one more sequence of each key in `passed` were open."""
        if self.open_sequences + len(passed) >= self.sequences:
            return "queue_full"
        same = passed.count(key)
        return self._key_reason(1 + same, 2 * (1 + same), key) if same else None

    def blocked_error(self, reason: str, key: str = "") -> ApiError:
        """Count a refusal and return its error. `reason` is a result of `blocked_reason` for this key."""
        if reason == "draining":
            return self.refuse(reason, "the server is shutting down", "shutting_down")
        if reason == "queue_full":
            return self.refuse(reason, "the server's queue is full")
        if reason == "queue_wait":
            return self.refuse(reason, f"the request would wait {_about(self.wait(key) or 0.0)}")
        used = self.by_key[key] if key in self.by_key else 0
        share = f"of {self.per_key} allowed" if reason == "key_limit" else "and the other places are for other keys"
        return self.too_many(reason, f"this API key has {used} open sequences, {share}: wait until some have ended")

    def reserve(self, sequences: int, prompts: int, outputs: int, key: str, within: float = math.inf) -> AdmissionSlot:
        """Reserve capacity for sequences and for the tokens of prompts and maximum outputs; the caller closes the slot.

        Raises ApiError 429 if the key has too much open, 400 if the request can never fit, and 503 if there is too
        little capacity now or if the request would probably not start within `within` seconds.
        """
        tokens = prompts + outputs
        self.check_size(sequences, tokens)
        if (reason := self._key_reason(sequences, tokens, key)) is not None:
            raise self.blocked_error(reason, key)
        if self.open_sequences + sequences > self.sequences or self.open_tokens + tokens > self.tokens:
            raise self.blocked_error("queue_full")
        self.check_wait(key, within)
        return AdmissionSlot(self, key, sequences, prompts, outputs)

    def reserve_response(self, key: str, nbytes: int) -> ResponseReservation:
        """Reserve memory for a response of `nbytes`; the caller closes it once the response was sent.

        Raises ApiError 429 if the key has too much open, and 503 if all keys together have. A single response always
        fits.
        """
        of_key, of_all = self.answer_bytes[key], self.answer_bytes.total()
        if of_key and self.keys > 1 and of_key + nbytes > self.answers // 2:
            cause = f"this API key has {of_key:,} bytes of open responses; another {nbytes:,} would exceed"
            raise self.too_many("answer_bytes", f"{cause} {self.answers // 2:,}")
        if of_all and of_all + nbytes > self.answers:
            raise self.refuse("answer_bytes", "open responses take too much memory")
        return ResponseReservation(self, key, nbytes)

    def check_size(self, sequences: int, tokens: int) -> None:
        """Raise ApiError 400 if the request can never fit."""
        if sequences > self.sequences or tokens > self.tokens:
            self.refused("too_large")
            cause = f"the request needs {sequences} sequences and {tokens} tokens, with its prompts"
            raise ApiError(f"{cause}; the server takes {self.sequences} and {self.tokens} at a time", param="n")

    def _key_reason(self, sequences: int, tokens: int, key: str) -> str | None:
        """Return why the key may not open this many further sequences and tokens, or None."""
        used = self.by_key[key] if key in self.by_key else 0
        if self.per_key is not None and used + sequences > self.per_key:
            return "key_limit"
        if self.keys > 1 and used:
            free_sequences = self.sequences - self.open_sequences - sequences
            free_tokens = self.tokens - self.open_tokens - tokens
            if used + sequences > _MAX_SHARE * free_sequences:
                return "key_share"
            if self.tokens_by_key[key] + tokens > _MAX_SHARE * free_tokens:
                return "key_share"
        return None

    def too_many(self, reason: str, cause: str) -> ApiError:
        """Count a refusal of one key's request and return its ApiError 429."""
        kind, code = "rate_limit_error", "rate_limit_exceeded"
        return self._refusal(reason, ApiError(cause, status=429, kind=kind, code=code, headers=retry_after(self.retry)))

    def count(self, slot: AdmissionSlot, sign: int) -> None:
        """Count a slot as reserved (`sign` 1) or released (-1)."""
        self.open_sequences += sign * slot.sequences
        self.open_tokens += sign * slot.tokens
        self.by_key.change(slot.key, sign * slot.sequences)
        self.tokens_by_key.change(slot.key, sign * slot.tokens)
        self.throughput.queue(self.waiting_sequences > 0)

    def learn(self, tokens: float) -> None:
        """Update the mean output length with an output of `tokens` tokens."""
        mean = tokens if math.isinf(self.mean_output) else self.mean_output
        self.mean_output = mean + _NEWEST_WEIGHT * (tokens - mean)


class ResponseReservation:
    """The memory of one response, counted until `close`."""

    def __init__(self, admission: Admission, key: str, nbytes: int) -> None:
        self._counts, self._key, self.nbytes = admission.answer_bytes, key, nbytes
        self._counts.change(key, nbytes)

    def close(self) -> None:
        """Release the memory. Further calls have no effect."""
        self._counts.change(self._key, -self.nbytes)
        self.nbytes = 0


class AdmissionSlot:
    """The capacity reserved for one request until it is closed."""

    def __init__(self, admission: Admission, key: str, sequences: int, prompts: int, outputs: int) -> None:
        self._admission, self.key, self.sequences = admission, key, sequences
        self.tokens = prompts + outputs
        self._work = 0.0  # expected tokens, while it waits
        self._open = True
        self._queued = admission.queued
        admission.count(self, 1)
        self._wait(self._expected(prompts, outputs))

    def resize(self, prompts: int, outputs: int) -> None:
        """Set the true number of prompt tokens and the maximum of output tokens. Raises the errors of `reserve`."""
        admission, tokens = self._admission, prompts + outputs
        admission.check_size(self.sequences, tokens)
        if admission.open_tokens - self.tokens + tokens > admission.tokens:
            raise admission.blocked_error("queue_full")
        admission.count(self, -1)
        self.tokens = tokens
        admission.count(self, 1)
        self._wait(self._expected(prompts, outputs))

    def begin(self) -> None:
        """Record that the first token has arrived, so the request no longer waits."""
        if self._queued:  # a slot that never waited is no measure of the queue's throughput
            self._admission.throughput.left(self._work)
            self._wait(0.0)
            self._queued = False

    def close(self, tokens: int = 0) -> None:
        """Release the slot after `tokens` generated tokens. Further calls have no effect."""
        if self._open:
            self._open = False
            self._wait(0.0)
            self._admission.count(self, -1)
            if tokens:
                self._admission.learn(tokens / self.sequences)

    def _expected(self, prompts: int, outputs: int) -> float:
        return prompts + min(outputs, self._admission.mean_output * self.sequences)

    def _wait(self, work: float) -> None:
        """Set the expected work of this slot in the queue; 0 if it no longer waits."""
        if not self._queued:
            return
        admission, key, before = self._admission, self.key, self._work
        admission.waiting_sequences += self.sequences * (bool(work) - bool(before))
        remaining = admission.work.get(key, 0.0) + work - before
        if remaining > 1e-6:
            admission.work[key] = remaining
        else:
            admission.work.pop(key, None)
        admission.all_work = admission.all_work + work - before if admission.work else 0.0
        self._work = work
        admission.throughput.queue(admission.waiting_sequences > 0)


def _about(seconds: float) -> str:
    """Return an approximate duration for a message."""
    return f"about {seconds:.0f} s" if seconds >= 1 else f"about {max(1.0, 1e3 * seconds):.0f} ms"
