"""Which program runs a step, and in which size: few sizes of decode steps, so that each can be one device graph."""

from __future__ import annotations

from collections.abc import Iterator

from llmc_runtime.format.program import Program

ROWS, TOKENS = "R", "T"


def bucket(rows: int, top: int) -> int:
    """The rows in which `rows` rows run: 1, 2, 4, then multiples of 8, at most `top`."""
    size = rows if rows <= 2 else 4 if rows <= 4 else -(-rows // 8) * 8
    return min(size, top)


def top_rows(program: Program, max_rows: int) -> int:
    """The most rows that the program may run."""
    return min(program.serves.get(ROWS, program.symbols.get(ROWS, (1, max_rows)))[1], max_rows)


def buckets(program: Program, max_rows: int) -> Iterator[int]:
    """Every size in which a program of one token a row runs, ascending."""
    top = top_rows(program, max_rows)
    rows = max(1, program.serves.get(ROWS, (1, top))[0])
    while rows <= top:
        size = bucket(rows, top)
        yield size
        rows = size + 1
