"""Prefix caching with recurrent layers on the fake device, whose tokens depend on the rows' states."""

from __future__ import annotations

import pytest
from llmc_runtime.kv.pages import PageError
from llmc_runtime.kv.snapshots import SnapshotPool

from tests.runtime.rig import Rig

PROMPT = [7 * i % 1000 for i in range(40)]


def run(rig: Rig, name: str, prompt: list[int], **params: object) -> tuple[int | None, list[int]]:
    """Run a request alone. Return how many tokens of its prompt were cached, and all its tokens."""
    request = rig.add(name, prompt, **params)
    rig.drain()
    return request.num_cached, request.tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_reused_up_to_a_snapshot(depth: int) -> None:
    rig = Rig(depth, snapshots=8)
    rig.scheduler.depth = depth
    assert run(rig, "a", PROMPT)[0] == 0
    assert [work.num_tokens for plan in rig.plans[:3] for work in plan.work] == [32, 4, 4]  # the last full page: 36
    assert run(rig, "b", PROMPT)[0] == 36
    _, tokens = run(rig, "c", PROMPT[:30] + [1] * 9, max_tokens=3)
    assert run(rig, "d", tokens)[0] == 36
    assert run(rig, "e", PROMPT[:30] + [2] * 9)[0] == 28  # where c left a


def test_one_that_decodes_keeps_its_last_snapshot() -> None:
    rig = Rig(snapshots=8)
    _, tokens = run(rig, "a", PROMPT[:10], max_tokens=60)
    assert rig.scheduler.counters.state_snapshots_saved == 5 and rig.scheduler.snapshots is not None
    assert rig.scheduler.snapshots.pool.num_used == 2  # of its prompt, and after 64 tokens
    assert run(rig, "b", tokens)[0] == 64
    assert run(rig, "c", tokens[:50])[0] == 8


def test_without_snapshots_nothing_is_reused() -> None:
    rig = Rig(snapshots=0)
    assert [run(rig, name, PROMPT)[0] for name in "ab"] == [0, 0]
    assert not any(plan.saves for plan in rig.plans)


def test_a_snapshot_goes_with_its_pages() -> None:
    rig = Rig(snapshots=8, num_pages=12)
    run(rig, "a", PROMPT)
    run(rig, "b", [1] * 45)
    assert rig.scheduler.snapshots is not None and rig.scheduler.snapshots.pool.num_used == 1
    assert run(rig, "c", PROMPT)[0] == 0


def test_tenants_do_not_take_each_others_snapshots() -> None:
    pool = SnapshotPool(4)
    for number in range(9):
        entry = pool.reserve()
        assert entry is not None
        pool.keep(entry, b"%d" % number, "mine" if number == 0 else "flood")
        assert pool.num_used <= 4
    assert sorted(pool.content()) == [b"0", b"6", b"7", b"8"]
    pool.use(b"6")
    assert pool.reserve() is not None and b"7" not in pool and b"6" in pool


def test_snapshots_that_rows_wait_for_are_not_evicted() -> None:
    pool = SnapshotPool(1)
    entry = pool.reserve()
    assert entry == 0 and pool.reserve() is None
    pool.keep(entry, b"a", "")
    pool.pin(pool.use(b"a"))
    assert pool.reserve() is None
    with pytest.raises(PageError, match="a row waits"):
        pool.drop(b"a")
    rig = Rig(snapshots=1)
    run(rig, "a", PROMPT)
    assert run(rig, "b", PROMPT)[0] == 36 and rig.scheduler.reset_prefix_cache()
    assert run(rig, "c", PROMPT)[0] == 0
