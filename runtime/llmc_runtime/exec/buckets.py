"""Selects the sizes in which a step runs. There are few of them, so that each can be one device graph."""

from __future__ import annotations

from collections.abc import Iterator

from llmc_runtime.format.program import FIRST, Program

ROWS, TOKENS = "R", "T"
_TILES = ((256, 64), (16, 16))  # steps of more than the first number of tokens are a multiple of the second


def bucket(rows: int, top: int) -> int:
    """Round `rows` up to 1, 2, 4 or a multiple of 8, limited to `top`."""
    size = rows if rows <= 2 else 4 if rows <= 4 else -(-rows // 8) * 8
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
