"""Latent attention over pages for tests of its kernels: nodes of several sizes, and random steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import state, tensor

PAGES, TABLE, ROWS = 40, 11, 6  # pages of the pool and of a row, device rows


@dataclass(frozen=True)
class Shape:
    """One node: dtypes of queries and of the pool, heads, elements of a latent and of the rotary part, page."""

    name: str
    q: str
    pool: str
    h: int
    latent: int
    rotary: int
    page: int = 16


def build(s: Shape, splits: int = 0) -> Graph:
    """A graph of paged_latent_attention, or of paged_latent_attention_split with one token per row."""
    g = Graph("test")
    rows = tensor("i32", "T" if splits else "R")
    operands = [
        g.input("q", tensor(s.q, "T", s.h, s.latent)),
        g.input("rotary", tensor(s.q, "T", s.h, s.rotary)),
        g.input("pool", state(s.pool, PAGES, s.page, s.latent + s.rotary)),
        g.input("pages", state("i32", ROWS, TABLE)),
        g.input("rows", rows),
        *([] if splits else [g.input("starts", tensor("i32", "R+1"))]),
        g.input("positions", tensor("i32", "T")),
    ]
    attrs = {"scale": (s.latent + s.rotary) ** -0.5 * 1.5}
    if splits:
        g.outputs = list(g.add(OPS["paged_latent_attention_split"], operands, attrs | {"splits": splits}).results)
    else:
        g.outputs = [g.add(OPS["paged_latent_attention"], operands, attrs).result]
    return g


def steps(rng: np.random.Generator, page: int, count: int, single: bool = False) -> list[list[tuple[int, int, int]]]:
    """Random steps: (device row, tokens before, new tokens) of each entry; -1 is a padding row.

    Their pages fit the pool. Some entries follow another one of the same row, as those that verify drafts do.
    """
    found = []
    while len(found) < count:
        step: list[tuple[int, int, int]] = []
        free = PAGES
        for row in rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]:
            total = int(rng.integers(1, TABLE * page + 1))
            new = 1 if single else min(total, int(rng.choice([1, 1, 2, 5, 33, 70, total])))
            if (free := free - -(-total // page)) < 0:
                break
            cut = int(rng.integers(0, new)) if new > 1 and rng.random() < 0.3 else 0
            step += [(int(row), total - new, cut)] * (cut > 0) + [(int(row), total - new + cut, new - cut)]
        step += [(-1, 0, 1 if single else int(rng.integers(0, 3)))] * int(rng.integers(0, 3))
        if step:
            found.append(step)
    return found


def draw(
    s: Shape, step: Sequence[tuple[int, int, int]], rng: np.random.Generator, single: bool = False
) -> list[np.ndarray]:
    """Inputs of a step; the pool is NaN wherever no token of a row lies, and every row's pages are scattered."""
    spans = [n for _, _, n in step]
    total = sum(spans) + (0 if single else int(rng.integers(0, 3)))
    pool = np.full((PAGES, s.page, s.latent + s.rotary), np.nan, np.float32)
    free = list(rng.permutation(PAGES))
    pages, positions = np.zeros((ROWS, TABLE), np.int32), np.full(total, -1, np.int32)
    held = dict.fromkeys(range(ROWS), 0)
    starts = np.concatenate([[0], np.cumsum(spans)]).astype(np.int32)
    for (row, before, n), at in zip(step, starts, strict=False):
        if row < 0:
            continue
        positions[at : at + n] = before + np.arange(n)
        need = -(-(before + n) // s.page)
        while held[row] < need:
            pages[row, held[row]] = free.pop()
            held[row] += 1
        for t in range(before + n):
            if np.isnan(pool[pages[row, t // s.page], t % s.page]).any():
                pool[pages[row, t // s.page], t % s.page] = rng.standard_normal(s.latent + s.rotary)
    q, rotary = (rng.standard_normal((total, s.h, n)).astype(np.float32) for n in (s.latent, s.rotary))
    rows = np.array([row for row, _, _ in step], np.int32)
    return [q, rotary, pool, pages, rows, *([] if single else [starts]), positions]
