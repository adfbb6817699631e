"""Reference-counted pages of the KV cache and the lists of free ones.

A page is a number. A page used by n tables has n references; a page without references is free. Free pages without
cached content are taken first. The pages of a cached prefix belong to the tenant that computed it. They are taken from
the tenant with the most free ones, least recently used first, so that one tenant's prompts do not take the place of all
prefixes of others. A tenant that has left keeps nothing: once MAX_AGE times as many pages as the pool has were evicted
since a page was last used, it goes before all others.

The pages of long tables are not released at once when their requests end: `retire` leaves most of them to later steps
(`begin_step`), or until free pages run short (`reclaim`). Until then they count as used.

With one tenant, this is the order of last use. Every operation takes O(1) time per page; to choose the tenant whose
pages are taken takes O(log n) amortized for n tenants with such pages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

from llmc_runtime.kv.cached_lists import CachedList, CachedLists

RELEASED_PER_STEP = 1024  # retired pages that a step releases
RELEASED_SHARE = 1 / 128  # or this share of all of them, if that is more
MAX_AGE = 4  # evictions since a cached page was last used, in sizes of the pool, after which it goes first


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
        self.num_revived = 0  # calls of `share` for free pages so far
        self.forget = forget
        self.refs = [0] * num_pages
        self.cached = bytearray(num_pages)  # 1 if the page's content belongs to a cached prefix
        self._retired: deque[list[int]] = deque()  # tables whose pages are still to be released, from the last one on
        self._num_retired = 0  # pages in these
        self.released_per_step = RELEASED_PER_STEP
        self._max_released = RELEASED_PER_STEP  # pages that `retire` releases at once until the next step
        self._tenants = [""] * num_pages  # whose prefix a cached page belongs to
        self._evictions = 0
        self._last_used = [0] * num_pages  # number of evictions when a cached page became free
        # Lists of free pages are rings with sentinels. That of pages without cached content is num_pages; those of
        # tenants follow.
        self._next = [*range(1, num_pages + 1), 0]
        self._prev = [num_pages, *range(num_pages)]
        self._lists = CachedLists(self._first_used)
        self._unused_ends: list[int] = []

    @property
    def num_used(self) -> int:
        """The number of pages with at least one reference."""
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """Take `count` free pages, with one reference each. Raises PageError if there are fewer."""
        if count > self.num_free:
            raise PageError(f"{count} pages requested; {self.num_free} are free")
        following, end = self._next, self.num_pages
        allocated = list[int]()
        page = following[end]
        while page != end and len(allocated) < count:
            allocated.append(page)
            page = following[page]
        following[end], self._prev[page] = page, end
        while len(allocated) < count:
            allocated += self._evict(count - len(allocated))
        for page in allocated:
            self.refs[page] = 1
        self.num_free -= count
        return allocated

    def share(self, page: int) -> None:
        """Add a reference to a page, whether it is in use or cached and free."""
        if not self.refs[page]:
            self._unlink(page)
            self.num_free -= 1
            self.num_revived += 1
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
            # Cached pages go to the tail of their tenant's list, others to the head, from which pages are taken.
            if cached[page]:
                after = self._list_of(page).end
                before = previous[after]
                self._last_used[page] = self._evictions
            else:
                before, after = end, following[end]
            following[before] = previous[after] = page
            previous[page], following[page] = before, after
            self.num_free += 1

    def retire(self, table: list[int]) -> None:
        """Drop one reference to each page of a table, last to first, at once or in later steps. `table` becomes the
        pool's.
        """
        self._retired.append(table)
        self._num_retired += len(table)
        self._max_released -= self._release_retired(self._max_released)

    def begin_step(self) -> None:
        """Release some of the pages of tables that were retired."""
        count = max(self.released_per_step, int(RELEASED_SHARE * self._num_retired))
        self._max_released = count - self._release_retired(count)

    def reclaim(self, count: int, max_released: float = math.inf) -> bool:
        """Return whether `count` pages are free, after releasing the retired pages that this takes, up to
        `max_released` of them.
        """
        while self.num_free < count and self._num_retired and max_released > 0:
            max_released -= self._release_retired(max(count - self.num_free, self.released_per_step))
        return self.num_free >= count

    def mark_cached(self, page: int, tenant: str = "") -> None:
        """Mark the content of a page in use as cached: once free, it goes to the tail of the tenant's list."""
        if not self.refs[page]:
            raise PageError(f"page {page} is free: its content cannot be cached")
        self.cached[page], self._tenants[page] = 1, tenant

    def drop_all(self) -> None:
        """Forget all cached content. Raises PageError if a page is in use."""
        if self.num_used:
            raise PageError(f"{self.num_used} pages are in use")
        ring = [self.num_pages, *self.free_list(), self.num_pages]
        self.cached = bytearray(self.num_pages)
        self._lists.clear()
        self._unused_ends.clear()
        self._next, self._prev = [0] * (self.num_pages + 1), [0] * (self.num_pages + 1)
        for before, after in pairwise(ring):
            self._next[before], self._prev[after] = after, before

    def free_list(self) -> list[int]:
        """Return the free pages: those without cached content, then those of each tenant, each list in the order of
        allocation. Takes O(pages) time; for audits.
        """
        return [page for pages in self.free_lists().values() for page in pages]

    def free_lists(self) -> dict[int, list[int]]:
        """Return the lists of free pages by their sentinels. Takes O(pages) time; for audits."""
        lists: dict[int, list[int]] = {}
        for end in (self.num_pages, *(cached.end for cached in self._lists.values())):
            pages = lists[end] = []
            page = self._next[end]
            while page != end and len(pages) <= self.num_pages:
                pages.append(page)
                page = self._next[page]
        return lists

    def _release_retired(self, count: int) -> int:
        """Release up to `count` pages of retired tables. Return their number."""
        released = 0
        while self._retired and released < count:
            table = self._retired[0]
            last = table[released - count :]
            del table[released - count :]
            self.release(reversed(last))
            released += len(last)
            if not table:
                self._retired.popleft()
        self._num_retired -= released
        return released

    def _evict(self, count: int) -> list[int]:
        """Take up to `count` pages of cached prefixes from a tenant's list, at least one."""
        victim, max_pages = self._victim(count)
        following, cached = self._next, self.cached
        evicted: list[int] = []
        page = following[victim.end]
        for _ in range(max_pages):
            cached[page] = 0
            if self.forget is not None:
                self.forget(page)
            evicted.append(page)
            page = following[page]
        following[victim.end], self._prev[page] = page, victim.end
        self._evictions += len(evicted)
        self._take_off(victim, len(evicted))
        return evicted

    def _victim(self, count: int) -> tuple[CachedList, int]:
        """Return the list from which pages are taken next if `count` are needed, and how many of them.

        Of n lists, the longest one loses at least `count` / n pages, as those that lose pages end with equal lengths.
        """
        lists = self._lists
        if len(lists) == 1:
            (only,) = lists.values()
            return only, min(count, only.length)
        oldest = lists.oldest()
        if self._evictions - self._first_used(oldest) > MAX_AGE * self.num_pages:
            return oldest, 1
        longest, excess = lists.longest()
        return longest, min(count, max(1, excess, count // len(lists)))

    def _first_used(self, cached: CachedList) -> int:
        """Return the number of evictions when the first page of a list became free."""
        return self._last_used[self._next[cached.end]]

    def _list_of(self, page: int) -> CachedList:
        """Return the list that a cached page is about to be appended to."""
        tenant = self._tenants[page]
        cached = self._lists.get(tenant)
        if cached is None:
            if not self._unused_ends:
                end = len(self._next)
                self._next.append(end)
                self._prev.append(end)
                self._unused_ends.append(end)
            cached = self._lists.make(tenant, self._unused_ends.pop(), self._evictions)
        self._lists.grow(cached)
        return cached

    def _unlink(self, page: int) -> None:
        """Remove a free page from its list."""
        before, after = self._prev[page], self._next[page]
        self._next[before], self._prev[after] = after, before
        if self.cached[page]:
            self._take_off(self._lists[self._tenants[page]], 1)

    def _take_off(self, cached: CachedList, count: int) -> None:
        """Count `count` pages less on a list."""
        if self._lists.shrink(cached, count):
            self._unused_ends.append(cached.end)
