"""Tool calls and reasoning over HTTP in each family's format, streamed and not."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
import httpx  # noqa: E402
from llmc_runtime.server.tool_calls.history import for_template  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from tests.runtime.families import BEGINS, DUMPED, ENDS, FAMILIES, WRITTEN  # noqa: E402
from tests.runtime.parrots import TOK, Ask, Servers, client, say  # noqa: E402

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.", "strict": False,
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
            "required": ["city"],
        },
    },
}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": -9, "maximum": 99, "title": "Size"},
        "kind": {"$ref": "#/$defs/kind"},
        "more": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
    "required": ["kind", "more"],
    "$defs": {"kind": {"enum": ["red::=", "green é", None]}},
}


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message that a stream's deltas of one choice make."""
    result: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            result["content"] += delta.content or ""
            result["reasoning"] += getattr(delta, "reasoning", None) or ""
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.type == "function" and call.function.name and call.index == len(result["tool_calls"])
                    result["tool_calls"].append([call.function.name, ""])
                result["tool_calls"][call.index][1] += call.function.arguments
            result["finish"] = choice.finish_reason or result.get("finish")
    return result


def simple(choice: Any) -> dict[str, Any]:
    """The same of a whole answer."""
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning", "")
    assert reasoning == getattr(message, "reasoning_content", "")
    return {
        "content": message.content or "", "reasoning": reasoning, "tool_calls": calls, "finish": choice.finish_reason
    }  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_reasoning_in_each_family_whole_and_streamed(ask: Ask, name: str) -> None:
    calls, thought = WRITTEN[name]
    for text in ("", "Let me see.\n"):
        answer = ask(name, thought + text + calls.replace("%s", DUMPED), tools=TOOLS)
        (choice,) = answer.choices
        assert simple(choice) == {
            "content": text.strip(), "reasoning": thought and "Hm, so.", "finish": "tool_calls",
            "tool_calls": [["get_weather", DUMPED], ["now", "{}"]],
        }  # fmt: skip
        assert (choice.message.content is None) == (not text)
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2 and all(len(i) == 9 and i.isalnum() for i in ids) == (name in ("mistral", "args"))
        chunks = list(ask(name, thought + text + calls.replace("%s", DUMPED), tools=TOOLS, stream=True))
        assert joined(chunks) == simple(choice)
    plain = ask(name, thought + "Hello <|im_end|>there", tools=TOOLS)
    assert simple(plain.choices[0]) == {
        "content": "Hello there", "reasoning": thought and "Hm, so.", "tool_calls": [], "finish": "stop"
    }  # fmt: skip
    assert plain.choices[0].message.tool_calls is None


def test_without_tools_calls_are_text_and_marks_stay_hidden(ask: Ask) -> None:
    assert ask("mistral", "a [TOOL_CALLS] b").choices[0].message.content == "a  b"
    assert ask("mistral", "a [TOOL_CALLS] b", tools=TOOLS).choices[0].message.content == "a [TOOL_CALLS] b"
    shown = ask(
        "mistral", "a [TOOL_CALLS]b", tools=TOOLS, tool_choice="none", extra_body={"skip_special_tokens": False}
    )
    assert shown.choices[0].message.content.startswith("a [TOOL_CALLS]b")


