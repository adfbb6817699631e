"""CachedLists: the free pages with cached prefixes, in a list for each tenant, and the longest and the oldest list.

A server has a tenant for each API key, perhaps thousands, and a long prompt takes thousands of pages: no operation
looks at all lists. Entries of the two heaps may be outdated; they are corrected when they reach the top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

_MIN_ENTRIES = 64  # entries of a heap that is not made anew


@dataclass(eq=False, slots=True)
class CachedList:
    """The free pages with a tenant's cached prefixes: a ring whose sentinel is `end`.

    number:  the order in which lists were made
    ranked:  the length in its valid entry among the longest lists, at least `length` unless it has grown; 0: none
    """

    tenant: str
    end: int
    number: int
    length: int = 0
    ranked: int = 0
    has_grown: bool = False


_Entry = tuple[int, int, CachedList]


class CachedLists(dict[str, CachedList]):
    """The lists by tenant, none of them empty. An operation takes O(log n) amortized time for n lists.

    `last_used` returns when the first page of a list was last used. For each list it never decreases, since pages are
    appended in the order in which they were used.
    """

    def __init__(self, last_used: Callable[[CachedList], int]) -> None:
        super().__init__()
        self._last_used = last_used
        self._longest: list[_Entry] = []  # by -length; valid if that is the list's `ranked`
        self._grown: list[CachedList] = []  # lists that may be longer than they are ranked
        self._oldest: list[_Entry] = []  # by last_used
        self._num_made = 0

    def make(self, tenant: str, end: int, now: int) -> CachedList:
        """Return a new list for a page that was last used `now`, which `grow` adds."""
        self._num_made += 1
        made = self[tenant] = CachedList(tenant, end, self._num_made)
        if self._is_outdated(self._oldest):
            others = (cached for cached in self.values() if cached.length)
            self._oldest = [(self._last_used(cached), cached.number, cached) for cached in others]
            heapify(self._oldest)
        heappush(self._oldest, (now, made.number, made))
        return made

    def grow(self, cached: CachedList) -> None:
        """Add a page to a list."""
        cached.length += 1
        if not cached.has_grown:
            cached.has_grown = True
            self._grown.append(cached)

    def shrink(self, cached: CachedList, count: int) -> bool:
        """Take `count` pages from a list. Return whether it is empty, and so removed."""
        cached.length -= count
        if not cached.length:
            del self[cached.tenant]
        return not cached.length

    def oldest(self) -> CachedList:
        """Return the list whose first page was not used for the longest time."""
        heap = self._oldest
        while True:
            ranked, number, cached = heap[0]
            if not cached.length:
                heappop(heap)
            elif (used := self._last_used(cached)) != ranked:
                heapreplace(heap, (used, number, cached))
            else:
                return cached

    def longest(self) -> tuple[CachedList, int]:
        """Return the longest list, and how many pages it has more than any other, at least."""
        self._rank_grown()
        heap = self._longest
        while True:
            negative, number, cached = heap[0]
            if cached.ranked != -negative:
                heappop(heap)
            elif cached.length != cached.ranked:
                cached.ranked = cached.length
                if cached.length:
                    heapreplace(heap, (-cached.length, number, cached))
                else:
                    heappop(heap)
            else:
                second = -min(entry[0] for entry in heap[1:3]) if len(heap) > 1 else 0
                return cached, max(0, cached.length - second)

    def clear(self) -> None:
        """Forget all lists."""
        super().clear()
        for entries in (self._longest, self._grown, self._oldest):
            entries.clear()

    def _rank_grown(self) -> None:
        """Bring the heap of the longest lists up to date."""
        if self._is_outdated(self._longest):
            self._longest = [(-cached.ranked, cached.number, cached) for cached in self.values() if cached.ranked]
            heapify(self._longest)
        for cached in self._grown:
            cached.has_grown = False
            if cached.length > cached.ranked:
                cached.ranked = cached.length
                heappush(self._longest, (-cached.length, cached.number, cached))
        self._grown.clear()

    def _is_outdated(self, heap: list[_Entry]) -> bool:
        """Whether most entries of a heap are outdated, so that it has to be made anew."""
        return len(heap) > 2 * len(self) + _MIN_ENTRIES
