"""A model-free device for tests and simulation: the next token is a hash of the true prefix.

Every KV slot stores the hash chain of the prefix that ends at its token. The chain is continued from the slot of the
previous position, which is read through the row's page table. The sampled token depends on the head of the chain, on
the chain at one earlier position, and on the row's parameters. A page, row, chunk, preemption or prefix hit that is
mixed up anywhere therefore yields a wrong token, and errors that are visible at once (lengths, positions, page tables,
`emit` flags) raise Mismatch. At depth 2 and more, execution is deferred: a launched step takes effect at a random
moment before it is waited for, in launch order, and an open step not before it is guided. Drafted tokens are accepted
at random; the KV slot of a rejected one then contains garbage. With recurrent layers, tokens depend on the row's states
instead (fake_states).
"""

from __future__ import annotations

import random
from collections import deque
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from tests.runtime.fake_states import FakeStates
from tests.runtime.step_reply import reply

ROOT = 0x6C6C6D63  # the chain of the empty prefix


class Mismatch(AssertionError):
    """A step that a correct scheduler never issues."""


class Work(NamedTuple):
    """A part of a Work with drafts: one token."""

    row: int
    num_tokens: int
    emit: bool


class StepLike(Protocol):
    """The parts of `sched.step.Step` that an executor uses."""

    inits: list[Any]
    pages: list[Any]
    drafts: list[Any]
    masks: list[Any]
    saves: list[Any]
    work: list[Any]
    open: bool
    plain: bool


def link(head: int, token: int) -> int:
    """Extend the chain of a prefix by one token."""
    return hash((head, token))


def draw(head: int, earlier: int, num_prompt: int, length: int, params: Any, mask: bytes, vocab_size: int) -> int:
    """Return the token after a prefix of `length` tokens; `earlier` is the chain at position head % length.

    Stop ids are skipped until `min_tokens` tokens are generated, as are tokens that `mask` excludes (empty: no mask).
    """
    token = hash((head, earlier, num_prompt, params.seed, params.temperature, params.biases)) % vocab_size
    stops = params.stops if length < num_prompt + params.min_tokens else ()
    for _ in range(vocab_size):
        if token not in stops and (not mask or mask[token >> 3] >> (token & 7) & 1):
            return token
        token = (token + 1) % vocab_size
    raise Mismatch("no token is allowed")


def score(head: int, token: int, vocab_size: int) -> tuple[float, int, list[int], list[float]]:
    """Return (log-probability, rank, most likely ids, their log-probabilities) of `token` after the prefix."""
    value = hash((head, token)) % 1000
    top = min(20, vocab_size)
    return -value / 100, value + 1, [(value + i) % vocab_size for i in range(top)], [-i / 7 for i in range(top)]


class _Row:
    __slots__ = ("ahead", "length", "look", "masks", "num_prompt", "params", "placed", "proposed", "table", "tokens")

    def __init__(self, init: Any) -> None:
        self.tokens, self.table, self.length = list(init.tokens), list(init.pages), init.computed
        self.proposed = 0  # tokens that a draft model has drafted after the last one
        self.placed: list[int] = []  # tokens that the host has drafted after the last one
        self.ahead: list[int] = []  # tokens that the device has drafted, if the row is guided
        self.look = 0, 0  # the tokens that the step returns: where they begin, and how many
        self.num_prompt, self.params = init.num_prompt, init.params
        self.masks: list[bytes] = [init.params.allowed] * (init.params.guided or 1)  # b"": none


