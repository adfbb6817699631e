"""AdmissionSlots: counts, estimated waits, shares of keys and refusals, under a clock that the test sets."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from typing import Any

import pytest
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.operations.admission import LATEST, SOONEST, Admission, AdmissionSlot, Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock, **options: Any) -> Admission:
    given = {"sequences": 1000, "tokens": 1 << 30, "rows": 4, **options}
    return Admission(**given, throughput=Throughput(clock))


def status(refusal: pytest.ExceptionInfo[ApiError]) -> tuple[int, str | None]:
    return refusal.value.status, refusal.value.code


class Engine:
    """A FIFO engine with some rows, each of which takes a fixed number of seconds per request."""

    def __init__(self, clock: Clock, where: Admission, seconds: float) -> None:
        self.clock, self.where, self.seconds = clock, where, seconds
        self.queue: deque[tuple[AdmissionSlot, float]] = deque()
        self.running: list[tuple[float, AdmissionSlot]] = []
        self.waited: list[float] = []

    def come(self, key: str = "") -> None:
        self.queue.append((self.where.reserve(1, 10, 20, key), self.clock.now))

    def go_on(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            for one in [one for one in self.running if one[0] <= self.clock.now]:
                self.running.remove(one)
                one[1].close(20)
            while self.queue and len(self.running) < self.where.rows:
                place, came = self.queue.popleft()
                place.begin()
                self.waited.append(self.clock.now - came)
                self.running.append((self.clock.now + self.seconds, place))
            self.clock.now += 0.05


def test_a_wait_is_estimated_from_what_leaves_the_queue() -> None:
    clock = Clock()
    where = admission(clock)
    engine = Engine(clock, where, 2.0)
    engine.come()
    engine.go_on(1000.0)
    assert where.wait() == 0.0, "quiet times tell nothing"
    for _ in range(200):
        engine.come()
    assert where.wait() is None, "nothing was seen yet"
    assert where.retry == SOONEST
    engine.go_on(20.0)
    seconds = where.wait()
    engine.come()
    engine.waited.clear()
    engine.go_on(300.0)
    assert seconds == pytest.approx(engine.waited[-1], rel=0.15) and seconds is not None and seconds > 60
    assert not where.open_sequences and not where.waiting_sequences and not where.work and where.wait() == 0.0


def test_the_wait_is_estimated_before_any_request_has_ended() -> None:
    clock = Clock()
    where = admission(clock, rows=1)
    places = [where.reserve(1, 10, 90, "") for _ in range(4)]
    places[0].begin()
    clock.now += 30.0
    assert where.wait() == pytest.approx(90.0), "had one begun now, the three would take as long each"
    assert where.retry == pytest.approx(45.0)
    clock.now += 300.0
    assert where.retry == LATEST


def test_an_engine_that_becomes_slower_is_noticed_within_the_window() -> None:
    clock, pace = Clock(), None
    pace = Throughput(clock)
    pace.queue(True)
    for rate in (100.0, 10.0):
        for _ in range(100):
            clock.now += 0.5
            pace.left(rate / 2)
        assert pace.seconds(1000.0, 10) == pytest.approx(1000.0 / rate, rel=0.1)


def test_requests_that_would_wait_too_long_are_refused_also_by_deadline() -> None:
    clock, reasons = Clock(), Counter[str]()
    where = admission(clock, max_wait=60.0, refused=lambda reason: reasons.update([reason]))
    engine = Engine(clock, where, 2.0)
    for _ in range(110):
        engine.come()
    engine.go_on(11.0)
    with pytest.raises(ApiError) as refusal:
        where.reserve(1, 10, 20, "", within=5.0)
    assert status(refusal) == (503, "server_overloaded") and "longer than its time limit" in refusal.value.message
    where.reserve(1, 10, 20, "", within=58.0).close()
    with pytest.raises(ApiError) as refusal:
        for _ in range(200):
            engine.come()
    assert status(refusal) == (503, "server_overloaded") and reasons == {"deadline": 1, "queue_wait": 1}
    headers = refusal.value.headers
    assert int(headers["Retry-After"]) == math.ceil(int(headers["retry-after-ms"]) / 1000) in range(25, 36)


@pytest.mark.parametrize(("seconds", "text"), ((0.0002, "1 ms"), (0.6, "600 ms"), (12.4, "12 s")))
def test_a_refusal_states_how_long_the_request_would_wait(
    monkeypatch: pytest.MonkeyPatch, seconds: float, text: str
) -> None:
    monkeypatch.setattr(Admission, "wait", lambda self, key=None: seconds)
    with pytest.raises(ApiError) as refusal:
        admission(Clock()).check_wait("a", within=1e-4)
    assert refusal.value.message == f"the request would wait about {text}, longer than its time limit"
    full = admission(Clock(), max_wait=1e-4)
    assert full.blocked_error("queue_wait", "a").message == f"the request would wait about {text}"


def test_a_light_key_is_not_refused_for_what_a_heavy_one_has_queued() -> None:
    clock = Clock()
    where = admission(clock, keys=2, max_wait=30.0)
    engine = Engine(clock, where, 2.0)
    for _ in range(60):
        engine.come("heavy")
    engine.go_on(10.0)
    wait, light = where.wait("heavy"), where.wait("light")
    assert wait is not None and light is not None and wait > 15 > 1.0 > light


def test_an_estimate_looks_at_each_key_only_if_all_of_them_take_too_long() -> None:
    class Work(dict[str, float]):
        looks = 0

        def values(self) -> Any:
            Work.looks += 1
            return super().values()

    clock = Clock()
    where = admission(clock, keys=200, max_wait=90.0, work=Work())
    engine = Engine(clock, where, 2.0)
    for number in range(100):
        engine.come(f"key {number}")
    engine.go_on(20.0)
    for number in range(100):
        assert where.blocked_reason(f"key {number}") is None
        where.reserve(1, 10, 20, f"key {number}").close()
    assert where.all_work == pytest.approx(sum(where.work.values())) and Work.looks == 1
    with pytest.raises(ApiError):
        for _ in range(300):
            where.reserve(1, 10, 20, "heavy")
    assert where.blocked_reason("heavy") == "queue_wait" and where.blocked_reason("light") is None


def test_one_of_several_keys_cannot_take_all() -> None:
    where = admission(Clock(), sequences=100, keys=3)
    places = []
    with pytest.raises(ApiError) as refusal:
        for _ in range(100):
            places.append(where.reserve(1, 1, 1, "a"))
    assert status(refusal) == (429, "rate_limit_exceeded") and len(places) == 80
    for key in "bc":
        where.reserve(4, 1, 1, key)
    alone = admission(Clock(), sequences=100, keys=1)
    assert all(alone.reserve(1, 1, 1, "a") for _ in range(100)), "with one key there is nobody to leave room for"


def test_tokens_are_shared_as_well() -> None:
    where = admission(Clock(), tokens=1000, keys=2)
    where.reserve(1, 100, 500, "a")
    with pytest.raises(ApiError) as refusal:
        where.reserve(1, 100, 200, "a")
    assert status(refusal) == (429, "rate_limit_exceeded")
    where.reserve(1, 100, 200, "b")


def test_a_place_that_turns_out_too_large_is_refused_and_nothing_is_left_of_it() -> None:
    where = admission(Clock(), tokens=1000)
    other = where.reserve(1, 1, 700, "a")
    place = where.reserve(1, 1, 100, "b")
    with pytest.raises(ApiError) as refusal:
        place.resize(250, 100)
    assert status(refusal) == (503, "server_overloaded")
    with pytest.raises(ApiError) as refusal:
        place.resize(950, 100)
    assert status(refusal) == (400, "invalid_value")
    place.close()
    place.close()
    assert where.open_tokens == 701 and where.by_key == {"a": 1}
    other.close()
    assert not where.open_tokens and not where.by_key and not where.tokens_by_key


@pytest.mark.parametrize("seed", range(5))
def test_admission_ends_empty_in_random_sequences(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    where = admission(clock, rows=3, sequences=40, tokens=4000, keys=3, max_wait=20.0)
    places: list[AdmissionSlot] = []
    for _ in range(3000):
        clock.now += draw.random()
        chance = draw.random()
        try:
            if chance < 0.4:
                places.append(
                    where.reserve(
                        draw.randrange(1, 4), draw.randrange(1, 99), draw.randrange(1, 99), draw.choice("abc")
                    )
                )
            elif places and chance < 0.55:
                draw.choice(places).resize(draw.randrange(1, 200), draw.randrange(1, 200))
            elif places and chance < 0.75:
                draw.choice(places).begin()
            elif places:
                places.pop(draw.randrange(len(places))).close(draw.randrange(50))
        except ApiError as e:
            assert e.status in (429, 503) and SOONEST * 1000 <= int(e.headers["retry-after-ms"]) <= LATEST * 1000
        assert where.open_sequences == sum(p.sequences for p in places) == sum(where.by_key.values()) <= 40
        assert where.open_tokens == sum(p.tokens for p in places) == sum(where.tokens_by_key.values()) <= 4000
        assert 0 <= where.waiting_sequences <= where.open_sequences and bool(where.work) == bool(
            where.waiting_sequences
        )
        assert (where.wait() or 0.0) >= 0.0
    for place in places:
        place.close()
    assert not where.open_sequences and not where.work and not where.waiting_sequences and not where.tokens_by_key


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draining": True}, "draining"), ({"sequences": 2}, "queue_full"), ({"tokens": 20}, "queue_full"),
        ({"per_key": 2}, "key_limit"), ({"sequences": 3, "keys": 2}, "key_share"), ({}, None),
    ],
)  # fmt: skip
def test_the_reason_of_a_blocked_key_is_that_of_its_error_and_is_not_counted(
    options: dict[str, Any], reason: str | None
) -> None:
    counted: list[str] = []
    where = admission(Clock(), **options, refused=counted.append)
    where.draining = False
    for _ in range(2):
        where.reserve(1, 5, 5, "a")
    where.draining = bool(options.get("draining"))
    assert where.blocked_reason("a") == reason and not counted
    if reason is not None:
        error = where.blocked_error(reason, "a")
        assert error.reason == reason and counted == [reason] and "Retry-After" in error.headers
        if reason.startswith("key"):
            assert str(error).endswith(": wait until some have ended") and "2 open sequences" in str(error)


def test_requests_that_were_passed_on_count_as_open() -> None:
    where = admission(Clock(), sequences=10, keys=2)
    for _ in range(7):
        where.reserve(1, 1, 1, "a")
    assert where.crowded_reason("a", []) is None and where.blocked_reason("a") is None
    assert where.crowded_reason("a", ["b", "b"]) is None
    assert where.crowded_reason("b", ["a", "b", "a"]) == "queue_full"
    assert where.crowded_reason("a", ["a"]) == "key_share"
    assert where.crowded_reason("b", ["b"]) is None
    assert where.blocked_reason("b") is None
