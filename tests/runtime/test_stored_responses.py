"""The store of responses: limits on bytes and entries, shares of keys, the order of evictions, chains."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server import stored_responses
from llmc_runtime.server.http.errors import ApiError, unavailable
from llmc_runtime.server.stored_responses import MAX_CONVERSATION, ResponseStore


def store(maximum: int = 1 << 20, keys: int = 1) -> ResponseStore:
    return ResponseStore(maximum, keys, lambda: unavailable("no room"))


def put(one: ResponseStore, name: str, size: int = 100, previous: str | None = None, key: str = "k") -> bool:
    """Store a response with an input and an output of one item each."""
    items = [json.dumps({"id": f"in-{name}", "text": "x" * size}).encode()]
    output = [{"id": f"out-{name}", "type": "message"}]
    return one.begin(key, name, previous, items).finish({"id": name, "output": output, "status": "completed"})


def earlier(one: ResponseStore, name: str | None, *references: str, key: str = "k") -> dict[str, Any]:
    encoded = one.earlier(key, name, references)
    found: dict[str, Any] = json.loads(encoded)
    listed = [*found["previous"], *found["referenced"].values()]
    assert one.length(key, name, references) <= len(encoded) and (one.length(key, name, references) > 0) == bool(listed)
    return found


def names(one: ResponseStore, key: str = "k") -> set[str]:
    return set(one._keys[key].entries) if key in one._keys else set()


def check(one: ResponseStore, maximum: int) -> None:
    """The counts are those of the contents, within the limits."""
    assert one.used == sum(of.used for of in one._keys.values()) <= maximum
    for of_key in one._keys.values():
        assert of_key.used == sum(entry.size for entry in of_key.entries.values())
        assert set(of_key.names.values()) == set(of_key.entries)
    assert one.count == sum(len(of.entries) for of in one._keys.values())


def test_a_chain_has_the_items_of_all_responses_in_order() -> None:
    one = store()
    put(one, "a")
    put(one, "b", previous="a")
    put(one, "c", previous="b")
    found = earlier(one, "c", "out-a", "none")
    assert [item["id"] for item in found["previous"]] == ["in-a", "out-a", "in-b", "out-b", "in-c", "out-c"]
    assert found["referenced"] == {"out-a": {"id": "out-a", "type": "message"}}
    assert earlier(one, None) == {"previous": [], "referenced": {}}
    document = json.loads(b"".join(one.get("k", "b").document()))
    assert document == {"id": "b", "output": [{"id": "out-b", "type": "message"}], "status": "completed"}
    one.delete("k", "a")
    with pytest.raises(ApiError) as error:
        earlier(one, "c")
    assert error.value.status == 404 and error.value.param == "previous_response_id" and "'a'" in error.value.message


def test_the_ids_of_an_input_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of an input of thousands of items takes no longer than one of a short input."""
    one, decoded = store(), list[bytes]()
    put(one, "a")
    decode = stored_responses._decode_id
    monkeypatch.setattr(stored_responses, "_decode_id", lambda item: decoded.append(item) or decode(item))
    assert [one.get("k", "a").ids for _ in range(3)] == [["in-a"]] * 3 and len(decoded) == 1


def test_keys_do_not_see_each_other() -> None:
    one = store(keys=2)
    put(one, "a")
    for use in (lambda: one.get("other", "a"), lambda: one.delete("other", "a"), lambda: earlier(one, "a", key="o")):
        with pytest.raises(ApiError) as error:
            use()
        assert error.value.status == 404
    assert earlier(one, None, "out-a", key="other")["referenced"] == {}


def test_the_least_recent_response_is_dropped_and_ends_of_chains_before_their_beginnings() -> None:
    probe = store()
    put(probe, "a")
    one = store(4 * probe.used + 100)
    for name in "abcd":
        put(one, name)
    assert names(one) == set("abcd")
    put(one, "e", previous="a")
    assert names(one) == set("acde") and list(one._keys["k"].entries)[-2:] == ["e", "a"]
    put(one, "f", previous="e")
    assert list(one._keys["k"].entries) == ["d", "f", "e", "a"]
    for name, rest in (("g", "feag"), ("h", "eagh"), ("i", "aghi"), ("j", "ghij")):
        put(one, name)
        assert names(one) == set(rest)
    check(one, 4 * probe.used + 100)


