"""Malicious requests: parameters, schemas, damaged bodies during streams of others, prefixes, media."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.attacks.bodies import EDGES, at_the_edge, damaged, fields, prompt
from tests.attacks.oracle import GOLDEN, answer
from tests.attacks.target import JSON, LEAKS, Target, leaks, target, until

KINDS = (200, 400)


def test_05_parameters_at_their_edges(steady: Target, draw: Random, full: bool) -> None:
    """Every field of every endpoint, as the server describes them, takes values at and beyond every edge: answered or
    refused with a cause, in little memory, while a neighbour is served normally."""
    found = fields(steady.ask("/openapi.json").json)
    assert len(found) > 100
    cases = [(path, names, value) for path, names in found for value in EDGES]
    cases = cases if full else draw.sample(cases, 100)
    draw.shuffle(cases)
    before = steady.memory()
    for number, (path, names, value) in enumerate(cases, 1):
        reply = steady.ask(path, at_the_edge(draw, path, names, value))
        case = (path, names, value)
        announced = reply.status in (429, 503) and "Retry-After" in reply.headers
        named = names in (("model",), ("previous_response_id",))
        assert announced or reply.status in ((*KINDS, 404) if named else KINDS), (case, reply)
        assert reply.status == 200 or reply.code, (case, reply)
        if number % 10 == 0:  # a failure names the cases since the last check
            steady.steady([(path, names, str(value)[:24]) for path, names, value in cases[number - 10 : number]])
    assert steady.memory() - before < 50 << 20


def test_05_a_neighbour_is_as_quick_as_before(steady: Target, draw: Random) -> None:
    """The slowest tenth of a neighbour's requests, with and without concurrent refusals."""
    found = fields(steady.ask("/openapi.json").json)

    def slow() -> float:
        seconds = []
        for _ in range(40):
            began = time.perf_counter()
            assert steady.ask("/v1/completions", GOLDEN).status == 200
            seconds.append(time.perf_counter() - began)
        return sorted(seconds)[-4]

    alone, over = slow(), threading.Event()

    def refusals() -> None:
        while not over.wait(0.002):
            path, names = draw.choice(found)
            steady.ask(path, at_the_edge(draw, path, names, draw.choice((2**63, -1, "x" * 4000, list(range(3000))))))

    thread = threading.Thread(target=refusals)
    thread.start()
    try:
        beside = min(slow() for _ in range(3))
    finally:
        over.set()
        thread.join()
    assert beside < 2 * alone + 0.25, (alone, beside)


DEEP = '{"type":"object","properties":{"a":' * 1500 + "{}" + "}}" * 1500  # as a text


def schemas(full: bool) -> list[dict[str, Any]]:
    """Forms that have slowed, filled or ended other servers."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}
    json_schemas: list[Any] = [
        {"type": "array", "minItems": 100_000, "items": {"type": "string"}}, {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/x"},
        {"type": "string", "minLength": 1_000_000}, {"type": "something"}, {"type": ["x", 1, None]}, many,
        {"anyOf": []},
        {"enum": [f"e{i}" for i in range(100_000 if full else 9000)]}, {"type": "string", "pattern": "(a+)+$"},
        {"not": {}},
        {"type": "string", "pattern": "["}, {"type": "string", "format": "no-such"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"multipleOf": 0}, {"multipleOf": 1e-300},
        {"type": "number", "minimum": 1e308, "maximum": -1e308}, {"properties": []}, {"required": "x"}, {"const": deep},
        {"type": "object", "patternProperties": {"(x+x+)+y": {}}}, {"items": 5}, {"type": "integer",
        "minimum": 10**400}, True,
        {"minProperties": 10**9}, {"uniqueItems": True, "type": "array"}, [], "", "{", "null", 5, "\0", deep, DEEP,
    ]  # fmt: skip
    regexes = (
        "(a+)+$", "((a*)*)*b", "(a|a)*c", "(.*){1,999}", "a{100000}", "(a{1,1000}){1,1000}", "(?=a)b", "(?!a)b",
        "(?<=a)b",
        "\\1(a)", "[", "(", "*", "a{2,1}", "\\p{Greek}+", "\\uD800", "(?P<n>a)(?P=n)", "x" * 60_000,
        "(" * 5000 + ")" * 5000,
        "[^\\x00-\\x{10FFFF}]", "", "\0", "(?i)" + "ſ" * 500, "|".join(f"w{i}" for i in range(5000)), "^$", "\\b\\B",
    )  # fmt: skip
    grammars = (
        "start: start", "start: start start | \"a\"", 'start: "a"* "a"* "a"* "b"', "x: y", "start: /(a+)+/",
        "root ::= root",
        "%import common.NUMBER\nstart: NUMBER", "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        "start: a~1..1000000\na: \"x\"",
        "start:", "\0", 'root ::= "a" | root root root', "start: " + " | ".join(f'"{i}"' for i in range(4000)),
        "%llguidance {}",
    )  # fmt: skip
    made: list[dict[str, Any]] = [{"structured_outputs": {"json": one}} for one in json_schemas]
    made += [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": one}}}
        for one in json_schemas
    ]
    made += [{"structured_outputs": {"regex": one}} for one in regexes]
    made += [{"structured_outputs": {"grammar": one}} for one in grammars]
    made += [
        {"structured_outputs": {"choice": one}} for one in ([], [""], ["x"] * 5000, ["x" * 70_000], [1], "x", [[]])
    ]
    return made + [{"structured_outputs": {"regex": "a", "whitespace_pattern": one, "json": {}}} for one in regexes[:6]]


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A function of these parameters, which has to be called."""
    function = {"name": "f", "parameters": schema, "strict": True}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def test_08_schemas_and_expressions(steady: Target, draw: Random, full: bool) -> None:
    """Each is answered or refused within seconds, and concurrent requests are unaffected."""
    pytest.importorskip("llguidance")
    made, beside = schemas(full), [with_schema(one) for one in ({"type": "object"}, {"$ref": "#"}, {"enum": []}, {})]
    for form in made if full else draw.sample(made, 15):
        began = time.monotonic()
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 1, **form}
        if draw.random() < 0.5:
            reply = steady.ask("/v1/completions", {"prompt": "x", **options})
        else:
            options["messages"] = [{"role": "user", "content": "x"}]
            reply = steady.ask(
                "/v1/chat/completions", {**options, **(draw.choice(beside) if draw.random() < 0.5 else {})}
            )
        shown = json.dumps(form)[:300]
        assert reply.status in KINDS and time.monotonic() - began < 12, (shown, reply)
        assert reply.status == 200 or reply.code, shown
        steady.steady(shown)


