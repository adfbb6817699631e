"""Steps take no time for requests that wait, and little for long ones that have ended.

The cached pages of a waiting request are found once and kept up to date; those of ended requests are released in parts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from draw import of_test
from llmc_runtime.kv.pages import RELEASED_SHARE, PagePool
from llmc_runtime.kv.prefix import MAX_MATCHES, PrefixCache
from llmc_runtime.kv.prefix_match import PrefixMatch
from llmc_runtime.sched.discarded_tokens import FREED_PER_STEP, FREED_SHARE, DiscardedTokens
from llmc_runtime.sched.guided_requests import GuidedRequests
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.waiting_queue import WaitingQueue

from tests.runtime.guides import Wandering
from tests.runtime.rig import Rig

PAGES = 100  # of the prompt that is cached


@pytest.mark.parametrize("sizes", [{}, {"snapshots": 8}], ids=["attention", "recurrent"])
def test_steps_do_not_match_a_request_again_that_does_not_fit(
    sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a request waits for pages, a step looks at none of its cached pages, unless they change."""
    work = Counter[str]()

    def counting(owner: Any, name: str) -> None:
        right = getattr(owner, name)

        def method(self: Any, *arguments: Any) -> Any:
            result = right(self, *arguments)
            work[name] += len(result) if isinstance(result, list) else arguments[0]
            return result

        monkeypatch.setattr(owner, name, method)

    rig = Rig(num_pages=2 * PAGES, max_model_len=2000, max_num_batched_tokens=500, max_num_seqs=8, **sizes)
    prompt = [3 * i % 1000 for i in range(4 * PAGES + 1)]
    rig.add("first", prompt, max_tokens=1)
    rig.drain()
    rig.add("second", prompt, max_tokens=60)
    for name in "ab":
        rig.add(name, 120, max_tokens=1 + 100)
    while rig.scheduler.waiting:
        rig.step()
    rig.add("late", [*prompt, *range(200)])
    rig.step()
    assert "late" in rig.waiting()
    counting(PrefixCache, "_pages_of")
    counting(PrefixMatch, "in_use")
    for _ in range(25):
        rig.step()
        assert "late" in rig.waiting()
    published = 3 * 25 // 4 + 3
    assert work["_pages_of"] <= 2 * published and not work["in_use"], work
    monkeypatch.undo()
    rig.drain()


def test_matches_that_are_kept_are_those_that_a_search_finds() -> None:
    """Under random publications, evictions and shares, a match kept has the pages of a new one, and its bound holds."""
    rng = random.Random(of_test())
    pool, size = PagePool(40), 2
    prefix = PrefixCache(pool, size, "model")
    sequences = [[rng.randrange(2) for _ in range(20)] for _ in range(MAX_MATCHES)]
    chains = [[prefix.root()] for _ in sequences]
    tables: list[list[int]] = []
    lengths = Counter[int]()
    for _ in range(3000):
        if tables and rng.random() < 0.5:
            pool.release(reversed(tables.pop(rng.randrange(len(tables)))))
        else:
            start_table(pool, prefix, rng.choice(sequences)[: rng.randrange(2, 21)], tables)
        for tokens, chain in zip(sequences, chains):
            kept = next((match for match in prefix._matches if match.chain is chain), None)
            match = prefix.match(chain, tokens)
            assert kept is None or match is kept
            fresh = prefix.match([prefix.root()], tokens)
            prefix.end_match(fresh)
            assert match.pages == fresh.pages
            count = len(match.pages) if rng.random() < 0.5 else rng.randrange(len(match.pages) + 1)
            in_use = sum(pool.refs[page] > 0 for page in match.pages[:count])
            assert match.max_in_use(count, pool) >= in_use
            if rng.random() < 0.1:
                assert match.in_use(count, pool) == in_use == match.max_in_use(count, pool)
            lengths[len(match.pages)] += 1
    assert len(lengths) > 5, lengths


def test_the_bound_holds_for_pages_that_are_computed_again() -> None:
    """A page that was free when counted is evicted; another one, in use, takes its place in the match."""
    pool = PagePool(1)
    prefix = PrefixCache(pool, 2, "model")
    tokens, chain, tables = [1, 2, 3], [prefix.root()], list[list[int]]()
    start_table(pool, prefix, tokens, tables)
    pool.release(tables.pop())
    assert prefix.match(chain, tokens).in_use(1, pool) == 0
    pool.release(pool.take(1))
    assert not prefix.match(chain, tokens).pages
    start_table(pool, prefix, tokens, tables)
    assert prefix.match(chain, tokens).max_in_use(1, pool) == 1


