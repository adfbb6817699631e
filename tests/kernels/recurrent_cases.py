"""Recurrent ops on device rows for tests of their kernels: nodes of several sizes, and random steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import state, tensor

ROWS = 6  # device rows
LEAST = 16  # tokens of the shortest run that is computed in chunks


@dataclass(frozen=True)
class Shape:
    """One recurrence: dtype, key heads, value heads, elements of a key and a value, whether it is the delta rule.

    n: tokens that may be rejected. channels: whether each channel of a key decays at a rate of its own. chunk: tokens
    of a chunk.
    """

    name: str
    dtype: str
    g: int
    h: int
    d: int
    e: int
    delta: bool = True
    n: int = 3
    channels: bool = False
    chunk: int = 32

    @property
    def factors(self) -> int:
        """The decays of a token."""
        return self.h * (self.d if self.channels else 1)

    @property
    def width(self) -> int:
        """The numbers of a token in the log."""
        return self.g * self.d + self.h * self.e + self.factors + self.h


@dataclass(frozen=True)
class Step:
    """A random step: operands rows, starts, positions, and per run its device row and first position."""

    operands: list[np.ndarray]
    first: dict[int, int]
    tokens: int


def random_step(rng: np.random.Generator, longest: int = 80) -> Step:
    """Runs of one or several entries, some of which have no tokens; padding entries, and tokens after the last one."""
    rows: list[int] = []
    sizes: list[int] = []
    positions: list[np.ndarray] = []
    first: dict[int, int] = {}
    for row in rng.permutation(ROWS)[: rng.integers(1, ROWS)]:
        if rows and rng.random() < 0.3:
            rows, sizes = [*rows, -1], [*sizes, int(rng.integers(0, 3))]
            positions.append(np.full(sizes[-1], -1))
        entries = rng.choice([1, 1, 2, 4], [1, int(rng.integers(0, 4))][rng.random() < 0.5] or 1)
        of_run = [int(rng.choice([0, 1, 1, 2, 5, rng.integers(1, longest)])) for _ in entries]
        start = int(rng.choice([0, 1, 2, rng.integers(0, 200)]))
        rows, sizes = rows + [int(row)] * len(of_run), sizes + of_run
        positions.append(start + np.arange(sum(of_run)))
        if sum(of_run):
            first[int(row)] = start
    rows += [-1] * int(rng.integers(0, 3))
    sizes += [0] * (len(rows) - len(sizes))
    positions.append(np.full(int(rng.integers(0, 3)), -1))
    at = np.concatenate(positions)
    if not len(at):
        return random_step(rng, longest)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return Step([np.array(x, np.int32) for x in (rows, starts, at)], first, len(at))


STEP: Any = (("rows", tensor("i32", "R")), ("starts", tensor("i32", "R+1")), ("positions", tensor("i32", "T")))


def conv_graph(dtype: str, channels: int, width: int, ring: int, bias: bool) -> Graph:
    g = Graph("test")
    operands = [
        g.input("x", tensor(dtype, "T", channels)),
        g.input("weight", tensor(dtype, channels, width)),
        g.input("recent", state(dtype, ROWS, ring, channels)),
        *(g.input(name, t) for name, t in STEP),
        *([g.input("bias", tensor(dtype, channels))] if bias else []),
    ]
    g.outputs = list(g.add(OPS["row_conv"], operands, {}).results)
    return g


def conv_inputs(g: Graph, step: Step, rng: np.random.Generator) -> list[np.ndarray]:
    """The ring is NaN except for the positions that the rows read."""
    (c, w), (_, n, _) = (tuple(int(d.const or 0) for d in g.inputs[i].type.shape) for i in (1, 2))
    recent = np.full((ROWS, n, c), np.nan, np.float32)
    for row, first in step.first.items():
        known = np.arange(max(0, first - w + 1), first) % n
        recent[row, known] = rng.standard_normal((len(known), c))
    x, weight, bias = (rng.standard_normal(s).astype(np.float32) for s in ((step.tokens, c), (c, w), c))
    return [x, weight, recent, *step.operands, *([bias] if len(g.inputs) == 7 else [])]


def recurrence_graph(s: Shape, op: str) -> Graph:
    """A graph of one recurrence, of chunk_factors or of row_log."""
    g = Graph("test")
    attrs = {name: value for name, value in (("chunk", s.chunk), ("least", LEAST)) if name in OPS[op].attrs}
    kinds = {
        "q": tensor(s.dtype, "T", s.g, s.d), "k": tensor(s.dtype, "T", s.g, s.d), "v": tensor(s.dtype, "T", s.h, s.e),
        "decay": tensor("f32", "T", s.factors), "memory": state("f32", ROWS, s.h, s.d, s.e), "base": state("i32", ROWS),
        "log": state("f32", ROWS, s.n, s.width), **dict(STEP), "beta": tensor("f32", "T", s.h),
        "factors": tensor("f32", "T", s.h, 1 + s.delta, s.chunk),
    }  # fmt: skip
    names = [slot.name for slot in OPS[op].operands if s.delta or slot.name != "beta"]
    g.outputs = list(g.add(OPS[op], [g.input(name, kinds[name]) for name in names], attrs).results)
    return g


def recurrence_inputs(g: Graph, s: Shape, step: Step, rng: np.random.Generator) -> list[np.ndarray]:
    """States are NaN except for what the rows read; a row that starts at position 0 reads nothing."""
    t = step.tokens
    keys = rng.standard_normal((t, s.g, s.d))
    made: dict[str, Any] = {
        "q": rng.standard_normal((t, s.g, s.d)), "k": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "v": rng.standard_normal((t, s.h, s.e)), "decay": -rng.exponential(0.5, (t, s.factors)),
        "memory": np.full((ROWS, s.h, s.d, s.e), np.nan), "beta": rng.random((t, s.h)),
        "base": rng.integers(0, 300, ROWS), "log": np.full((ROWS, s.n, s.width), np.nan),
        **dict(zip(("rows", "starts", "positions"), step.operands, strict=True)),
    }  # fmt: skip
    if "factors" in {v.name for v in g.inputs}:
        used = [made[name] for name in ("q", "k", "decay", "rows", "starts", *["beta"] * s.delta)]
        made["factors"] = OPS["chunk_factors"].ref(*used, chunk=s.chunk, least=LEAST)
    for row, first in step.first.items():
        if not first:
            continue
        made["memory"][row] = rng.standard_normal((s.h, s.d, s.e))
        made["base"][row] = rng.integers(max(0, first - s.n), first + 1)
        logged = np.arange(made["base"][row], first) % s.n
        tokens = rng.standard_normal((len(logged), made["log"].shape[2])) / s.d**0.5
        tokens[:, -s.factors - s.h :] = rng.random((len(logged), s.factors + s.h))
        tokens[:, -s.factors - s.h : -s.h] *= -1
        made["log"][row, logged] = tokens
    return [made[v.name].astype(np.int32 if v.type.dtype == "i32" else np.float32) for v in g.inputs]