def test_08_many_schemas_leave_nothing_behind(steady: Target, times: Callable[[int, int], int]) -> None:
    """Compiled grammars are evicted: memory does not grow, and no file is written."""
    pytest.importorskip("llguidance")

    def ask(first: int, count: int) -> None:
        for i in range(first, first + count):
            form = {"type": "object", "properties": {f"name{i}": {"type": "string", "maxLength": i % 90 + 1}}}
            body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": form}}
            assert steady.ask("/v1/completions", body).status == 200

    ask(0, times(20, 200))
    before = steady.memory()
    ask(10_000, times(20, 1500))
    assert steady.memory() - before < 30 << 20


def test_09_no_request_ends_the_engine(steady: Target, draw: Random, times: Callable[[int, int], int]) -> None:
    """Damaged bodies for every endpoint: never a 5xx, and the server is unaffected after each one."""
    for _ in range(times(60, 3000)):
        path, body = damaged(draw)
        reply = steady.ask(path, body)
        assert reply.status < 500, (path, body[:2000], reply)
        assert reply.status == 200 or reply.code, (path, body[:2000], reply)
        steady.steady((path, body[:2000]))


def test_09_what_breaks_the_engine_would_be_seen(draw: Random) -> None:
    """A server whose device gives one wrong token in fifty, and one whose engine was replaced, are not steady."""
    with target(engine={"wrong": 50}) as wrong, pytest.raises(AssertionError, match=r"another golden|== answer"):
        for i in range(30):
            wrong.steady(i)
    with target(front={"restart_delay": 0.0}) as other:
        other.steady()
        dead = other.engine
        os.kill(dead, signal.SIGKILL)
        until(lambda: other.figure("restarts_total") == 1 and other.ask("/ready").status == 200)
        with pytest.raises(AssertionError, match=f"{dead} ended"):
            other.steady()


