"""The store of /v1/responses: bounded memory, accounting while a response is sent, and responses without storing."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx

from tests.runtime.parrots import Servers, say
from tests.runtime.served import until


def post(servers: Servers, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{servers[0]}/think/v1/responses", json={"temperature": 0, **body}, timeout=60)


def test_a_long_conversation_with_a_small_body_goes_to_a_text_process(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = servers[1]["think"]
    begun: list[bytes] = []
    begin = serving.text_processes.begin
    monkeypatch.setattr(serving.text_processes, "begin", lambda kind, body: begun.append(kind) or begin(kind, body))
    items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 400}] * 100
    body = {"input": [*items, say("Hello")], "max_output_tokens": 2}
    first = post(servers, body)
    assert first.status_code == 400 and begun == [b"S"], first.text  # its prompt is too long for the model
    store, name = serving.stored, "resp_long"
    encoded = json.dumps({"type": "message", "id": "m", "role": "user", "content": "z " * 20_000}).encode()
    assert store.begin("", name, None, [encoded]).finish({"output": []})
    second = post(servers, {"input": [say("Hello")], "previous_response_id": name})
    assert begun == [b"S", b"S"] and second.json()["error"]["code"] == "context_length_exceeded"
    assert second.json()["error"]["param"] == "input"


def test_items_of_earlier_responses_are_not_kept(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests that continue a conversation of megabytes hold no copies of it."""
    store, found = servers[1]["think"].stored, list[bytes]()
    of_store = store.earlier
    monkeypatch.setattr(store, "earlier", lambda *args: found.append(of_store(*args)) or found[-1])
    ignored = json.dumps({"type": "message", "id": "m", "role": "user", "content": "x", "y": "z" * 50_000}).encode()
    assert store.begin("", "resp_padded", None, [ignored]).finish({"output": []})
    body = {"input": [say("word " * 300)], "stream": True, "ignore_eos": True, "previous_response_id": "resp_padded"}
    with httpx.stream("POST", f"{servers[0]}/think/v1/responses", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("event") and len(found) == 1 and len(found[0]) > 50_000
        assert sys.getrefcount(found[0]) <= sys.getrefcount(bytes(50_000)) + 1  # that of the list `found`
        assert list(lines)


def test_stored_responses_that_are_not_read_have_a_limit(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes are counted with those of open responses until they are sent or the client leaves."""
    serving, size = servers[1]["think"], 16 << 20  # more than sockets take
    monkeypatch.setattr(serving.admission, "answers", size * 3 // 2)
    for name in ("_limits", "_shares"):
        monkeypatch.setattr(serving.stored, name, (2 * size, 10))
    item = json.dumps({"type": "message", "id": "m", "role": "user", "content": "z" * size}).encode()
    assert serving.stored.begin("", "resp_big", None, [item]).finish({"id": "resp_big", "output": []})
    url = f"{servers[0]}/think/v1/responses/resp_big"
    with httpx.stream("GET", f"{url}/input_items"):
        assert httpx.get(f"{url}/input_items").status_code == 503
    until(lambda: not serving.admission.answer_bytes.total())
    listed = httpx.get(f"{url}/input_items")
    assert listed.content.endswith(item + b"]}") and listed.json()["first_id"] == "m"
    serving.stored.delete("", "resp_big")


def test_without_room_only_requests_to_store_are_refused(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing is the default, so that others who fill the store would else stop everybody."""
    store = servers[1]["think"].stored
    before = store.count, store.used
    for name, status in (("_make_room", 503), ("_shares", 400)):
        monkeypatch.setattr(store, name, (lambda *_: False) if name == "_make_room" else (10, 10))
        body = {"input": "Hello", "max_output_tokens": 2}
        assert post(servers, body | {"store": True}).status_code == status
        answered = post(servers, body)
        assert answered.status_code == 200 and answered.json()["store"] is False
        with httpx.stream(
            "POST", f"{servers[0]}/think/v1/responses", json=body | {"stream": True}, timeout=60
        ) as reply:
            events = [json.loads(x.removeprefix("data: ")) for x in reply.iter_lines() if x.startswith("data: ")]
        assert [e["response"]["store"] for e in events if "response" in e] == [False] * 3
    assert (store.count, store.used) == before


def test_a_client_that_leaves_frees_its_place_in_the_store(servers: Servers) -> None:
    store = servers[1]["think"].stored
    before = store.count, store.used
    body = {"input": [say("word " * 300)], "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{servers[0]}/think/v1/responses", json=body, timeout=60) as reply:
        lines = reply.iter_lines()  # a generator that is dropped ends the stream
        assert next(lines) and store.count == before[0] + 1
    for _ in range(500):
        if (store.count, store.used) == before:
            return
        time.sleep(0.01)
    raise AssertionError((store.count, store.used, before))
