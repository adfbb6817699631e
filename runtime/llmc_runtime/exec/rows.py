"""The device rows as the host writes them: a step's diffs become bytes of the state buffers; it runs nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc_runtime.device.device import Device, Memory
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.fields import REMEDY
from llmc_runtime.format.manifest import State
from llmc_runtime.sched.step import RowInit, RowPages

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)
_WORD = 32
ROLES = ("tokens", "length", "pages", "fparams", "iparams", "stops", "seen", "counts")


class _Table:
    """One state as rows of `width` 4-byte elements, and how its rows reach the device."""

    def __init__(self, device: Device, memory: Memory, state: State, env: Mapping[str, int]) -> None:
        rows = state.shape[0](env)
        dtype = _FLOAT if state.dtype == "f32" else _INT
        self.view = memory.host.view(dtype).reshape(rows, -1)
        self._device, self._memory = device, memory
        self._stride = self.view.shape[1] * 4

    def push(self, row: int, start: int, stop: int) -> None:
        at = row * self._stride
        self._device.push(self._memory, at + start * 4, at + stop * 4)

    def set(self, row: int, values: list[int] | list[float] | np.ndarray, start: int = 0) -> None:
        stop = start + len(values)
        self.view[row, start:stop] = values
        self.push(row, start, stop)


class Rows:
    """Applies `RowInit` and `RowPages`. What a state's row holds is said in the table of states of the step's ops."""

    def __init__(
        self, device: Device, states: Mapping[str, tuple[State, Memory]], env: Mapping[str, int], vocab: int
    ) -> None:
        """`states`: role -> (state, its memory), for every role of `ROLES` that the artifact's programs use."""
        for role in ("tokens", "length", "pages"):
            if role not in states:
                raise LlmcError("E113", f"the artifact has no state for {role}", REMEDY)
        self._tables = {role: _Table(device, m, s, env) for role, (s, m) in states.items()}
        self._vocab = vocab
        self.count = self._tables["length"].view.shape[0]
        self.max_len = self._tables["tokens"].view.shape[1]
        self._used = [False] * self.count  # whether the row's counts may be other than zero
        self.wants_logprobs = [False] * self.count

    def init(self, init: RowInit) -> None:
        """Rebuild a row: everything that steps read of it is written, whatever was there before."""
        row, tokens, tables = init.row, np.asarray(init.tokens, np.int32), self._tables
        tables["tokens"].set(row, tokens)
        tables["length"].set(row, [init.computed])
        tables["pages"].set(row, init.pages)
        params = init.params
        for role, values in (
            ("fparams", params.floats()),
            ("iparams", params.ints(init.num_prompt)),
            ("stops", params.stop_row()),
        ):
            if role in tables:
                tables[role].set(row, values)
        if "seen" in tables:
            self._seen(row, tokens[: init.num_prompt])
        if "counts" in tables:
            self._counts(row, tokens[init.num_prompt :])
        self.wants_logprobs[row] = params.want_logprobs

    def grow(self, pages: RowPages) -> None:
        """Append pages to a row's table."""
        self._tables["pages"].set(pages.row, pages.pages, pages.start)

    def _seen(self, row: int, prompt: np.ndarray) -> None:
        """The bitmap of the prompt's ids: id i is bit i % 32 of word i // 32."""
        words = self._tables["seen"].view.shape[1]
        bits = np.zeros(words * _WORD, np.uint8)
        bits[prompt] = 1
        self._tables["seen"].set(row, np.packbits(bits, bitorder="little").view(np.int32))

    def _counts(self, row: int, output: np.ndarray) -> None:
        table = self._tables["counts"]
        if self._used[row]:
            table.view[row] = 0
        if len(output):
            table.view[row] = np.bincount(output, minlength=self._vocab)[: self._vocab]
        if self._used[row] or len(output):
            table.push(row, 0, table.view.shape[1])
        self._used[row] = True
