"""Step budget: the number of prompt tokens in a step with decoding requests, so that these are not delayed.

A long chunk of a prompt delays the next token of every decoding request. A step's duration is modelled as

    the time of a step that only decodes + the number of prompt tokens * the time of a prompt token,

both running means of measured steps, and the budget is the number of prompt tokens that fits a target. Steps in which
no request decodes have no budget. Details:

- Tiles. Kernels compute tiles of tokens, and other sizes run other kernels, so that the time of large steps grows in
  stairs. The budget of a large step is a whole number of tiles, and a size that was measured to miss the target is left
  out.
- Probes. While prompts follow each other, no step only decodes, and the time of decoding would be counted as time of
  the prompts' tokens. A step with a single prompt token is therefore planned before the first step with prompts, and
  after every PROBE_INTERVAL of them.
- Fast decoding. If decoding is much faster than the target, shorter steps cost prompts little: a step with prompts then
  takes at most FAST_STRETCH times as long as one that only decodes, but at least MIN_TARGET_SHARE times the target.
- Longer steps. Large steps compute more tokens in a second than small ones, so that a burst of prompts ends sooner with
  them. While many prompt tokens are missing (a backlog), a step may take up to MAX_LONGER times the target, but no more
  than one step in LONGER_INTERVAL of those in which requests decode; up to MAX_SAVED unused ones are kept for a burst.
  Over many steps, fewer than 1 % of the times between two tokens of a request are thus that long; the 99th percentile
  rises slightly, as it also counts ordinary steps that miss the target.
- Backlog. It is measured in steps within the target. A longer step needs a backlog of MIN_BACKLOG if MAX_SAVED longer
  steps are kept, and of more the fewer are kept, up to MAX_BACKLOG, since the last ones are worth most in the longest
  bursts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import Work, prompt_tokens

MAX_STRETCH = 2.0  # a step may take this many times as long as one that only decodes, regardless of the target
# If decoding is fast, a step takes FAST_STRETCH times as long as one that only decodes, or MIN_TARGET_SHARE of the
# target if that is longer.
FAST_STRETCH = 4.0
MIN_TARGET_SHARE = 0.4
MIN_TOKENS = 16  # prompt tokens that every step may compute, except for those that measure decoding
# Longer steps for a backlog of prompt tokens (see above):
MIN_BACKLOG, MAX_BACKLOG = 6, 10  # steps within the target that the backlog must need
MAX_LONGER = 6.0  # maximum duration of a longer step, in targets
LONGER_INTERVAL = 160  # steps in which requests decode, for each longer step
MAX_SAVED = 6  # maximum number of longer steps kept for later
PROBE_INTERVAL = 64  # consecutive steps with prompts after which decoding is measured
FIRST_TOKENS = 256  # prompt tokens of a step before any was measured
LARGE, TILE = 512, 128  # steps with at least LARGE prompt tokens are a multiple of TILE
_MULTIPLES = ((LARGE, TILE), (256, 64), (64, 16))  # a budget of the first number or more is a multiple of the second
_TOLERANCE = 1.02  # steps of a size miss the target if they take this many times as long
_LEFT_OUT_FACTOR = 0.999  # factor of a size's time whenever that size is left out, so that it is tried again later
_MAX_INCREASE = 1.5  # a measured time of a size counts as at most this many times the known one
_LONGER_FACTOR = 1.5  # a step with this many times the prompt tokens of one within the target is a longer one
_WEIGHT = 0.2  # weight of a measurement in a running mean
_RARE_WEIGHT = 0.5  # weight of a measurement after PROBE_INTERVAL steps without any
_MAX_DEVIATION = 4.0  # a measurement counts as at most this many times the mean, and at least the mean divided by this
_MIN_SECONDS = 1e-7  # seconds; a smaller measurement counts as this


def num_decoding(running: Sequence[Request], start: int = 0) -> int:
    """Return how many of these requests, from index `start`, decode in the next step.

    A request whose last token is in flight does not: it computes nothing more.
    """
    requests = running[start:] if start else running
    return sum([r.num_total - r.num_planned == 1 and r.num_total != r.limit for r in requests])


class StepTimer:
    """Measures the duration of steps, of which several may be in flight: from planning, or the end of the step before,
    to the end.
    """

    def __init__(self) -> None:
        self._planned: deque[float] = deque()  # when the plans of the steps in flight began
        self._ended = 0.0  # when the last step ended

    def planned(self, began: float) -> None:
        """Record that a step was planned, from this time on."""
        self._planned.append(began)

    def ended(self, now: float) -> float:
        """Return the seconds that the oldest step in flight took."""
        began, self._ended = max(self._planned.popleft(), self._ended), now
        return now - began

    def running(self, now: float) -> float:
        """Return the seconds for which the oldest step in flight has run."""
        return now - max(self._planned[0], self._ended)

    def forget(self) -> None:
        """Drop the steps in flight."""
        self._planned.clear()


class StepBudget:
    """Chooses the number of tokens of steps in which some requests decode and others compute their prompts.

    target: seconds that such a step should take at most. It takes less if decoding alone takes less than a quarter of
    it, and may take longer if decoding alone takes more than half of it, since prompts would hardly get any time
    otherwise. limit: maximum number of tokens in a step.
    """

    def __init__(self, target: float, limit: int) -> None:
        self.target, self.limit = target, limit
        self.latest = limit  # the last budget
        self._unmeasured = PROBE_INTERVAL  # steps with prompts that were planned since decoding was measured
        self._stale = False  # whether a step was planned to measure decoding again
        self._decode = _Mean()  # seconds of a step that only decodes
        self._token = _Mean()  # further seconds for each prompt token
        self._sizes: dict[int, _Size] = {}  # further seconds of large steps, by their tokens
        self._long_token = _Mean()  # further seconds for each prompt token of a longer step
        self._saved = 0.0  # longer steps that may be planned, up to MAX_SAVED

    def tokens(self, running: Sequence[Request], waiting: int) -> int:
        """Return the maximum number of tokens of the next step. waiting: tokens of prompts that may be admitted."""
        missing = waiting + sum([n for r in running if (n := r.num_total - r.num_planned) > 1])
        rows = num_decoding(running) if missing else 0
        if not rows:
            return self.limit
        self._unmeasured += 1
        if self._unmeasured > PROBE_INTERVAL:
            self._unmeasured, self._stale = 0, True
            return min(self.limit, rows + 1)  # a step gives the first prompt a token
        prompt = self._prompt_tokens()
        if self._saved >= 1 and missing > self._backlog() * prompt and (longer := self._longer_step_tokens()) > prompt:
            self._saved -= 1
            return min(self.limit, _whole_tiles(rows, longer))
        total = _whole_tiles(rows, prompt)
        if prompt >= LARGE:
            total = self._measured_size(total)
        self.latest = min(self.limit, total)
        return self.latest

    def learn(self, work: Sequence[Work], seconds: float) -> None:
        """Take the duration of a step.

        Steps in which no request decodes do not count, nor do steps with less than half of the prompt tokens that fit
        the target: these run other kernels than decoding steps, and say little about the time per token.
        """
        prompts = [item.num_tokens for item in work if item.num_tokens > 1 + item.drafts]
        if len(prompts) == len(work):
            return
        self._saved = min(MAX_SAVED, self._saved + 1 / LONGER_INTERVAL)
        prompt, further = sum(prompts), seconds - self._decode.value
        if not prompts:
            self._decode.add(seconds, _RARE_WEIGHT if self._stale else _WEIGHT)
            self._unmeasured, self._stale = 0, False
        elif self._is_longer(prompt):
            self._long_token.add(further / prompt)
        elif prompt >= self._prompt_tokens() // 2:
            self._learn_size(sum(item.num_tokens for item in work), further, prompt * self._token.value)
            self._token.add(further / prompt)

    def expected(self, work: Sequence[Work]) -> float:
        """Return the seconds that a step should take by what was measured, 0 if that is not known."""
        prompt = prompt_tokens(work)
        rows = any(item.num_tokens <= 1 + item.drafts for item in work)
        if (rows and not self._decode.value) or (prompt and not self._token.value):
            return 0.0
        token = self._long_token.value if self._is_longer(prompt) else 0.0
        return rows * self._decode.value + prompt * (token or self._token.value)

    def _learn_size(self, total: int, further: float, expected: float) -> None:
        """Take the further seconds of a step of `total` tokens, of which the time per token predicts `expected`."""
        if total >= LARGE:
            size = -(-total // TILE) * TILE
            known = self._sizes.setdefault(size, _Size(expected or further))
            known.add(further)

    def _measured_size(self, total: int) -> int:
        """Return the largest size up to `total` that was not measured to miss the target, or LARGE."""
        limit = _TOLERANCE * step_seconds(self.target, self._decode.value) - self._decode.value
        while total > LARGE and (known := self._sizes.get(total)) is not None and known.seconds > limit:
            known.leave_out()
            total -= TILE
        return total

    def _backlog(self) -> float:
        """Return how many steps within the target the missing prompt tokens must need for a longer one."""
        return MAX_BACKLOG - (MAX_BACKLOG - MIN_BACKLOG) * self._saved / MAX_SAVED

    def _longer_step_tokens(self) -> int:
        """Return the prompt tokens of a longer step."""
        ordinary = step_seconds(self.target, self._decode.value)
        seconds = MAX_LONGER * min(self.target, ordinary)
        if not self._long_token.value:
            return int(seconds / ordinary * self._prompt_tokens())
        return int((seconds - self._decode.value) / self._long_token.value)

    def _is_longer(self, prompt: int) -> bool:
        """Whether a step with decoding requests and `prompt` prompt tokens is a longer one."""
        return bool(self._token.value) and prompt > _LONGER_FACTOR * self._prompt_tokens()

    def _prompt_tokens(self) -> int:
        """Return the prompt tokens of a step within the target."""
        if not self._token.value:
            return FIRST_TOKENS
        seconds = step_seconds(self.target, self._decode.value) - self._decode.value
        return max(MIN_TOKENS, min(self.limit, int(seconds / self._token.value)))


def _whole_tiles(rows: int, prompt: int) -> int:
    """Return the tokens of a step of `rows` rows that decode and `prompt` prompt tokens, rounded down by _MULTIPLES."""
    total = rows + prompt
    return total - next((total % size for min_prompt, size in _MULTIPLES if prompt >= min_prompt), 0)


def step_seconds(target: float, decode: float) -> float:
    """Return how long a step with prompts should take, if one that only decodes takes `decode` seconds."""
    return max(min(target, max(MIN_TARGET_SHARE * target, FAST_STRETCH * decode)), MAX_STRETCH * decode)


class _Mean:
    """A running mean of positive numbers, which a single outlier changes little; 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, measured: float, weight: float = _WEIGHT) -> None:
        """Take a measurement."""
        measured = max(measured, _MIN_SECONDS)
        if self.value:
            measured = min(max(measured, self.value / _MAX_DEVIATION), self.value * _MAX_DEVIATION)
            self.value += weight * (measured - self.value)
        else:
            self.value = measured


class _Size:
    """The further seconds of steps of one size: as expected, as measured when it is tried, and then a running mean."""

    def __init__(self, expected: float) -> None:
        self.seconds = expected
        self._tried = False

    def add(self, measured: float) -> None:
        """Take a measurement; a single outlier counts as little as possible."""
        measured = max(_MIN_SECONDS, min(measured, _MAX_INCREASE * self.seconds))
        self.seconds += (_WEIGHT if self._tried else 1.0) * (measured - self.seconds)
        self._tried = True

    def leave_out(self) -> None:
        """Record that the size was not used because of its time, and reduce that so that it is tried again."""
        self.seconds *= _LEFT_OUT_FACTOR
        self._tried = False
