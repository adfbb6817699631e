"""The rule that chooses an engine: prefixes stay together, the load is spread, a dead engine's pages are forgotten."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from llmc_runtime.engine.router import MAX_LOAD_RATIO, MAX_PAGES, OPEN_SEQUENCE_TOKENS, Load, Router, below_share

from tests.draw import of_test

PAGE = 4


def idle(engines: int) -> dict[int, Load]:
    return {engine: Load() for engine in range(engines)}


def test_a_conversation_stays_and_others_spread() -> None:
    router, talks = Router(3, PAGE, 1000), [[100 * talk + i for i in range(40)] for talk in range(9)]
    homes: dict[int, set[int]] = {talk: set() for talk in range(9)}
    for turn in range(6):
        for talk, tokens in enumerate(talks):
            engine, uncached = router.choose(tokens, "", "", idle(3))
            assert uncached <= (40 if turn == 0 else 21)
            homes[talk].add(engine)
            tokens += [1000 + 100 * talk + turn * 20 + i for i in range(20)]
    assert all(len(engines) == 1 for engines in homes.values())
    assert Counter(engine for (engine,) in homes.values()) == {0: 3, 1: 3, 2: 3}


def test_salts_separate_prefixes() -> None:
    router, tokens = Router(2, PAGE, 1000), list(range(40))
    first, _ = router.choose(tokens, "a/", "", idle(2))
    assert router.choose(tokens, "a/", "", idle(2)) == (first, 4)
    assert router.choose(tokens, "b/", "", idle(2)) == (1 - first, 40)


def test_a_tenant_that_floods_forgets_its_own_pages() -> None:
    """However many prompts and salts it sends: another tenant's conversation stays on its engine."""
    router, talk = Router(2, PAGE, 100), list(range(40))
    home, _ = router.choose(talk, "b/", "b", idle(2))
    for i in range(500):
        router.choose([i] * 80, f"a/{i}", "a", idle(2))
    assert router.choose(talk, "b/", "b", idle(2)) == (home, 4)


def test_a_request_that_ignores_prefixes_counts_all_tokens() -> None:
    router, tokens = Router(2, PAGE, 1000), list(range(40))
    router.choose(tokens, "", "", idle(2))
    assert router.choose(tokens, "", "", idle(2), reuses=False)[1] == 40


def test_a_busy_engine_loses_its_prefix_when_waiting_costs_more() -> None:
    router, tokens = Router(2, PAGE, 1000), list(range(400))
    home, _ = router.choose(tokens, "", "", idle(2))
    loads = idle(2)
    loads[home].queued_tokens = 390
    assert router.choose(tokens, "", "", loads)[0] == home
    loads[home].queued_tokens = 800
    assert router.choose(tokens, "", "", loads)[0] == 1 - home
    router, loads = Router(2, PAGE, 1000), idle(2)
    home, _ = router.choose(tokens, "", "", loads)
    loads[home].sequences = 4  # the limit is 1.5 times the mean plus one, though it would be cheaper
    assert 4 * OPEN_SEQUENCE_TOKENS < 390 and router.choose(tokens, "", "", loads)[0] == 1 - home


def test_an_engine_without_free_rows_is_left_out_while_another_has_some() -> None:
    router, tokens = Router(2, PAGE, 1000, rows=4), list(range(400))
    home, _ = router.choose(tokens, "", "", idle(2))
    loads = {home: Load(0, 4), 1 - home: Load(300, 3)}  # it has the prefix and no queue, but a request waits there
    assert router.choose(tokens, "", "", loads)[0] == 1 - home
    loads[1 - home].sequences = 4
    loads[home].sequences = 5
    home = router.choose(tokens, "", "", loads)[0]
    assert router.choose(tokens, "", "", loads)[0] == home  # all are full: the rule of cost


def test_a_burst_fills_the_rows_of_all_engines() -> None:
    """First tokens of one engine arrive before those of the other, which makes it cheaper for a while."""
    rng, rows = random.Random(of_test()), 64
    router, loads = Router(2, PAGE, 0, rows=rows), idle(2)
    for _ in range(2 * rows):
        engine, uncached = router.choose(list(range(40)), "", "", loads)
        loads[engine].queued_tokens += uncached
        loads[engine].sequences += 1
        if rng.random() < 0.2:
            loads[rng.randrange(2)].queued_tokens = 0
    assert [load.sequences for load in loads.values()] == [rows, rows]


