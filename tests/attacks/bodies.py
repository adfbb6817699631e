"""Bodies of attacks: every field of every endpoint in the server's OpenAPI description, boundary values, and damaged
bodies. Other modules send them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.attacks.fake_engine import VOCAB

CAPS = (4, 20, 64, 128, 256, 1024, 4096, 65536)
EDGES: tuple[Any, ...] = (
    -(2**63), -(2**31), -1, 0, 1, 2, *(cap + more for cap in CAPS for more in (0, 1)), 2**31 - 1, 2**31, 2**53, 2**63,
    2**64 - 1, 2**64, 10**40, 1e308, -1e308, 1e-320, 0.5, -0.0, True, False, "", "\0", "x", "\u202e\U0001f600", "1",
    "null",
    "../../etc/passwd", "http://127.0.0.1:9/x", "{{7*7}}", "%s%n", "x" * 4000, [], [[]], [None], [[[]]], ["x"] * 300,
    [0] * 3000, ["x" * 2000] * 5, [-1], [2**63], [1e308], list(range(3000)), {}, {"": ""}, {"x": None}, {"type": "x"},
    {str(i): 1 for i in range(1100)}, {"0": 1e308}, {"-1": 1}, {"a": {"b": {"c": []}}},
)  # fmt: skip
RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"9" * 5000,
    b'"\\ud800"',
    b"-0",
    b"1E5",
    b"01",
    b"'x'",
    b"\xff",
    b"",
)


def edge(draw: Random) -> Any:
    """One of EDGES, to be changed at will."""
    return copy.deepcopy(draw.choice(EDGES))


def prompt(draw: Random, most: int = 20) -> list[int]:
    """Return random token ids, which most likely no other request has."""
    return [draw.randrange(3, VOCAB - 1) for _ in range(draw.randrange(1, most))]


def valid(draw: Random) -> tuple[str, dict[str, Any]]:
    """An endpoint, and a body that it takes."""
    common: dict[str, Any] = {"model": "toy", "max_tokens": draw.randrange(1, 6), "temperature": draw.choice([0, 1])}
    extra: dict[str, Any] = draw.choice(
        [
            {}, {"stream": True, "stream_options": {"include_usage": True}}, {"n": 2, "temperature": 1},
            {"stop": ["e", "ab"]}, {"logit_bias": {"50": 5}}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
            {"bad_words": ["the"]}, {"allowed_token_ids": [70, 71, 72]}, {"seed": 5, "repetition_penalty": 1.1},
            {"structured_outputs": {"regex": "[a-c]{1,4}"}}, {"structured_outputs": {"choice": ["yes", "no"]}},
            {"response_format": {"type": "json_object"}}, {"cache_salt": "s", "priority": 0}, {"min_tokens": 1},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        ]
    )  # fmt: skip
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": draw.choice(["Hi", [{"type": "text", "text": "x"}]])}]
    }
    kind = draw.randrange(16)
    if kind > 11:
        return _of_other_apis(draw, chat, kind > 13)
    if kind < 5:
        ways = ["The kernel", ["a", "b"], prompt(draw), [prompt(draw), prompt(draw)]]
        more = draw.choice([{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
        more = {} if "stream" in extra else more
        return "/v1/completions", {"prompt": draw.choice(ways), **common, **extra, **more}
    if kind < 9:
        more = draw.choice([{}, {"logprobs": True, "top_logprobs": 3}, {"chat_template_kwargs": {"a": 1}}])
        body = {**chat, **common, **extra, **more}
        return "/v1/chat/completions", _with_tools(draw, body) if draw.random() < 0.3 else body
    if kind == 9:
        return "/tokenize", {"prompt": "The kernel", "return_token_strs": True}
    return ("/tokenize", chat) if kind == 10 else ("/detokenize", {"tokens": prompt(draw)})


def _of_other_apis(draw: Random, chat: dict[str, Any], responses: bool) -> tuple[str, dict[str, Any]]:
    """A body of /v1/responses, or one of /v1/messages and the route that counts its tokens."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    said, more = chat["messages"], draw.choice([{}, {"stream": True}, {"top_k": 2, "seed": 5}, {"ignore_eos": True}])
    if responses:
        called = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
        turn = [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        ]
        asked = draw.choice(["Hi", said, [*said, *turn, *said], [*said, called, {**called, "name": 7}]])
        extra = draw.choice(
            [{}, {"store": False}, {"text": {"format": {"type": "json_object"}}}, {"metadata": {"a": "b"}},
             {"tools": [{"type": "function", "name": "weather", "parameters": city}], "tool_choice": "required"},
             {"previous_response_id": "resp_0"}, {"include": ["reasoning.encrypted_content"], "instructions": "x"}]
        )  # fmt: skip
        return "/v1/responses", {"input": asked, "max_output_tokens": draw.randrange(1, 6), **more, **extra}
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "x"}}
    turn = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}]}]  # fmt: skip
    body = {"messages": draw.choice([said, [*said, *turn], [*said, {"role": "assistant", "content": "I"}]])}
    tools = {"tools": [{"name": "weather", "input_schema": city}], "tool_choice": {"type": "any"}}
    body |= draw.choice([{}, {"system": "x"}, {"thinking": {"type": "enabled", "budget_tokens": 9}}, tools])
    if draw.random() < 0.3:
        return "/v1/messages/count_tokens", body
    return "/v1/messages", {**body, "max_tokens": draw.randrange(1, 6), "stop_sequences": ["e"], **more}


