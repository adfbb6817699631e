"""/v1/responses: items and events of each family's outputs, inputs of clients, stored responses, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
import httpx  # noqa: E402

from tests.runtime.families import DUMPED, FAMILIES, WRITTEN  # noqa: E402
from tests.runtime.parrots import Servers, client, events, say  # noqa: E402

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
HELLO = say("Hello")["content"]


def post(servers: Servers, body: dict[str, Any], name: str = "think") -> httpx.Response:
    whole = {"temperature": 0, **body}
    return httpx.post(f"{servers[0]}/{name}/v1/responses", json=whole, timeout=60)


def shown(items: list[Any]) -> list[tuple[str, str]]:
    """The type and the text of each item."""
    found = []
    for item in items:
        fields = item if isinstance(item, dict) else item.to_dict()
        text = fields.get("arguments") or "".join(part["text"] for part in fields.get("content") or ())
        found.append((fields["type"], text))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_items_of_each_family_whole_and_streamed(servers: Servers, name: str) -> None:
    calls, thought = WRITTEN[name]
    ask = client(servers, name).responses
    for text in ("", "Let me see.\n"):
        given = {"model": "parrot", "input": [say(thought + text + calls.replace("%s", DUMPED))], "tools": TOOLS}
        whole = ask.create(**given, temperature=0)
        wanted = [("function_call", DUMPED), ("function_call", "{}")]
        wanted = [("message", text.strip())] * bool(text) + wanted
        wanted = [("reasoning", "Hm, so.")] * bool(thought) + wanted
        assert shown(whole.output) == wanted and whole.status == "completed"
        assert [one.name for one in whole.output if one.type == "function_call"] == ["get_weather", "now"]
        assert len({one.call_id for one in whole.output if one.type == "function_call"}) == 2
        assert bool(whole.usage.output_tokens_details.reasoning_tokens) == bool(thought)
        with ask.stream(**given, temperature=0) as stream:
            taken = [event.type for event in stream]
            final = stream.get_final_response()
        assert shown(final.output) == wanted and taken[-1] == "response.completed"
        assert final.usage.output_tokens == whole.usage.output_tokens


def check_order(found: list[dict[str, Any]], last: str) -> dict[str, Any]:
    """Check the order of events and that deltas add up to the final items; return the final response."""
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert [one["type"] for one in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == last and not any("response" in one for one in found[2:-1])
    items: list[dict[str, Any]] = []
    parts: dict[int, str] = {}
    for one in found[2:-1]:
        kind, index = one["type"], one["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items) and one["item"]["status"] == "in_progress" and len(parts) == 0
            items.append(one["item"])
            parts[index] = ""
        elif kind == "response.output_item.done":
            assert one["item"]["id"] == items[index]["id"] and shown([one["item"]])[0][1] == parts.pop(index)
            items[index] = one["item"]
        elif kind.endswith(".delta"):
            assert one["item_id"] == items[index]["id"] and one["delta"]
            parts[index] += one["delta"]
        elif kind.endswith((".done", ".added")) and "part" in one:
            assert one["part"]["text"] in ("", parts[index])
        else:
            assert one.get("text", one.get("arguments")) == parts[index]
    assert not parts and found[-1]["response"]["output"] == items
    final: dict[str, Any] = found[-1]["response"]
    return final


def test_events_come_in_order_with_the_fields_of_the_items(servers: Servers) -> None:
    calls, thought = WRITTEN["think"]
    text = thought + "Well.\n" + calls.replace("%s", DUMPED)
    body = {"input": [say(text)], "tools": TOOLS, "stream": True, "store": False}
    final = check_order(events(post(servers, body).text), "response.completed")
    assert final["store"] is False and final["completed_at"] and final["usage"]["input_tokens"] > 10
    found = events(post(servers, {**body, "max_output_tokens": 4}).text)
    final = check_order(found, "response.incomplete")
    assert final["incomplete_details"] == {"reason": "max_output_tokens"} and final["usage"]["output_tokens"] == 4
    assert final["output"][-1]["status"] == "incomplete"
    cut = post(servers, {**body, "stream": False, "max_output_tokens": 40}).json()
    assert cut["status"] == cut["output"][-1]["status"] == "incomplete" and cut["completed_at"] is None


def test_an_output_without_a_text_has_an_empty_message(servers: Servers) -> None:
    for text, kinds in (("", ["message"]), ("<think>\nHm.\n</think>\n\n", ["reasoning", "message"])):
        for stream in (False, True):
            reply = post(servers, {"input": [say(text)], "stream": stream})
            body = check_order(events(reply.text), "response.completed") if stream else reply.json()
            assert [item["type"] for item in body["output"]] == kinds and shown(body["output"])[-1][1] == ""


def test_the_response_repeats_the_request(servers: Servers) -> None:
    form = {"type": "json_schema", "name": "one", "schema": {"type": "object", "properties": {"a": {"const": 1}}}}
    body = post(servers, {
        "model": "parrot", "input": HELLO, "instructions": "Be kind.", "metadata": {"a": "b"}, "top_p": 0.5,
        "temperature": 0.5, "max_output_tokens": 300, "text": {"format": form, "verbosity": "low"}, "user": "me",
        "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False, "reasoning": {"effort": "low",
        "summary": "auto"}, "truncation": "disabled", "store": False, "include": [], "service_tier": "auto",
        "stream_options": None, "safety_identifier": "x", "prompt_cache_key": "y", "background": False,
    }).json()  # fmt: skip
    assert body["object"] == "response" and body["id"].startswith("resp_") and body["model"] == "parrot"
    assert body["metadata"] == {"a": "b"} and body["instructions"] == "Be kind." and body["text"]["format"] == form
    assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.5, 0.5, 300)
    assert body["tool_choice"] == "none" and body["parallel_tool_calls"] is False and body["store"] is False
    assert body["tools"][1] == {"type": "function", "name": "now", "description": None, "parameters": None,
                                "strict": False}  # fmt: skip
    assert body["reasoning"] == {"effort": "low", "summary": None} and body["error"] is None
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]


def test_text_formats_and_tool_choices_are_enforced(servers: Servers) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "one", "schema": schema, "strict": True}
    for one in (form, {"type": "json_object"}):
        for stream in (False, True):
            body = {"input": HELLO, "text": {"format": one}, "max_output_tokens": 200, "stream": stream, "seed": 1}
            reply = post(servers, body, "hermes")
            final = check_order(events(reply.text), "response.completed") if stream else reply.json()
            assert isinstance(json.loads(shown(final["output"])[-1][1]), dict)
    named = {"type": "function", "name": "now"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        body = {"input": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
        final = post(servers, {**body, "max_output_tokens": 300}, "hermes").json()
        assert [one["name"] for one in final["output"]] == ["now"] and final["tool_choice"] == choice


def test_reasoning_and_calls_of_earlier_turns_reach_the_template(servers: Servers) -> None:
    """A conversation of items has the prompt of the same chat."""
    url = f"{servers[0]}/think/v1"
    calls = [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    chat = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "When"},
        {"type": "text", "text": "?"}]}, {"role": "assistant", "content": "Now.", "reasoning_content": "Hm.",
        "tool_calls": calls}, {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "assistant", "content": "At noon."}, say("x"),
    ]  # fmt: skip
    parts = [{"type": "input_text", "text": "When"}, {"type": "input_text", "text": "?"}]
    said = {"type": "output_text", "text": "At noon.", "annotations": []}
    rest: list[dict[str, Any]] = [
        {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": "Now."},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "message", "role": "assistant", "content": [said]},
        say("x"),
    ]
    tools = [{"type": "function", "function": {"name": "now"}}]
    wanted = httpx.post(f"{url}/chat/completions", json={"messages": chat, "tools": tools, "temperature": 0}).json()
    for reasoning in (
        {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "reasoning", "summary": [], "content": [], "encrypted_content": "SG0u"},
    ):
        items = [{"role": "user", "content": parts}, reasoning, *rest]
        body = post(
            servers, {"instructions": "Be kind.", "input": items, "tools": [{"type": "function", "name": "now"}]}
        )
        assert body.json()["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"], reasoning


def test_reasoning_goes_back_and_forth_encoded(servers: Servers) -> None:
    body = {"input": [say("<think>\nHm, é.\n</think>\n\nYes.")], "include": ["reasoning.encrypted_content"]}
    (item, _) = post(servers, body).json()["output"]
    assert item["content"][0]["text"] == "Hm, é." and item["encrypted_content"]
    only = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    again = post(servers, {"input": [say("a"), only, {"role": "assistant", "content": "Yes."}, say("b")]})
    assert again.status_code == 200
    assert post(servers, {"input": HELLO}).json()["output"][0].get("encrypted_content") is None


def test_a_stored_response_is_continued_listed_and_deleted(servers: Servers) -> None:
    ask = client(servers, "think").responses
    first = ask.create(model="parrot", input=HELLO, instructions="Be kind.", temperature=0)
    assert first.store and ask.retrieve(first.id).to_dict() == first.to_dict()
    with ask.stream(model="parrot", input=[say("And now")], previous_response_id=first.id, temperature=0) as stream:
        second = stream.until_done().get_final_response()
    assert second.previous_response_id == first.id and shown(ask.retrieve(second.id).output) == [("message", "And now")]
    items = [{"role": "user", "content": HELLO}, {"role": "assistant", "content": "Hello"}, say("And now"),
             {"role": "assistant", "content": "And now"}, say("x")]  # fmt: skip
    whole = post(servers, {"input": items}).json()
    third = post(servers, {"input": [say("x")], "previous_response_id": second.id}).json()
    assert third["usage"]["input_tokens"] == whole["usage"]["input_tokens"]  # without the instructions
    reference = {"type": "item_reference", "id": first.output[0].id}
    fourth = post(servers, {"input": [items[0], reference, *items[2:]]}).json()
    assert fourth["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    page = ask.input_items.list(fourth["id"], limit=2, order="asc")
    assert page.has_more and [one.id for one in page.data][1] == first.output[0].id
    assert len(list(ask.input_items.list(fourth["id"], limit=2))) == 5
    ask.delete(first.id)
    for call in (lambda: ask.retrieve(first.id), lambda: ask.delete(first.id),
                 lambda: ask.create(input="x", previous_response_id=second.id)):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call()
    gone = post(servers, {"input": [items[0], reference]})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "item_not_found"


def test_responses_with_store_false_are_not_stored(servers: Servers) -> None:
    store = servers[1]["think"].stored
    before = store.count, store.used
    one = post(servers, {"input": HELLO, "store": False}).json()
    url = f"{servers[0]}/think/v1/responses/{one['id']}"
    assert httpx.get(url).status_code == 404 and (store.count, store.used) == before
    failed = post(servers, {"input": HELLO, "text": {"format": {"type": "json_schema", "schema": {"type": 7}}}})
    assert failed.status_code == 400 and (store.count, store.used) == before
    for query in ("limit=0", "limit=101", "limit=x", "order=up"):
        stored = post(servers, {"input": HELLO}).json()["id"]
        reply = httpx.get(f"{servers[0]}/think/v1/responses/{stored}/input_items?{query}")
        assert reply.status_code == 400 and reply.json()["error"]["param"] == query.partition("=")[0]
    assert httpx.get(f"{servers[0]}/think/v1/responses/{stored}?stream=true").status_code == 400
    assert httpx.get(f"{servers[0]}/think/v1/responses/{stored}/input_items?after=x").status_code == 404
    named = {"type": "message", "role": "user", "content": "x", "id": "i" * 257}
    assert post(servers, {"input": [named]}).status_code == 400
    twice = [{**named, "id": name} for name in ("a", "b", "a", "c")]
    stored = post(servers, {"input": twice}).json()["id"]
    for query, want in (("order=asc&after=a", "bac"), ("order=desc&after=a", "ba"), ("order=asc&limit=2", "ab"),
                        ("after=c&limit=1", "a")):  # fmt: skip
        listed = httpx.get(f"{servers[0]}/think/v1/responses/{stored}/input_items?{query}").json()
        assert [item["id"] for item in listed["data"]] == list(want), listed
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (want[0], want[-1], "limit" in query)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"), ({"input": []}, "input"), ({"input": 7}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input"), ({"input": [{"role": "user", "content": 7}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "now"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": 7, "name": "now", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "not a name", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": [{"type": "reasoning", "encrypted_content": "not of this server"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "none"}]}, "input"),
    ({"input": [{"type": "item_reference"}]}, "input"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "x", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": 7}}, "tool_choice"),
    ({"include": ["file_search_call.results"]}, "include"), ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning"), ({"background": True}, "background"),
    ({"conversation": "x"}, "conversation"), ({"prompt": {"id": "x"}}, "prompt"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"enable_response_messages": True}, "enable_response_messages"),
    ({"previous_input_messages": [{}]}, "previous_input_messages"),
    ({"max_tokens": 5}, "max_tokens"), ({"n": 2}, "n"), ({"response_format": {"type": "text"}}, "response_format"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"metadata": {"a": "b" * 513}}, "metadata"), ({"metadata": {"a": 1}}, "metadata"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": {"format": {"type": "x"}}}, "text.format"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": 1e9}, "temperature"), ({"model": "other"}, "model"), ({"tools": [{}] * 129}, "tools"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"), ({"input": [{}] * 4097}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_unsupported_fields_are_refused_by_name(servers: Servers, body: dict[str, Any], param: str) -> None:
    asked = {"input": HELLO, **body} if body and "input" not in body else body
    small = post(servers, asked)
    large = post(servers, {**asked, "unknown": "x" * 40_000})
    for reply in (small, large):
        assert reply.status_code in (400, 404), reply.text
        found = reply.json()["error"]["param"]
        assert found == param or str(found).startswith((f"{param}.", f"{param}[")), reply.text
    assert small.json() == large.json()


def test_an_error_during_a_stream_is_an_event(servers: Servers) -> None:
    from llmc_runtime.server.call import Call
    from llmc_runtime.server.http.errors import late
    from llmc_runtime.server.openai.responses import ResponsesResponse
    from llmc_runtime.server.requests.responses_request import ResponsesRequest

    serving = servers[1]["think"]
    answer = ResponsesResponse(serving, ResponsesRequest(input="x"), Call("resp_1", "", "input"), None)
    answer._params = serving.llm.get_default_sampling_params()
    blocks = answer.failed(late(3.0)).decode().strip().split("\n\n")
    found = [json.loads(block.partition("data: ")[2]) for block in blocks]
    assert [one["type"] for one in found] == ["error", "response.failed"]
    assert found[0]["code"] == "deadline_exceeded" and found[1]["sequence_number"] == 1
    assert found[1]["response"]["status"] == "failed" and "3 s" in found[1]["response"]["error"]["message"]


def test_large_inputs_and_long_conversations_are_read_elsewhere(servers: Servers) -> None:
    """The prompts are those of small ones, and the items are stored."""
    long = [{"role": "user", "content": "word " * 12}, {"role": "assistant", "content": "Yes."}]
    first = post(servers, {"input": [*long, say("Hello")]}).json()
    pad = {"unknown": "x" * 40_000}
    padded = post(servers, {"input": [*long, say("Hello")], **pad}).json()
    assert padded["usage"]["input_tokens"] == first["usage"]["input_tokens"] and padded["store"]
    listed = httpx.get(f"{servers[0]}/think/v1/responses/{padded['id']}/input_items?order=asc").json()["data"]
    assert [one["content"] for one in listed[:2]] == [one["content"] for one in long] and len(listed) == 3
    wanted = post(servers, {"input": [say("x")], "previous_response_id": first["id"]}).json()
    for more in ({}, pad):
        body = {"input": [say("x")], "previous_response_id": padded["id"], **more}
        assert post(servers, body).json()["usage"]["input_tokens"] == wanted["usage"]["input_tokens"]
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    for more in ({}, pad):
        body = {"input": [*long, say("Hello"), reference, say("x")], **more}
        assert post(servers, body).json()["usage"]["input_tokens"] == wanted["usage"]["input_tokens"]
