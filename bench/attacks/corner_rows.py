"""The attacks of rows 13 and 14, by name: corners of grammars, texts, sampling, stored responses and connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

from bench.attacks.further import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Client,
    Senders,
    clients,
    dropped,
    fixed,
    raw,
    repeat,
)
from bench.attacks.further_rows import MESSAGES, Attacks, completion, drawn, ids, letters
from bench.attacks.link import Door
from bench.attacks.watch import request

TOKENIZE, COUNT = "/tokenize", "/v1/messages/count_tokens"
_HELD = 1.5  # seconds that a connection without progress is kept
Draw = random.Random


def guided(draw: Draw | None = None, **outputs: Any) -> dict[str, Any]:
    """Return a completion with structured outputs; with `draw`, no two of them are the same."""
    salt = {} if draw is None else {"whitespace_pattern": f"[ ]{{0,{draw.randrange(1, 10**6)}}}"}
    return completion(max_tokens=4, structured_outputs={**outputs, **salt})


def schema(form: dict[str, Any]) -> dict[str, Any]:
    """Return a completion with a JSON schema."""
    return guided(json=form)


def chat(content: Any, **more: Any) -> dict[str, Any]:
    """Return a chat of one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def nested(depth: int) -> Any:
    """Return lists in objects, `depth` deep."""
    value: Any = "x"
    for i in range(depth):
        value = [value] if i % 2 else {"x": value}
    return value


def choices(draw: Draw) -> dict[str, Any]:
    """Return a completion with 1,024 choices of 60 bytes that differ in their ends."""
    same = letters(draw, 50)
    return guided(choice=[f"{same}{i:08d}" for i in range(1024)])


def patterns(draw: Draw) -> dict[str, Any]:
    """Return a completion with a schema whose names of properties follow expressions with classes of Unicode."""
    kinds = ("L", "Lu", "N", "P", "S", "Greek", "Han")
    rules = {rf"^{letters(draw, 3)}\p{{{kinds[i % 7]}}}{{1,20}}$": {"type": "string"} for i in range(24)}
    return schema({"type": "object", "patternProperties": rules, "additionalProperties": False})


def digits(draw: Draw) -> dict[str, Any]:
    """Return a completion with bounds of 300 digits."""
    low = draw.randrange(10**299, 10**300)
    return schema({"type": "integer", "minimum": low, "maximum": 9 * 10**300})