def _with_tools(draw: Random, body: dict[str, Any]) -> dict[str, Any]:
    """A conversation with functions, perhaps with calls of them and their results."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "description": "of a city", "parameters": city}
    body["tools"] = [{"type": "function", "function": {**function, "strict": draw.random() < 0.5}}]
    body["tool_choice"] = draw.choice(
        ["auto", "none", "required", {"type": "function", "function": {"name": "weather"}}]
    )
    body["parallel_tool_calls"] = draw.random() < 0.5
    if draw.random() < 0.4:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
        body["messages"] += [
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]
    return body


def damaged(draw: Random) -> tuple[str, bytes]:
    """An endpoint, and a valid body of some endpoint, changed in its values, its structure or its bytes."""
    path, body = valid(draw)
    if draw.random() < 0.03:
        path = valid(draw)[0]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        body = _changed(draw, body)
    data = json.dumps(body).encode()
    if draw.random() < 0.5:
        return path, data
    for _ in range(draw.choice([1, 1, 2, 8])):
        data = _broken(draw, data)
    return path, data


def _changed(draw: Random, body: Any) -> Any:
    """The same with a value, a name or a place of it changed."""
    places = list(_places(body))
    if not places:
        return edge(draw)
    holder, name = draw.choice(places)
    deed = draw.randrange(5)
    if deed < 3:
        holder[name] = edge(draw)
    elif deed == 3:
        del holder[name]
    elif isinstance(holder, dict):
        holder[draw.choice(["x", "", "__class__", "n", "stop", "tools", "suffix", "tool_choice"])] = edge(draw)
    else:
        holder.extend([holder[name]] * draw.choice([1, 3, 200]))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    names = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for name in names:
        yield value, name
        yield from _places(value[name])


def _broken(draw: Random, data: bytes) -> bytes:
    at, deed = draw.randrange(len(data) + 1), draw.randrange(6)
    if deed == 0:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if deed == 1:
        return data[:at]
    if deed == 2:
        return data[:at] + draw.choice(RAW) + data[at + draw.choice([0, 1, 4]) :]
    if deed == 3:
        return data[:at] + data[draw.randrange(len(data) + 1) :]
    if deed == 4:
        return (
            data[:at]
            + draw.choice([b"[", b"{", b'"', b"}", b",", b":", b"\\u0000", b"\0"]) * draw.choice([1, 99])
            + data[at:]
        )
    return data[:at] + bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9))) + data[at:]


def fields(described: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """(endpoint, path of a field) for every field of every body that an OpenAPI description names, nested ones too."""
    schemas, found = described["components"]["schemas"], []
    for path, methods in described["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            found += [(path, names) for names in _names(content["application/json"]["schema"], schemas, ())]
    return found


def _names(schema: dict[str, Any], schemas: dict[str, Any], before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if len(before) > 4:
        return
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")):
        if isinstance(one, dict):
            yield from _names(one, schemas, before)
    for name, inner in schema.get("properties", {}).items():
        yield (*before, name)
        yield from _names(inner, schemas, (*before, name))


def at_the_edge(draw: Random, path: str, names: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A small valid body for the endpoint, with `value` at the place of a field."""
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 1.0}
    if path == "/v1/responses":
        body = {"input": "x", "max_output_tokens": 2}
    elif "chat" in path or "messages" in path:
        body["messages"] = [{"role": "user", "content": "x"}]
    elif "detokenize" in path:
        body["tokens"] = [50]
    else:
        body["prompt"] = prompt(draw)
    if names[0] in ("messages", "tools"):
        value = value if len(names) == 1 else [_nested(names[1:], value)]
        return {**body, names[0]: value}
    if names[0] in ("stream_options", "top_logprobs"):
        body |= {"stream": True} if names[0] == "stream_options" else {"logprobs": True}
    return {**body, names[0]: _nested(names[1:], value)}


def _nested(names: tuple[str, ...], value: Any) -> Any:
    return {names[0]: _nested(names[1:], value)} if names else value
