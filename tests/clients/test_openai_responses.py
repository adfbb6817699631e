"""openai-python's responses: whole, streamed, parsed, with tools, stored ones, errors; texts are the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from kit import QUESTIONS, WEATHER, Server, joined, user
from pydantic import BaseModel

Truth = Callable[..., dict[str, Any]]
ASKED: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 40}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=120) as one:
        yield one


def test_texts_whole_and_streamed(client: openai.OpenAI, truth: Truth) -> None:
    for question in QUESTIONS:
        true = truth(messages=user(question), max_tokens=40)
        for asked in (question, user(question)):
            whole = client.responses.create(input=asked, **ASKED)
            assert whole.output_text == true["text"] and not whole.store
            assert whole.status == {"length": "incomplete", "stop": "completed"}[true["finish_reason"]]
            assert whole.usage.output_tokens == len(true["token_ids"])
            assert whole.usage.input_tokens == len(true["prompt_token_ids"])
        events = list(client.responses.create(input=question, stream=True, **ASKED))
        assert joined([one.delta for one in events if one.type == "response.output_text.delta"]) == true["text"]
        assert [one.sequence_number for one in events] == list(range(len(events)))
        assert events[-1].type == f"response.{whole.status}" and events[-1].response.output_text == true["text"]


def test_parsed_outputs_and_the_helper_for_streams(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        size: Literal["small", "large"]
        deep: bool

    asked = {**ASKED, "max_output_tokens": 200, "input": QUESTIONS[0]}
    whole = client.responses.parse(text_format=Answer, **asked)
    assert isinstance(whole.output_parsed, Answer)
    with client.responses.stream(text_format=Answer, **asked) as stream:
        final = stream.until_done().get_final_response()
    assert final.output_parsed == whole.output_parsed


def test_a_tool_and_its_result(tool_server: Server) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER}
    talk: Any = user("What is the weather in Bonn?")
    asked = {**ASKED, "max_output_tokens": 200, "tools": [tool]}
    with openai.OpenAI(base_url=tool_server.v1, api_key=tool_server.key, max_retries=0) as client:
        whole = client.responses.create(input=talk, tool_choice={"type": "function", "name": "get_weather"}, **asked)
        (call,) = whole.output
        assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Aachen", "Bonn", "Cologne")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "clear, 21 degrees"}
        answer = client.responses.create(input=[*talk, *whole.output, result], tool_choice="none", **asked)
        assert answer.output_text


def test_errors(client: openai.OpenAI) -> None:
    for more, param in (({"temperature": 9e9}, "temperature"), ({"store": True}, "store"),
                        ({"truncation": "auto"}, "truncation")):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(input="x", **{**ASKED, **more})
        assert error.value.param == param
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(input="x", previous_response_id="resp_x", **ASKED)
    assert unknown.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_x")
