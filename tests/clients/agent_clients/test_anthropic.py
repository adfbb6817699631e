"""anthropic's client over /v1/messages: texts, streams, tools, structured outputs, counts, errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from kit import QUESTIONS, TIME, WEATHER, Server, joined, user

Truth = Callable[..., dict[str, Any]]
TOOLS: Any = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
    for one in (WEATHER, TIME)
]
ASKED: Any = {"model": "demo", "max_tokens": 40, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(tool_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key=tool_server.key, max_retries=0, timeout=120) as one:
        yield one


def test_texts_whole_and_streamed(server: Server, truth: Truth) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        for question in QUESTIONS:
            messages: Any = user(question)
            true = truth(messages=messages, max_tokens=40)
            whole = client.messages.create(messages=messages, **ASKED)
            assert whole.content[0].text == true["text"]
            reason = {"length": "max_tokens", "stop": "end_turn"}[true["finish_reason"]]
            assert whole.stop_reason == reason and whole.usage.output_tokens == len(true["token_ids"])
            count = client.messages.count_tokens(model="demo", messages=messages)
            assert count.input_tokens == len(true["prompt_token_ids"])
            with client.messages.stream(messages=messages, **ASKED) as stream:
                pieces = list(stream.text_stream)
                final = stream.get_final_message()
            assert joined(pieces) == final.content[0].text == true["text"] and final.stop_reason == reason


def test_asynchronously_with_a_bearer_token(server: Server, truth: Truth) -> None:
    async def work() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token=server.key, api_key=None) as client:
            made = [client.messages.create(messages=user(one), **ASKED) for one in QUESTIONS]  # type: ignore[list-item]
            return [whole.content[0].text for whole in await asyncio.gather(*made)]

    assert asyncio.run(work()) == [truth(messages=user(one), max_tokens=40)["text"] for one in QUESTIONS]


def test_a_tool_and_its_result(client: anthropic.Anthropic) -> None:
    messages: Any = user("What is the weather in Bonn?")
    asked = {**ASKED, "max_tokens": 200, "tools": TOOLS}
    choice: Any = {"type": "tool", "name": "get_weather"}
    whole = client.messages.create(messages=messages, tool_choice=choice, **asked)
    (call,) = whole.content
    assert call.name == "get_weather" and call.input["city"] in ("Aachen", "Bonn", "Cologne")
    with client.messages.stream(messages=messages, tool_choice=choice, **asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == call.input and final.stop_reason == whole.stop_reason
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "clear, 21 degrees"}
    messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=messages, tool_choice={"type": "none"}, system="Be brief.", **asked)
    assert answer.content[0].type == "text" and answer.content[0].text


def grammar(events: list[Any]) -> str:
    """The order of a stream's events: s, e of a message, b, x of a block, d of a delta, m of the final counts."""
    letters = {
        "message_start": "s", "content_block_start": "b", "content_block_delta": "d", "content_block_stop": "x",
        "message_delta": "m", "message_stop": "e",
    }  # fmt: skip
    return "".join(letters[one.type] for one in events)


def test_events_in_order_and_counts(client: anthropic.Anthropic) -> None:
    messages: Any = user("What is the weather in Bonn?")
    forced: Any = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}}
    text = list(client.messages.create(messages=messages, stream=True, **ASKED))
    call = list(client.messages.create(messages=messages, stream=True, **{**ASKED, "max_tokens": 200}, **forced))
    cut = list(client.messages.create(messages=messages, stream=True, **{**ASKED, "max_tokens": 2}, **forced))
    assert re.fullmatch("sbd+xme", grammar(text)) and re.fullmatch("sbd+xme", grammar(call))
    assert re.fullmatch("s(bd*x)?me", grammar(cut))
    assert {one.delta.type for one in text[2:-3]} == {"text_delta"}
    assert {one.delta.type for one in call[2:-3]} == {"input_json_delta"} and call[1].content_block.input == {}
    assert [one[-2].delta.stop_reason for one in (call, cut)] == ["tool_use", "max_tokens"]
    assert [one.index for one in call if hasattr(one, "index")] == [0] * (len(call) - 3)
    counted = client.messages.count_tokens(model="demo", messages=messages, **forced).input_tokens
    for events in (call, cut):
        usage = events[-2].usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert cut[-2].usage.output_tokens == 2


def test_structured_outputs_and_stop_sequences(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    messages: Any = user(QUESTIONS[0])
    whole = client.messages.create(messages=messages, output_config=config, **{**ASKED, "max_tokens": 200})
    assert whole.content[0].text.replace(" ", "") in ('{"size":"small"}', '{"size":"large"}')
    text = client.messages.create(messages=messages, **ASKED).content[0].text
    stop = text.split()[3]
    stopped = client.messages.create(messages=messages, stop_sequences=[stop], **ASKED)
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == stop
    assert stopped.content[0].text == text[: text.index(stop)]


def test_errors(client: anthropic.Anthropic, tool_server: Server) -> None:
    messages: Any = user("x")
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(messages=messages, **{**ASKED, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="temperature") as error:
        client.messages.create(messages=messages, **{**ASKED, "extra_body": {"temperature": 1e9}})
    body: Any = error.value.body
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(messages=[{"role": "user", "content": [{"type": "image"}]}], **ASKED)  # type: ignore
    wrong = anthropic.Anthropic(base_url=tool_server.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(messages=messages, **ASKED)
