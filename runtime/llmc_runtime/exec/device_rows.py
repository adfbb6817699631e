"""Writes the device rows: converts a step's row updates into bytes of the state buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmc_runtime.device.device import Device, Memory
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.manifest import State
from llmc_runtime.sched.step import RowDrafts, RowInit, RowMasks, RowPages

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)
_WORD = 32
_WRITE_COST = 32 << 10  # the overhead of a copy, as the number of bytes copied in the same time
ROLES = (
    "tokens", "length", "pages", "fparams", "iparams", "stops", "seen", "counts", "bias_ids", "biases", "allowed",
    "draft_allowed", "drafts", "reach",
)  # fmt: skip


class _Table:
    """A state buffer as rows of `width` 4-byte elements."""

    def __init__(self, device: Device, memory: Memory, state: State, env: Mapping[str, int]) -> None:
        self.dtype = _FLOAT if state.dtype == "f32" else _INT
        self.rows = state.shape[0](env)
        self.width = memory.nbytes // 4 // self.rows
        self._device, self._memory = device, memory

    @property
    def view(self) -> np.ndarray:
        """The state on the device, [rows, width]; a copy if the host cannot access the memory."""
        host = self._memory.host if len(self._memory.host) else self._device.read(self._memory)
        return host.view(self.dtype).reshape(self.rows, self.width)

    def set(self, row: int, values: list[int] | list[float] | np.ndarray, start: int = 0) -> None:
        """Write values to a row, beginning at element `start`."""
        at = (row * self.width + start) * 4
        self._device.write(self._memory, at, np.asarray(values, self.dtype))

    def write(self, row: int, rows: np.ndarray) -> None:
        """Write whole rows from `row` on, [n, width] of the state's dtype."""
        self._device.write(self._memory, row * self.width * 4, rows)

    def fetch(self, row: int, start: int, count: int) -> np.ndarray:
        """Start reading elements of a row; see `Device.fetch`. Returns u8[4 * count]."""
        at = (row * self.width + start) * 4
        return self._device.fetch(self._memory, at, at + 4 * count)

    def clear(self, row: int) -> None:
        """Zero a row."""
        self._device.zero(self._memory, row * self.width * 4, (row + 1) * self.width * 4)