def start_table(pool: PagePool, prefix: PrefixCache, tokens: Sequence[int], tables: list[list[int]]) -> None:
    """Add a computed table of all full pages of `tokens`, published, if there are pages for it."""
    chain = [prefix.root()]
    match = prefix.match(chain, tokens)
    hits = list(match.pages)
    prefix.end_match(match)
    full = len(tokens) // prefix.page_size
    if full - len(hits) + sum(not pool.refs[page] for page in hits) > pool.num_free:
        return
    for page in hits:
        pool.share(page)
    pages = hits + pool.take(full - len(hits))
    prefix.publish(chain, tokens, pages, len(hits), full)
    tables.append(pages)


def test_pages_of_long_requests_that_end_are_released_over_several_steps() -> None:
    """Neither a step nor an abort releases all pages at once; a request that needs them gets them at once."""
    rig = Rig(num_pages=340, max_model_len=500, max_num_batched_tokens=500, max_num_seqs=5)
    pool = rig.scheduler.pool
    pool.released_per_step = 8
    for name in "abc":
        rig.add(name, 390, max_tokens=8)
    rig.add("short", 4, max_tokens=100)
    while rig.waiting():
        rig.step()
    rig.abort("a")
    assert pool._num_retired >= 80 and rig.engine.stats()["kv_cache_usage_perc"] > 0.7
    while len(rig.running()) > 1:
        rig.step()
    before = pool._num_retired
    assert before > 200
    rig.step()
    assert pool._num_retired == before - 8
    rig.add("next", 390, max_tokens=1)
    assert rig.step()["next"].finish_reason == "length", "its pages were retired ones"
    rig.abort("short")
    assert not rig.engine.has_work() and rig.engine.stats()["kv_cache_usage_perc"] == 0 < pool.num_used
    assert rig.scheduler.reset_prefix_cache() and pool.num_used == 0


def test_retired_pages_are_released_before_a_running_request_is_preempted() -> None:
    rig = Rig(num_pages=20, max_model_len=200, max_num_batched_tokens=200)
    rig.scheduler.pool.released_per_step = 0
    rig.add("grows", 4, max_tokens=70)
    rig.add("long", 60, max_tokens=2)
    while rig.engine.has_work():
        rig.step()
    assert rig.scheduler.counters.num_preemptions == 0


def test_a_share_of_many_retired_pages_is_released_in_a_step() -> None:
    """So that steps which retire more pages than RELEASED_PER_STEP do not do so without end."""
    pool = PagePool(1)
    pool.take(1)
    pool.released_per_step, pool.refs[0] = 1, 10_000
    for _ in range(9):
        pool.retire([0] * 1000)
    pool.begin_step()
    retired = pool._num_retired
    pool.begin_step()
    assert pool._num_retired == retired - int(retired * RELEASED_SHARE)


def test_token_ids_of_long_requests_are_freed_over_several_steps() -> None:
    """The ids of ten long lists leave by a share of all, then by FREED_PER_STEP; a short list is left alone."""
    discarded = DiscardedTokens()
    short, lists = [0] * FREED_PER_STEP, [[0] * (4 * FREED_PER_STEP + index) for index in range(10)]
    for tokens in (short, *lists):
        discarded.add(tokens)
    left, freed = sum(map(len, lists)), list[int]()
    while left:
        assert discarded.num_tokens == left
        discarded.free_some()
        freed.append(left - sum(map(len, lists)))
        left -= freed[-1]
    assert freed[0] == int(FREED_SHARE * sum(freed)) > FREED_PER_STEP == freed[-2] >= freed[-1] > 0
    assert not discarded.num_tokens and len(short) == FREED_PER_STEP
    discarded.free_some()


def test_a_long_request_that_ends_is_freed_by_later_steps() -> None:
    rig = Rig(num_pages=400, page_size=64, max_model_len=20_000, max_num_batched_tokens=20_000)
    request = rig.add("long", FREED_PER_STEP + 100, max_tokens=2)
    rig.drain()
    assert len(request.tokens) == FREED_PER_STEP + 102
    for count in (102, 0):
        rig.add("short", 4, max_tokens=1)
        rig.drain()
        assert len(request.tokens) == count


def test_steps_ask_no_guide_of_a_request_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask would be a call; thousands of guided requests may wait."""
    asked = Counter[Wandering]()
    right = Wandering.mask

    def mask(self: Wandering) -> bytes | None:
        asked[self] += 1
        return right(self)

    monkeypatch.setattr(Wandering, "mask", mask)
    guided, waiting = GuidedRequests(), WaitingQueue()
    requests = [Request(str(index), [1], guide=Wandering(100)) for index in range(3)]
    for request in requests:
        request.status = Status.WAITING
        guided.add(request)
    guided.start(requests[1])
    requests[1].status = Status.RUNNING
    guided.park([requests[1]], waiting, lambda request: None)
    assert not guided.ended() and not guided.awaited()
    guided.stop_waiting()
    assert set(asked) == {requests[1].guide} and bool(guided)
    guided.remove(requests[1])
    asked.clear()
    assert not guided.awaited() and not asked and bool(guided), "the others are still live"