def required(draw: Draw) -> dict[str, Any]:
    """Return a completion with a schema of 1,500 required properties."""
    names = [f"{letters(draw, 4)}{i}" for i in range(1500)]
    return schema({"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names})


def rules(draw: Draw) -> dict[str, Any]:
    """Return a completion with a grammar of 1,500 rules, each of which begins with another."""
    count, word = 1500, letters(draw, 4)
    text = "\n".join(f'r{i}: r{(i + 1) % count} "{word}" | r{(i * 7 + 3) % count} | "x"' for i in range(count))
    return guided(grammar=f"start: r0\n{text}")


def tagged(draw: Draw) -> dict[str, Any]:
    """Return a chat with 250 structural tags of free text."""
    tags = [{"begin": f"<{letters(draw, 3)}{i}>", "content": {"type": "any_text"}, "end": "</f>"} for i in range(250)]
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
    return chat("x", response_format={"type": "structural_tag", "format": form})


def strict_tools(draw: Draw) -> dict[str, Any]:
    """Return a chat with 100 functions whose calls follow their schemas."""
    form = {"type": "object", "properties": {letters(draw, 5): {"enum": [letters(draw, 6) for _ in range(10)]}}}
    defs = [{"type": "function", "function": {"name": f"f{i}", "parameters": form, "strict": True}} for i in range(100)]
    return chat("x", tools=defs)


def definitions(draw: Draw) -> dict[str, Any]:
    """Return a chat with a function whose grammar repeats 200 KB of definitions for each of 800 arguments, where a
    format writes them one by one (`--options "--tool-call-parser qwen3_coder"`).
    """
    properties = {f"{letters(draw, 4)}{i}": {"type": "array", "minItems": 1} for i in range(800)}
    definitions = {f"d{i}": {"type": "string", "pattern": "x" * 50} for i in range(2400)}
    form = {"type": "object", "properties": properties, "$defs": definitions}
    function = {"type": "function", "function": {"name": "f", "parameters": form}}
    return chat("x", tools=[function], tool_choice="required")


def called(count: int, arguments: str) -> dict[str, Any]:
    """Return a chat with `count` earlier calls of a tool."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    return {"messages": [{"role": "user", "content": "x"}, *turns * count], "tools": tools, "max_tokens": 1}


def wrong_bytes(draw: Draw) -> dict[str, Any]:
    """Return a stream of tokens that are single bytes and form no characters."""
    return completion(n=16, max_tokens=400, ignore_eos=True, stream=True, allowed_token_ids=[draw.randrange(3, 250)])


def scored_stream(path: str) -> Callable[[Draw], dict[str, Any]]:
    """Return streams with everything that makes an event longer."""

    def make(draw: Draw) -> dict[str, Any]:
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True}
        more = {"n": 16, "max_tokens": 60, "ignore_eos": True, "stream": True, **usage}
        return chat("x", **{**more, "logprobs": True, "top_logprobs": 20}) if path == CHAT else completion(
            **{**more, "logprobs": 20})  # fmt: skip

    return make


def banned(draw: Draw) -> dict[str, Any]:
    """Return a stream that fails after its first token, as a bad word is all that may follow."""
    return completion(max_tokens=50, allowed_token_ids=[90], bad_words=["xx", "xxx"], stream=True, ignore_eos=True)


def items(count: int, size: int = 1) -> list[dict[str, Any]]:
    """Return items of a response's input."""
    return [{"role": "user", "content": "x" * size} for _ in range(count)]


def stored(body: dict[str, Any], path: str, method: str = "GET") -> Client:
    """Return a client that stores one response, and then requests `path` below it repeatedly."""

    async def client(senders: Senders, number: int) -> None:
        door = senders.door
        created = await senders.send(request(door.host, door.key, RESPONSES, {**body, "store": True}))
        with contextlib.suppress(ValueError, KeyError):
            name = json.loads(created)["id"]
            data = request(door.host, door.key, f"{RESPONSES}/{name}{path}").replace(b"GET", method.encode(), 1)
            while not senders.over:
                await senders.send(data)

    return client


PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def headed(lines: str, path: str = COMPLETIONS, body: Any = None, version: str = "1.1") -> Callable[[Door], bytes]:
    """Return a request with further lines in its head."""

    def make(door: Door) -> bytes:
        head, _, data = request(door.host, door.key, path, body).partition(b"\r\n\r\n")
        head = head.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
        return head + b"\r\n" + lines.encode("latin-1") + b"\r\n" + data if lines else head + b"\r\n\r\n" + data

    return make


def half_closed(path: str, body: Any) -> Client:
    """Return a client that closes its side of the connection after the request, and reads the response."""

    async def client(senders: Senders, number: int) -> None:
        data = request(senders.door.host, senders.door.key, path, body)
        while not senders.over:
            with contextlib.suppress(OSError):
                reader, link = await senders.open()
                link.write(data)
                link.write_eof()
                status_line = await reader.read(16)
                senders.statuses[int(status_line[9:12] or 0)] += 1
                link.transport.abort()

    return client


def unread(body: dict[str, Any], behind: int = 0) -> Client:
    """Return a client that never reads its response; `behind` further requests follow on the same connection."""

    async def client(senders: Senders, number: int) -> None:
        door = senders.door
        data = request(door.host, door.key, COMPLETIONS, body) + request(door.host, door.key, "/v1/models") * behind
        while not senders.over:
            with contextlib.suppress(OSError), socket.socket() as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                link.setblocking(False)
                await asyncio.get_running_loop().sock_connect(link, (door.host, door.port))
                await asyncio.get_running_loop().sock_sendall(link, data)
                await asyncio.sleep(min(_HELD, max(0.01, senders.end - time.monotonic())))
                senders.statuses[0] += 1

    return client


def trickled(size: int, piece: int, pause: float) -> Client:
    """Return a client that sends a body in pieces."""

    async def client(senders: Senders, number: int) -> None:
        data = request(senders.door.host, senders.door.key, COMPLETIONS, b" " * size)
        while not senders.over:
            with contextlib.suppress(OSError):
                reader, link = await senders.open()
                for at in range(0, len(data), piece):
                    link.write(data[at : at + piece])
                    await asyncio.sleep(pause)
                    if senders.over:
                        break
                else:
                    senders.statuses[int((await reader.read(16))[9:12] or 0)] += 1
                link.transport.abort()
        senders.statuses[0] += 1

    return client


def grammars() -> Attacks:
    """Row 13: grammars and functions."""
    numbered = drawn(COMPLETIONS, lambda draw: guided(regex=rf"(\p{{L}}\p{{M}}*){{1,{draw.randrange(60, 90)}}}"))
    counted = drawn(COMPLETIONS, lambda draw: guided(regex=f"((a{{1,{draw.randrange(90, 99)}}}){{1,99}}){{1,99}}"))
    fresh = drawn(COMPLETIONS, lambda draw: schema({"properties": {letters(draw, 12): {"type": "integer"}}}))
    space = drawn(COMPLETIONS, lambda draw: guided(draw, json={"type": "array", "items": {"type": "integer"}}))
    many = drawn(COMPLETIONS, lambda draw: {**guided(regex=f"[a-z {letters(draw, 5)}]*"), "n": 16, "max_tokens": 60})
    parts = drawn(COMPLETIONS, lambda draw: schema({"prefixItems": [{"const": letters(draw, 6)} for _ in range(1500)]}))
    fixed_value = drawn(COMPLETIONS, lambda draw: schema({"const": {letters(draw, 9): "x" * 60_000}}))
    conditions = {"if": {"type": "string"}, "then": {"minLength": 2}, "unevaluatedProperties": False}
    pointers = {"$defs": {"a/b": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/a~1b"}] * 1000}
    bodies = {
        "1,024 choices with one beginning": drawn(COMPLETIONS, choices),
        "100,000 choices": fixed(COMPLETIONS, guided(choice=[f"w{i}" for i in range(100_000)])),
        "patternProperties with classes of Unicode": drawn(COMPLETIONS, patterns),
        "expressions with classes of Unicode": numbered,
        "repetitions of repetitions": counted,
        "bounds of 300 digits": drawn(COMPLETIONS, digits),
        "1,500 required properties": drawn(COMPLETIONS, required),
        "1,500 prefixItems": parts,
        "a constant of 60 KB": fixed_value,
        "if, then, unevaluatedProperties": fixed(COMPLETIONS, schema(conditions)),
        "1,000 references with escapes": fixed(COMPLETIONS, schema(pointers)),
        "1,500 rules that begin with others": drawn(COMPLETIONS, rules),
        "250 structural tags of free text": drawn(CHAT, tagged),
        "100 strict functions": drawn(CHAT, strict_tools),
        "800 arguments beside 200 KB of definitions": drawn(CHAT, definitions),
        "a new schema each time": fresh,
        "white space patterns": space,
        "n=16 with an expression": many,
    }
    return {f"8 x {name}": clients(8, repeat(body)) for name, body in bodies.items()}


def texts() -> Attacks:
    """Row 13: prompts, conversations and tokenization."""
    emoji, stacked = "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 1500, "Z" + "\u0351\u036b\u0343\u036a" * 3500
    deep = {f"v{i}": nested(40) for i in range(64)}
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(4000)]
    bodies = {
        "/tokenize: a word of 8 MB": fixed(TOKENIZE, {"prompt": "a" * 8_000_000}),
        "/tokenize: 8 MB of spaces": fixed(TOKENIZE, {"prompt": " " * 8_000_000}),
        "/tokenize: 8,000 letters in one word": fixed(TOKENIZE, {"prompt": "q" * 8000}),
        "a prompt of 30,000 equal letters": fixed(COMPLETIONS, completion(prompt="a" * 30_000)),
        "a prompt of 2,000 special tokens": fixed(COMPLETIONS, completion(prompt="<|im_start|>" * 2000)),
        "a prompt of emoji sequences": fixed(COMPLETIONS, completion(prompt=emoji)),
        "a prompt of stacked marks": fixed(COMPLETIONS, completion(prompt=stacked)),
        "truncate_prompt_tokens 1 of 30 KB": drawn(
            COMPLETIONS, lambda draw: completion(prompt=letters(draw, 30_000), truncate_prompt_tokens=1)
        ),
        "128 prompts of one letter": fixed(COMPLETIONS, completion(prompt=["x"] * 128, max_tokens=1)),
        "chats of 700 turns": fixed(CHAT, {"messages": turns[:700], "max_tokens": 1}),
        "64 template variables 40 deep": fixed(CHAT, chat("x", chat_template_kwargs=deep)),
        "continue_final_message of 30 KB": fixed(CHAT, {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 30_000}],
            "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}),
        "100 earlier calls": fixed(CHAT, called(100, '{"a": [[[[1]]]]}')),
        "earlier calls of 200 KB": fixed(CHAT, called(2, json.dumps({"a": "x" * 200_000}))),
        "count_tokens of 4,000 messages": fixed(COUNT, {"model": "demo", "messages": turns}),
        "/detokenize of single bytes": fixed("/detokenize", {"tokens": list(range(130, 250)) * 15}),
    }  # fmt: skip
    return {f"8 x {name}": clients(8, repeat(body)) for name, body in bodies.items()}


def sampling() -> Attacks:
    """Row 13: parameters that make a step, an event or an end more expensive."""
    stops = ["y" + "x" * (1000 + i) for i in range(16)]
    penalties = {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.9}
    bans = {str(i): -100 for i in range(3, 1027)}
    salted = drawn(
        COMPLETIONS, lambda draw: completion(prompt=ids(draw, 200), max_tokens=1, cache_salt=letters(draw, 200))
    )
    events = drawn(RESPONSES, lambda draw: {"input": letters(draw, 9), "max_output_tokens": 60, "stream": True})
    messages = {"model": "demo", "max_tokens": 60, "stream": True, "messages": [{"role": "user", "content": "x"}]}
    loads = {
        "4 x n=16 chats with top_logprobs 20, streamed": (4, drawn(CHAT, scored_stream(CHAT))),
        "4 x n=16 completions with all of an event": (4, drawn(COMPLETIONS, scored_stream(COMPLETIONS))),
        "4 x n=16 tokens that form no characters": (4, drawn(COMPLETIONS, wrong_bytes)),
        "4 x n=16 stop strings that match but for their first letter": (4, fixed(COMPLETIONS, completion(
            n=16, max_tokens=300, ignore_eos=True, stop=stops, logit_bias={"90": 100}, stream=True))),
        "24 x outputs that end at once": (24, fixed(COMPLETIONS, completion(stop=["", "e", "a", " "][1:]))),
        "4 x n=16 with penalties": (4, drawn(COMPLETIONS, lambda draw: completion(
            n=16, max_tokens=300, ignore_eos=True, prompt=ids(draw, 300), **penalties))),
        "8 x streams that fail after a token": (8, drawn(COMPLETIONS, banned)),
        "8 x 1,024 ids banned": (8, fixed(COMPLETIONS, completion(logit_bias=bans, max_tokens=30, min_tokens=30))),
        "8 x a salt of its own, 200 ids": (8, salted),
        "16 x /v1/responses, streamed": (16, events),
        "16 x /v1/messages, streamed": (16, fixed(MESSAGES, messages)),
    }  # fmt: skip
    attackers = {name: clients(count, repeat(body)) for name, (count, body) in loads.items()}
    for seconds in ("0.001", "0.02"):
        data = headed(f"X-Request-Timeout: {seconds}\r\n", COMPLETIONS, completion(max_tokens=500, n=4))
        attackers[f"24 x a time limit of {seconds} s"] = clients(24, raw(data))
    return attackers


def stores() -> Attacks:
    """Row 14: stored responses."""
    short = {"max_output_tokens": 1}
    long = {"input": items(8, 900_000), **short}
    references = [{"type": "item_reference", "id": f"msg_{i}"} for i in range(900)]
    last = "/input_items?limit=1&after=msg_none"
    return {
        "8 x input_items of 900 items, after one that is not there": clients(
            8, stored({"input": items(900), "truncation": "disabled", **short}, last)
        ),
        "8 x input_items of 7 MB, after one that is not there": clients(8, stored(long, last)),
        "8 x a stored response again and again": clients(8, stored({"input": "x", **short}, "")),
        "8 x deleted again and again": clients(8, stored({"input": "x", **short}, "", "DELETE")),
        "8 x 900 references to nothing": clients(8, repeat(fixed(RESPONSES, {"input": references, **short}))),
        "8 x responses of 30 KB stored": clients(
            8, repeat(drawn(RESPONSES, lambda draw: {"input": letters(draw, 3000), "store": True, **short}))
        ),
        "8 x a previous response of nobody": clients(
            8, repeat(drawn(RESPONSES, lambda draw: {"input": "x", "previous_response_id": letters(draw, 200)}))
        ),
    }


def connections() -> Attacks:
    """Row 14: heads, bodies and connections."""
    big = fixed(COMPLETIONS, completion(user="u" * 8_000_000, metadata={"a": "b" * 10}))
    names = drawn(COMPLETIONS, lambda draw: completion(model=f"x\n\x1b[31m{letters(draw, 200)}"))
    ordinary = completion(max_tokens=8)
    stream = completion(n=16, max_tokens=900, ignore_eos=True, stream=True)
    return {
        "16 x half-closed connections": clients(16, half_closed(COMPLETIONS, ordinary)),
        "16 x half-closed streams": clients(16, half_closed(COMPLETIONS, completion(max_tokens=60, stream=True))),
        "40 x streams that nobody reads": clients(40, unread(stream)),
        "40 x unread streams, 40 requests behind": clients(40, unread(stream, 40)),
        "300 x bodies that trickle": clients(300, trickled(30_000, 200, 0.02)),
        "500 x /health without a key": clients(500, raw(lambda door: PROBE)),
        "8 x HTTP/1.0": clients(8, raw(headed("Connection: keep-alive\r\n", COMPLETIONS, ordinary, "1.0"))),
        "8 x Expect: 100-continue": clients(8, raw(headed("Expect: 100-continue\r\n", COMPLETIONS, ordinary))),
        "8 x one id for all requests": clients(8, raw(headed("X-Request-Id: a\r\n", COMPLETIONS, ordinary))),
        "8 x an id of 60 KB": clients(8, raw(headed(f"X-Request-Id: {'a' * 60_000}\r\n", COMPLETIONS, ordinary))),
        "8 x tracestate of 8 KB": clients(8, raw(headed(
            f"traceparent: 00-{'a' * 32}-{'b' * 16}-01\r\ntracestate: a=\x1b[31m{'x' * 8000}\r\n", "/v1/models"))),
        "8 x one header 90 times": clients(8, raw(headed("X-A: b\r\n" * 90, "/v1/models"))),
        "8 x paths of 20 KB": clients(8, raw(headed("", f"/v1/{'%41' * 6000}"))),
        "8 x a user of 8 MB": clients(8, repeat(big)),
        "8 x models that do not exist": clients(8, repeat(names)),
        "8 x /admin/state": clients(8, repeat(fixed("/admin/state", None))),
        "24 x /openapi.json": clients(24, repeat(fixed("/openapi.json", None))),
        "24 x /v1/models": clients(24, repeat(fixed("/v1/models", None))),
        "bodies reset half-way, 40 x 50/s": clients(
            40, dropped(lambda draw, count: (COMPLETIONS, b" " * 30_000), 0.0, 0.02)
        ),
    }  # fmt: skip
