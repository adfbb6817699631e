"""The programs of an artifact that have one role, bound to their buffers, and the inputs that they share.

A step runs in one of few sizes (`bucket`, `token_bucket`), so that each can be one device graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device, Run
from llmc_runtime.exec.buffer_layout import INPUTS, Layout
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.program import FIRST, Program

_PADDING = (-1, 0, 0)  # inputs of a padding row: no row, zero tokens, nothing sampled
Columns = tuple[list[int], ...]  # a step's entries by column: row, number of tokens, whether it emits
ROWS, TOKENS = "R", "T"
_TILES = ((256, 64), (16, 16))  # steps of more than the first number of tokens are a multiple of the second


def bucket(rows: int, top: int) -> int:
    """Round `rows` up to 1, 2, 4 or a multiple of 8, limited to `top`."""
    if rows <= 2:
        size = rows
    elif rows <= 4:
        size = 4
    else:
        size = -(-rows // 8) * 8
    return min(size, top)


def token_bucket(tokens: int, top: int) -> int:
    """Round the tokens of a step with prompts up to 1, 2, 4, 8, a multiple of 16, or of 64 from 257 on; at most `top`.

    Kernels compute tiles of tokens, so that most of the padding costs nothing.
    """
    size = next((size for minimum, size in _TILES if tokens > minimum), 0)
    return min(-(-tokens // size) * size, top) if size else bucket(tokens, top)


def top_rows(program: Program, max_rows: int) -> int:
    """Return the largest number of entries that the program can run: of rows, unless rows have several entries."""
    top = program.serves.get(ROWS, program.symbols.get(ROWS, (1, max_rows)))[1]
    return top if program.drafts or program.role == FIRST else min(top, max_rows)


def buckets(program: Program, max_rows: int) -> Iterator[int]:
    """Yield every size in which a program with one token per row runs, in ascending order."""
    top = top_rows(program, max_rows)
    rows = max(1, program.serves.get(ROWS, (1, top))[0])
    while rows <= top:
        size = bucket(rows, top)
        yield size
        rows = size + 1


@dataclass(frozen=True)
class Bound:
    """A program bound to its buffers.

    `symbols` are the values of its symbols in order; `slots` gives the indices of those that a step sets. `width` is
    the number of most likely ids that it returns. `halves` are the two runs for open steps, split before the first
    launch that reads token masks; they are bound on first use.
    """

    program: Program
    symbols: np.ndarray
    slots: tuple[tuple[str, int], ...]
    run: Run
    width: int
    halves: list[Run] = field(default_factory=list)

    def size(self, tokens: int, rows: int) -> None:
        """Set the symbol values for the next run."""
        for name, index in self.slots:
            self.symbols[index] = tokens if name == TOKENS else rows


class EntryPoints:
    """The programs of `role` (see Program.role). `env` has the values of the symbols that no step sets.

    `max_entries` is the maximum number of entries of a step. Raises LlmcError E113 or E202.
    """

    def __init__(self, artifact: Artifact, device: Device, layout: Layout, env: Mapping[str, int], role: str) -> None:
        self._device, self._layout, self._env = device, layout, env
        self._rows = artifact.manifest.limits.max_num_seqs
        self.bound: Sequence[Bound] = tuple(self._bind(p) for p in artifact.programs if p.role == role)
        self.max_entries = max((top_rows(x.program, self._rows) for x in self.bound), default=0)
        self._memory, self._stride = layout.inputs[role], layout.strides[role]
        self._table = np.zeros((len(INPUTS), self._stride // 4), np.int32)  # host copy of the inputs
        self._sent: object = None  # the inputs now on the device; None: unknown
        self._decodes: dict[tuple[int, bool, bool], tuple[Bound, int, int]] = {}  # by rows, `verifies` and `plain`

    def ready(self, columns: Columns, verifies: bool = False, plain: bool = False) -> Bound:
        """Upload the inputs of a step, and return the program that serves it, ready to run.

        `verifies`: entries may be drafts. `plain`: a program that skips a head is preferred, as no row drafts. Raises
        LlmcError E614 if no program serves a step of this size.
        """
        tokens, count = sum(columns[1]), len(columns[0])
        bound, tokens, rows = self._pick(tokens, count, verifies, plain)
        self._feed(rows, columns)
        bound.size(tokens, rows)
        return bound

    def sizes(self) -> Iterator[Bound]:
        """Yield the programs with one token per entry in every size in which they run, with the size set."""
        for bound in self.bound:
            if bound.program.uniform:
                for rows in buckets(bound.program, self._rows):
                    bound.size(rows, rows)
                    yield bound

    def close(self) -> None:
        """Drop the programs."""
        self.bound = ()
        self._decodes.clear()

    def _feed(self, size: int, columns: Columns) -> None:
        """Upload the inputs, padded to `size` rows, unless they equal those of the step before."""
        key = (size, columns)
        if key == self._sent:
            return
        for line, column, pad in zip(self._table, columns, _PADDING):
            line[: len(column)] = column
            line[len(column) : size] = pad
        self._sent = None  # unknown if the write fails
        self._device.write(self._memory, 0, self._table)
        self._sent = key

    def _pick(self, tokens: int, rows: int, verifies: bool, plain: bool) -> tuple[Bound, int, int]:
        """Return the program that serves a step of this size, and the tokens and rows in which it runs: on a device
        with graphs rounded up, so that sizes recur.
        """
        key = rows, verifies, plain
        if tokens == rows and key in self._decodes:
            return self._decodes[key]
        env = {TOKENS: tokens, ROWS: rows}
        fitting = [b for b in self.bound if b.program.fits(env) and (b.program.drafts or not verifies)]
        allowed = [b for b in fitting if plain or not b.program.is_plain]
        if not allowed:
            served = "; ".join(f"{b.program.name}: {dict(b.program.serves)}" for b in self.bound)
            cause = f"no program serves a step of {tokens} tokens in {rows} rows ({served})"
            raise LlmcError("E614", cause, "recompile with larger --max-num-batched-tokens or --max-num-seqs")
        bound = next((b for b in allowed if b.program.is_plain), allowed[0])
        if self._device.replays:
            rows = bucket(rows, top_rows(bound.program, self._rows))
        if not bound.program.uniform:
            return bound, self._tokens(bound.program, tokens), rows
        self._decodes[key] = bound, rows, rows
        return self._decodes[key]

    def _tokens(self, program: Program, tokens: int) -> int:
        """Return the number of tokens, padding included, with which a program runs a step."""
        if not self._device.replays:
            return tokens
        top = program.serves.get(TOKENS, program.symbols.get(TOKENS, (tokens, tokens)))[1]
        return token_bucket(tokens, top)

    def _bind(self, program: Program) -> Bound:
        """Bind one program. Raises LlmcError E113 for unknown symbols, E202 for an unsupported number of pages."""
        names = list(program.symbols)
        unbound = set(names) - {TOKENS, ROWS, *self._env}
        if unbound:
            raise LlmcError("E113", f"program {program.name} has the unknown symbol {min(unbound)}", REMEDY)
        low, high = program.symbols.get("P", (0, 1 << 62))
        if not low <= self._env["P"] <= high:
            cause = f"program {program.name} supports {low} to {high} KV pages, not {self._env['P']}"
            raise LlmcError("E202", cause, f"set a KV cache size between {low} and {high} pages")
        symbols = np.array([self._env.get(n, 1) for n in names], np.int64)
        run = self._device.bind(program, self._layout.addresses(program), symbols)
        slots = tuple((n, i) for i, n in enumerate(names) if n not in self._env)
        return Bound(program, symbols, slots, run, self._top_width(program))

    def _top_width(self, program: Program) -> int:
        """Return the number of most likely ids that a program returns for each row.

        Raises LlmcError E113 if their buffer is not a matrix of 32-bit numbers that fits its bytes.
        """
        top = next((b for b in program.buffers if b.name == "top_ids"), None)
        if top is None:
            return 0
        sizes = {**program.top(), **self._env}
        shape = [size(sizes) for size in top.shape]
        if len(shape) != 2 or min(shape) < 0 or math.prod(shape) * 4 > top.bytes(sizes):
            cause = f"program {program.name}: the buffer top_ids has the shape {shape} and {top.bytes(sizes)} bytes"
            raise LlmcError("E113", cause, REMEDY)
        return shape[1]
