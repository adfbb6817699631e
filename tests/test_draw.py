"""What a run draws from the tests that are one of many of a kind: another half under another seed, all when asked."""

from __future__ import annotations

from draw import SEED, left_out


def test_a_run_leaves_out_its_share_and_every_seed_another_one() -> None:
    names = [f"test[{i}]" for i in range(41)]
    out = left_out(names, 0.5)
    assert out == left_out(names[::-1], 0.5, SEED) and out < set(names) and 20 <= len(out) <= 21
    assert set.union(*(set(names) - left_out(names, 0.5, seed) for seed in range(20))) == set(names)
    assert not left_out(names, 1.0) and not left_out([], 0.5)
