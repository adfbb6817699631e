"""Fair queues: whose job is next, and counts by key."""

from __future__ import annotations

from llmc_runtime.fair_queue import FairQueue, KeyCounts


def test_keys_take_turns() -> None:
    queue: FairQueue[int] = FairQueue(3, 2)
    for job in range(4):
        queue.add("a", job)
    queue.add("b", 10)
    assert [queue.next() for _ in range(4)] == [("a", 0), ("b", 10), ("a", 1), None]
    queue.end("b")
    assert queue.next() is None, "two jobs of a run"
    queue.end("a")
    assert queue.next() == ("a", 2)
    assert queue.remove("a", 3) and not queue.remove("a", 3) and not queue.remove("c", 1)
    queue.end("a")
    assert queue.next() is None and not len(queue)


def test_a_job_starts_at_once_if_nothing_of_its_key_waits() -> None:
    queue: FairQueue[int] = FairQueue(2, 1)
    assert queue.start("a") and not queue.start("a"), "one of a key"
    queue.add("a", 0)
    queue.end("a")
    assert not queue.start("a"), "an earlier job waits"
    assert queue.start("b") and queue.next() == ("a", 0)
    assert not queue.start("c"), "both slots are taken"


def test_the_newest_job_of_the_key_with_the_most_gives_way() -> None:
    queue: FairQueue[int] = FairQueue(1, 1)
    for key, job in (("a", 0), ("b", 1), ("b", 2), ("a", 3), ("b", 4)):
        queue.add(key, job)
    assert [queue.pop_newest() for _ in range(2)] == [4, 3] and len(queue) == 3
    queue.clear()
    assert not len(queue) and queue.start("a")


def test_counts_of_zero_have_no_entry() -> None:
    counts = KeyCounts()
    counts.change("a", 3)
    counts.change("b", 5)
    assert counts.heaviest == "b" and counts.total() == 8
    counts.change("b", -5)
    counts.change("c", 0)
    assert counts == {"a": 3} and list(counts) == ["a"]
