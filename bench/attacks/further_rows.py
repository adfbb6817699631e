"""The attacks of rows 11 and 12, by name. The clients of `further` send them."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

from bench.attacks.further import CHAT, COMPLETIONS, Body, chain, clients, dropped, fixed, raw, repeat, slow
from bench.attacks.link import Answer, Door
from bench.attacks.watch import request

Attacks = dict[str, Callable[[Door], list[Answer]]]
EMBEDDINGS, RERANK, MESSAGES = "/v1/embeddings", "/v1/rerank", "/v1/messages"


def completion(**more: Any) -> dict[str, Any]:
    """Return a body of /v1/completions."""
    return {"prompt": "x", "max_tokens": 8, **more}


def letters(draw: random.Random, size: int) -> str:
    """Return random lower-case letters."""
    return "".join(draw.choices(string.ascii_lowercase, k=size))


def ids(draw: random.Random, count: int) -> list[int]:
    """Return random token ids of a prompt."""
    return [draw.randrange(3, 250) for _ in range(count)]


def drawn(path: str, make: Callable[[random.Random], dict[str, Any]]) -> Body:
    """Return bodies that differ from one request to the next."""
    return lambda draw, count: (path, make(draw))


def bad_words(draw: random.Random) -> dict[str, Any]:
    """Return a completion with the maximum number of long bad words."""
    return completion(max_tokens=16, bad_words=[letters(draw, 120) for _ in range(128)])


def enumerated(draw: random.Random) -> dict[str, Any]:
    """Return a completion with an enumeration of a few thousand strings."""
    form = {"enum": [letters(draw, 10) for _ in range(4000)]}
    return completion(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": form}})


def cycles(draw: random.Random) -> dict[str, Any]:
    """Return a completion with a schema of definitions that refer to one another in a cycle."""
    kinds = [f"{letters(draw, 4)}{i}" for i in range(60)]
    definitions = {
        kind: {"type": "object", "properties": {other: {"$ref": f"#/$defs/{other}"} for other in kinds[:12]}}
        for kind in kinds
    }
    form = {"$defs": definitions, "$ref": f"#/$defs/{kinds[0]}"}
    return completion(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": form}})


def all_stops(draw: random.Random) -> dict[str, Any]:
    """Return a completion of one letter again and again, with stop strings that match it but for their last letter."""
    stops = ["x" * (1000 + i) + "y" for i in range(16)]
    return completion(n=16, max_tokens=900, ignore_eos=True, stop=stops, logit_bias={"90": 100}, stream=True)


def sampled(draw: random.Random) -> dict[str, Any]:
    """Return a completion with everything that makes a step longer."""
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    filters = {"temperature": 1.5, "top_k": 4000, "top_p": 0.99, "min_p": 1e-6, "logprobs": 20}
    return completion(prompt=ids(draw, 900), n=16, max_tokens=8, ignore_eos=True, **penalties, **filters)


def images(count: int) -> dict[str, Any]:
    """Return a message with small images."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    return {"model": "x", "max_tokens": 4, "messages": [{"role": "user", "content": [image] * count}]}


def tools(count: int, properties: int = 1) -> dict[str, Any]:
    """Return a chat with many functions, one of which must be called."""
    form = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(properties)}}
    defs = [{"type": "function", "function": {"name": f"f{i}", "parameters": form}} for i in range(count)]
    return {"messages": [{"role": "user", "content": "x"}], "tools": defs, "tool_choice": "required", "max_tokens": 4}


