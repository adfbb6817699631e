"""instructor: objects of a type, by JSON schema."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from kit import CHAT, Server
from pydantic import BaseModel, ConfigDict, Field


class Meal(BaseModel):
    """The structured output."""

    model_config = ConfigDict(extra="forbid")
    dish: Literal["bread", "fish", "soup"]
    guests: int = Field(ge=1, le=9)


def test_an_object(server: Server) -> None:
    with openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=120) as client:
        wrapped = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        meal, answer = wrapped.chat.completions.create_with_completion(
            model="demo", messages=CHAT, response_model=Meal, temperature=0, max_tokens=300, max_retries=0
        )
    assert isinstance(meal, Meal)
    assert Meal.model_validate_json(answer.choices[0].message.content) == Meal(**meal.model_dump())
