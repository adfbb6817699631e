"""Requests that no client library sends: ambiguous HTTP messages, upgrades and other protocols, invalid numbers and
characters, grammars without an end, ids of other clients.

Each gets the correct status and a cause without delay, and no hidden request is answered.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.attacks.conftest import KEYS
from tests.attacks.target import Reply, Target
from tests.attacks.wire import Link, head, raw

BODY = b'{"prompt": "x", "max_tokens": 1}'
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SECONDS = 20.0  # of any answer, on a machine that other tests share


def answers(server: Target, sent: bytes) -> list[Reply]:
    """All answers, up to the end of the connection or a second of silence."""
    found: list[Reply] = []
    with Link(server) as link:
        link.send_some(sent)
        try:
            while (reply := link.answer()).status:
                found.append(reply)
                link.settimeout(1.0)
        except TimeoutError:
            pass
    return found


REFUSED: list[tuple[bytes, bytes]] = [  # lines after the head's others, and the body
    (b"Content-Length: 5\r\n" + CHUNKED, CHUNKS),
    (b"Transfer-Encoding: xchunked\r\n", CHUNKS),
    (b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS),
    (b"Transfer-Encoding: identity\r\n", BODY),
    (CHUNKED * 2, CHUNKS),
    (b"Transfer-Encoding : chunked\r\n", CHUNKS),
    (b"Transfer-Encoding: \x0bchunked\r\n", CHUNKS),
    (LENGTH + b"Content-Length: 5\r\n", BODY),
    *((b"Content-Length: %b\r\n" % number, BODY) for number in (b"", b"5 5", b"1e2", b"9" * 30, b"\xef\xbc\x95")),
    (b"X: a\r" + CHUNKED + LENGTH, BODY),
    (b"X: a\0b\r\n" + LENGTH, BODY),
    (b": x\r\n" + LENGTH, BODY),
    (b"X\r\n" + LENGTH, BODY),
    (b"Host: other\r\n" + LENGTH, BODY),
    *(
        (CHUNKED, b"%b\r\n%b\r\n0\r\n\r\n" % (size, BODY))
        for size in (b"0x20", b"-1", b"+1", b"1_0", b" 1", b"1 ", b"", b"g", b"F" * 21)
    ),
    (CHUNKED, b"%x\r\n%b0\r\n\r\n" % (len(BODY), BODY)),  # no line end after a chunk
    (CHUNKED, b"%x\r\n%b\r\n0\r\nno trailer\r\n\r\n" % (len(BODY), BODY)),
]


@pytest.mark.parametrize("chunk", range(4))
def test_27_smuggled_requests(steady: Target, chunk: int) -> None:
    """Each ambiguous message gets one answer, 400, and ends the connection with what follows it."""
    inner = head(steady, "/v1/models", "GET")
    for lines, body in REFUSED[chunk::4]:
        found = answers(steady, head(steady)[:-2] + lines + b"\r\n" + body + inner)
        assert [one.status for one in found] == [400], (lines, body, found)
        assert found[0].code == "invalid_http", (lines, body)
        if lines == CHUNKED:
            assert "chunks" in found[0].json["error"]["message"]


TWICE = (
    "Authorization: Bearer {}",
    "Content-Type: {}",
    "Content-Encoding: {}",
    "X-Api-Key: {}",
    "X-Request-Timeout: {}",
)


@pytest.mark.parametrize("line", TWICE)
def test_27_headers_of_which_a_proxy_may_read_the_other(steady: Target, line: str) -> None:
    """Two values, of which one is valid, in both orders; the same value twice is one."""
    name = line.partition(":")[0]
    valid = {"Authorization": KEYS[0], "Content-Type": "application/json", "Content-Encoding": "identity",
             "X-Api-Key": KEYS[0], "X-Request-Timeout": "60"}[name]  # fmt: skip
    other = {"Authorization": KEYS[1], "Content-Type": "text/plain", "Content-Encoding": "gzip",
             "X-Api-Key": KEYS[1], "X-Request-Timeout": "61"}[name]  # fmt: skip
    start = b"\r\n".join(one for one in head(steady).split(b"\r\n") if not one.startswith(name.encode()))[:-2]
    for pair, status in (((valid, other), 400), ((other, valid), 400), ((valid, valid), 200)):
        more = "".join(line.format(value) + "\r\n" for value in pair).encode()
        reply = raw(steady, start + more + LENGTH + b"\r\n" + BODY)
        assert reply.status == status, (pair, reply)
        assert status == 200 or (reply.code == "invalid_http" and name.lower() in str(reply.json)), reply


def test_27_ids_that_exclude_each_other(steady: Target) -> None:
    """The message shows the ids of the request, at most a few of them, and nothing of how they are stored."""
    for ids, shown in (([90], "[90]"), (list(range(20, 50)), "[20, 21, 22, 23, 24, 25, 26, 27, ...]")):
        body = {"prompt": "x", "max_tokens": 4, "min_tokens": 2, "allowed_token_ids": ids, "stop_token_ids": ids}
        reply = steady.ask("/v1/completions", body)
        assert reply.status == 400 and f"allowed_token_ids = {shown} is not" in str(reply.json), reply


def test_27_what_can_be_read_in_one_way_is_served(steady: Target) -> None:
    """The request that follows it is served, too."""
    inner = head(steady, "/v1/models", "GET")
    for lines, body in (
        (LENGTH, BODY), (CHUNKED, CHUNKS), (b"transfer-encoding:\tCHUNKED\r\n", CHUNKS), (LENGTH * 2, BODY),
        (CHUNKED, b"%x;a=b\r\n%b\r\n000\r\nX: y\r\n\r\n" % (len(BODY), BODY)),
    ):  # fmt: skip
        found = answers(steady, head(steady)[:-2] + lines + b"\r\n" + body + inner)
        assert [one.status for one in found] == [200, 200], (lines, body, found)


def test_27_upgrades_and_other_protocols(steady: Target) -> None:
    """An upgrade is ignored, as HTTP specifies; other versions and protocols are refused; Expect has a time limit."""
    upgrades: list[dict[str, Any]] = [
        {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": 13, "Sec_WebSocket_Key": "eHh4eA=="},
        {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings", "HTTP2_Settings": "AAMAAABkAAQAAP__"},
    ]
    for more in upgrades:
        assert raw(steady, head(steady, "/v1/models", "GET", **more)).status == 200, more
        assert raw(steady, head(steady, Content_Length=len(BODY), **more) + BODY).status == 200, more
    get = head(steady, "/v1/models", "GET")
    for version in (b"HTTP/2.0", b"HTTP/3.0", b"HTTP/0.9"):
        reply = raw(steady, get.replace(b"HTTP/1.1", version))
        assert reply.status == 505 and reply.code == "http_version", (version, reply)
    assert raw(steady, get.replace(b"HTTP/1.1", b"HTTP/1.9")).status == 200
    for sent in (b"GET /v1/models\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b" " * 5000 + b"\r\n\r\n"):
        assert raw(steady, sent).status in (400, 401, 505), sent[:30]
    for method in ("TRACE", "CONNECT", "OPTIONS", "PUT", "PRI", "get", "A" * 5000):
        reply = raw(steady, head(steady, "/v1/completions", method))
        assert reply.status == 405 and reply.headers["allow"] == "POST", (method, reply)
    reply = raw(steady, head(steady, "/v1/completions", "HEAD"), "HEAD")
    assert reply.status == 405 and reply.body == b""
    with Link(steady) as link:
        link.send_some(head(steady, Expect="100-continue", Content_Length=len(BODY)))
        assert link.answer().status == 100
        link.send_some(BODY)
        assert link.answer().status == 200
    assert raw(steady, head(steady, Expect="100-continue", Content_Length=9_000_000)).status == 413


def test_27_targets_and_headers(steady: Target) -> None:
    """Long queries, keys in them, other spellings of a path, hosts in the target, huge headers."""
    for target, statuses in (
        ("/v1/models?x=" + "y" * 7_000, (200,)), ("/v1/models?x=" + "y" * 100_000, (414,)),
        ("/v1/models?x=%00%ff%u1234", (200,)), ("/v1/models#x", (404,)), ("/health/../metrics", (404,)),
        ("/health%2f..%2fmetrics", (404,)), ("http://evil.test/v1/models", (400,)), ("localhost:1", (400,)),
        ("/v1/responses/" + "a" * 6000, (404,)), ("/v1/responses/%00", (404,)), ("/v1/responses/..%2f..%2fetc", (404,)),
    ):  # fmt: skip
        assert raw(steady, head(steady, target, "GET")).status in statuses, target[:40]
    without = f"GET /v1/models?api_key={steady.key} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    assert raw(steady, without).status == 401
    get = head(steady, "/v1/models", "GET")
    for more, status in (
        (b"Cookie: " + b"a=b; " * 4000, 200), (b"X-Long: " + b"y" * 60_000, 431),
        (b"traceparent: 00-" + b"a" * 9000, 200), (b"X-Request-Id: a\tb<script>", 200),
        (b"X-Request-Id: " + b"a" * 129, 200), (b"Range: bytes=0-1", 200),
        (b"X-HTTP-Method-Override: DELETE\r\nX-Original-URL: /admin/drain", 200),
    ):  # fmt: skip
        reply = raw(steady, get[:-2] + more + b"\r\n\r\n")
        assert reply.status == status and b"script" not in str(reply.headers).encode(), (more[:40], reply)
    for seconds in ("NaN", "inf", "-1", "0", "1e400", "9" * 5000, "1_0", "5s"):
        reply = raw(steady, head(steady, X_Request_Timeout=seconds, Content_Length=len(BODY)) + BODY)
        assert reply.status == 400, seconds[:10]


NUMBERS = {"1e400": "1e400", "10^5 digits": "9" * 100_000, "NaN": "NaN", "-Infinity": "-Infinity", "0x1": "0x1"}
FIELDS = (
    "max_tokens", "temperature", "seed", "top_k", "n", "priority", "logit_bias", "min_p", "truncate_prompt_tokens",
    "unknown", "prompt",
)  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_27_numbers_that_no_type_holds(steady: Target, name: str) -> None:
    """In every kind of field, known or not."""
    for field in FIELDS:
        value = NUMBERS[name]
        value = f'{{"5": {value}}}' if field == "logit_bias" else f"[{value}]" if field == "prompt" else value
        start = "" if field == "prompt" else '"prompt": "x", '
        reply = steady.ask("/v1/completions", f'{{{start}"{field}": {value}}}'.encode(), timeout=SECONDS)
        assert reply.status == 400 and reply.code == "invalid_json", (field, reply)


def test_27_numbers_at_the_edge(steady: Target) -> None:
    """Zeros and integers with a decimal point are accepted; others are out of range."""
    for field, number, status in (
        ("temperature", "1E-99999", 200), ("temperature", "-0", 200), ("temperature", "1e308", 400),
        ("seed", "1.0", 200), ("seed", "1.5", 400), ("seed", str(2**64), 400), ("top_k", str(2**63), 400),
        ("priority", str(2**31), 400), ("priority", str(-(2**31)), 200), ("max_tokens", str(2**63), 400),
    ):  # fmt: skip
        body = f'{{"prompt": "x", "max_tokens": 1, "{field}": {number}}}'
        body = f'{{"prompt": "x", "{field}": {number}}}' if field == "max_tokens" else body
        reply = steady.ask("/v1/completions", body.encode(), timeout=SECONDS)
        assert reply.status == status, (field, number, reply)


HALVES = (r"\ud800", r"\udc00", r"\udc00\ud800", r"\ud800\u0041", "\\ud83d\\u", "\\ud83d")
BYTES = (b"\xe9", b"\xc0\xaf", b"\xed\xa0\x80\xed\xb0\x80", b"\xf0\x9f\x98", b"\xf4\x90\x80\x80")


def test_27_halves_of_characters(steady: Target) -> None:
    """Lone surrogates and bytes that are no UTF-8, in values and in names of fields."""
    texts = [half.encode() for half in HALVES] + list(BYTES)
    for text in texts:
        for field in (b'"prompt":"%b"', b'"prompt":"x","stop":["%b"]', b'"prompt":"x","bad_words":["%b"]',
                      b'"prompt":"x","%b":1', b'"prompt":"x","user":"%b"', b'"prompt":"x","model":"%b"'):  # fmt: skip
            reply = steady.ask("/v1/completions", b'{"max_tokens":1,' + field % text + b"}", timeout=SECONDS)
            assert reply.status == 400 and reply.code == "invalid_json", (text, field, reply)
    for text in ("\x00", "\ufffe\uffff", "\U0001f600", "\u202e"):
        reply = steady.ask("/v1/completions", {"prompt": f"a{text}b", "max_tokens": 1}, timeout=SECONDS)
        assert reply.status == 200, (text, reply)


def test_27_documents_that_are_not_one_object(steady: Target) -> None:
    """Two documents, comments, other encodings, lists, nothing; the last of two equal names counts."""
    for body in (
        b"",
        b"null",
        b"[]",
        b'"x"',
        BODY * 2,
        b"/**/" + BODY,
        BODY[:-1] + b",}",
        BODY.decode().encode("utf-16"),
    ):
        reply = steady.ask("/v1/completions", body, timeout=SECONDS)
        assert reply.status == 400 and reply.code == "invalid_json", (body[:40], reply)
    for prompt in (["x", [1, 2]], [1, "x"], [[[1]]], [[]], [], [None], [-1], [10**9], [1.5], [True], {}, True):
        reply = steady.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1}, timeout=SECONDS)
        assert reply.status == (200 if prompt == ["x", [1, 2]] else 400), (prompt, reply)


def chain(count: int) -> dict[str, Any]:
    """A schema whose definitions refer to the next one, `count` of them, or (0) to themselves."""
    made = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % max(1, count)}"} for i in range(max(1, count))}
    return {"$defs": made, "$ref": "#/$defs/d0"}


def doubled(key: str, depth: int) -> dict[str, Any]:
    """A schema that doubles with each of its definitions."""
    made: dict[str, Any] = {"d0": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for i in range(1, depth):
        made[f"d{i}"] = {key: [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    return {"$defs": made, "$ref": f"#/$defs/d{depth - 1}"}


SCHEMAS: tuple[tuple[Any, int], ...] = (
    (chain(0), 400), (chain(2), 400), (chain(3000), 400), (doubled("allOf", 30), 200), (doubled("anyOf", 40), 200),
    ({"$ref": "http://127.0.0.1:9/x"}, 400), ({"$ref": "file:///etc/passwd"}, 400), ({"$ref": "#/$defs/../x"}, 400),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, 200), ({"not": {"type": "integer"}}, 400),
    ({"type": "string", "minLength": 10**9}, 200), ({"type": "number", "minimum": 1e-300, "maximum": 1e300}, 400),
)  # fmt: skip
REGEXES = {
    r"(a+)\1": 400, r"(?=a)a": 400, r"(?<=a)b": 400, r"(?>a+)b": 400, r"(?P<x>a)(?P=x)": 400, r"(a)?(?(1)b|c)": 400,
    "((((": 400, "(" * 3000 + "a" + ")" * 3000: 400, r"(a+)+$": 200, r"(a|a)*" * 64: 200, r"\p{L}{1,200}": 200,
}  # fmt: skip
GRAMMARS = {
    'start: "a"~1..1000000': 200, 'start: a\na: a "x" | "y"': 200, "start: ": 200, "start: foo": 400,
    '%import .../etc/passwd\nstart: "x"': 400, 'start: "\0"': 400, "start: <|no such token|>": 400,
    'start: a{"x"}\na{p}: p': 400,
}  # fmt: skip


def test_27_grammars(steady: Target) -> None:
    """Definitions in circles and doublings, references to elsewhere, expressions with a memory: served or refused."""
    bodies = [({"json": form}, status) for form, status in SCHEMAS]
    bodies += [({"regex": text}, status) for text, status in REGEXES.items()]
    bodies += [({"grammar": text}, status) for text, status in GRAMMARS.items()]
    for form, status in bodies:
        began = time.monotonic()
        body = {"prompt": "x", "max_tokens": 2, "structured_outputs": form}
        reply = steady.ask("/v1/completions", body, timeout=2 * SECONDS)
        assert reply.status == status and time.monotonic() - began < 2 * SECONDS, (str(form)[:90], reply)
        assert status == 200 or reply.code == "invalid_value", reply


def tagged(begin: str, end: str, trigger: str, count: int = 1) -> dict[str, Any]:
    """A chat with structural tags."""
    made = [{"begin": begin.format(i), "schema": {"type": "integer"}, "end": end} for i in range(count)]
    form = {"type": "structural_tag", "structures": made, "triggers": [trigger]}
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": form}


def function(name: str, count: int = 0) -> dict[str, Any]:
    form = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}
    return {"type": "function", "function": {"name": name, "parameters": form}}


def test_27_tags_and_tools(steady: Target) -> None:
    """Hundreds of tags, tags without an end, functions with thousands of parameters, names that are templates."""
    for body, statuses in (
        (tagged("<f{}>", "</f>", "<f", 300), (200,)), (tagged("<f{}>", "</f>", "<f", 800), (400,)),
        (tagged("x", "x", "x"), (200,)), (tagged("<f>", "</f>", ""), (400,)),
        (tagged("<f>", "</f>", "<g"), (400,)), (tagged("a" * 30_000, "", "a" * 29_999), (400,)),
    ):  # fmt: skip
        reply = steady.ask("/v1/chat/completions", body, timeout=2 * SECONDS)
        assert reply.status in statuses, (str(body)[:200], reply)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    for tools, choice in (
        ([function("f", 5000)], "required"), ([function("f")] * 100, "auto"), ([function("<tool_call>{}")], "auto"),
        ([function("{{ 7 * 7 }}")], "auto"), ([function("f")], {"type": "function", "function": {"name": "g"}}),
        ([], "required"), ([function("f" * 65)], "auto"),
    ):  # fmt: skip
        reply = steady.ask("/v1/chat/completions", {**chat, "tools": tools, "tool_choice": choice}, timeout=SECONDS)
        code = "context_length_exceeded" if len(str(tools)) > 100_000 else "invalid_value"
        assert reply.status == 400 and reply.code == code, (str(tools)[:60], reply)
    for arguments in ("[" * 5000 + "]" * 5000, '{"a": 1e400', '{"a": NaN}', "\x00", "{" * 100):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*chat["messages"], {"role": "assistant", "tool_calls": [call]}]  # type: ignore[misc]
        reply = steady.ask("/v1/chat/completions", {**chat, "messages": messages}, timeout=SECONDS)
        assert reply.status in (200, 400), (arguments[:20], reply)


def test_27_files_images_and_names_of_others(steady: Target) -> None:
    """Multipart bodies and parts that are no text, adapters, and responses of another key."""
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n--x--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert steady.ask("/v1/chat/completions", form, headers=kind).status == 415
    assert steady.ask("/v1/audio/transcriptions", form, headers=kind).status == 404
    for part in (
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}, {"type": "zzz"}, {},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {"type": "text", "text": None},
        {"type": "file", "file": {"file_id": "x"}}, {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
    ):  # fmt: skip
        body = {"messages": [{"role": "user", "content": [part]}]}
        reply = steady.ask("/v1/chat/completions", body, timeout=SECONDS)
        assert reply.status == 400 and "messages[0].content" in reply.json["error"]["message"], (str(part)[:60], reply)
    for model in ("toy:lora", "../../etc/passwd", "TOY", "toy\n", "toy@main"):
        reply = steady.ask("/v1/completions", {"prompt": "x", "model": model})
        assert reply.status == 404 and reply.code == "model_not_found", (model, reply)
    assert steady.ask("/v1/completions", {"prompt": "x", "model": "m" * 70_000}).status == 400
    stored = steady.ask("/v1/responses", {"input": "x", "max_output_tokens": 2, "store": True}).json["id"]
    other = head(steady, f"/v1/responses/{stored}", "GET").replace(KEYS[0].encode(), KEYS[1].encode())
    mine = head(steady, f"/v1/responses/{stored}", "GET")
    delete = other.replace(b"GET", b"DELETE")
    follow = json.dumps({"input": "y", "previous_response_id": stored, "max_output_tokens": 1}).encode()
    after = (
        head(steady, "/v1/responses", Content_Length=len(follow)).replace(KEYS[0].encode(), KEYS[1].encode()) + follow
    )
    for sent in (other, delete, after):
        assert raw(steady, sent).status == 404, sent[:60]
    assert raw(steady, mine).status == 200
    assert raw(steady, mine.replace(b"GET", b"DELETE")).status == 200 and raw(steady, mine).status == 404


def test_27_roles_that_no_template_knows(steady: Target) -> None:
    """They never reach the template, with any endpoint that takes messages."""
    for role in ("", "root", "__class__", "user ", "USER", "{{ 7 * 7 }}", "x" * 100_000, "us\u0435r"):
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            messages = [{"role": role, "content": "x"}]
            body: dict[str, Any] = {"input": messages} if path == "/v1/responses" else {"messages": messages}
            reply = steady.ask(path, {**body, "model": "toy", "max_tokens": 2} if "v1/m" in path else body)
            assert reply.status == 400 and "role" in reply.json["error"]["message"], (path, role[:20], reply)


def test_27_scores_are_the_same_from_the_cache(steady: Target) -> None:
    """A prompt whose pages are cached has the log-probabilities that it had without, and as many."""
    body = {"prompt": "the river and the mill " * 8, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 3}
    found = [steady.ask("/v1/completions", body).json["choices"][0]["prompt_logprobs"] for _ in range(3)]
    assert found[0] and found == found[:1] * 3
    echo = {**body, "echo": True, "logprobs": 5, "max_tokens": 0}
    del echo["prompt_logprobs"]
    first, second = (steady.ask("/v1/completions", echo).json["choices"][0] for _ in range(2))
    assert first == second and first["text"] == body["prompt"]
