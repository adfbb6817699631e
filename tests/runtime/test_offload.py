"""Large bodies: the same answers as small ones, limits of the text processes, their ends, clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from llmc_runtime.server.api_routes import DETOKENIZE
from llmc_runtime.server.requests.parse import SMALL_BODY, SMALL_TEXT, is_large
from llmc_runtime.server.text_pool import text_messages as m
from llmc_runtime.server.text_pool.jobs import TextJobs, check_size
from llmc_runtime.server.text_pool.text_process import TextProcess

from tests.runtime.served import TOK, Served, served, until

PAD = "x" * (SMALL_BODY + 1)
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "Hello, kernel"}]
CALLED = {"role": "assistant", "content": "x", "tool_calls": "none of the form"}
SAME: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The kernel", "max_tokens": 5, "temperature": 0}),
    ("/v1/completions", {"prompt": "Größe \n 東京", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["a", "b c", "d"], "max_tokens": 3, "temperature": 0, "return_token_ids": True}),
    ("/v1/completions", {"prompt": [70, 71, 72], "max_tokens": 3, "temperature": 0, "echo": True}),
    ("/v1/completions", {"prompt": [[70], [71, 72]], "max_tokens": 3.0, "seed": 3, "n": 2}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "temperature": 0, "stream": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "temperature": 0, "allowed_token_ids": [70, 71]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "temperature": 0, "logit_bias": {"50": 5}, "stop": ["e"]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "seed": 2**64 - 1}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "temperature": 0}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "temperature": 0, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "temperature": 0, "stream": True}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", "max_tokens": 2, "seed": 1}),
    ("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "content": "I am"}], "max_tokens": 3,
                              "temperature": 0, "continue_final_message": True}),
    ("/tokenize", {"prompt": "The kernel of a matrix", "return_token_strs": True}),
    ("/tokenize", {"prompt": "The kernel", "add_special_tokens": False}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [70, 71, 72, 1]}),
    # refused
    ("/v1/completions", {"prompt": "x", "max_tokens": "many"}),
    ("/v1/completions", {"prompt": "x", "model": "another"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}),
    ("/v1/completions", {"prompt": "x", "temperature": 0, "n": 2}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": ["a"] * 129}),
    ("/v1/completions", {"prompt": [70, "a"]}),
    ("/v1/completions", {"prompt": [10**6]}),
    ("/v1/completions", {"prompt": [7] * 500}),
    ("/v1/completions", {"max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", {"messages": [*HELLO, CALLED], "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "x"}]}),
    ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}),
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "x", "model": "another"}),
    ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "not a name"}}]}),
    ("/detokenize", {"tokens": [-1]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


def post(server: Served, path: str, body: Any) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return httpx.post(f"{server.url}{path}", content=data, headers={"Content-Type": "application/json"}, timeout=60)


def comparable(reply: httpx.Response) -> tuple[int, Any]:
    """Return the parts of a response that must be equal: all but ids and times."""
    texts = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    found = [json.loads(text) for text in texts or [reply.text]]
    for one in found:
        (one.get("usage") or {}).pop("prompt_tokens_details", None)  # what the second one finds in the cache
    if texts:  # chunks are cut as the tokens come
        written = [
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for one in found
            for choice in one["choices"]
        ]
        return reply.status_code, ["".join(written), found[-1]["choices"][0]["finish_reason"]]
    return reply.status_code, [{k: v for k, v in one.items() if k not in ("id", "created")} for one in found]


def idle(server: Served) -> int:
    """Processes that are ready for a job."""
    return len(server.serving.text_processes._idle)


def ended(given: list[int]) -> bool:
    """None of these runs; they may not have been waited for."""
    for pid in given:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


def pids(server: Served) -> list[int]:
    return server.serving.text_processes.pids


@pytest.mark.parametrize(("path", "body"), SAME)
def test_a_large_body_has_the_answer_of_a_small_one(server: Served, path: str, body: dict[str, Any]) -> None:
    small, large = post(server, path, body), post(server, path, {**body, "unknown": PAD})
    assert comparable(small) == comparable(large)


def test_large_bodies_are_read_elsewhere_and_their_unknown_fields_counted(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc_runtime.server import endpoint

    seen: list[int] = []
    monkeypatch.setattr(endpoint, "parse", lambda data, kind, unknown: seen.append(len(data)))
    before = server.serving.metrics._counts["request_unknown_fields"]
    for path in ("/v1/completions", "/tokenize"):
        assert post(server, path, {"prompt": "x", "one": PAD, "two": 2}).status_code == 200
    assert seen == [] and pids(server)
    assert server.serving.metrics._counts["request_unknown_fields"] == before + 4
    server.rest()


def test_bodies_that_count_as_large() -> None:
    assert not is_large(b"x" * SMALL_BODY, SMALL_BODY) and is_large(b"x" * (SMALL_BODY + 1), SMALL_BODY)
    assert is_large(b"[" * 2000, SMALL_BODY) and is_large(b"x" * (SMALL_TEXT + 1), SMALL_TEXT)


@pytest.mark.parametrize("unit", [b"{}", b"[]", b'{"a":1}', b"[[[]]]"])
def test_bodies_of_many_objects_are_refused_before_they_are_decoded(unit: bytes) -> None:
    count = m.MAX_CONTAINERS // (unit.count(b"{") + unit.count(b"["))
    check_size(bytearray(b"[" + b",".join([unit] * (count - 1)) + b"]"))
    with pytest.raises(Exception, match="objects and lists"):
        check_size(bytearray(b"[" + b",".join([unit] * (count + 1)) + b"]"))


def test_only_structure_counts_and_not_the_texts() -> None:
    check_size(bytearray(json.dumps({"prompt": '{[,"\\' * m.MAX_VALUES}).encode()))
    check_size(bytearray(b'"' + b"\\n," * m.MAX_VALUES))
    with pytest.raises(Exception, match="values"):
        check_size(bytearray(b"[1" + b",1" * m.MAX_VALUES + b"]"))


def test_the_error_for_complex_and_long_bodies_has_the_limit(server: Served) -> None:
    deep = b'{"prompt":"x","u":' + b"[" * 40_000 + b"]" * 40_000 + b"}"
    wide = b'{"prompt":"x","u":[' + b"{}," * m.MAX_CONTAINERS + b"{}]}"
    many = json.dumps({"prompt": "x", "allowed_token_ids": [70] * 70_000}).encode()
    tools = json.dumps({"messages": HELLO, "tools": [TOOL] * 4000}).encode()
    for path, body, words in (
        ("/v1/completions", deep, "nested deeper"),
        ("/v1/completions", wide, "objects and lists"),
        ("/v1/completions", many, "up to 65536"),
        ("/v1/chat/completions", tools, "up to 128"),
        ("/v1/completions", json.dumps({"prompt": "word " * 100_000}).encode(), "maximum context length"),
        ("/v1/completions", json.dumps({"prompt": ["word " * 20_000] * 20}).encode(), "maximum context length"),
        ("/tokenize", json.dumps({"prompt": "a b " * 400_000}).encode(), "more than 262144 tokens"),
        ("/detokenize", json.dumps({"tokens": [70] * 300_000}).encode(), "at most 262144"),
        ("/v1/completions", b'{"prompt":"' + b"\xff" * SMALL_BODY + b'"}', "UTF-8"),
        ("/v1/completions", json.dumps({"prompt": "x", "tools": [PAD]}).encode(), "tools is not supported"),
        ("/v1/chat/completions", json.dumps({"messages": HELLO, "tool_choice": {"x": PAD}}).encode(), "tool_choice"),
    ):
        reply = post(server, path, body)
        assert reply.status_code == 400 and words in reply.text, (words, reply.text[:300])
    server.rest()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every process that gets a job is stopped (SIGSTOP) right before it, and its pid added to this list."""
    found: list[int] = []
    is_ready = TextProcess.is_ready

    async def then_stop(process: TextProcess) -> bool:
        ready = await is_ready(process)
        os.kill(process.pid, signal.SIGSTOP)
        found.append(process.pid)
        return ready

    monkeypatch.setattr(TextProcess, "is_ready", then_stop)
    return found