@dataclass(frozen=True, slots=True)
class _Biases:
    """The biases that were written last, as they are in a row."""

    source: tuple[tuple[int, float], ...] = ()
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, _INT))
    values: np.ndarray = field(default_factory=lambda: np.empty(0, _FLOAT))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of the row that was built last, i32, and the bitmap of the first `num_prompt` of them."""

    source: Sequence[int] = field(default_factory=list)
    num_prompt: int = 0
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    seen: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


class Rows:
    """Applies `RowInit`, `RowPages`, `RowDrafts` and `RowMasks`. The table of states in the step's ops documents the
    contents of a row.
    """

    def __init__(
        self, device: Device, states: Mapping[str, tuple[State, Memory]], env: Mapping[str, int], vocab: int
    ) -> None:
        """`states` maps each role of `ROLES` that the artifact's programs use to (state, memory)."""
        for role in ("tokens", "length", "pages"):
            if role not in states:
                raise LlmcError("E113", f"the artifact has no state for {role}", REMEDY)
        self._tables = {role: _Table(device, m, s, env) for role, (s, m) in states.items()}
        self._vocab = vocab
        self.count = self._tables["length"].rows
        self.max_len = self._tables["tokens"].width
        pages = self._tables["pages"]
        self._pages = np.zeros((pages.rows, pages.width), np.int32)  # page tables; only the host writes them
        self._used = [False] * self.count  # whether a row's counts may be nonzero
        words = -(-vocab // _WORD)
        self.masks = self._tables["allowed"].width // words if "allowed" in self._tables else 0  # room per row
        self._mask_words = words
        self._masks: list[list[bytes | None]] = [[None] * self.masks for _ in range(self.count)]  # None: unknown
        self._biases = _Biases()
        self._tokens = _Tokens()
        self._guided = [0] * self.count  # number of masks that the tokens of a row take in turn; 0: no guide
        self.wants_logprobs = [False] * self.count
        self.drafts = [False] * self.count  # whether tokens are drafted for a row

    def init(self, init: RowInit) -> None:
        """Rebuild a row. Everything that steps read from it is overwritten."""
        row, tables = init.row, self._tables
        tokens, seen = self._tokens_of(init)
        tables["tokens"].set(row, tokens)
        tables["length"].set(row, [init.computed])
        tables["pages"].set(row, init.pages)
        self._pages[row, : len(init.pages)] = init.pages
        params = init.params
        for role, values in (
            ("fparams", params.floats()),
            ("iparams", params.ints(init.num_prompt)),
            ("stops", params.stop_row()),
            ("drafts", params.draft_row()),
        ):
            if role in tables:
                tables[role].set(row, values)
        if "seen" in tables:
            tables["seen"].set(row, seen)
        if "counts" in tables:
            self._write_counts(row, tokens[init.num_prompt :])
        if params.biases and "biases" in tables:
            self._write_biases(row, params.biases)
        self._guided[row] = params.guided
        if params.allowed:
            self._write_mask(row, 0, params.allowed)
            if "draft_allowed" in tables:
                tables["draft_allowed"].set(row, np.frombuffer(params.allowed, np.int32))
        self.wants_logprobs[row] = params.want_logprobs
        self.drafts[row] = params.drafting[0] > 0

    def draft(self, drafts: RowDrafts) -> None:
        """Place drafted tokens after those of a row."""
        self._tables["tokens"].set(drafts.row, drafts.tokens, drafts.start)

    def place(self, row: int, computed: int) -> None:
        """Record that the draft model has the KV of this many first tokens of a row."""
        self._tables["reach"].set(row, [computed])

    def mask(self, new: RowMasks) -> None:
        """Write the masks of a guided row's next tokens, except those that the device has already."""
        count = self._guided[new.row]
        for index, mask in enumerate(new.masks):
            self._write_mask(new.row, (new.start + index) % count, mask)

    def history(self, row: int, start: int, count: int) -> np.ndarray:
        """Start reading up to `count` tokens of a row from position `start` on; see `Device.fetch`. Returns u8."""
        table = self._tables["tokens"]
        return table.fetch(row, start, min(count, table.width - start))

    def grow(self, grown: Sequence[RowPages]) -> None:
        """Append pages to the rows' tables: one write per row, or a single write of all rows in the range if that is
        cheaper.
        """
        table, host = self._tables["pages"], self._pages
        for g in grown:
            host[g.row, g.start : g.start + len(g.pages)] = g.pages
        first, last = min(g.row for g in grown), max(g.row for g in grown)
        if len(grown) > 1 and (last + 1 - first) * table.width * 4 <= len(grown) * _WRITE_COST:
            table.write(first, host[first : last + 1])
            return
        for g in grown:
            table.set(g.row, g.pages, g.start)

    def _write_mask(self, row: int, slot: int, mask: bytes) -> None:
        if "allowed" in self._tables and self._masks[row][slot] is not mask:
            self._masks[row][slot] = None  # unknown if the write fails
            self._tables["allowed"].set(row, np.frombuffer(mask, np.int32), slot * self._mask_words)
            self._masks[row][slot] = mask

    def _write_biases(self, row: int, biases: tuple[tuple[int, float], ...]) -> None:
        if self._biases.source is not biases:  # the outputs of a request share them, and begin one after the other
            ids, values = zip(*biases)
            self._biases = _Biases(biases, np.asarray(ids, _INT), np.asarray(values, _FLOAT))
        self._tables["bias_ids"].set(row, self._biases.ids)
        self._tables["biases"].set(row, self._biases.values)

    def _tokens_of(self, init: RowInit) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a row, and the bitmap of its prompt's ids: id i is bit i % 32 of word i // 32.

        They are made once for the outputs of a request, which share its prompt and begin one after the other: for
        100,000 tokens, that takes 2 ms.
        """
        last = self._tokens
        if last.source is not init.tokens or last.num_prompt != init.num_prompt:
            ids, words = np.asarray(init.tokens, np.int32), np.empty(0, np.uint32)
            if "seen" in self._tables:
                prompt, words = ids[: init.num_prompt], np.zeros(self._tables["seen"].width, np.uint32)
                np.bitwise_or.at(words, prompt // _WORD, np.uint32(1) << (prompt % _WORD).astype(np.uint32))
            last = self._tokens = _Tokens(init.tokens, init.num_prompt, ids, words.view(np.int32))
        return last.ids, last.seen

    def _write_counts(self, row: int, output: np.ndarray) -> None:
        """Write how often each id is in a row's output; an unused row has zeros already."""
        table = self._tables["counts"]
        if len(output):
            table.set(row, np.bincount(output, minlength=self._vocab)[: self._vocab])
        elif self._used[row]:
            table.clear(row)
        self._used[row] = True