def test_prefixes_of_a_dead_engine_are_forgotten() -> None:
    router, tokens = Router(2, PAGE, 1000), list(range(40))
    home, _ = router.choose(tokens, "", "", idle(2))
    router.forget(home)
    assert router.choose(tokens, "", "", {home: Load()}) == (home, 40)


def test_old_pages_are_forgotten_last_pages_first() -> None:
    router = Router(1, PAGE, 10)
    old, new = list(range(24)), [100 + i for i in range(28)]
    router.choose(old, "", "", idle(1))  # 6 pages
    router.choose(new, "", "", idle(1))  # 7 pages: three of the old ones go
    assert router.choose(new, "", "", idle(1))[1] == 4
    assert router.choose([*old, 1], "", "", idle(1))[1] == 25 - 3 * PAGE


def test_long_prompts_are_compared_up_to_a_limit() -> None:
    router, tokens = Router(1, PAGE, 1 << 20), list(range((MAX_PAGES + 5) * PAGE))
    router.choose(tokens, "", "", idle(1))
    assert router.choose(tokens, "", "", idle(1))[1] == 5 * PAGE


def test_without_prefix_caching_the_load_decides() -> None:
    router, tokens = Router(2, PAGE, 0), list(range(40))
    assert [router.choose(tokens, "", "", idle(2)) for _ in range(3)] == [(0, 40)] * 3
    assert router.choose(tokens, "", "", {0: Load(0, 1), 1: Load()}) == (1, 40)


@pytest.mark.parametrize("_", range(20))
def test_drawn_loads(_: int) -> None:
    """The chosen engine is ready and within its share; no ready engine within its share is cheaper."""
    rng = random.Random(of_test())
    engines = rng.randrange(1, 6)
    router = Router(engines, PAGE, rng.choice([0, 3, 50, 1000]))
    seen: list[list[int]] = [[1, 2, 3]]
    for _ in range(200):
        ready = rng.sample(range(engines), rng.randrange(1, engines + 1))
        loads = {one: Load(rng.randrange(500), rng.randrange(20)) for one in ready}
        base = rng.choice(seen)
        tokens = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(9) for _ in range(rng.randrange(30))]
        allowed = below_share(loads)
        limit = MAX_LOAD_RATIO * sum(load.sequences for load in loads.values()) / len(loads) + 1
        assert allowed and all(loads[one].sequences < limit for one in allowed)
        matched = {one: router._pages_of[one].matched("", router._chain(tokens, "")) for one in allowed}
        chosen, uncached = router.choose(tokens, "", "", loads)
        assert chosen in allowed and 1 <= uncached <= len(tokens)

        def cost(one: int) -> int:
            hits = min(matched[one], (len(tokens) - 1) // PAGE)  # noqa: B023
            return len(tokens) - PAGE * hits + loads[one].queued_tokens + OPEN_SEQUENCE_TOKENS * loads[one].sequences  # noqa: B023

        assert cost(chosen) == min(map(cost, allowed))
        assert all(len(held) <= router._bound for held in router._pages_of)
        seen.append(tokens)
        if rng.random() < 0.05:
            router.forget(rng.choice(ready))


def test_conversations_under_load_keep_nine_tenths_of_the_cached_tokens() -> None:
    """64 conversations of six turns, 32 open at a time, over two engines."""
    rng = random.Random(of_test())
    router, loads = Router(2, 16, 1 << 16), idle(2)
    talks = [[rng.randrange(1000) for _ in range(300)] for _ in range(64)]
    turns = [talk for _ in range(6) for talk in range(64)]
    best = cached = 0
    running: list[tuple[int, int]] = []  # engine, uncached tokens
    for number, talk in enumerate(turns):
        tokens = talks[talk]
        engine, uncached = router.choose(tokens, "", "", loads)
        if number >= 64:
            best, cached = best + (len(tokens) - 150) // 16 * 16, cached + len(tokens) - uncached
        loads[engine].sequences += 1
        loads[engine].queued_tokens += uncached
        running.append((engine, uncached))
        if len(running) > 32:
            begun, queued = running[-4]  # has its first token, and another one ends
            running[-4] = (begun, 0)
            loads[begun].queued_tokens -= queued
            done, queued = running.pop(rng.randrange(len(running) - 4))
            loads[done].sequences -= 1
            loads[done].queued_tokens -= queued
        tokens += [rng.randrange(1000) for _ in range(150)]
    assert cached >= 0.9 * best
