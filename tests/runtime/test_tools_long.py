"""Long outputs are parsed as they arrive: no update takes longer than its own text, however long the output is."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.tool_calls import reasoning
from llmc_runtime.server.tool_calls.call_format import CallFormat, CallPiece
from llmc_runtime.server.tool_calls.json_stream import JsonText
from llmc_runtime.server.tool_calls.message import MessageParser
from llmc_runtime.server.tool_calls.parser_select import OutputFormats
from llmc_runtime.server.tool_calls.python_literals import PythonText
from llmc_runtime.server.tool_calls.reasoning import THINK
from llmc_runtime.server.tool_calls.registry import Glm45, Llama3Json, OpenAI, Qwen3Coder
from llmc_runtime.server.tool_calls.response_plan import ResponsePlan

from tests.runtime.parrots import TOK

TOOLS: dict[str, Any] = {"f": {"type": "object", "properties": {"list": {"type": "array"}}}}
ENDS = {
    Qwen3Coder: ("<tool_call>\n<function=f>\n<parameter=list>\n", "\n</parameter>\n</function>\n</tool_call>"),
    Glm45: ("<tool_call>f\n<arg_key>list</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
}


@pytest.mark.parametrize("form", ENDS)
@pytest.mark.parametrize("item", ["1, ", "'a', "])
def test_a_long_value_is_read_as_it_arrives(form: Any, item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    for scan in (JsonText, PythonText):

        def feed(self: Any, text: str, at: int, _feed: Any = scan.feed) -> int:
            nonlocal read
            end = int(_feed(self, text, at))
            read += end - at
            return end

        monkeypatch.setattr(scan, "feed", feed)
    begin, end = ENDS[form]
    reader, count = form(TOOLS), 5000
    pieces = [begin, *(["[" + item] + [item] * count), item.rstrip(", ") + "]"]
    for piece in pieces:
        assert "".join(x.arguments for x in reader.push(piece) if isinstance(x, CallPiece)) in ("", "{")
    read = 0
    out = reader.push(end) + reader.finish()
    assert read < 100
    arguments = "".join(x.arguments for x in out if isinstance(x, CallPiece))
    assert arguments.count("1" if item[0] == "1" else '"a"') == count + 2 and arguments.endswith("]}")


def test_the_end_of_long_reasoning_is_found_as_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update decodes its own tokens only; the count includes the end mark and nothing after it."""
    decoded, original = 0, reasoning.detokenizer

    def counting(*args: Any, **options: Any) -> Any:
        stream = original(*args, **options)
        push = stream.push

        def counted(token: int) -> str:
            nonlocal decoded
            decoded += 1
            return str(push(token))

        stream.push = counted
        return stream

    monkeypatch.setattr(reasoning, "detokenizer", counting)
    thought, end, answer = (TOK.encode(text, add_special_tokens=False) for text in ("so ", "</think>", "Yes."))
    parser = MessageParser(ResponsePlan(OutputFormats(None, THINK, (), TOK), reasoning=THINK, opened=True))
    for _ in range(2000):
        parser.take("so ", thought, final=False)
    assert parser.reasoning_tokens == 2000 * len(thought)
    decoded = 0
    delta = parser.take("</think>Yes.", [*end, *answer], final=False)
    assert delta.content == "Yes." and decoded <= len(end) + len(answer)
    assert parser.reasoning_tokens == 2000 * len(thought) + len(end)
    parser.take("Yes.", answer, final=True)
    assert parser.reasoning_tokens == 2000 * len(thought) + len(end)


@pytest.mark.parametrize(("form", "text"), [(Llama3Json, "{"), (OpenAI, "<|channel|>"), (OpenAI, "<|end|>")])
def test_marks_that_start_no_call_take_linear_time(form: type[CallFormat], text: str) -> None:
    """A text of 16 times the length takes less than 40 times as long. If each mark took time in proportion to the text
    after it, it would take 80 times and more."""

    def seconds(count: int) -> float:
        reader, began = form(TOOLS), time.thread_time()
        reader.push(text * count)
        reader.finish()
        return time.thread_time() - began

    count = 128_000 // len(text)
    assert seconds(count) < 40 * min(seconds(count // 16) for _ in range(5))
