"""Pages and the prefix cache compared with a naive model: sharing, evictions, and their order."""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from draw import of_test
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from llmc_runtime.kv.cached_lists import CachedList, CachedLists
from llmc_runtime.kv.pages import MAX_AGE, PageError, PagePool
from llmc_runtime.kv.prefix import PrefixCache

from tests.runtime.audit import audit_pages

SIZE = 2


def cache(num_pages: int, size: int = SIZE) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, size, "model")


def match(prefix: PrefixCache, chain: list[bytes], tokens: list[int]) -> list[int]:
    """The cached pages of the longest prefix of `tokens`."""
    return prefix.match(chain, tokens).pages


def table(pool: PagePool, prefix: PrefixCache, tokens: list[int], tenant: str = "") -> list[int]:
    """A computed table of all full pages of `tokens`, published."""
    chain = [prefix.root(tenant)]
    hits = match(prefix, chain, [*tokens, 0])
    for page in hits:
        pool.share(page)
    full = len(tokens) // prefix.page_size
    pages = hits + pool.take(full - len(hits))
    prefix.publish(chain, tokens, pages, len(hits), full, tenant)
    return pages


def test_pages_come_in_order_and_go_in_reverse() -> None:
    pool = PagePool(5)
    first = pool.take(3)
    assert first == [0, 1, 2] and pool.num_free == 2 and pool.num_used == 3
    pool.release(reversed(first))
    assert pool.free_list() == [0, 1, 2, 3, 4], "unkept pages go to the head: the warmest is given out first"


def test_a_page_is_free_when_its_last_table_lets_go() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share(page)
    pool.release([page])
    assert pool.refs[page] == 1 and pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    with pytest.raises(PageError, match=f"page {page} freed twice"):
        pool.release([page])


@pytest.mark.parametrize(
    "act", [lambda p: p.take(3), lambda p: p.mark_cached(1), lambda p: PagePool(0), lambda p: p.drop_all()]
)
def test_broken_promises_are_errors(act: Callable[[PagePool], object]) -> None:
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(PageError):
        act(pool)
    audit_pages(pool, [[0]])


def test_kept_pages_are_given_out_last_and_the_end_of_a_sequence_first() -> None:
    pool, prefix = cache(6)
    old = table(pool, prefix, [1, 2, 3, 4])
    new = table(pool, prefix, [5, 6, 7, 8])
    pool.release(reversed(old))
    pool.release(reversed(new))
    assert pool.free_list() == [4, 5, old[1], old[0], new[1], new[0]]
    pool.take(3)
    assert match(prefix, [prefix.root()], [1, 2, 3, 4, 9]) == [old[0]], "the first page outlives the second"


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    pool, prefix = cache(4)
    pages = table(pool, prefix, [1, 2, 3, 4])
    root = prefix.root()
    assert match(prefix, [root], [1, 2, 3, 4]) == pages[:1]
    assert match(prefix, [root], [1, 2, 3, 4, 5]) == pages
    assert match(prefix, [root], [1, 2, 3]) == pages[:1]
    assert match(prefix, [root], [1, 2]) == []
    assert match(prefix, [root], [3, 4, 1, 2, 0]) == [], "the same pages in another order are another prefix"
    assert match(prefix, [root], [9, 9, 3, 4, 0]) == [], "a page counts only after its parent"


def test_salt_and_context_separate() -> None:
    pool, prefix = cache(4)
    table(pool, prefix, [1, 2])
    assert match(prefix, [prefix.root("salt")], [1, 2, 3]) == []
    pairs = [("", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "a")]
    assert len({PrefixCache(PagePool(1), 2, context).root(salt) for context, salt in pairs}) == 5


def test_tokens_are_compared_so_a_forged_digest_hits_nothing() -> None:
    pool, prefix = cache(4)
    table(pool, prefix, [1, 2])
    chain = [prefix.root()]
    prefix.extend(chain, [1, 2], 1)
    assert match(prefix, chain, [1, 2, 3])
    assert match(prefix, list(chain), [7, 8, 3]) == [], "this chain claims the digest of other tokens"