class FakeExecutor:
    """An executor with rows, page tables, lengths, tokens and KV of its own, updated by the host's diffs.

    `rng` chooses how many of the launched steps have run when a launch returns; without it, none has. It also chooses
    how many tokens are drafted and accepted; without it, as many as possible. `logits` is the maximum number of rows of
    logits in a step (0: the number of rows).
    """

    def __init__(
        self,
        rows: int,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        max_model_len: int,
        max_tokens: int,
        depth: int = 1,
        rng: random.Random | None = None,
        logits: int = 0,
        head: bool = False,
        stops: bool = False,
        snapshots: int | None = None,
        rejectable: int = 0,
    ) -> None:
        """head: drafts are those of a head, whose KV every step computes. stops: it may stop drafting. snapshots,
        rejectable: see FakeStates."""
        self.depth, self._rng, self._logits, self._head, self._stops = depth, rng, logits or rows, head, stops
        self._drafts = rng and random.Random(rng.getrandbits(64))  # draws in the order of the steps, whenever they run
        self._queue: deque[StepLike] = deque()  # launched, not run
        self._outputs: deque[Any] = deque()  # run, not waited for
        self._oldest = 0  # ticket of the first of these
        self._held = False  # whether the last step in the queue is open
        self.vocab_size, self.page_size, self.max_model_len = vocab_size, page_size, max_model_len
        self.num_pages, self.max_tokens = num_pages, max_tokens
        self.rows: list[_Row | None] = [None] * rows
        self._kv = [0] * (num_pages * page_size)
        self._drafted = [0] * (num_pages * page_size)  # the KV of a draft model
        self._position = [-1] * (num_pages * page_size)  # the sequence position stored in each slot
        self._states = FakeStates(rows, snapshots, rejectable)

    rejection = 0.4  # probability that a draft is rejected

    def run(self, step: StepLike) -> Any:
        """Launch a step and wait for it."""
        return self.wait(self.launch(step))

    def launch(self, step: StepLike) -> int:
        """Enqueue a step, which runs now or later, and return its ticket. Raises Mismatch if it, or an earlier one, is
        invalid.
        """
        open_now = len(self._queue) + len(self._outputs)
        _require(open_now < self.depth, f"{open_now} steps are under way")
        _require(not self._held, "a step after an open one")
        self._queue.append(step)
        self._held = step.open
        if self._rng is not None:
            self._go(self._rng.randrange(len(self._queue) + 1))
        return self._oldest + open_now

    def guide(self, ticket: int, masks: Any) -> None:
        """Supply the masks of an open step. All steps before it must have been waited for."""
        _require(self._held and ticket == self._oldest, f"ticket {ticket} is guided, {self._oldest} is the oldest")
        self._held = False
        for new in masks:
            self._mask(new)
        if self._rng is not None:
            self._go(self._rng.randrange(2))

    def wait(self, ticket: int) -> Any:
        """Return the output of the oldest step not yet waited for, which must have this ticket."""
        _require(ticket == self._oldest, f"ticket {ticket} is waited for, the oldest is {self._oldest}")
        if not self._outputs:
            self._go(1)
        _require(bool(self._outputs), "an open step is waited for")
        self._oldest += 1
        return self._outputs.popleft()

    def done(self, ticket: int) -> bool:
        """Return whether the step has run."""
        return ticket < self._oldest + len(self._outputs)

    def settle(self) -> None:
        """Run everything launched except an open step, and discard the outputs."""
        self.catch_up()
        self._oldest += len(self._outputs) + len(self._queue)
        self._outputs.clear()
        self._queue.clear()
        self._held = False

    def catch_up(self) -> None:
        """Run everything launched except an open step, so that the device's state can be inspected."""
        self._go(len(self._queue))

    def _go(self, count: int) -> None:
        for _ in range(min(count, len(self._queue) - self._held)):
            self._outputs.append(self._step(self._queue.popleft()))

    def _step(self, step: StepLike) -> Any:
        for init in step.inits:
            self._check_pages(init.pages)
            _require(init.num_prompt <= len(init.tokens) <= self.max_model_len, "a row with too many tokens")
            self.rows[init.row] = row = _Row(init)
            for position in range(0, init.computed, self.page_size):
                self._read(row, position)
            self._states.restore(init.row, init.snapshot)
        for grow in step.pages:
            table = self._row(grow.row).table
            self._check_pages(grow.pages)
            _require(grow.start <= len(table), f"row {grow.row} has {len(table)} pages, not {grow.start}")
            table[grow.start :] = grow.pages  # pages after it were those of rejected drafts
        for drafts in step.drafts:
            row = self._row(drafts.row)
            _require(drafts.start == len(row.tokens), f"row {drafts.row}: drafts at {drafts.start}")
            _require(all(0 <= token < self.vocab_size for token in drafts.tokens), f"row {drafts.row}: {drafts}")
            row.placed = drafts.tokens
        for new in step.masks:
            self._mask(new)
        work = step.work
        _require(len({item.row for item in work}) == len(work), "a row occurs twice")
        _require(sum(item.num_tokens for item in work) <= self.max_tokens, "more tokens than the program serves")
        _require(sum(item.rows for item in work) <= self._logits, "more rows of logits than the program has")
        scores: dict[int, Any] = {i: [] for i, item in enumerate(work) if item.score}
        runs = []
        for i, item in enumerate(work):
            first = self._row(item.row).length
            runs.append(self._run(item) if item.drafts else [self._work(item, scores.get(i))])
            self._states.settle(item.row, first, first + item.num_tokens, self._row(item.row).length)
        rows = [[(token, self._logprobs(item.row, token)) for token in run] for item, run in zip(work, runs)]
        accepted = {i: run[1:] for i, (item, run) in enumerate(zip(work, rows)) if item.drafts}
        proposed = [self._propose(item) for item in work]
        for item in work:
            _require(not (step.plain and (item.propose or item.fill)), f"row {item.row}: drafts after a plain step")
        likely = {i: made for i, item in enumerate(work) if (made := self._draft(item, proposed[i]))}
        for save in step.saves:
            _require(any(item.row == save.row for item in work), f"row {save.row} is saved and not computed")
            self._states.save(save.row, save.entry)
        looked = {item.row: found for item in work if (found := self._looked(self._row(item.row)))}
        return reply(
            [run[0][0] for run in rows], [run[0][1] for run in rows], scores, accepted, proposed, looked, likely
        )

    def _mask(self, new: Any) -> None:
        row = self._row(new.row)
        _require(0 < len(new.masks) <= len(row.masks), f"row {new.row}: {len(new.masks)} masks")
        for index, mask in enumerate(new.masks):
            row.masks[(new.start + index) % len(row.masks)] = mask
        row.look = new.start, new.look

    def _looked(self, row: _Row) -> list[int]:
        """Return the tokens that the host asks for, and forget the masks of the step."""
        (start, count), row.look = row.look, (0, 0)
        if row.params.guided:
            row.masks = [b""] * len(row.masks)
        return [*row.tokens, *row.ahead][start : start + count]

    def _guess(self, row: _Row, count: int) -> list[int]:
        """Draft tokens of a guided row without its masks; some are wrong."""
        tokens, vocab, rng = list(row.tokens), self.vocab_size, self._drafts
        chain = list(accumulate(tokens, link, initial=ROOT))
        for _ in range(count):
            length, head = len(tokens), chain[-1]
            token = draw(head, chain[head % length + 1], row.num_prompt, length, row.params, b"", vocab)
            if rng is not None and rng.random() < self.rejection / 2:
                token = rng.randrange(vocab)
            tokens.append(token)
            chain.append(link(head, token))
        return tokens[len(row.tokens) :]

    def _run(self, item: Any) -> list[int | None]:
        """Verify drafts: compute one token after the other until a draft is rejected."""
        row, size = self._row(item.row), self.page_size
        _require(item.emit and item.num_tokens == 1 + item.drafts, f"row {item.row}: {item}")
        end = row.length + item.num_tokens
        _require(end <= min(len(row.table) * size, self.max_model_len), f"row {item.row}: drafts past its pages")
        if not row.params.drafting[0] or self._stops:
            drafted = len(row.placed) or row.proposed
            _require(item.drafts <= drafted, f"row {item.row}: {item.drafts} drafts of {drafted}")
        first, one, run = row.length, Work(item.row, 1, True), []
        for index in range(item.num_tokens):
            run.append(self._work(one, None))
            if self._rejects(row, index, run[-1]):
                break
        row.placed, row.ahead = [], []
        for position in range(first, row.length):
            slot = row.table[position // size] * size + position % size
            if self._drafted[slot] == hash(("drafted", first, position)):
                self._drafted[slot] = self._kv[slot]  # the draft is the token
        for position in range(row.length, end):
            slot = row.table[position // size] * size + position % size
            self._kv[slot], self._position[slot] = hash((position, "rejected")), position
        return run

    def _rejects(self, row: _Row, index: int, token: int | None) -> bool:
        """Whether the draft at this index is not the token: by comparison for drafts of the host, else by chance."""
        if row.placed:
            return index == len(row.placed) or row.placed[index] != token
        if row.params.guided:
            return index == len(row.ahead) or row.ahead[index] != token
        return self._drafts is not None and self._drafts.random() < self.rejection

    def _draft(self, item: Any, found: int) -> list[float]:
        """Compute the KV of a draft model that a step asks for; require what its drafts need.

        Returns their probabilities if it may stop drafting. A draft is marked in its KV slot until it is verified: it
        may be the token, or not. `found`: the number of drafts that prompt lookup has found.
        """
        row, size, kv, rng = self._row(item.row), self.page_size, self._drafted, self._drafts or random.Random(0)
        if found and not (item.propose and not item.lookup):
            _require(not item.fill, f"row {item.row}: prompt lookup beside a draft model")
            row.proposed = found
            return []
        row.proposed = made = rng.randint(1, item.propose) if self._stops and item.stop is not None else item.propose
        if row.params.guided and (made or not row.params.drafting[0]):
            row.ahead = self._guess(row, made)
        end = max(item.fill_from + item.fill, row.length + item.propose)
        _require(end <= min(len(row.table) * size, self.max_model_len), f"row {item.row}: drafts past its pages")

        def slot(position: int) -> int:
            return int(row.table[position // size] * size + position % size)

        def extend(first: int, last: int) -> None:
            head = kv[slot(first - 1)] if first else ROOT
            for position in range(first, last):
                token = row.tokens[position] if position < len(row.tokens) else -1
                kv[slot(position)] = head = hash((head, token))

        if item.propose:
            _require(item.emit and len(row.tokens) == row.length + 1, f"row {item.row}: drafts without a last token")
        if self._head:
            _require(not item.fill, f"row {item.row}: a head computes KV after a step")
            return self._likely(made)
        extend(item.fill_from, item.fill_from + item.fill)
        if item.propose:
            begin = max(0, row.length - 1)
            if begin:
                known = kv[slot(begin - 1)] == self._kv[slot(begin - 1)]
                _require(known, f"row {item.row}: the draft model lacks the KV before token {begin}")
            extend(begin, row.length + 1)
            for position in range(row.length + 1, row.length + made):
                kv[slot(position)] = hash(("drafted", row.length, position))
        return self._likely(made)

    def _likely(self, count: int) -> list[float]:
        """Draw the probabilities of drafts."""
        rng = self._drafts or random.Random(0)
        return [rng.random() for _ in range(count)] if self._stops else []

    def _propose(self, item: Any) -> int:
        """Return the number of tokens drafted for a row."""
        row = self._row(item.row)
        most = row.params.drafting[0] if item.emit else 0
        if row.params.guided and most:
            row.ahead = self._guess(row, most)
        return most if self._drafts is None or not most else self._drafts.randrange(most + 1)

    def _work(self, item: Any, scores: list[Any] | None) -> int | None:
        row = self._row(item.row)
        start, stop, size = row.length, row.length + item.num_tokens, self.page_size
        _require(start < stop <= len(row.tokens), f"row {item.row}: {start} to {stop} of {len(row.tokens)} tokens")
        _require(stop <= len(row.table) * size, f"row {item.row}: {stop} tokens on {len(row.table)} pages")
        head = self._read(row, start - 1) if start else ROOT
        seen = self._states.before(item.row, start, head)
        kv, positions, table, tokens = self._kv, self._position, row.table, row.tokens
        for position in range(start, stop):
            slot = table[position // size] * size + position % size
            kv[slot] = head = link(head, tokens[position])
            seen = link(seen, tokens[position])
            self._states.put(item.row, position + 1, seen)
            positions[slot] = position
            if scores is not None and position + 1 < row.num_prompt:
                scores.append(score(seen, tokens[position + 1], self.vocab_size))
        head = seen
        row.length = stop
        _require(scores is None or row.params.want_logprobs, f"row {item.row}: it wants no log-probabilities")
        _require(item.emit == (stop == len(tokens)), f"row {item.row}: emit is {item.emit} at {stop} of {len(tokens)}")
        if not item.emit:
            return None
        earlier = self._read(row, head % stop)
        mask = row.masks[stop % len(row.masks)]
        _require(not row.params.guided or bool(mask), f"row {item.row}: it is guided and has no mask at {stop}")
        token = draw(head, earlier, row.num_prompt, stop, row.params, mask, self.vocab_size)
        if stop < self.max_model_len:
            tokens.append(token)
        return token

    def _read(self, row: _Row, position: int) -> int:
        slot = row.table[position // self.page_size] * self.page_size + position % self.page_size
        found = self._position[slot]
        _require(found == position, f"slot {slot} holds position {found}, read as {position}")
        return self._kv[slot]

    def _row(self, number: int) -> _Row:
        row = self.rows[number]
        if row is None:
            raise Mismatch(f"row {number} was never built")
        return row

    def _check_pages(self, pages: list[int]) -> None:
        _require(not pages or (min(pages) >= 0 and max(pages) < self.num_pages), f"pages {pages} of {self.num_pages}")

    def _logprobs(self, number: int, token: int | None) -> tuple[float, int, list[int], list[float]] | None:
        if token is None or not self._row(number).params.want_logprobs:
            return None
        top = min(20, self.vocab_size)
        ids = [(token + i) % self.vocab_size for i in range(top)]
        return (-0.5, 1, ids, [-0.5 - i for i in range(top)])


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Mismatch(message)
