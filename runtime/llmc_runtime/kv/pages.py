"""Reference-counted pages of the KV cache and the free list.

A page is a number. A page used by n tables has n references; a page without references is on the free list. Pages are
taken from the head of the list: first those whose content is of no further use, then pages of cached prefixes, least
recently used first. Every operation takes O(1) time per page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class PageError(RuntimeError):
    """An operation that violates the pool's contract, such as freeing a page twice: a bug in the caller."""


class PagePool:
    """A pool of `num_pages` pages, all free at first, allocated in ascending order.

    `forget(page)` is called when a page with cached content is reallocated, before its content is overwritten.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None] | None = None) -> None:
        if num_pages < 1:
            raise PageError(f"a pool needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.forget = forget
        self.refs = [0] * num_pages
        self.cached = bytearray(num_pages)  # 1 if the page's content belongs to a cached prefix
        # The free list is a ring with a sentinel, whose number is num_pages: next[sentinel] is the head.
        self._next = [*range(1, num_pages + 1), 0]
        self._prev = [num_pages, *range(num_pages)]

    @property
    def num_used(self) -> int:
        """The number of pages with at least one reference."""
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """Take `count` pages from the head of the free list, with one reference each. Raises PageError if there are
        fewer.
        """
        if count > self.num_free:
            raise PageError(f"{count} pages requested; {self.num_free} are free")
        following, refs, cached, end = self._next, self.refs, self.cached, self.num_pages
        allocated = []
        page = following[end]
        for _ in range(count):
            if cached[page]:
                cached[page] = 0
                if self.forget is not None:
                    self.forget(page)
            refs[page] = 1
            allocated.append(page)
            page = following[page]
        following[end] = page
        self._prev[page] = end
        self.num_free -= count
        return allocated

    def share(self, page: int) -> None:
        """Add a reference to a page, whether it is in use or cached on the free list."""
        if not self.refs[page]:
            before, after = self._prev[page], self._next[page]
            self._next[before] = after
            self._prev[after] = before
            self.num_free -= 1
        self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page, in order.

        Pass a table's pages last to first, so that the end of a sequence is evicted before its beginning. Raises
        PageError if a page has no reference.
        """
        refs, cached, following, previous, end = self.refs, self.cached, self._next, self._prev, self.num_pages
        for page in pages:
            count = refs[page] - 1
            if count < 0:
                raise PageError(f"page {page} freed twice")
            refs[page] = count
            if count:
                continue
            # Cached pages go to the tail, others to the head, from which pages are taken.
            before, after = (previous[end], end) if cached[page] else (end, following[end])
            following[before] = previous[after] = page
            previous[page], following[page] = before, after
            self.num_free += 1

    def mark_cached(self, page: int) -> None:
        """Mark the content of a page in use as cached: once free, the page goes to the tail of the free list."""
        if not self.refs[page]:
            raise PageError(f"page {page} is free: its content cannot be cached")
        self.cached[page] = 1

    def drop_all(self) -> None:
        """Forget all cached content. Raises PageError if a page is in use."""
        if self.num_used:
            raise PageError(f"{self.num_used} pages are in use")
        self.cached = bytearray(self.num_pages)

    def free_list(self) -> list[int]:
        """Return the free pages in the order of allocation. Takes O(pages) time; for audits."""
        pages: list[int] = []
        page = self._next[self.num_pages]
        while page != self.num_pages and len(pages) <= self.num_pages:
            pages.append(page)
            page = self._next[page]
        return pages
