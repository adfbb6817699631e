"""Cases of recurrent kernels: steps with several entries of a row, prompts, new rows, padding and dirty states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from kernels.harness import Case

from llmc.codegen.kernel import Kernel
from llmc.ir.example import example_graph
from llmc.ir.ops import OPS

M = 12  # device rows
# (runs of a step, each the tokens of its entries; padding entries; padding tokens)
STEPS: dict[str, tuple[Sequence[Sequence[int]], int, int]] = {
    "decode": ([[1]] * 5, 2, 2),
    "verify": ([[1], [1] * 4, [1] * 3], 1, 1),
    "mixed": ([[1], [37], [1, 1], [0], [5, 0, 3], [18]], 2, 19),
    "prompt": ([[75]], 0, 0),
}
# key heads, value heads, elements of keys, of values
SHAPES = ((2, 4, 16, 16), (1, 3, 20, 37), (3, 3, 8, 5))


def step(rng: np.random.Generator, name: str, after: int) -> dict[str, np.ndarray]:
    """Return rows, starts and positions of a step; every third run begins at position 0, the others at `after` or later.

    A padding entry has one of the padding tokens; the others are behind the last entry.
    """
    runs, padding, spare = STEPS[name]
    rows, counts, positions = [], [], []
    for i, (row, run) in enumerate(zip(rng.permutation(M), runs, strict=False)):
        rows += [row] * len(run)
        counts += run
        first = 0 if i % 3 == 1 else after + int(rng.integers(0, 50))
        positions += range(first, first + sum(run))
    rows += [-1] * padding
    counts += [0] * padding
    if name == "mixed":
        counts[-1] = 1
    total = len(positions) + spare
    return {
        "rows": np.array(rows, np.int32),
        "starts": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "positions": np.array([*positions, *[-1] * (total - len(positions))], np.int32),
    }


def _floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def conv_arrays(rng: np.random.Generator, name: str, channels: int, width: int, ring: int, bias: bool) -> list[Any]:
    """Operands of row_conv."""
    of_step = step(rng, name, 1)
    x = _floats(rng, len(of_step["positions"]), channels)
    arrays = [x, _floats(rng, channels, width), _floats(rng, M, ring, channels), *of_step.values()]
    return [*arrays, _floats(rng, channels)] if bias else arrays


def recurrence_arrays(
    rng: np.random.Generator, name: str, shape: tuple[int, int, int, int], delta: bool, log: int
) -> dict[str, Any]:
    """Operands of row_recurrence by name, and base and log of `log` tokens if it is not 0.

    Some keys are equal to the ones before, as in repeated text.
    """
    g, h, d, e = shape
    of_step = step(rng, name, 5)
    t = len(of_step["positions"])
    k = _floats(rng, t, g, d)
    k[t // 3 : t // 2] = k[t // 3 : t // 3 + 1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    out = {
        "q": _floats(rng, t, g, d), "k": k, "v": _floats(rng, t, h, e),
        "decay": -rng.uniform(0, 1, (t, h)).astype(np.float32) ** 3, "memory": _floats(rng, M, h, d, e),
    }  # fmt: skip
    if log:
        first = dict.fromkeys(range(M), 7)
        for i, row in enumerate(of_step["rows"]):
            if row >= 0 and (i == 0 or of_step["rows"][i - 1] != row) and of_step["starts"][i] < t:
                first[int(row)] = int(of_step["positions"][of_step["starts"][i]])
        base = [max(0, first[m] - int(rng.integers(0, log + 1))) for m in range(M)]
        logged = _floats(rng, M, log, g * d + h * e + 2 * h)
        logged[..., : g * d] /= d**0.5
        logged[..., -2 * h : -h] = -np.abs(logged[..., -2 * h : -h])
        logged[..., -h:] = rng.random((M, log, h))
        out |= {"base": np.array(base, np.int32), "log": logged}
    out |= of_step
    return {**out, "beta": rng.random((t, h)).astype(np.float32)} if delta else out


def cases(kernels: dict[str, Kernel], rng: np.random.Generator, target: Any) -> Iterator[Case]:
    """Yield the cases of all recurrent kernels, by op name, under all schedules."""
    for name in STEPS:
        for width, ring, channels in ((4, 4, 37), (3, 6, 300), (2, 2, 8), (1, 1, 5)):
            for dtype in ("f32", "bf16"):
                arrays = conv_arrays(rng, name, channels, width, ring, width != 3)
                yield from _scheduled(f"row_conv-{name}-{width}", "row_conv", kernels, arrays, dtype, target)
        for i, shape in enumerate(SHAPES):
            for log in (0, 3):
                delta, dtype = bool((i + log) % 2), "bf16" if i != 1 or log else "f32"
                of = recurrence_arrays(rng, name, shape, delta, log)
                op = "row_recurrence_draft" if log else "row_recurrence"
                what = f"{name}-{'x'.join(map(str, shape))}-{'delta' if delta else 'sum'}"
                yield from _scheduled(f"{op}-{what}", op, kernels, list(of.values()), dtype, target)
                if log:
                    logged = [x for key, x in of.items() if key not in ("q", "memory")]
                    yield from _scheduled(f"row_log-{what}", "row_log", kernels, logged, dtype, target)


def _scheduled(
    name: str, op: str, kernels: dict[str, Kernel], arrays: list[Any], dtype: str, target: Any
) -> Iterator[Case]:
    graph = example_graph(OPS[op], arrays, {}, dtype).graphs["main"]
    (node,) = graph.nodes
    for i, schedule in enumerate(kernels[op].schedules(node, target)):
        # Chunks round their factors to TF32 on tensor cores.
        error = 5e-3 if schedule.get("chunk") and "interpret" not in target.name else 2e-5
        yield Case(f"{name}-{dtype}-{i}", graph, kernels[op], schedule, arrays, rtol=error, atol=error)