def test_10_nobody_gets_what_is_another_s(steady: Target, draw: Random, times: Callable[[int, int], int]) -> None:
    """Greedy streams keep their output during damaged bodies of others, and if clients choose equal ids."""
    over, came = threading.Event(), [0]

    def noise(own: Random) -> None:
        while not over.is_set():
            path, body = damaged(own)
            steady.ask(path, body, key=own.choice(("first-secret-key", "second-secret-key")))
            came[0] += 1

    threads = [threading.Thread(target=noise, args=[Random(draw.random())]) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(times(25, 1000)):
            ids = prompt(draw, 60)
            body = {
                "prompt": ids,
                "max_tokens": 20,
                "temperature": 0,
                "seed": 7,
                "ignore_eos": True,
                "stream": i % 2 == 0,
            }
            body |= {"request_id": "same", "user": "same"}
            reply = steady.ask("/v1/completions", body, headers={"X-Request-Id": "same"})
            if reply.status in (429, 503):  # the noise filled the queue, or this key's share of it, and says so
                assert "Retry-After" in reply.headers
                continue
            assert text_of(reply.body, bool(body["stream"])) == answer(ids, 20), ids
            assert reply.headers["X-Request-Id"] == "same" and b'"same"' not in reply.body
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert came[0]


def text_of(body: bytes, stream: bool) -> str:
    """The text of a completion, whole or streamed."""
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    events = [line[6:] for line in body.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for one in events[:-1] for choice in json.loads(one)["choices"])


def cached(server: Target, ids: list[int], key: str = "", salt: str | None = None) -> int:
    """Tokens of a prompt that came from the cache; the answer is the oracle's."""
    body = {"prompt": ids, "max_tokens": 3, "temperature": 0, "seed": 7, "ignore_eos": True}
    reply = server.ask("/v1/completions", body | ({} if salt is None else {"cache_salt": salt}), key=key or server.key)
    assert reply.status == 200 and reply.json["choices"][0]["text"] == answer(ids, 3), reply
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_11_prefixes_are_what_they_seem(steady: Target, draw: Random) -> None:
    """A hit is an equal beginning, never equal bytes in another shape."""
    ids = [draw.randrange(3, 400) for _ in range(40)]
    assert cached(steady, ids) == 0 and cached(steady, ids) == 36
    shifted = [(i * 256) % 400 + 3 for i in ids]
    assert cached(steady, shifted) == 0 and cached(steady, ids[1:]) == 0 and cached(steady, ids[::-1]) == 0
    for same in range(0, 40, 7):
        other = [*ids[:same], (ids[same] + 1) % 400 + 3, *ids[same + 1 :]]
        assert cached(steady, other) == same // 4 * 4
    assert cached(steady, ids[4:8] + ids[4:]) == 0


@pytest.mark.parametrize("weak", [1])
def test_11_collisions_are_detected(weak: int, draw: Random, times: Callable[[int, int], int]) -> None:
    """With digests of one byte prefixes collide all the time; tokens are compared, so that every answer is right."""
    with target(engine={"weak": weak}) as server:
        for _ in range(times(40, 1500)):
            cached(server, prompt(draw, 60))
        server.at_rest()


def test_10_a_stored_response_belongs_to_its_key(steady: Target) -> None:
    first, second = "first-secret-key", "second-secret-key"
    asked = {"input": "x", "max_output_tokens": 2}
    name = steady.ask("/v1/responses", asked, key=first).json["id"]
    item = steady.ask(f"/v1/responses/{name}", key=first).json["output"][0]["id"]
    uses: tuple[tuple[str, Any, str], ...] = (
        (f"/v1/responses/{name}", None, "GET"), (f"/v1/responses/{name}/input_items", None, "GET"),
        (f"/v1/responses/{name}", None, "DELETE"), ("/v1/responses", {**asked, "previous_response_id": name}, "POST"),
        ("/v1/responses", {**asked, "input": [{"type": "item_reference", "id": item}]}, "POST"),
    )  # fmt: skip
    for key, status in ((second, 404), (first, 200)):
        for path, body, method in sorted(uses, key=lambda use: use[2] == "DELETE"):
            assert steady.ask(path, body, method=method, key=key).status == status, (path, body, method, key)
    assert steady.ask(f"/v1/responses/{name}", key=first).status == 404


def test_12_the_cache_tells_other_keys_nothing(steady: Target, draw: Random) -> None:
    """A prompt of one key is a miss for another key, and for another salt of its own; it is a hit for its own key."""
    ids = [draw.randrange(3, 400) for _ in range(80)]
    first, second = "first-secret-key", "second-secret-key"
    assert cached(steady, ids, first) == 0 and cached(steady, ids, second) == 0
    assert cached(steady, ids, first) == cached(steady, ids, second) == 76
    assert cached(steady, ids, first, "a") == 0 and cached(steady, ids, second, "a") == 0
    assert cached(steady, ids, first, "") == 76
    for salt in ("/", f"{second}", "a/", "\u0000"):  # a salt is not part of a key's name
        other = [draw.randrange(3, 400) for _ in range(40)]
        assert cached(steady, other, second) == 0 and cached(steady, other, first, salt) == 0, salt


def test_12_nor_does_the_time(draw: Random, full_only: None) -> None:
    """If a prompt takes 50 microseconds a token: the area under the curve of one key's times on another's prompts
    against new ones is near a half; on its own prompts it is not.

    Of 250 pairs drawn from one distribution, the area deviates from a half by 0.05 in one of twenty runs, so pairs are
    added while it does: of 2,000 pairs, it does in one of ten million. The area of a leak does not depend on how many
    pairs there are."""
    with target(keys=("first-secret-key", "second-secret-key"), engine={"per_token": 5e-5, "depth": 1}) as server:

        def seconds(ids: list[int], key: str) -> float:
            began = time.perf_counter()
            assert server.ask("/v1/completions", {"prompt": ids, "max_tokens": 1}, key=key).status == 200
            return time.perf_counter() - began

        new: list[float] = []
        others: list[float] = []
        own: list[float] = []
        while len(new) < 250 or (len(new) < 2000 and abs(area(new, others) - 0.5) >= 0.05):
            for _ in range(250):
                a, b = ([draw.randrange(3, 400) for _ in range(200)] for _ in range(2))
                seconds(a, "first-secret-key")
                for which in draw.sample((0, 1), 2):
                    (others if which else new).append(seconds(a if which else b, "second-secret-key"))
                own.append(seconds(a, "first-secret-key"))
        assert abs(area(new, others) - 0.5) < 0.05, (area(new, others), len(new))
        assert area(new, own) > 0.9


def area(one: list[float], other: list[float]) -> float:
    """How often a value of `one` is over a value of `other`."""
    return sum(a > b for a in one for b in other) / (len(one) * len(other))


def test_18_answers_tell_nothing_of_the_inside(steady: Target, draw: Random) -> None:
    """Errors hold no address, path, line of code, environment, key or other prompt, and neither does the log; every
    answer of every attack goes through the same search."""
    secret = "nobody-else-may-read-this"
    options = {"messages": [{"role": "user", "content": secret}], "max_tokens": 3}
    assert steady.ask("/v1/chat/completions", options).status == 200
    probes: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": [{"role": secret, "content": [{"type": secret}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"messages": 1}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "["}}), ("/v1/completions", b"\xff"),
        ("/v1/completions", {"prompt": ["x", 5]}), ("/v1/completions", {"prompt": {"x": object.__name__}}),
        ("/detokenize", {"tokens": [10**9]}), ("/v1/models/%2e%2e/x", None), ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "\ud800"}), ("/v1/completions", {"prompt": [[]]}), ("/v1/completions",
        {"prompt": "x", "n": 65}),
    ]  # fmt: skip
    for path, body in probes:
        reply = steady.ask(path, body)
        assert reply.status in (400, 404), (path, body, reply)
        assert not leaks(reply.body.decode(), [secret, *KEYS_OF_LOG]) or secret in str(body), reply
        assert reply.headers.get("server") is None and "x-powered-by" not in reply.headers
    text = "".join(line for line in steady.lines if "attack routes" not in line)
    assert secret not in text and not any(key in text for key in KEYS_OF_LOG) and "Traceback" not in text


