"""Tools through openai-python: calls whole and streamed, results, parsed arguments, the documented example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from kit import NAMED, ROOT, Server, call_of, enforced
from pydantic import BaseModel, Field


@pytest.fixture(scope="module")
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tool_server.v1, api_key=tool_server.key, max_retries=0, timeout=120) as one:
        yield one


def test_openai_whole_and_streamed(client: openai.OpenAI, call: dict[str, Any]) -> None:
    options = enforced("demo", tool_choice=NAMED)
    whole = client.chat.completions.create(**options).choices[0].message.tool_calls
    assert [call_of(one.function) for one in whole] == [call] and whole[0].id
    name, pieces = "", []
    for chunk in client.chat.completions.create(**options, stream=True):
        for one in chunk.choices[0].delta.tool_calls or []:
            assert one.index == 0 and (not name or one.function.name is None)
            name = name or one.function.name
            pieces.append(one.function.arguments or "")
    assert name == "get_weather" and "".join(pieces) == whole[0].function.arguments
    with client.chat.completions.stream(**options) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [{"name": one.name, "arguments": json.loads(one.arguments)} for one in events] == [call]


def test_openai_all_the_way(client: openai.OpenAI) -> None:
    """A call, its result, a final answer; no calls if they are not allowed."""
    options = enforced("demo")
    message = client.chat.completions.create(**options).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "clear, 21 degrees"}
    talk = [*options["messages"], message.to_dict(), result]
    answer = client.chat.completions.create(**{**options, "messages": talk, "tool_choice": "none"}).choices[0]
    assert answer.message.content and not answer.message.tool_calls
    free = client.chat.completions.create(**{**options, "tool_choice": "auto"}).choices[0]
    assert bool(free.message.tool_calls) == (free.finish_reason == "tool_calls")
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(**enforced("demo", tool_choice={"type": "function", "function": {"name": "x"}}))
    assert unknown.value.param and unknown.value.param.startswith("tool_choice")


def test_openai_parses_arguments(client: openai.OpenAI) -> None:
    class GetWeather(BaseModel):
        """The weather of a city, now."""

        city: Literal["Aachen", "Bonn"]
        days: int = Field(ge=1, le=9)

    tools = [openai.pydantic_function_tool(GetWeather)]
    (made,) = (
        client.chat.completions.parse(**enforced("demo", tools=tools, tool_choice="required"))
        .choices[0]
        .message.tool_calls
    )
    assert isinstance(made.function.parsed_arguments, GetWeather)


def test_the_example(tool_server: Server) -> None:
    command = [sys.executable, ROOT / "examples" / "tools" / "weather.py", tool_server.v1]
    environment = {**os.environ, "OPENAI_API_KEY": tool_server.key}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    call, answer = ended.stdout.split("\n", 1)
    assert call.startswith('get_weather({"city": ') and answer.strip()