async def ended_by(server: Served, stopped: list[int], number: int) -> httpx.Response:
    """Send a large body; its process gets a signal while it has the job."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        work = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "u": PAD, "max_tokens": 1}))
        while not stopped:
            await asyncio.sleep(0.01)
        os.kill(stopped[0], number)
        os.kill(stopped[0], signal.SIGCONT)
        return await work


@pytest.mark.parametrize(("number", "status"), [(signal.SIGPROF, 400), (signal.SIGABRT, 400), (signal.SIGKILL, 503)])
def test_a_process_that_ends_during_a_job_is_replaced(
    number: int, status: int, stopped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 if a limit was reached (SIGPROF: processor time, SIGABRT: memory); 503 if something else ended it."""
    with served() as server:
        reply = asyncio.run(ended_by(server, stopped, number))
        assert reply.status_code == status, reply.text
        assert status == 400 or "retry-after" in reply.headers
        assert ("s of CPU time" in reply.text) == (number == signal.SIGPROF)
        monkeypatch.undo()
        assert post(server, "/v1/completions", {"prompt": "x", "u": PAD, "max_tokens": 1}).status_code == 200
        until(lambda: idle(server) == 2)
        assert not set(pids(server)) & set(stopped)
        server.rest()


def test_requests_do_not_see_that_idle_processes_were_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor right after the signal, while a process looks alive since its threads have not ended yet."""
    body = {"prompt": "x", "u": PAD, "max_tokens": 1}
    with served() as server:
        assert post(server, "/v1/completions", body).status_code == 200
        until(lambda: idle(server) == 2)
        before = pids(server)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        until(lambda: ended(before))
        monkeypatch.setattr(TextProcess, "alive", True)
        assert post(server, "/v1/completions", body).status_code == 200
        until(lambda: idle(server) == 2)
        assert not set(pids(server)) & set(before)
        server.rest()


def test_a_job_that_waits_too_long_for_its_process_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        body = {"prompt": "x", "u": PAD, "max_tokens": 1}
        assert post(server, "/v1/completions", body).status_code == 200
        until(lambda: idle(server) == 2)
        monkeypatch.setattr(m, "SECONDS", 0.3)
        for pid in pids(server):
            os.kill(pid, signal.SIGSTOP)
        reply = post(server, "/v1/completions", body)
        assert reply.status_code == 503 and "retry-after" in reply.headers, reply.text
        monkeypatch.setattr(m, "SECONDS", 30.0)
        for pid in pids(server):
            os.kill(pid, signal.SIGCONT)
        assert post(server, "/v1/completions", body).status_code == 200
        server.rest()


def test_a_client_that_leaves_frees_its_place_in_the_lane(server: Served) -> None:
    post(server, "/v1/completions", {"prompt": "x", "u": PAD, "max_tokens": 1})
    until(lambda: idle(server) == 2)
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"prompt": "x", "u": PAD, "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    stopped = pids(server)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        links = []
        for _ in range(6):
            link = socket.create_connection((host, int(port)))
            link.sendall(head.encode() + str(len(data)).encode() + b"\r\n\r\n" + data)
            links.append(link)
        lanes = server.serving.text_processes.lanes
        until(lambda: lanes.waiting == 4)
        assert server.serving.bodies.used > 4 * SMALL_BODY
        for link in links:
            link.close()
        until(lambda: lanes.waiting == 0)
        until(lambda: server.serving.bodies.used <= 2 * len(data))
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    until(lambda: server.serving.bodies.used == 0)
    assert post(server, "/v1/completions", {"prompt": "x", "u": PAD, "max_tokens": 1}).status_code == 200
    assert pids(server) == stopped or set(pids(server)) == set(stopped)
    server.rest()


def test_the_processes_end_with_the_server() -> None:
    with served() as server:
        post(server, "/v1/completions", {"prompt": "x", "u": PAD, "max_tokens": 1})
        until(lambda: idle(server) == 2)
        there = pids(server)
    until(lambda: not any(psutil.pid_exists(pid) for pid in there))


def spec(**more: Any) -> m.TextProcessConfig:
    given = {
        "tokenizer": TOK.backend.to_str(), "named_tokens": dict(TOK.named_tokens), "template": None,
        "chat_templates": dict(TOK.chat_templates), "tool_calls": "auto", "reasoning": "auto", "names": ["toy"],
        "vocab_size": 428, "max_model_len": 256, "max_prompt_tokens": 1000, "generation": {},
    }  # fmt: skip
    return m.TextProcessConfig(**(given | more))


def test_the_prompts_of_a_request_together_are_bounded_too() -> None:
    texts = TextJobs(spec(max_prompt_tokens=100))
    job = texts.completion(bytearray(json.dumps({"prompt": [[70] * 40] * 5}).encode()))
    assert job.parsed.prompts == 5 and job.parsed.known == 0
    found = []
    with pytest.raises(Exception, match="more than 100 tokens together"):
        for prompt in job.prompts(b""):
            found.append(prompt)
    assert [len(prompt.ids) for prompt in found] == [40, 40]


def test_a_process_that_has_grown_ends_after_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc_runtime.server.operations import malloc
    from llmc_runtime.server.text_pool.text_worker import Link, Worker

    sizes = iter([0, m.KEPT_BYTES, m.KEPT_BYTES + 1])
    monkeypatch.setattr(malloc, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(signal, "setitimer", lambda *given: None)
    ours, theirs = socket.socketpair()
    body = json.dumps({"tokens": [70, 71]}).encode()
    for _ in range(2):
        ours.sendall(m.HEAD.pack(DETOKENIZE.job, len(body)) + body)
    worker = Worker(Link(theirs), TextJobs(spec()))
    worker.run()  # it returns
    link, kinds = Link(ours), []
    ends = []
    for _ in range(4):
        kind, payload = link.receive()
        kinds.append(kind)
        if kind == m.DONE:
            ends.append(m.msgspec.msgpack.decode(payload, type=m.Done).leaves)
    assert kinds == [m.ANSWER, m.DONE] * 2 and ends == [False, True]


CPU = "m.CPU_SECONDS = 0.05"
MEMORY = "m.MEMORY_BYTES = 32 << 20"
PATCHED = (
    "import sys; sys.path[:] = {path!r}; from llmc_runtime.server.text_pool import text_messages as m; {limit};"
    "from llmc_runtime.server.text_pool.text_worker import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize(("limit", "words"), [(CPU, "0.05 s of CPU time"), (MEMORY, "32 MiB of memory")])
def test_limits_of_time_and_memory_end_only_the_job(monkeypatch: pytest.MonkeyPatch, limit: str, words: str) -> None:
    from llmc_runtime.server.text_pool import text_process

    command = [sys.executable, "-P", "-c", PATCHED.format(path=sys.path, limit=limit)]
    monkeypatch.setattr(text_process, "module_command", lambda module, nice: command)
    name = limit.partition(" = ")[0]
    monkeypatch.setattr(m, name.removeprefix("m."), 0.05 if limit == CPU else 32 << 20)
    with served() as server:
        for _ in range(2):
            reply = post(server, "/detokenize", {"tokens": [70], "u": [0.5] * 1_500_000})
            assert reply.status_code == 400 and words in reply.text, reply.text[:300]
            assert reply.json()["error"]["code"] == "body_too_complex"
        assert post(server, "/tokenize", {"prompt": "x", "u": PAD}).status_code == 200