def test_the_second_copy_of_a_prefix_stays_private() -> None:
    pool, prefix = cache(4)
    chains = [[prefix.root()], [prefix.root()]]
    one, two = pool.take(1), pool.take(1)
    prefix.publish(chains[0], [1, 2], one, 0, 1)
    prefix.publish(chains[1], [1, 2], two, 0, 1)
    assert match(prefix, [prefix.root()], [1, 2, 3]) == one and len(prefix) == 1
    pool.release(two)
    pool.release(one)
    assert pool.free_list()[0] == two[0] and pool.free_list()[-1] == one[0]


def shares(pool: PagePool) -> dict[str, list[int]]:
    """The free pages with prefixes of each tenant, in the order in which they are taken."""
    lists = pool.free_lists()
    return {tenant: lists[own.end] for tenant, own in pool._lists.items()}


def test_pages_are_taken_from_the_tenant_that_has_most() -> None:
    rng = random.Random(of_test())
    lost = Counter[str]()
    for _ in range(20):
        pool, tables, names = PagePool(rng.randrange(20, 200)), list[list[int]](), "abcd"[: rng.randrange(1, 5)]
        for _ in range(200):
            free, before, evictions = pool.free_lists()[pool.num_pages], shares(pool), pool._evictions
            pages = pool.take(rng.randrange(1 + min(pool.num_free, rng.choice([3, 30]))))
            after = shares(pool)
            assert pages[: len(free)] == free[: len(pages)], "pages without prefixes come first"
            evicted = pages[len(free) :]
            for name, own in before.items():
                left = after.get(name, [])
                assert own[len(own) - len(left) :] == left, "the least recently used of a tenant come first"
                taken = own[: len(own) - len(left)]
                fresh = [page for page in taken if evictions - pool._last_used[page] <= MAX_AGE * pool.num_pages]
                if fresh:
                    lost[name] += len(fresh)
                    assert len(left) + 1 >= max(map(len, after.values()), default=0), f"{name} had fewer than others"
            kept = set(itertools.chain.from_iterable(after.values()))
            assert set(evicted) == set(itertools.chain.from_iterable(before.values())) - kept
            for page in rng.sample(pages, rng.randrange(len(pages) + 1)):
                pool.mark_cached(page, rng.choice(names))
            tables += [pages]
            while tables and rng.random() < 0.55:
                pool.release(reversed(tables.pop(rng.randrange(len(tables)))))
            audit_pages(pool, tables)
    assert len(lost) == 4


def test_a_tenant_that_has_left_keeps_nothing() -> None:
    pool, prefix = cache(8)
    pool.release(reversed(table(pool, prefix, [1, 2, 3, 4], "left")))
    for turn in range(MAX_AGE * 8 + 16):
        assert turn > MAX_AGE * 8 or len(shares(pool)["left"]) == 2
        pool.release(table(pool, prefix, [turn + 10, 0], "present"))
    assert set(shares(pool)) == {"present"} and len(prefix) == 8


