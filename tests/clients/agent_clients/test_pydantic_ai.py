"""pydantic-ai over /v1/responses and /v1/messages: texts, streams, a tool and its result, structured outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from anthropic import AsyncAnthropic
from kit import QUESTIONS, WEATHER, Server, joined, user
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import ModelRequest, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

Truth = Callable[..., dict[str, Any]]
GREEDY: Any = {"temperature": 0.0, "max_tokens": 40}


class Answer(BaseModel):
    """A structured output."""

    size: Literal["small", "large"]
    deep: bool


def model_of(kind: str, server: Server) -> Any:
    """A model of one of the two APIs."""
    if kind == "responses":
        client = AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=120)
        return OpenAIResponsesModel("demo", provider=OpenAIProvider(openai_client=client))
    anthropic = AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=120)
    return AnthropicModel("demo", provider=AnthropicProvider(anthropic_client=anthropic))


@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_texts_whole_and_streamed(server: Server, truth: Truth, kind: str) -> None:
    async def work() -> None:
        agent = Agent(model_of(kind, server), model_settings=GREEDY)
        for question in QUESTIONS[:2]:
            true = truth(messages=user(question), max_tokens=40)["text"]
            whole = await agent.run(question)
            assert whole.output == true and whole.usage.output_tokens > 1
            async with agent.run_stream(question) as streamed:
                assert joined([piece async for piece in streamed.stream_text(delta=True)]) == true

    asyncio.run(work())


@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_a_tool_and_its_result(tool_server: Server, kind: str) -> None:
    tool = ToolDefinition(name=WEATHER["name"], parameters_json_schema=WEATHER["parameters"])

    async def work() -> None:
        model, parameters = model_of(kind, tool_server), ModelRequestParameters(function_tools=[tool])
        talk: list[Any] = [ModelRequest.user_text_prompt("What is the weather in Bonn?", instructions="Be brief.")]
        settings: Any = {"temperature": 0.0, "max_tokens": 200, "parallel_tool_calls": False}
        forced: Any = {**settings, "tool_choice": "required"}
        whole = await model_request(model, talk, model_settings=forced, model_request_parameters=parameters)
        (call,) = whole.tool_calls
        arguments = call.args_as_dict()
        assert call.tool_name == "get_weather" and arguments["city"] in ("Aachen", "Bonn", "Cologne")
        async with model_request_stream(
            model, talk, model_settings=forced, model_request_parameters=parameters
        ) as streamed:
            async for _ in streamed:
                pass
            assert streamed.get().tool_calls[0].args_as_dict() == arguments
        result = ToolReturnPart(call.tool_name, "clear, 21 degrees", tool_call_id=call.tool_call_id)
        talk += [whole, ModelRequest(parts=[result])]
        free: Any = {**settings, "tool_choice": "none"}
        answer = await model_request(model, talk, model_settings=free, model_request_parameters=parameters)
        assert answer.text and not answer.tool_calls

    asyncio.run(work())


@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_structured_outputs(tool_server: Server, kind: str) -> None:
    async def work() -> None:
        model = model_of(kind, tool_server)
        settings: Any = {"temperature": 0.0, "max_tokens": 300}
        if kind == "responses":  # for the other API, it knows by the model's name what is supported
            native = Agent(model, output_type=NativeOutput(Answer), model_settings=settings)
            assert isinstance((await native.run(QUESTIONS[0])).output, Answer)
        called = Agent(model, output_type=ToolOutput(Answer, name="final"), model_settings=settings)
        assert isinstance((await called.run(QUESTIONS[0])).output, Answer)

    asyncio.run(work())
