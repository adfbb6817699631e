"""Reference-counted pages of the KV cache and the order in which free ones are given out. No tokens, no requests.

A page is a number. One in use by n tables has n references; one with none is on the free list: at its head pages whose
content nobody can ask for again, at its tail pages that a prefix may still hit, least recently used first. Every
operation costs O(1) a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class PageError(RuntimeError):
    """A broken promise of the caller (a page freed twice, taken when there is none): a bug, never bad input."""


class PagePool:
    """`num_pages` pages, all free at first, given out in ascending order.

    `forget(page)` is called when a kept page is given out again, before its content is lost.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None] | None = None) -> None:
        if num_pages < 1:
            raise PageError(f"a pool needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.forget = forget
        self.refs = [0] * num_pages
        self.kept = bytearray(num_pages)  # 1: some prefix may ask for this page's content
        # The free list is a ring through a sentinel, number num_pages: next[sentinel] is its head.
        self._next = [*range(1, num_pages + 1), 0]
        self._prev = [num_pages, *range(num_pages)]

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """`count` pages from the head of the free list, with one reference each. PageError where there are fewer."""
        if count > self.num_free:
            raise PageError(f"{count} pages asked for, {self.num_free} free")
        following, refs, kept, end = self._next, self.refs, self.kept, self.num_pages
        taken = []
        page = following[end]
        for _ in range(count):
            if kept[page]:
                kept[page] = 0
                if self.forget is not None:
                    self.forget(page)
            refs[page] = 1
            taken.append(page)
            page = following[page]
        following[end] = page
        self._prev[page] = end
        self.num_free -= count
        return taken

    def share(self, page: int) -> None:
        """One more reference to a page, whether in use or kept on the free list."""
        if not self.refs[page]:
            before, after = self._prev[page], self._next[page]
            self._next[before] = after
            self._prev[after] = before
            self.num_free -= 1
        self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page, in the given order: give a table's pages last first, so that the end of a
        sequence is lost before its beginning. PageError where a page has no reference."""
        refs, kept, following, previous, end = self.refs, self.kept, self._next, self._prev, self.num_pages
        for page in pages:
            left = refs[page] - 1
            if left < 0:
                raise PageError(f"page {page} freed twice")
            refs[page] = left
            if left:
                continue
            before, after = (previous[end], end) if kept[page] else (end, following[end])
            following[before] = previous[after] = page
            previous[page], following[page] = before, after
            self.num_free += 1

    def keep(self, page: int) -> None:
        """The content of a page in use may be asked for again: when freed it goes to the tail."""
        if not self.refs[page]:
            raise PageError(f"page {page} is free: its content cannot be kept")
        self.kept[page] = 1

    def drop_all(self) -> None:
        """Nobody asks for any content again. PageError while a page is in use."""
        if self.num_used:
            raise PageError(f"{self.num_used} pages are in use")
        self.kept = bytearray(self.num_pages)

    def free_list(self) -> list[int]:
        """The free pages in the order in which they will be given out; O(pages), for audits."""
        found: list[int] = []
        page = self._next[self.num_pages]
        while page != self.num_pages and len(found) <= self.num_pages:
            found.append(page)
            page = self._next[page]
        return found
