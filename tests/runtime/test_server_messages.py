"""/v1/messages: blocks and events of each family's outputs, inputs of clients, stop reasons, errors, x-api-key."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
import httpx
from llmc_runtime.server.messages_api.messages_response import ContentBlocks
from llmc_runtime.server.tool_calls.message import Delta

from tests.runtime.families import CALL, DUMPED, FAMILIES, WRITTEN
from tests.runtime.parrots import Servers, events, say
from tests.runtime.served import served

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA,
     "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]  # fmt: skip


def post(servers: Servers, body: dict[str, Any], name: str = "think", path: str = "") -> httpx.Response:
    whole = {"model": "parrot", "temperature": 0, "max_tokens": 400, **body}
    if path:
        whole = {key: value for key, value in whole.items() if key not in ("temperature", "max_tokens")}
    return httpx.post(f"{servers[0]}/{name}/v1/messages{path}", json=whole, timeout=60)


FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def message_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make, whose order is checked."""
    assert found[0]["type"] == "message_start"
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = found[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    opened = False
    for one in found[1:-2]:
        if one["type"] == "content_block_start":
            assert not opened and one["index"] == len(message["content"])
            message["content"].append({**one["content_block"], "json": ""})
            opened = True
            continue
        assert opened and one["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if one["type"] == "content_block_stop":
            text = block.pop("json")
            if block["type"] == "tool_use" and text:
                block["input"] = json.loads(text)
            opened = False
        elif one["delta"]["type"] == "input_json_delta":
            block["json"] += one["delta"]["partial_json"]
        else:
            field = FIELDS[one["delta"]["type"]]
            block[field] += one["delta"][field]
    assert not opened
    return message | found[-2]["delta"] | {"usage": found[-2]["usage"]}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs from one request to the next."""
    blocks = [{key: value for key, value in one.items() if key != "id"} for one in message["content"]]
    usage = message["usage"]["output_tokens"]
    return {**message, "id": "", "content": blocks, "usage": usage}


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_each_family_whole_and_streamed(servers: Servers, name: str) -> None:
    calls, thought = WRITTEN[name]
    for text in ("", "Let me see.\n"):
        body = {"messages": [say(thought + text + calls.replace("%s", DUMPED))], "tools": TOOLS}
        whole = post(servers, body, name).json()
        kinds = ["thinking"] * bool(thought) + ["text"] * bool(text) + ["tool_use", "tool_use"]
        assert [one["type"] for one in whole["content"]] == kinds and whole["stop_reason"] == "tool_use"
        assert [one["input"] for one in whole["content"][-2:]] == [CALL, {}]
        assert [one["name"] for one in whole["content"][-2:]] == ["get_weather", "now"]
        assert not thought or (whole["content"][0]["thinking"] == "Hm, so." and whole["content"][0]["signature"])
        assert not text or whole["content"][bool(thought)]["text"] == "Let me see."
        streamed = message_of(events(post(servers, {**body, "stream": True}, name).text))
        assert plain(streamed) == plain(whole)


def test_arguments_of_calls_are_sent_as_they_arrive_and_decoded_for_whole_responses_only() -> None:
    """Each part of the text becomes an event at once; decoding all of it at the end would hold the event loop."""
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    parts = ['{"a": ', "[1, ", "2]}"]
    for decodes in (False, True):
        blocks = ContentBlocks(decodes)
        (start,) = blocks.take(Delta(calls=[head]))
        assert start["content_block"] == {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
        for part in parts:
            (event,) = blocks.take(Delta(calls=[{"index": 0, "function": {"arguments": part}}]))
            assert event["delta"] == {"type": "input_json_delta", "partial_json": part}
        assert list(blocks.close()) == [{"type": "content_block_stop", "index": 0}]
        assert blocks.blocks[0]["input"] == ({"a": [1, 2]} if decodes else {})


def test_stop_reasons_and_usage(servers: Servers) -> None:
    for stream in (False, True):

        def ask(**more: Any) -> Any:
            body = {"messages": [say("One two three four")], "stream": stream, **more}  # noqa: B023
            reply = post(servers, body, "hermes")
            return message_of(events(reply.text)) if stream else reply.json()  # noqa: B023

        ended = ask()
        assert ended["content"] == [{"type": "text", "text": "One two three four"}]
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
        usage = ended["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert (
            total
            == post(servers, {"messages": [say("One two three four")]}, "hermes", "/count_tokens").json()[
                "input_tokens"
            ]
        )
        cut = ask(max_tokens=3)
        assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 3
        stopped = ask(stop_sequences=["three"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
        assert stopped["content"][0]["text"] == "One two "
        long = ask(max_tokens=10**6, ignore_eos=True, top_k=1)
        assert long["stop_reason"] == "model_context_window_exceeded"


def test_a_cut_call_and_an_empty_output(servers: Servers) -> None:
    calls, thought = WRITTEN["think"]
    text = thought + calls.replace("%s", DUMPED)
    for stream in (False, True):
        reply = post(servers, {"messages": [say(text)], "tools": TOOLS, "max_tokens": 60, "stream": stream})
        if stream:
            found = events(reply.text)
            assert found[-2]["delta"]["stop_reason"] == "max_tokens"
        else:
            assert reply.json()["stop_reason"] == "max_tokens" and reply.json()["content"][-1]["type"] == "tool_use"
        reply = post(servers, {"messages": [say("")], "stream": stream})
        message = message_of(events(reply.text)) if stream else reply.json()
        assert message["content"] == [] and message["stop_reason"] == "end_turn"


def test_a_conversation_of_blocks_has_the_prompt_of_the_same_chat(servers: Servers) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}]
    chat = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "Now.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"}, say("x"),
    ]  # fmt: skip
    blocks = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Now."},
            {"type": "tool_use", "id": "c1", "name": "now", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": say("x")["content"], "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    url, tools = (
        f"{servers[0]}/think/v1",
        [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
    )
    wanted = httpx.post(f"{url}/chat/completions", json={"messages": chat, "tools": tools, "temperature": 0}).json()
    for system in ("Be kind.", [{"type": "text", "text": "Be kind."}]):
        body = {"messages": blocks, "system": system, "tools": [TOOLS[1]]}
        usage = post(servers, body).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == wanted["usage"]["prompt_tokens"]
        large = post(servers, {**body, "unknown": "x" * 40_000}).json()["usage"]
        assert large["input_tokens"] + large["cache_read_input_tokens"] == wanted["usage"]["prompt_tokens"]
        for pad in ("", "x" * 40_000):
            count = post(servers, {**body, "unknown": pad}, path="/count_tokens")
            assert count.json() == {"input_tokens": wanted["usage"]["prompt_tokens"]}, count.text


def test_the_start_of_an_answer_is_continued(servers: Servers) -> None:
    url = f"{servers[0]}/hermes/v1"
    messages = [say("x"), {"role": "assistant", "content": "I am"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    wanted = httpx.post(f"{url}/chat/completions", json={"messages": messages, "max_tokens": 3, **more}).json()
    for content in ("I am", [{"type": "text", "text": "I"}, {"type": "text", "text": " am"}]):
        body = {"messages": [messages[0], {"role": "assistant", "content": content}]}
        assert post(servers, body, "hermes", "/count_tokens").json()["input_tokens"] == wanted["usage"]["prompt_tokens"]


def test_thinking_is_switched_and_left_out(servers: Servers) -> None:
    text = "<think>\nHm.\n</think>\n\nYes."

    def kinds(**more: Any) -> list[str]:
        reply = post(servers, {"messages": [say(text)], **more})
        assert reply.status_code == 200, reply.text
        return [one["type"] for one in reply.json()["content"]]

    assert kinds() == kinds(thinking={"type": "enabled", "budget_tokens": 1024}) == ["thinking", "text"]
    assert kinds(thinking={"type": "adaptive", "display": "omitted"}) == ["text"]

    def tokens(**more: Any) -> int:
        found: int = post(servers, {"messages": [say("x")], **more}, path="/count_tokens").json()["input_tokens"]
        return found

    off = tokens(chat_template_kwargs={"enable_thinking": False})
    assert tokens(thinking={"type": "disabled"}) == off != tokens() == tokens(thinking={"type": "adaptive"})


def test_output_formats_and_choices_are_enforced(servers: Servers) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    for more in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        body = post(servers, {"messages": [say("x")], **more}, "hermes").json()
        assert isinstance(json.loads(body["content"][0]["text"])["a"], int)
    for choice, names in (
        ({"type": "tool", "name": "now"}, ["now"]),
        ({"type": "any", "disable_parallel_tool_use": True}, None),
    ):
        body = post(servers, {"messages": [say("x")], "tools": TOOLS, "tool_choice": choice}, "hermes").json()
        found = [one["name"] for one in body["content"]]
        assert body["stop_reason"] in ("tool_use", "max_tokens") and len(found) == 1 and found == (names or found)
    none = post(servers, {"messages": [say("x")], "tools": TOOLS, "tool_choice": {"type": "none"}}, "hermes")
    assert none.json()["content"][0] == {"type": "text", "text": "x"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"messages": None}, "messages"),
    ({"messages": [{"role": "tool"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "redacted_thinking"),
    ({"messages": [{"role": "assistant", "content": [7]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "now"}]}]}, "arguments"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "a b"}]}]}, "[0].name"),
    ({"system": [{"type": "image"}]}, "system"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: not supported: 'bash_20250124'; describe"),
    ({"tools": [{"name": "not a name", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": TOOLS, "tool_choice": {"type": "all"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "any needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOLS[0], "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [{**TOOLS[0], "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tools": [{**TOOLS[0], "allowed_callers": 7}]}, "tools[0].allowed_callers"),
    ({"thinking": {"type": "enabled", "display": "all"}}, "thinking.display"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 10}}}, "output_config.task_budget"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "none"}}, "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, "thinking"), ({"container": "x"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"), ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"n": 2}, "n is not supported"), ({"stop": ["x"]}, "stop is not supported"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"), ({"temperature": 1e9}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": None}, "max_tokens"), ({"max_tokens": "x"}, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), REFUSED)
def test_unsupported_fields_are_refused_by_name(servers: Servers, body: dict[str, Any], words: str) -> None:
    asked = {"messages": [say("x")], **body}
    small = post(servers, asked)
    large = post(servers, {**asked, "unknown": "x" * 40_000})
    for reply in (small, large):
        error = reply.json()
        assert reply.status_code == 400 and error["type"] == "error", reply.text
        assert error["error"]["type"] == "invalid_request_error" and words in error["error"]["message"], reply.text
    assert small.json() == large.json()


def test_fields_without_effect_are_accepted(servers: Servers) -> None:
    body = {
        "messages": [say("x")], "metadata": {"user_id": "me"}, "service_tier": "auto", "speed": "standard",
        "cache_control": {"type": "ephemeral"}, "inference_geo": "x",
        "tools": [{**TOOLS[0], "defer_loading": False, "allowed_callers": ["direct"], "eager_input_streaming": True}],
        "context_management": {
            "edits": [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
        },
    }  # fmt: skip
    before = servers[1]["think"].metrics._counts["request_unknown_fields"]
    assert post(servers, body).status_code == 200
    assert servers[1]["think"].metrics._counts["request_unknown_fields"] == before


def test_keys_and_errors_have_the_form_of_the_api_in_every_layer() -> None:
    key, body = "first-secret-key", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    with served(keys=(key, "other-secret-key"), sequences=4, per_key=2, pace=0.01) as server:
        url = f"{server.url}/v1/messages"

        def ask(path: str = "", **more: Any) -> tuple[int, str]:
            reply = httpx.post(url + path, **({"json": body, "headers": {"x-api-key": key}} | more))
            found = reply.json()
            assert reply.status_code == 200 or (found["type"] == "error" and found["error"]["message"])
            return reply.status_code, found.get("error", found).get("type", "")

        assert ask() == ask("/") == ask(headers={"Authorization": f"Bearer {key}"}) == (200, "message")
        assert ask("/count_tokens")[0] == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer wrong", "x-api-key": key}):
            assert ask(headers=headers) == (401, "authentication_error")
        assert ask("/none") == (404, "not_found_error")
        assert ask(json={**body, "model": "none"}) == (404, "not_found_error")
        assert ask(json=None, content=b"x") == (415, "invalid_request_error")
        head = {"x-api-key": key, "Content-Type": "application/json"}
        assert ask(json=None, content=b"x", headers=head) == (400, "invalid_request_error")
        assert ask(json=None, content=b" " * (9 << 20), headers=head)[0] in (413,)
        server.serving.admission.draining = True
        assert ask() == (503, "overloaded_error")
        assert httpx.get(url).json()["type"] == "error" and httpx.get(url, headers=head).status_code == 405
        for path in ("/v1/responses", "/v1/completions"):
            reply = httpx.post(f"{server.url}{path}", json={"input": "x", "prompt": "x"}, headers=head)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "shutting_down"
        server.serving.admission.draining = False


def test_a_key_in_both_headers_opens_no_admin_route() -> None:
    admin, key = "admin-secret-key", "first-secret-key"
    with served(keys=(key,), admin_keys=(admin,)) as server:
        for headers, status in (({"x-api-key": key}, 403), ({"x-api-key": "none"}, 401), ({"x-api-key": admin}, 200)):
            assert httpx.get(f"{server.url}/admin/state", headers=headers).status_code == status
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": admin}).status_code == 401