def test_a_key_has_half_and_the_heaviest_key_gives_way() -> None:
    one = store(14_200, keys=3)
    for i in range(10):
        put(one, f"a{i}", key="a")
    assert one._keys["a"].used <= 7100 and "a9" in names(one, "a") and "a0" not in names(one, "a")
    for i in range(2):
        put(one, f"b{i}", key="b")
    kept = names(one, "a")
    for i in range(4):
        put(one, f"c{i}", key="c")
    assert names(one, "b") == {"b0", "b1"} and names(one, "c") == {"c0", "c1", "c2", "c3"} and names(one, "a") < kept
    check(one, 14_200)


def test_making_room_does_not_look_at_all_keys_for_each_response() -> None:
    one, keys = store(2_000_000, keys=400), [f"key {number}" for number in range(400)]
    for number in range(1200):
        assert put(one, str(number), key=keys[number % 400])
    count, calls = one.count, Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        pending = one.begin("other", "large", None, [b" " * 900_000])
    finally:
        sys.setprofile(None)
    assert count - one.count > 200 and (calls["call"] + calls["c_call"]) / (count - one.count) < 40
    assert all(names(one, key) for key in keys), "a key has lost more than others"
    pending.close()
    check(one, 2_000_000)


def test_a_response_that_never_fits_and_one_that_does_not_fit_now() -> None:
    one = store(6000)
    with pytest.raises(ApiError) as error:
        one.begin("k", "a", None, [b"x" * 6000])
    assert error.value.status == 400 and error.value.param == "store"
    pending = [one.begin("k", str(i), None, [b"[]" * 300]) for i in range(3)]
    with pytest.raises(ApiError) as error:
        one.begin("k", "more", None, [b"[]"])
    assert error.value.status == 503
    pending[0].close()
    pending[0].close()
    pending.pop().close()
    assert put(one, "more")
    big = one.begin("k", "big", None, [b"[]"])
    assert not big.finish({"output": [{"id": "o", "text": "x" * 9000}]}) and not big.finish({"output": []})
    for rest in pending:
        rest.close()
    check(one, 6000)
    assert names(one) == {"more"}


def test_entries_and_conversations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_ENTRIES", 3)
    one = store()
    for name in "abcde":
        put(one, name)
    assert names(one) == set("cde")
    long = store(64 << 20)
    put(long, "a", MAX_CONVERSATION // 2)
    put(long, "b", MAX_CONVERSATION // 2, "a")
    assert earlier(long, "a")
    with pytest.raises(ApiError) as error:
        earlier(long, "b")
    assert error.value.param == "previous_response_id" and error.value.status == 400
    monkeypatch.setattr(stored_responses, "MAX_MESSAGES", 4)
    for name, previous in (("x", None), ("y", "x"), ("z", "y")):
        put(one, name, previous=previous)
    assert len(earlier(one, "y")["previous"]) == 4
    for look_up in (one.earlier, one.length):
        with pytest.raises(ApiError, match="more than 4 items"):
            look_up("k", "z", ())


def test_a_response_that_cannot_be_encoded_leaves_no_reservation() -> None:
    one = store()
    pending = one.begin("k", "a", None, [b"{}"])
    with pytest.raises(TypeError):
        pending.finish({"output": [{"id": "o", "text": object()}]})
    pending.close()
    assert (one.used, one.count) == (0, 0)


def test_the_counts_stay_right_whatever_happens() -> None:
    draw, one, known, pending = random.Random(3), store(40_000, keys=2), list[tuple[str, str]](), list[Any]()
    for i in range(3000):
        key, name, kind = draw.choice("ab"), str(i), draw.randrange(5)
        try:
            if kind < 2:
                previous = draw.choice([n for k, n in known[-5:] if k == key] or [None])
                if put(one, name, draw.randrange(3000), previous, key):
                    known.append((key, name))
            elif kind == 2 and known:
                one.delete(*draw.choice(known[-20:]))
            elif kind == 3:
                pending.append(one.begin(key, name, None, [b"[]"] * draw.randrange(20)))
            elif pending:
                pending.pop(draw.randrange(len(pending))).close()
        except ApiError:
            pass
        assert 0 <= one.used <= 40_000
    for rest in pending:
        rest.close()
    check(one, 40_000)


def test_a_server_without_a_store_refuses_stored_responses() -> None:
    one = store(0)
    assert not one.enabled
    with pytest.raises(ApiError, match="stores none"):
        one.get("k", "a")
