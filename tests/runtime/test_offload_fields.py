"""The fields of a large body besides its prompt: how many there may be, and what the server keeps of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.parse import SMALL_BODY
from llmc_runtime.server.requests.request_fields import CompletionRequest, JsonSchema, ResponseFormat
from llmc_runtime.server.requests.responses_request import ResponsesRequest
from llmc_runtime.server.text_pool import text_messages as m
from llmc_runtime.server.text_pool.jobs import _fields
from llmc_runtime.server.text_pool.pool import OffloadedJob

from tests.runtime.served import Served, served
from tests.runtime.test_offload import HELLO, post


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


def test_fields_that_are_too_large_for_the_server_are_refused_by_name(server: Served) -> None:
    for name, value in (("cache_salt", "x" * m.MAX_FIELD_BYTES), ("response_format", {"type": "text", "json_schema":
                        {"schema": {"x": "y" * m.MAX_FIELD_BYTES}}})):  # fmt: skip
        reply = post(server, "/v1/completions", {"prompt": "x", name: value})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text[:300]


def test_values_of_the_other_fields_are_limited_and_brackets_in_texts_are_not_counted() -> None:
    """The server decodes these fields in its event loop, and keeps them while the request is open."""
    text = '{["' * m.MAX_FIELD_CONTAINERS
    request = ResponsesRequest(instructions=text)
    assert msgspec.json.decode(_fields(request), type=ResponsesRequest) == request
    form = ResponseFormat(type="text", json_schema=JsonSchema(schema={"x": ["ab"] * m.MAX_FIELD_VALUES}))
    with pytest.raises(ApiError) as refusal:
        _fields(CompletionRequest(prompt="", response_format=form))
    assert refusal.value.param == "response_format" and "32768 values" in refusal.value.message


def test_allowed_ids_of_a_large_body_are_packed_and_the_other_fields_decoded_once(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    take_fields = OffloadedJob.take_fields

    def take(job: OffloadedJob, kind: Any) -> Any:
        fields = take_fields(job, kind)
        taken.append((fields.allowed_token_ids, job.parsed.fields))
        return fields

    monkeypatch.setattr(OffloadedJob, "take_fields", take)
    ids = [70] * SMALL_BODY
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
        reply = post(server, path, {**prompt, "max_tokens": 3, "allowed_token_ids": ids, "return_token_ids": True})
        assert reply.status_code == 200 and reply.json()["choices"][0]["token_ids"] == [70] * 3, reply.text[:300]
        assert taken.pop() == (array("I", ids), b"")
        for wrong in ([-1, *ids], [1 << 40, *ids]):
            reply = post(server, path, {**prompt, "allowed_token_ids": wrong})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "allowed_token_ids", reply.text[:300]
    server.rest()
