"""Executes steps on a device: applies a step's row updates, selects and runs a program, and returns the outputs."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device, Event, Memory, Run
from llmc_runtime.exec.buffer_layout import Layout, kv_capacity
from llmc_runtime.exec.device_rows import ROLES, Rows
from llmc_runtime.exec.draft_steps import DraftSteps
from llmc_runtime.exec.entry_points import Bound, Columns, EntryPoints
from llmc_runtime.exec.logits import as_f32, find_logits, row_bytes
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import RECURRENT, State, in_snapshot
from llmc_runtime.format.pooling import POOLED
from llmc_runtime.format.program import RANK, Program
from llmc_runtime.sched.step import RowMasks, RowSave, Step, StepOutput, TokenLogprobs, Work

_LOGPROBS = (("logprob", np.float32), ("rank", np.int32), ("top_ids", np.int32), ("top_logprobs", np.float32))


class StateSnapshots:
    """Snapshots in `memory`, one after the other, each with a row's part of every state, in order.

    The copies run in the device's order of execution, so the host waits for none.
    """

    def __init__(self, device: Device, memory: Memory, states: Sequence[tuple[State, Memory]]) -> None:
        self._device, self._memory = device, memory
        self._parts: list[tuple[Memory, int, int]] = []  # a state, its bytes per row, and their place in a snapshot
        at = 0
        for state, place in states:
            self._parts.append((place, state.row_bytes, at))
            at += in_snapshot(state)
        self._stride = at

    def save(self, row: int, entry: int) -> None:
        """Copy the states of a row to a snapshot."""
        for state, nbytes, at in self._parts:
            self._device.copy(self._memory, entry * self._stride + at, state, row * nbytes, nbytes)

    def restore(self, entry: int, row: int) -> None:
        """Copy a snapshot to the states of a row."""
        for state, nbytes, at in self._parts:
            self._device.copy(state, row * nbytes, self._memory, entry * self._stride + at, nbytes)


@dataclass(eq=False)
class Ticket:
    """A step in flight: its work, the event at its end, and the u8 output buffers, which are valid after the event.

    `ids` are the sampled ids, or the pooled values. `entries` are the rows of logits: one per item of `work`, or one
    per token if the item has drafts or its prompt is scored. `needs_logprobs` flags the entries that need
    log-probabilities; it is empty if none does. `proposed` are the numbers of tokens drafted per entry; None if none
    are. `second_half` runs the part of an open step that needs its masks; the event is recorded after that. `looks` are
    requests for tokens of rows, and `looked` has these tokens, by row. `plain`: no draft model runs after the step.
    `likely`: see StepOutput. `saves`: see Step.
    """

    work: list[Work]
    entries: list[Work]
    event: Event = None
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: tuple[np.ndarray, ...] = ()
    needs_logprobs: list[bool] = field(default_factory=list)
    proposed: np.ndarray | None = None
    width: int = 0
    second_half: Run | None = None
    looks: list[RowMasks] = field(default_factory=list)
    plain: bool = False
    looked: dict[int, np.ndarray] = field(default_factory=dict)
    likely: dict[int, list[float]] = field(default_factory=dict)
    saves: Sequence[RowSave] = ()


class _StepEntries(NamedTuple):
    """The rows of logits of a step's work, as columns of a program's inputs too, whether they verify drafts, and which
    need log-probabilities (see Ticket)."""

    work: list[Work]
    entries: list[Work]
    columns: Columns
    verifies: bool
    needed: list[bool]


class Executor:
    """Owns the states, the arena and the programs of one artifact on one device.

    `kv_bytes` is the KV cache's budget in bytes (None: the device's share of the free memory, limited to what the rows
    can use); `capacity` is the resulting size. Up to `depth` steps may be in flight. `max_drafts` is the maximum number
    of drafted tokens that a step verifies per row, and `max_entries` the maximum number of rows of logits. `snapshots`
    is the number of snapshots of recurrent layers' states (None: the default, see plan_kv).

    Raises LlmcError E107, E111, E112, E113, E202, E203 or E205 if it cannot be built.
    """

    def __init__(
        self, artifact: Artifact, device: Device, kv_bytes: int | None = None, snapshots: int | None = 0
    ) -> None:
        self.artifact = artifact
        self.device = device
        self.depth = device.depth
        manifest = artifact.manifest
        for part in artifact.parts:
            if part.manifest.weights.mode == "none":
                raise LlmcError("E111", f"{part.root} has no weights yet", f"run llmc pack {part.root} CHECKPOINT")
        self.capacity = kv_capacity(artifact, device, kv_bytes, snapshots)
        self._env = {"P": self.capacity.pages, **({RANK: artifact.rank} if manifest.ranks > 1 else {})}
        self._layout = Layout(artifact, device, self._env, self.capacity.snapshot_bytes)
        self._steps = EntryPoints(artifact, device, self._layout, self._env, "")
        by_role = {s.role: (s, self._layout.states[s.name]) for s in manifest.states if s.role in ROLES}
        self._mask_state = by_role["allowed"][0].name if "allowed" in by_role else ""
        self.rows = Rows(device, by_role, self._env, manifest.vocab_size)
        pooling = manifest.pooling
        self._pooled_bytes = 0 if pooling is None else pooling.width * 4  # bytes of a prompt's pooled values; 0: none
        self._pooled = self._layout.output(POOLED) if self._pooled_bytes else None
        self._ids = None if self._pooled_bytes else self._layout.output("ids")
        self.draft_model = DraftSteps(artifact, device, self._layout, self._env, self.rows)
        self.max_drafts = max((p.drafts for p in artifact.programs), default=0)
        self.max_entries = self._steps.max_entries or manifest.limits.max_num_seqs
        self._proposed = self._layout.output("proposed") if self.max_drafts else None
        self._outputs = () if self._pooled_bytes else tuple(self._layout.output(name) for name, _ in _LOGPROBS)
        self._snapshots: StateSnapshots | None = None
        if self._layout.snapshots is not None:
            states = [(s, self._layout.states[s.name]) for s in manifest.states if s.role == RECURRENT]
            self._snapshots = StateSnapshots(device, self._layout.snapshots, states)
        self._open: deque[Ticket] = deque()
        self._last_program: tuple[Program, int] | None = None  # the program of the last step, and its number of entries
        self._last_entries = _StepEntries(work=[], entries=[], columns=([], [], []), verifies=False, needed=[])

    def run(self, step: Step) -> StepOutput:
        """Launch a step and wait for it. Returns one id (or None) per work item, and log-probabilities where requested.

        Raises LlmcError E614 if no program serves a step of this size, and E114 if the device fails.
        """
        return self.wait(self.launch(step))

    def launch(self, step: Step) -> Ticket:
        """Apply the row updates and start the step. Returns a ticket for `wait`.

        At most `depth` tickets may be open, and they must be waited for in the order of their launches. Raises the
        errors of `run`, some of which are reported only by `wait`.
        """
        if len(self._open) >= self.depth:
            raise RuntimeError(f"{len(self._open)} steps are in flight, the maximum of this device")
        for init in step.inits:
            self.rows.init(init)
            if self._snapshots is not None and init.snapshot >= 0:
                self._snapshots.restore(init.snapshot, init.row)
        if step.pages:
            self.rows.grow(step.pages)
        for drafts in step.drafts:
            self.rows.draft(drafts)
        for masks in step.masks:
            self.rows.mask(masks)
        ticket = self._start(step)
        self._open.append(ticket)
        return ticket

    def guide(self, ticket: Ticket, masks: Sequence[RowMasks]) -> None:
        """Supply the token masks of an open step and run its second half."""
        if ticket.second_half is None:
            raise RuntimeError("only an open step can be guided, and only once")
        for new in masks:
            self.rows.mask(new)
        ticket.looks += [new for new in masks if new.look]
        ticket.second_half()
        ticket.second_half = None
        self._fetch_outputs(ticket)

    def wait(self, ticket: Ticket) -> StepOutput:
        """Wait for the oldest step in flight and return its output."""
        if not self._open or self._open[0] is not ticket:
            raise RuntimeError("steps must be waited for once, in the order of their launches")
        if ticket.second_half is not None:
            raise RuntimeError("an open step must be guided before it is waited for")
        try:
            self.device.wait(ticket.event)
        except LlmcError:
            self._open.clear()
            raise
        self._open.popleft()
        if self._pooled_bytes:
            return self._pool(ticket)
        ids = ticket.ids.view(np.int32).tolist()
        tokens = [i if w.emit else None for i, w in zip(ids, ticket.entries)]
        logprobs: list[TokenLogprobs | None] = _logprobs(ticket) if ticket.needs_logprobs else [None] * len(tokens)
        proposed = [] if ticket.proposed is None else ticket.proposed.view(np.int32).tolist()
        if ticket.entries is ticket.work:
            out = StepOutput(tokens, logprobs, proposed=proposed)
        else:
            out = _merge(ticket.work, tokens, logprobs, proposed)
        out.likely = ticket.likely
        out.looked = {row: values.view(np.int32).tolist() for row, values in ticket.looked.items()}
        return out

    def _pool(self, ticket: Ticket) -> StepOutput:
        """Return the output of a step of a model that pools."""
        data, none = ticket.ids.tobytes(), [None] * len(ticket.work)
        rows = [
            data[i * self._pooled_bytes : (i + 1) * self._pooled_bytes] if w.emit else b""
            for i, w in enumerate(ticket.work)
        ]
        return StepOutput([*none], [*none], pooled=rows)

    def logits(self) -> np.ndarray:
        """Return the logits of the last step, f32[entries, vocabulary], after it was waited for.

        Raises LlmcError E113 if its program does not keep them until the end.
        """
        if self._last_program is None or self._open:
            raise RuntimeError("logits are read after a step was waited for, before the next one is launched")
        program, count = self._last_program
        vocab = self.artifact.manifest.vocab_size
        index = find_logits(program, vocab)
        buffer = program.buffers[index]
        data = self.device.read(self._layout.arena_part(buffer, count * row_bytes(buffer, vocab)))
        return as_f32(data, buffer.dtype).reshape(count, vocab)

    def done(self, ticket: Ticket) -> bool:
        """Return whether the step has ended, so that `wait` returns at once."""
        return ticket.second_half is None and self.device.done(ticket.event)

    def settle(self) -> None:
        """Wait for all steps in flight and discard their outputs, including a step whose launch was interrupted."""
        self._open.clear()
        self.device.wait(self.device.mark())

    def prepare(self) -> int:
        """Prepare every size of decode step in advance and return the number of sizes. No program is run."""
        count = 0
        for bound in chain(self._steps.sizes(), self.draft_model.sizes()) if self.device.replays else ():
            self.device.prepare(bound.run)  # before the next size is set
            count += 1
        return count

    def close(self) -> None:
        """Release the device's memory and threads."""
        self._steps.close()
        self.draft_model.close()
        self._open.clear()
        self.device.close()

    def _start(self, step: Step) -> Ticket:
        """Choose the program of a step, and run it; of an open step, only the part before its masks are read."""
        if step.inits or step.work != self._last_entries.work:  # the rows of consecutive steps are often the same
            self._last_entries = self._step_entries(step.work)
        work, entries, columns, verifies, needed = self._last_entries
        count = len(entries)
        if not count:
            return Ticket(work, entries, self.device.mark())
        bound = self._steps.ready(columns, verifies, step.plain)
        self._last_program = bound.program, count
        looks = [masks for masks in step.masks if masks.look]
        ticket = Ticket(
            work, entries, needs_logprobs=needed, width=bound.width, looks=looks, plain=step.plain, saves=step.saves
        )
        if step.open:
            first, ticket.second_half = self._halves(bound)
            first()
        else:
            bound.run()
            self._fetch_outputs(ticket)
        return ticket

    def _step_entries(self, work: list[Work]) -> _StepEntries:
        """Return the rows of logits that a step's work needs."""
        verifies = any(w.drafts for w in work)
        splits = verifies or any(w.score for w in work)
        entries = [entry for w in work for entry in _entries_of(w)] if splits else work
        columns = [w.row for w in entries], [w.num_tokens for w in entries], [int(w.emit) for w in entries]
        enabled = self.rows.wants_logprobs
        needed = [] if self._pooled_bytes else [(w.emit or w.score) and enabled[w.row] for w in entries]
        return _StepEntries(work, entries, columns, verifies, needed if True in needed else [])

    def _fetch_outputs(self, ticket: Ticket) -> None:
        """Fetch the outputs and record the event, once everything in the step is launched."""
        device, count, width = self.device, len(ticket.entries), ticket.width
        if self._pooled is not None:
            ticket.ids = device.fetch(self._pooled, 0, count * self._pooled_bytes)
        elif self._ids is not None:
            ticket.ids = device.fetch(self._ids, 0, count * 4)
        if self._proposed is not None and True in self.rows.drafts:
            ticket.proposed = device.fetch(self._proposed, 0, count * 4)
        if ticket.needs_logprobs:
            row_bytes = (4, 4, 4 * width, 4 * width)
            ticket.logprobs = tuple(device.fetch(m, 0, count * n) for m, n in zip(self._outputs, row_bytes))
        if self._snapshots is not None:
            for save in ticket.saves:
                self._snapshots.save(save.row, save.entry)
        if not ticket.plain and self.draft_model:
            ticket.likely = self.draft_model.run(ticket.work, _num_lookup_drafts(ticket))
        for look in ticket.looks:
            ticket.looked[look.row] = self.rows.history(look.row, look.start, look.look)
        ticket.event = device.mark()

    def _halves(self, bound: Bound) -> list[Run]:
        """Return the program split before the first launch that reads masks: the first half can run without them."""
        if not bound.halves:
            program = bound.program
            masks = [i for i, buffer in enumerate(program.buffers) if buffer.name == self._mask_state]
            cut = next(n for n, launch in enumerate(program.launches) if any(i in launch.args for i in masks))
            for launches in (program.launches[:cut], program.launches[cut:]):
                half = replace(program, launches=launches)
                bound.halves.append(self.device.bind(half, self._layout.addresses(half), bound.symbols))
        return bound.halves


