"""PrefixMatch: the cached pages that a waiting request can reuse, kept up to date while pages come and go."""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.kv.pages import PagePool


class PrefixMatch:
    """The pages of the longest cached prefix of a sequence, at most `max_pages`.

    chain:  the sequence's digests (see PrefixCache); identifies the match
    pages:  the pages, which have no reference by this match
    """

    __slots__ = ("_counted", "_in_use", "_index", "_revived", "chain", "max_pages", "pages")

    def __init__(self, chain: list[bytes], max_pages: int) -> None:
        self.chain, self.max_pages = chain, max_pages
        self.pages: list[int] = []
        self._index: dict[bytes, int] = {}  # page digest -> its index in the prompt
        # At the last count: how many pages were counted and in use, and PagePool.num_revived.
        self._counted = self._in_use = self._revived = 0

    def extend(self, pages: Sequence[int]) -> None:
        """Add the pages that follow."""
        start = len(self.pages)
        self._index.update(zip(self.chain[start + 1 : start + 1 + len(pages)], range(start, start + len(pages))))
        self.pages += pages

    def forget(self, digest: bytes) -> None:
        """Drop the page with this digest, if there is one, and those after it: it is evicted."""
        index = self._index.get(digest)
        if index is not None:
            for later in self.chain[index + 1 : len(self.pages) + 1]:
                del self._index[later]
            del self.pages[index:]
            self._counted = min(self._counted, index)

    def length_to(self, digest: bytes) -> int:
        """Return the number of pages up to the one with this digest, 0 if there is none."""
        return self._index.get(digest, -1) + 1

    def max_in_use(self, count: int, pool: PagePool) -> int:
        """Return an upper bound of `in_use(count, pool)` in O(1) time.

        It is that of the last count, plus pages that were not counted, plus free pages that got a reference since then.
        """
        new = max(0, count - self._counted) + pool.num_revived - self._revived
        return min(count, self._in_use + new)

    def in_use(self, count: int, pool: PagePool) -> int:
        """Count those of the first `count` pages that have references, in O(count) time."""
        references = list(map(pool.refs.__getitem__, self.pages[:count]))
        self._counted, self._in_use, self._revived = count, count - references.count(0), pool.num_revived
        return self._in_use