def conversation(turns: int) -> dict[str, Any]:
    """Return a chat of many short turns, the longest loop of a template."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": "x"} for i in range(turns)], "max_tokens": 1}


def chunked(size: int) -> Callable[[Door], bytes]:
    """Return a request whose body comes in chunks of one byte."""

    def make(door: Door) -> bytes:
        head = request(door.host, door.key, COMPLETIONS, b"").replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        return head + b"1\r\n \r\n" * size + b"0\r\n\r\n"

    return make


def headers(count: int, size: int) -> Callable[[Door], bytes]:
    """Return a request with many further headers."""

    def make(door: Door) -> bytes:
        more = "".join(f"X-Header-{i}: {'v' * size}\r\n" for i in range(count)).encode()
        return request(door.host, door.key, "/v1/models").replace(b"\r\n\r\n", b"\r\n" + more + b"\r\n")

    return make


def repeated(path: str, body: Any, count: int) -> Callable[[Door], bytes]:
    """Return a pipeline of one request."""
    return lambda door: request(door.host, door.key, path, body) * count


def valid_work() -> Attacks:
    """Row 11: valid requests that cause work in the engine or in threads of the front."""
    marks = "a" + "\u0300\u0316\u0323" * 1000
    bias = {str(i): 0.5 for i in range(3, 1027)}
    return {
        "8 x n=64, max_tokens 1": clients(8, repeat(fixed(COMPLETIONS, completion(n=64, max_tokens=1)))),
        "8 x chains of 60 stored responses": clients(8, chain),
        "8 x 128 bad words": clients(8, repeat(drawn(COMPLETIONS, bad_words))),
        "24 x /tokenize with token strings": clients(
            24, repeat(fixed("/tokenize", {"prompt": "the river " * 300, "return_token_strs": True}))
        ),
        "8 x prompts of 900 ids, max_tokens 1": clients(
            8, repeat(drawn(COMPLETIONS, lambda draw: completion(prompt=ids(draw, 900), max_tokens=1)))
        ),
        "8 x prompts of 700 letters, max_tokens 1": clients(
            8, repeat(drawn(COMPLETIONS, lambda draw: completion(prompt=letters(draw, 700), max_tokens=1)))
        ),
        "4 x n=16 with all sampling parameters": clients(4, repeat(drawn(COMPLETIONS, sampled))),
        "4 x 16 stop strings that nearly match": clients(4, repeat(drawn(COMPLETIONS, all_stops))),
        "8 x logit_bias of 1,024 ids": clients(
            8, repeat(fixed(COMPLETIONS, completion(logit_bias=bias, max_tokens=2, n=4)))
        ),
        "8 x best_of 64": clients(8, repeat(fixed(COMPLETIONS, completion(best_of=64, n=1, max_tokens=2)))),
        "8 x echo with prompt_logprobs": clients(
            8, repeat(drawn(COMPLETIONS, lambda draw: completion(
                prompt=ids(draw, 800), max_tokens=1, echo=True, logprobs=5, prompt_logprobs=20)))
        ),
        "8 x enumerations of 4,000 strings": clients(8, repeat(drawn(COMPLETIONS, enumerated))),
        "8 x cycles of $ref": clients(8, repeat(drawn(COMPLETIONS, cycles))),
        "8 x combining marks": clients(8, repeat(fixed(COMPLETIONS, completion(prompt=marks[:400], max_tokens=1)))),
        "8 x chats of 50 turns": clients(8, repeat(fixed(CHAT, conversation(50)))),
        "8 x 16 functions, one required": clients(8, repeat(fixed(CHAT, tools(16)))),
        "16 x priorities": clients(
            16, repeat(drawn(COMPLETIONS, lambda draw: completion(priority=draw.randrange(-99, 99), max_tokens=4)))
        ),
        "cancel storm: 40 x streams dropped after 20 ms": clients(
            40, dropped(fixed(COMPLETIONS, completion(n=4, max_tokens=500, stream=True)), 0.02, 0.02)
        ),
        "40 slow readers of n=8": clients(
            40, slow(drawn(COMPLETIONS, lambda draw: completion(n=8, max_tokens=500, stream=True, ignore_eos=True)))
        ),
        "8 pipelines of 40 completions": clients(
            8, raw(repeated(COMPLETIONS, completion(max_tokens=1), 40), 40)
        ),
    }  # fmt: skip


def refused_work() -> Attacks:
    """Row 12: requests that are refused, and requests without work in the engine."""
    big = {str(i): 1 for i in range(100_000)}
    documents = ["x"] * 10_000
    return {
        "8 x logit_bias of 100,000 ids": clients(8, repeat(fixed(COMPLETIONS, completion(logit_bias=big)))),
        "8 x enumeration of 100,000 strings": clients(8, repeat(fixed(COMPLETIONS, completion(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {
                "enum": [f"word{i}" for i in range(100_000)]}}})))),
        "8 x 10,000 functions": clients(8, repeat(fixed(CHAT, tools(10_000)))),
        "8 x /v1/embeddings of 2,048 inputs": clients(8, repeat(fixed(EMBEDDINGS, {"input": ["x"] * 2048}))),
        "8 x /v1/rerank of 10,000 documents": clients(
            8, repeat(fixed(RERANK, {"query": "x", "documents": documents}))
        ),
        "8 x /v1/messages with 1,000 images": clients(8, repeat(fixed(MESSAGES, images(1000)))),
        "8 x bodies in 2,000 chunks of a byte": clients(8, raw(chunked(2000))),
        "8 x 95 headers of 300 bytes": clients(8, raw(headers(95, 300))),
        "8 x 1,000 headers": clients(8, raw(headers(1000, 10))),
        "8 pipelines of 40 invalid requests": clients(
            8, raw(repeated(COMPLETIONS, {"prompt": "x", "max_tokens": -1}, 40), 40)
        ),
        "connections dropped at once, 40 x 1,000/s": clients(
            40, dropped(fixed("/v1/models", None), 0.0, 0.02)
        ),
        "24 x /metrics": clients(24, repeat(fixed("/metrics", None))),
        "8 x /v1/responses that do not exist": clients(8, repeat(fixed("/v1/responses/resp_x/input_items", None))),
        "24 x /detokenize of 4,000 ids": clients(
            24, repeat(fixed("/detokenize", {"tokens": [100] * 4000}))
        ),
    }  # fmt: skip