def _num_lookup_drafts(ticket: Ticket) -> list[int]:
    """Return the number of drafts that prompt lookup has found for each work item; empty if no item depends on it."""
    if ticket.proposed is None or not any(w.lookup for w in ticket.work):
        return []
    counts, ends = ticket.proposed.view(np.int32), accumulate(w.rows for w in ticket.work)
    return [int(counts[end - 1]) for end in ends]


def digest_of(ticket: Ticket) -> int:
    """Return the CRC-32 of the ids that a step has sampled, after it was waited for."""
    return zlib.crc32(ticket.ids.tobytes())


def _entries_of(work: Work) -> list[Work]:
    """Return the entries of a work item: one, or one per token if the prompt is scored or if it has drafts."""
    if work.drafts:
        return [Work(work.row, 1, emit=True)] * work.num_tokens
    if not work.score:
        return [work]
    scored = [Work(work.row, 1, emit=False, score=True)] * (work.num_tokens - work.emit)
    return [*scored, Work(work.row, 1, emit=True)] if work.emit else scored


def _merge(
    work: list[Work], tokens: list[int | None], logprobs: list[TokenLogprobs | None], proposed: list[int]
) -> StepOutput:
    """Merge the outputs of entries by work item. If the item is scored, its last entry may emit a token, and the others
    are scores. If it has drafts, its first entries emit tokens, and the others have id -1.
    """
    out = StepOutput([], [])
    scores: dict[int, list[TokenLogprobs]] = {}
    accepted: dict[int, list[tuple[int, TokenLogprobs | None]]] = {}
    last_proposed: list[int] = []
    begin = 0
    for index, w in enumerate(work):
        end = begin + w.rows
        entry = begin if w.drafts else end - 1  # the entry of the first token that it emits
        out.tokens.append(tokens[entry])
        out.logprobs.append(logprobs[entry] if w.emit else None)
        if w.score:
            scores[index] = [score for score in logprobs[begin : end - w.emit] if score is not None]
        if w.drafts:
            further = zip(tokens[begin + 1 : end], logprobs[begin + 1 : end])
            accepted[index] = [(token, row) for token, row in further if token is not None and token >= 0]
        last_proposed += proposed[end - 1 : end]
        begin = end
    out.scores, out.accepted, out.proposed = scores, accepted, last_proposed
    return out


def _logprobs(ticket: Ticket) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of a step's entries; None for entries that need none."""
    count = len(ticket.entries)
    arrays = [x.view(dtype) for x, (_, dtype) in zip(ticket.logprobs, _LOGPROBS)]
    logprob, rank = arrays[0].tolist(), arrays[1].tolist()
    ids, tops = (x.reshape(count, -1).tolist() for x in arrays[2:])
    columns: Any = zip(ticket.needs_logprobs, logprob, rank, ids, tops)
    return [TokenLogprobs(lp, k, i, t) if needed else None for needed, lp, k, i, t in columns]
