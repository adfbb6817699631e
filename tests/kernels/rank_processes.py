"""Ranks as processes that interpret Triton collectives on memory that they share, as GPUs do."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from kernels.cases import Text
from llmc_runtime.format.group_memory import (
    DATA,
    EMPTY,
    ENDED_WORD,
    LIMIT_WORD,
    PEERS_WORD,
    RANK_WORD,
    group_bytes,
)

from llmc.codegen.kernel import Kernel, Schedule
from llmc.ir.dtype import DTYPES
from llmc.ir.interp import bind_symbols
from llmc.testing.case import POISON_BYTE, Buffer
from llmc.testing.triton_interpreter import INTERPRETED, interpret, tensor_of

NONE: Mapping[int, int] = MappingProxyType({})


def shared(nbytes: int) -> np.ndarray:
    """Zeroed memory, u8[nbytes], that forked processes share with this one at the same address."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def group_memories(ranks: int, limit: int) -> list[np.ndarray]:
    """The memory of every rank of a group, whose kernels read a lane at most `limit` times."""
    memories = [shared(group_bytes(ranks)) for _ in range(ranks)]
    for rank, memory in enumerate(memories):
        words = memory[:DATA].view(np.int64)
        words[RANK_WORD], words[LIMIT_WORD] = rank, limit
        words[PEERS_WORD : PEERS_WORD + ranks] = [m.ctypes.data for m in memories]
        memory[DATA:] = EMPTY
    return memories


def has_ended(memory: np.ndarray) -> bool:
    """Whether kernels of the rank with this memory have given up."""
    return bool(memory[:DATA].view(np.int64)[ENDED_WORD])


class Launch:
    """One collective as every rank launches it: its source, sizes and grid of at most `programs` programs."""

    def __init__(self, kernel: Kernel, text: Text, schedule: Schedule, sizes: dict[str, int], programs: int) -> None:
        graph = text.graph()
        (node,) = graph.nodes
        assert kernel.reject(node, INTERPRETED) is None
        self.node, self.kernel, self.schedule = node, kernel, schedule
        self.source = kernel.emit(node, schedule, INTERPRETED)
        self.operands, self.results = [v.type for v in node.operands], [v.type for v in node.results]
        self.shapes = [tuple(int(d.subs(sizes)) for d in t.shape) for t in (*self.operands, *self.results)]
        bound = bind_symbols(graph, [np.zeros(s) for s in self.shapes[: len(self.operands)]], {})
        self.sizes = [int(d.subs(bound)) for d in self.source.sizes]
        chunks = int(self.source.grid[0].subs(bound))
        self.grid = (min(chunks, programs), 1, 1)

    def run(
        self, xs: Sequence[np.ndarray], memories: Sequence[np.ndarray], rank: int, inplace: Mapping[int, int] = NONE
    ) -> list[np.ndarray]:
        """Return the rank's results in their dtypes; raises AssertionError if bytes outside of them are written.

        memories: of all ranks of the group. inplace: result -> the operand whose memory it is in.
        """
        sources = [Buffer.holding(x, t) for x, t in zip(xs, self.operands, strict=True)]
        shapes = self.shapes[len(sources) :]
        targets = [
            sources[inplace[i]] if i in inplace else Buffer(int(np.prod(shape)) * DTYPES[t.dtype].bits // 8)
            for i, (t, shape) in enumerate(zip(self.results, shapes, strict=True))
        ]
        every = zip([*sources, *targets], [*self.operands, *self.results], strict=True)
        words = torch.from_numpy(memories[rank]).view(torch.int64)
        interpret(self.source, [*(tensor_of(b, t.dtype) for b, t in every), words], self.sizes, self.grid, memories)
        for b in (*sources, *targets):
            b.check("an operand or a result")
        for i, (x, t) in enumerate(zip(xs, self.operands, strict=True)):
            if i not in inplace.values():
                np.testing.assert_array_equal(sources[i].get(t, x.shape).view(np.uint8), x.view(np.uint8))
        return [b.get(t, shape) for b, t, shape in zip(targets, self.results, shapes, strict=True)]


def is_poisoned(y: np.ndarray) -> bool:
    """Whether no byte of a result was written."""
    return bool((y.view(np.uint8) == POISON_BYTE).all())


def run_ranks(ranks: int, work: Callable[[int], Any], seconds: float = 120) -> list[Any]:
    """Run `work(rank)` in a process per rank at the same time and return the results, or raise the first error."""
    context = multiprocessing.get_context("fork")
    results: Sequence[Any] = [context.Queue() for _ in range(ranks)]

    def main(rank: int) -> None:
        try:
            results[rank].put((True, work(rank)))
        except BaseException as e:
            results[rank].put((False, repr(e)))

    processes = [context.Process(target=main, args=(rank,)) for rank in range(ranks)]
    for p in processes:
        p.start()
    try:
        found = [q.get(timeout=seconds) for q in results]
    finally:
        for p in processes:
            p.join(1)
            p.kill()
    assert all(ok for ok, _ in found), [error for ok, error in found if not ok]
    return [value for _, value in found]