def test_several_outputs_logprobs_usage_stops_and_limits(ask: Ask) -> None:
    text = WRITTEN["think"][1] + WRITTEN["think"][0].replace("%s", DUMPED)
    answer = ask("think", text, tools=TOOLS, n=3, temperature=1, logprobs=True)
    assert [simple(choice) for choice in answer.choices] == [simple(answer.choices[0])] * 3
    ids = TOK.encode(text, add_special_tokens=False)
    assert [len(choice.logprobs.content) for choice in answer.choices] == [len(ids) + 1] * 3
    assert answer.usage.completion_tokens == 3 * (len(ids) + 1)
    thought = ids.index(TOK.token_id("</think>") or 0) + 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3 * thought
    options: dict[str, Any] = {"tools": TOOLS, "n": 3, "temperature": 1, "logprobs": True, "stream": True}
    chunks = list(ask("think", text, **options, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 3 * thought
    parts = [joined([c for c in chunks if c.choices and c.choices[0].index == i]) for i in range(3)]
    assert parts == [simple(answer.choices[0])] * 3
    tokens = sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices and c.choices[0].logprobs)
    assert tokens == 3 * (len(ids) + 1)
    for more, finish, arguments in (
        ({"max_tokens": len(TOK.encode(text[: text.index("days")]))}, "length", None),
        ({"stop": ["days"]}, "tool_calls", '{"city": "Köln", "'),
    ):
        got = [simple(ask("think", text, tools=TOOLS, **more).choices[0])]
        got.append(joined(list(ask("think", text, tools=TOOLS, **more, stream=True))))
        assert got[0] == got[1] and got[0]["finish"] == finish and len(got[0]["tool_calls"]) == 1
        assert DUMPED.startswith(got[0]["tool_calls"][0][1]) and arguments in (None, got[0]["tool_calls"][0][1])
    one = ask("think", text, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert simple(one)["tool_calls"] == [["get_weather", DUMPED]]


def good(found: Any) -> bool:
    """BOUNDED, by another way."""
    assert {"kind", "more"} <= set(found) <= {"kind", "more", "size"} and found["kind"] in ("red::=", "green é", None)
    return type(found["more"]["on"]) is bool and len(found["more"]) == 1 and -9 <= found.get("size", 0) <= 99


@pytest.mark.parametrize("name", [*FAMILIES, "unknown"])
def test_an_enforced_call_matches_the_schema(ask: Ask, name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": BOUNDED}}, NOW]
    draw = random.Random(name)
    thought = WRITTEN.get(name, ("", ""))[1]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        for _ in range(1 + (choice == "required")):
            text = thought + "".join(draw.choices("abc {}\n", k=draw.randrange(9)))
            several = draw.random() < 0.5
            options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": several, "temperature": 1}
            answer = ask(name, text, **options, seed=draw.randrange(1 << 30), max_tokens=6000)
            message = simple(answer.choices[0])
            assert (
                message["finish"] == "tool_calls"
                and message["content"] == ""
                and message["reasoning"] == (thought and "Hm, so.")
            )
            assert 1 <= len(message["tool_calls"]) <= (32 if options["parallel_tool_calls"] and name != "llama" else 1)
            for function, arguments in message["tool_calls"]:
                found = json.loads(arguments)
                assert good(found) if function == "f" else (function, found, choice) == ("now", {}, "required")


@pytest.mark.parametrize("name", ["hermes", "llama", "args", "opens", "coder", "python"])
def test_a_strict_call_follows_its_schema_and_text_is_free(ask: Ask, name: str) -> None:
    strict = {"type": "function", "function": {"name": "get_weather", "parameters": BOUNDED, "strict": True}}
    thought = WRITTEN[name][1]
    called = WRITTEN["hermes" if name == "opens" else name][0].replace("%s", DUMPED)  # without what is required
    for text in ("Hello [1] {", "Let me see.\n" + called):
        options: dict[str, Any] = {"tools": [strict, NOW], "temperature": 1, "max_tokens": 4000}
        message = simple(ask(name, thought + text, **options).choices[0])
        assert message == joined(list(ask(name, thought + text, **options, stream=True)))
        assert message["content"].startswith(text.removesuffix(called).strip()), message
        assert message["reasoning"] == (thought and "Hm, so.") and bool(message["tool_calls"]) == (called in text)
        for function, arguments in message["tool_calls"]:
            assert good(json.loads(arguments)) if function == "get_weather" else function == "now"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_grammar_allows_calls_as_the_template_writes_them(servers: Servers, ask: Ask, name: str) -> None:
    """The model repeats an earlier call, as its template writes it, under the grammar."""
    if name == "opens":  # its template has no form of calls
        return
    serving, arguments = servers[1][name], {"city": "Köln", "days": [1, {"a": None}]}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = serving.prompting._template(True)
    messages = for_template(messages, template.features, False)
    text = template.render(messages, tools=TOOLS, add_generation_prompt=False)
    written = text[text.rindex("?") + 1 :]
    begins, ends = BEGINS.get(name, "[TOOL_CALLS]"), ENDS.get(name, "}")
    written = written[written.index(begins) : written.rindex(ends) + len(ends)].replace(', "id": "abcdefghi"', "")
    answer = ask(name, WRITTEN[name][1] + written, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert simple(answer.choices[0])["tool_calls"] == [["get_weather", json.dumps(arguments, ensure_ascii=False)]]
    ids = TOK.encode(WRITTEN[name][1] + written, add_special_tokens=False)
    assert answer.usage.completion_tokens in (len(ids), len(ids) + 1)


MORE = {**BOUNDED["properties"]["more"], "additionalProperties": False}
CLOSED = {**BOUNDED, "properties": {**BOUNDED["properties"], "more": MORE}, "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": CLOSED}}


@pytest.mark.parametrize("name", ["think", "opens", "args", "hermes"])
def test_a_form_holds_behind_reasoning_and_beside_calls(ask: Ask, name: str) -> None:
    calls, thought = WRITTEN[name]
    for seed in range(3):
        answer = ask(name, thought + "no JSON", response_format=FORM, temperature=1, seed=seed, max_tokens=900)
        message = simple(answer.choices[0])
        assert good(json.loads(message["content"])) and message["reasoning"] == (thought and "Hm, so.")
    both: dict[str, Any] = {"response_format": FORM, "tools": TOOLS, "max_tokens": 900}
    value = {"kind": "green é", "more": {"on": True}}
    answer = ask(name, thought + json.dumps(value, ensure_ascii=False), **both)
    assert json.loads(simple(answer.choices[0])["content"]) == value
    written = WRITTEN["think"][0].replace("</tool_call><tool_call>", "</tool_call>\n<tool_call>\n")
    written = calls if name in ("hermes", "args") else written.replace("{}}</tool", "{}}\n</tool")
    assert simple(ask(name, thought + written.replace("%s", DUMPED), **both).choices[0])["tool_calls"][0] == [
        "get_weather",
        DUMPED,
    ]
    for form in ({"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'start: "yes" | "no"'}):
        answer = ask(name, thought + "perhaps", extra_body={"structured_outputs": form})
        assert simple(answer.choices[0])["content"] in ("yes", "no")


def test_reasoning_is_switched_by_the_template_and_left_out_on_request(ask: Ask) -> None:
    text = "<think>Hm, so.</think>Hello"
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert simple(ask("think", text).choices[0])["reasoning"] == "Hm, so."
    for more in ({"extra_body": kwargs}, {"reasoning_effort": "none"}):
        answer = ask("think", "Hello", **more)
        assert simple(answer.choices[0])["content"] == "Hello"
        assert getattr(answer.usage, "completion_tokens_details", None) is None
    for stream in (False, True):
        quiet = ask("think", text, extra_body={"include_reasoning": False}, stream=stream)
        message = joined(list(quiet)) if stream else simple(quiet.choices[0])
        assert (message["content"], message["reasoning"]) == ("Hello", "")
    cut = ask("opens", "all of it is thought", max_tokens=9)
    assert cut.choices[0].message.content is None and cut.usage.completion_tokens_details.reasoning_tokens == 9


@pytest.mark.parametrize("padding", [0, 3000])
def test_a_request_replaces_the_servers_default_variables(ask: Ask, padding: int) -> None:
    before = [{"role": "system", "content": "x " * padding}] * (padding > 0)  # long ones are rendered elsewhere
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    for text, more, reasoning in (("Hello", {}, ""), ("<think>Hm, so.</think>Hello", thinks, "Hm, so.")):
        message = simple(ask("quiet", text, messages=[*before, say(text)], **more).choices[0])
        assert (message["content"], message["reasoning"]) == ("Hello", reasoning)


def test_templates_switch_reasoning_by_what_the_prompt_opens(ask: Ask) -> None:
    on, off = ({"extra_body": {"chat_template_kwargs": {"thinking": value}}} for value in (True, False))
    for stream in (False, True):
        for name, text, more, want in (
            ("deepseek", "Hm, so.</think>Hello", on, ("Hello", "Hm, so.")), ("deepseek", "Hello", off, ("Hello", "")),
            ("deepseek", "Hello", {}, ("Hello", "")), ("glm", "Hello", {"reasoning_effort": "none"}, ("Hello", "")),
            ("glm", "<think>Hm, so.</think>\nHello", {}, ("Hello", "Hm, so.")), ("glm", "Hello", {}, ("Hello", "")),
        ):  # fmt: skip
            answer = ask(name, text, **more, stream=stream)
            message = joined(list(answer)) if stream else simple(answer.choices[0])
            assert (message["content"], message["reasoning"]) == want, (name, text)


class Meal(BaseModel):
    """A meal, as arguments of a call."""

    name: Literal["soup", "rice"]
    hot: bool


def test_channels_are_reasoning_calls_and_content(servers: Servers, ask: Ask) -> None:
    thought, final = "<|channel|>analysis<|message|>Hm, so.<|end|>", "<|channel|>final<|message|>"
    start, to = "<|start|>assistant", "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    hello = {"content": "Hello", "reasoning": "Hm, so.", "tool_calls": [], "finish": "stop"}
    called = {"content": "", "reasoning": "Hm, so.", "finish": "tool_calls", "tool_calls": [["get_weather", DUMPED]]}
    preamble = "<|channel|>commentary<|message|>Let me see.<|end|>"
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        (thought + start + final + "Hello", {}, hello), (final + "Hello", {}, hello | {"reasoning": ""}),
        (thought + start + final + "Hello", {"tools": TOOLS}, hello),
        (thought + start + to + DUMPED, {"tools": TOOLS}, called),
        (to + DUMPED, {"tools": TOOLS}, called | {"reasoning": ""}),
        (thought + start + preamble + start + to + DUMPED, {"tools": TOOLS}, called | {"content": "Let me see."}),
        (start + " to=functions.get_weather<|channel|>commentary json<|message|>" + DUMPED, {"tools": TOOLS},
         called | {"reasoning": ""}),
        (thought + start + to.replace("get_weather", "other") + "{}", {"tools": TOOLS},
         hello | {"content": start + to.replace("get_weather", "other") + "{}"}),
        (thought + start + to + DUMPED, {"tools": TOOLS, "tool_choice": "required"}, called),
        (to + DUMPED, {"tools": TOOLS, "tool_choice": "required"}, called | {"reasoning": ""}),
        (thought + start + final + '{"kind": null, "more": {"on": true}}', {"response_format": FORM, "tools": TOOLS},
         hello | {"content": '{"kind": null, "more": {"on": true}}'}),
        (final + "yes", {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
         hello | {"content": "yes", "reasoning": ""}),
    )  # fmt: skip
    for text, request, want in cases:
        assert simple(ask("channels", text, **request).choices[0]) == want, text
        assert joined(list(ask("channels", text, **request, stream=True))) == want, text
    for seed in range(3):
        answer = ask("channels", thought + "?", tools=[NOW], tool_choice="required", temperature=1, seed=seed)
        assert simple(answer.choices[0]) == {**called, "tool_calls": [["now", "{}"]]}


def test_openais_own_helpers_read_them(servers: Servers) -> None:
    tool = openai.pydantic_function_tool(Meal)
    text = '<tool_call>\n{"name": "Meal", "arguments": {"name": "soup", "hot": true}}\n</tool_call>'
    options: dict[str, Any] = {"model": "parrot", "messages": [say(text)], "tools": [tool], "max_tokens": 200}
    one = client(servers, "hermes")
    parsed = one.chat.completions.parse(**options).choices[0].message
    assert parsed.tool_calls[0].function.parsed_arguments == Meal(name="soup", hot=True)
    with one.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert last.message.tool_calls[0].function.parsed_arguments == Meal(name="soup", hot=True)
    forced = one.chat.completions.parse(**{**options, "messages": [say("x")], "tool_choice": "required"})
    assert all(isinstance(call.function.parsed_arguments, Meal) for call in forced.choices[0].message.tool_calls)
    shaped = one.chat.completions.parse(**{**options, "messages": [say("x")], "response_format": Meal, "tools": []})
    assert isinstance(shaped.choices[0].message.parsed, Meal)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_and_results_go_back_to_the_model(ask: Ask, name: str) -> None:
    calls, thought = WRITTEN[name]
    calls = calls.partition("; ")[0]  # the template of Llama 3 has one call a message
    message = ask(name, thought + calls.replace("%s", DUMPED), tools=TOOLS).choices[0].message.to_dict()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in message["tool_calls"]]
    history = [{"role": "user", "content": "?"}, message, *results]
    after = {"role": "assistant", "content": "It is 21."}
    answer = ask(name, "", messages=[*history, after, say("Good.")], tools=TOOLS)
    assert simple(answer.choices[0])["content"] in ("Good.", "")  # where the prompt opens reasoning, all of it is that
    for given in ("no JSON", None, {"city": "x"}):
        message["tool_calls"][0]["function"]["arguments"] = given
        message["tool_calls"][0]["id"] = results[0]["tool_call_id"] = "an-id-of-another-server"
        assert ask(name, "", messages=[*history, after, say("Good.")], tools=TOOLS).choices


def bad_tools(**more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **more}}]


@pytest.mark.parametrize("stream", [False, True])
def test_impossible_requests_name_the_field(servers: Servers, stream: bool) -> None:
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("bare", {"tools": TOOLS}, "tools"), ("bare", {"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ("unknown", {"tools": TOOLS}, "tools"), ("hermes", {"tool_choice": "required"}, "tool_choice"),
        ("hermes", {"tools": [], "tool_choice": "required"}, "tool_choice"),
        ("hermes", {"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ("hermes", {"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ("hermes", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ("hermes", {"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ("hermes", {"tools": [NOW, NOW]}, "tools"),
        ("hermes", {"tools": bad_tools(name="a b")}, "tools[0].function.name"),
        ("hermes", {"tools": bad_tools(name="x" * 65)}, "tools[0].function.name"),
        ("hermes", {"tools": bad_tools(description=1)}, "tools[0].function.description"),
        ("hermes", {"tools": bad_tools(parameters={"type": "array"})}, "tools[0].function.parameters"),
        ("hermes", {"tools": bad_tools(parameters=[])}, "tools[0].function.parameters"),
        ("hermes", {"tools": bad_tools(strict="yes")}, "tools[0].function.strict"),
        ("hermes", {"tools": bad_tools(description="x" * (1 << 18))}, "tools"), ("hermes", {"tools": "x"}, "tools"),
        ("hermes", {"tools": [bad_tools(name=f"f{i}")[0] for i in range(129)]}, "tools"),
        ("hermes", {"tools": bad_tools(parameters={"$ref": "#/nowhere"}), "tool_choice": "required"}, "tools"),
        ("hermes", {"tools": bad_tools(parameters={"properties": {f"p{i}": {"enum": ["x" * 100]} for i in range(700)}}),
                    "tool_choice": "required"}, "tools"),
        ("hermes", {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
        ("hermes", {"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ("think", {"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs"),
        ("hermes", {"functions": [{"name": "f"}]}, "functions"),
        ("hermes", {"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ("hermes", {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}, "messages[0].tool_calls[0]"),
        ("hermes", {"messages": [{"role": "tool", "tool_call_id": 1, "content": ""}]}, "messages[0].tool_call_id"),
        ("bare", {"messages": [{"role": "tool", "tool_call_id": "1", "content": ""}]}, "messages[0]"),
    )  # fmt: skip
    with httpx.Client(timeout=30) as http:
        for name, more, param in cases:
            body = {"messages": [say("x")], "max_tokens": 50, "stream": stream, **more}
            reply = http.post(f"{servers[0]}/{name}/v1/chat/completions", json=body)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param, (more, reply.text)
        response = http.post(f"{servers[0]}/hermes/v1/completions", json={"prompt": "x", "tools": TOOLS})
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
        counts = [
            http.post(f"{servers[0]}/hermes/tokenize", json={"messages": [say("x")], **more}).json()["count"]
            for more in ({}, {"tools": TOOLS})
        ]
        assert counts[0] < counts[1]