def test_pages_are_taken_without_looking_at_all_tenants() -> None:
    """A server may have a thousand API keys, and a long prompt takes thousands of pages."""

    def calls_per_page(num_tenants: int, count: int) -> float:
        pool = PagePool(2048)
        for tenant in range(num_tenants):
            pages = pool.take(pool.num_pages // num_tenants)
            for page in pages:
                pool.mark_cached(page, str(tenant))
            pool.release(reversed(pages))
        pool.release(pool.take(pool.num_pages // 4))  # corrects the order of the tenants
        calls = Counter[str]()
        sys.setprofile(lambda frame, event, argument: calls.update([event]))
        try:
            pool.take(count)
        finally:
            sys.setprofile(None)
        return (calls["call"] + calls["c_call"]) / count

    for count in (1, 1536):
        assert calls_per_page(512, count) < 40, f"{count} pages"
        assert calls_per_page(2, count) < 40, f"{count} pages"


def test_the_longest_and_the_oldest_list_are_those_that_a_search_finds() -> None:
    rng = random.Random(of_test())
    first_used = dict[CachedList, int]()
    lists = CachedLists(first_used.__getitem__)
    for now in range(5000):
        tenant = str(int(rng.expovariate(0.2)))
        cached = lists.get(tenant)
        if cached is None:
            first_used[cached := lists.make(tenant, 0, now)] = now
            lists.grow(cached)
        elif rng.random() < 0.5:
            lists.grow(cached)
        else:
            lists.shrink(cached, rng.randint(1, min(3, cached.length)))
            first_used[cached] = max(first_used[cached], now - rng.randrange(99))
        if lists and rng.random() < 0.5:
            longest, excess = lists.longest()
            lengths = sorted(cached.length for cached in lists.values())
            assert longest.length == lengths[-1] and excess <= lengths[-1] - (lengths[-2] if lengths[:-1] else 0)
        if lists and rng.random() < 0.5:
            assert first_used[lists.oldest()] == min(first_used[cached] for cached in lists.values())
        assert len(lists._longest) + len(lists._oldest) <= 4 * len(lists) + 200


def test_with_one_tenant_the_least_recently_used_goes_first() -> None:
    pool, prefix = cache(6)
    tables = [table(pool, prefix, [i, i], "a") for i in range(6)]
    for pages in tables[::-1]:
        pool.release(pages)
    for (page,) in tables[::-1]:
        assert pool.take(1) == [page]


def test_reset_only_when_idle() -> None:
    pool, prefix = cache(2)
    pages = table(pool, prefix, [1, 2])
    with pytest.raises(PageError, match="1 pages are in use"):
        prefix.reset()
    assert match(prefix, [prefix.root()], [1, 2, 3]) == pages
    pool.release(pages)
    prefix.reset()
    assert not len(prefix) and match(prefix, [prefix.root()], [1, 2, 3]) == []
    assert pool.take(2) and not len(prefix)


def test_disabled_hits_nothing() -> None:
    pool = PagePool(2)
    prefix = PrefixCache(pool, SIZE, enabled=False)
    prefix.publish([prefix.root()], [1, 2], pool.take(1), 0, 1)
    assert match(prefix, [prefix.root()], [1, 2, 3]) == [] and not any(pool.cached)


class Sharing(RuleBasedStateMachine):
    """Random tables over a small pool; `memory` has the contents of the pages, `public` the pages that may be hits."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.prefix = cache(7)
        self.tables: list[list[int]] = []
        self.memory: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.public: dict[tuple[str, tuple[int, ...]], int] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from(["", "s"]),
        publish=st.booleans(),
    )
    def start(self, tokens: list[int], salt: str, publish: bool) -> None:
        chain = [self.prefix.root(salt)]
        hits = match(self.prefix, chain, tokens)
        wanted = []
        for stop in range(SIZE, len(tokens), SIZE):
            if (salt, tuple(tokens[:stop])) not in self.public:
                break
            wanted.append(self.public[salt, tuple(tokens[:stop])])
        assert hits == wanted and len(hits) * SIZE < len(tokens)
        for index, page in enumerate(hits):
            assert self.memory[page] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        need = -(-len(tokens) // SIZE) - len(hits)
        if need + sum(not self.pool.refs[page] for page in hits) > self.pool.num_free:
            return
        for page in hits:
            self.pool.share(page)
        fresh = self.pool.take(need)
        self.public = {key: page for key, page in self.public.items() if page not in fresh}
        pages, full = hits + fresh, len(tokens) // SIZE
        for index in range(len(hits), full):
            self.memory[pages[index]] = (salt, tuple(tokens[: (index + 1) * SIZE]))
        if publish:
            self.prefix.publish(chain, tokens, pages, len(hits), full, salt)
            for index in range(len(hits), full):
                self.public.setdefault((salt, tuple(tokens[: (index + 1) * SIZE])), pages[index])
        self.tables.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        pages = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(pages))

    @precondition(lambda self: not self.tables)
    @rule()
    def reset(self) -> None:
        self.prefix.reset()
        assert not self.pool._lists
        self.public.clear()

    @invariant()
    def nothing_leaks(self) -> None:
        audit_pages(self.pool, self.tables)
        assert sorted(self.prefix.content()) == sorted(self.public.values())


Sharing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSharing = Sharing.TestCase


def test_cached_pages_are_not_objects_of_the_garbage_collector() -> None:
    """A collection visits each container, and would delay a step if each of a million cached pages had one."""
    pool, prefix = cache(500)
    tokens = list(range(1000))
    pages, chain = pool.take(500), [prefix.root()]
    before = len(gc.get_objects())
    prefix.publish(chain, tokens, pages, 0, 500)
    assert len(prefix) == 500 and len(gc.get_objects()) < before + 50
