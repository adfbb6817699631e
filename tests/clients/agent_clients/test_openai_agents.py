"""openai-agents over /v1/responses: texts, streams, a tool and its result, structured outputs, stored conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from kit import QUESTIONS, Server, joined, user
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

Truth = Callable[..., dict[str, Any]]
GREEDY = {"temperature": 0.0, "max_tokens": 40}
set_tracing_disabled(True)


class Answer(BaseModel):
    """A structured output."""

    size: Literal["small", "large"]
    deep: bool


def run(server: Server, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `work`, which is called with a model."""

    async def whole() -> Any:
        async with AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=120) as client:
            return await work(OpenAIResponsesModel(model="demo", openai_client=client))

    return asyncio.run(whole())


def test_texts_whole_and_streamed(server: Server, truth: Truth) -> None:
    async def work(model: Any) -> None:
        agent = Agent(name="one", model=model, model_settings=ModelSettings(**GREEDY))
        for question in QUESTIONS[:2]:
            true = truth(messages=user(question), max_tokens=40)["text"]
            whole = await Runner.run(agent, question)
            assert whole.final_output == true and whole.raw_responses[0].usage.output_tokens > 1
            streamed, pieces = Runner.run_streamed(agent, question), list[str]()
            async for event in streamed.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    pieces.append(event.data.delta)
            assert joined(pieces) == streamed.final_output == true

    run(server, work)


def test_a_tool_and_its_result(store_server: Server) -> None:
    seen: list[tuple[str, int]] = []

    @function_tool
    def get_weather(city: Literal["Aachen", "Bonn"], days: int = Field(ge=1, le=9)) -> str:
        """The weather of a city, now."""
        seen.append((city, days))
        return "clear, 21 degrees"

    async def work(model: Any) -> None:
        settings = ModelSettings(temperature=0.0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(name="one", instructions="Be brief.", model=model, tools=[get_weather], model_settings=settings)
        whole = await Runner.run(agent, "What is the weather in Bonn?", max_turns=5)
        assert whole.final_output and len(seen) == 1 and seen[0][0] in ("Aachen", "Bonn")
        kinds = [item.type for item in whole.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        streamed = Runner.run_streamed(agent, "What is the weather in Bonn?", max_turns=5)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == whole.final_output and seen[0] == seen[1] and len(seen) == 2

    run(store_server, work)


def test_structured_outputs(server: Server) -> None:
    async def work(model: Any) -> None:
        settings = ModelSettings(temperature=0.0, max_tokens=200)
        agent = Agent(name="one", model=model, output_type=Answer, model_settings=settings)
        assert isinstance((await Runner.run(agent, QUESTIONS[0])).final_output, Answer)

    run(server, work)


@pytest.mark.parametrize("stored", [True, False])
def test_a_conversation_goes_on(store_server: Server, stored: bool) -> None:
    """With its items, and with the response that it continues: the same answer."""

    async def work(model: Any) -> str:
        agent = Agent(name="one", model=model, model_settings=ModelSettings(**GREEDY, store=stored))
        first = await Runner.run(agent, QUESTIONS[0])
        again = [*first.to_input_list(), {"role": "user", "content": QUESTIONS[1]}]
        second: Any = await Runner.run(agent, again)
        if stored:
            continued = await Runner.run(agent, QUESTIONS[1], previous_response_id=first.last_response_id)
            assert continued.final_output == second.final_output
        return str(second.final_output)

    talk = [*user(QUESTIONS[0])]
    body = {"model": "demo", "temperature": 0, "max_tokens": 40}
    first = store_server.post("/v1/chat/completions", {**body, "messages": talk})["choices"][0]["message"]["content"]
    talk += [{"role": "assistant", "content": first}, *user(QUESTIONS[1])]
    second = store_server.post("/v1/chat/completions", {**body, "messages": talk})["choices"][0]["message"]["content"]
    assert run(store_server, work) == second