KEYS_OF_LOG = ("first-secret-key", "second-secret-key")


def test_18_leaks_would_be_seen() -> None:
    """The search for leaks detects them."""
    for text in (
        "Traceback (most recent call last)", "<object at 0x7f3a2b1c9d40>", 'File "x", line 3, in f', "in engine.py",
        "/usr/lib/x",
        "site-packages", "<class 'int'>", "<function f",
    ):  # fmt: skip
        assert LEAKS.search(text), text
    assert leaks("abc key-of-mine", ["key-of-mine"]) == ["key-of-mine"]
    assert not leaks('{"error":{"message":"prompt: token ids of the vocabulary, 0 to 427"}}')


def test_22_media_is_refused(steady: Target) -> None:
    """Any part but text is refused before it is decoded; no decompression bomb is opened."""
    bomb = "data:image/png;base64," + "A" * 2_000_000
    for part in (
        {"type": "image_url", "image_url": {"url": bomb}}, {"type": "image_url", "image_url": bomb}, {"type": "image",
        "image": bomb},
        {"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}}, {"type": "audio_url",
        "audio_url": {}},
        {"type": "video_url", "video_url": {"url": bomb}}, {"type": "file", "file": {"file_data": bomb}},
        {"type": "image_embeds"},
        {"image_url": {"url": bomb}}, {"type": "text", "image_url": bomb}, 5, None, [], {"type": "text",
        "text": {"url": bomb}},
    ):  # fmt: skip
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
            began = time.monotonic()
            reply = steady.ask(path, json.dumps(body).encode(), headers=JSON)
            assert reply.status == 400 and reply.code and time.monotonic() - began < 10, (path, str(part)[:80], reply)
    for name in ("multi_modal_data", "mm_processor_kwargs", "modalities", "audio", "prompt_embeds"):
        body = {"prompt": "x", "max_tokens": 1, name: {"image": bomb}}
        assert steady.ask("/v1/completions", body).status in KINDS, name
