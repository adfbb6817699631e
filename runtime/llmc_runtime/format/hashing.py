"""SHA-256 of small files, and of the blocks of large ones with several threads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

BLOCK = 16 << 20
Buffer = bytes | bytearray | memoryview


def sha256(data: Buffer) -> str:
    """Return the SHA-256 in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def spans(size: int, block: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of every block of a file of `size` bytes."""
    for begin in range(0, size, block):
        yield begin, min(begin + block, size)


def wrong_blocks(data: memoryview, blocks: Sequence[str], block: int = BLOCK, threads: int = 2) -> list[int]:
    """Return the indices of the blocks of `data` whose hash differs from `blocks`, which has one hash per block.

    The threads run in parallel, as hashlib releases the GIL.
    """
    pieces = list(spans(len(data), block))
    if len(pieces) != len(blocks):
        return list(range(max(len(pieces), len(blocks))))
    with ThreadPoolExecutor(max(1, min(threads, len(pieces)))) as pool:
        actual = list(pool.map(lambda p: sha256(data[p[0] : p[1]]), pieces))
    return [i for i, (a, b) in enumerate(zip(actual, blocks)) if a != b]


class BlockHasher:
    """Hashes a stream block by block while it is written."""

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.blocks: list[str] = []
        self._hash = hashlib.sha256()
        self._remaining = block

    def update(self, data: memoryview) -> None:
        """Append data to the stream."""
        while len(data):
            piece = data[: self._remaining]
            self._hash.update(piece)
            self._remaining -= len(piece)
            data = data[len(piece) :]
            if not self._remaining:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """Return the hashes of all blocks; the last block may be shorter."""
        if self._remaining != self.block:
            self._close()
        return tuple(self.blocks)

    def _close(self) -> None:
        self.blocks.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()
        self._remaining = self.block
