"""Tool calls that max_tokens cuts off, in each family's form: nothing of their markup is content, whole or streamed."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

from tests.runtime.families import BEGINS, DUMPED, FAMILIES, WRITTEN  # noqa: E402
from tests.runtime.parrots import TOK, Ask  # noqa: E402
from tests.runtime.test_server_tools import TOOLS, joined, simple  # noqa: E402


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_calls_that_max_tokens_cuts_off_leave_no_content(ask: Ask, name: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    thought, called = WRITTEN[name][1], WRITTEN[name][0].replace("%s", DUMPED)
    draw = random.Random(name)
    for choice in ("required", named):
        for most in (1, 2, *draw.sample(range(3, len(TOK.encode(called)) - 4), 4)):
            options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": most}
            whole = ask(name, thought + called, **options).choices[0]
            message = simple(whole)
            assert whole.message.content is None and message["finish"] in ("length", "tool_calls")
            assert joined(list(ask(name, thought + called, stream=True, **options))) == message
            assert all(function in ("get_weather", "now") for function, _ in message["tool_calls"])


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_the_model_that_max_tokens_cuts_off_leave_no_markup(ask: Ask, name: str) -> None:
    thought, called = WRITTEN[name][1], WRITTEN[name][0].replace("%s", DUMPED)
    count = len(TOK.encode(thought + called))
    for most in random.Random(name).sample(range(len(TOK.encode(thought)) + 12, count - 1), 4):
        message = simple(ask(name, thought + called, tools=TOOLS, max_tokens=most).choices[0])
        begun = message["tool_calls"] or not message["content"]
        opening = BEGINS.get(name, "[TOOL_CALLS]").startswith(message["content"][:4]) and len(message["content"]) < 24
        assert begun or opening, (most, message)
        assert not (message["tool_calls"] and message["content"]), (most, message)
