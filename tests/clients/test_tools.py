"""Tools through litellm, langchain-openai and instructor: the call is the one that the server makes without them."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import litellm
import openai
from kit import NAMED, Server, call_of, enforced, user
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr


def test_litellm(tool_server: Server, call: dict[str, Any]) -> None:
    options = {**enforced("openai/demo", tool_choice=NAMED), "api_base": tool_server.v1, "api_key": tool_server.key}
    options.pop("parallel_tool_calls")
    whole = litellm.completion(**options).choices[0]
    assert [call_of(one.function) for one in whole.message.tool_calls] == [call]
    built = litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True)))
    assert [call_of(one.function) for one in built.choices[0].message.tool_calls] == [call]


def test_langchain(tool_server: Server, call: dict[str, Any]) -> None:
    chat = ChatOpenAI(
        model="demo", base_url=tool_server.v1, api_key=SecretStr(tool_server.key), temperature=0,
        max_completion_tokens=200, max_retries=0, timeout=120,
    )  # fmt: skip
    tools = enforced("demo")["tools"]
    bound = chat.bind_tools(tools, tool_choice="get_weather", parallel_tool_calls=False)
    (made,) = bound.invoke(user("What is the weather in Bonn?")).tool_calls
    assert {"name": made["name"], "arguments": made["args"]} == call
    pieces = list(bound.stream(user("What is the weather in Bonn?")))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    assert {"name": whole.tool_calls[0]["name"], "arguments": whole.tool_calls[0]["args"]} == call


def test_instructor(tool_server: Server) -> None:
    class GetWeather(BaseModel):
        """The weather of a city, now."""

        city: Literal["Aachen", "Bonn"]
        days: int = Field(ge=1, le=9)

    client = openai.OpenAI(base_url=tool_server.v1, api_key=tool_server.key, max_retries=0, timeout=120)
    wrapped = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    options = {"messages": user("What is the weather in Bonn?"), "temperature": 0, "max_tokens": 200}
    made = wrapped.chat.completions.create(model="demo", response_model=GetWeather, max_retries=0, **options)
    assert isinstance(made, GetWeather)
