"""SGLang's router in front of two servers: its requests and policies, a killed server, a draining server."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kit import CHAT, DEMO, PROJECT, QUESTIONS, STARTS, Server, user

LONG: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
EAGER = (
    "--health-check-interval-secs=1", "--health-success-threshold=1", "--health-failure-threshold=1",
    "--worker-startup-check-interval=1", "--cb-timeout-duration-secs=1",
)  # fmt: skip


class Process:
    """A command that writes to a log; it ends with the block."""

    def __init__(self, command: list[str | Path], log: Path) -> None:
        self.log, self._command = log, command
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal, and return the exit status."""
        self._process.send_signal(number)
        return self._process.wait(60)

    def again(self) -> None:
        """Start it again."""
        self._start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


class Fleet:
    """A router with a policy before two servers, whose ports do not change."""

    def __init__(self, stack: ExitStack, folder: Path, policy: str, *options: str | Path) -> None:
        self.router, *self.servers = (Server(f"http://127.0.0.1:{free_port()}", "") for _ in range(3))
        self.processes = [stack.enter_context(self._serve(one, folder)) for one in self.servers]
        for one in self.servers:
            until(lambda one=one: answers(f"{one.url}/ready"))
        module = [sys.executable, "-m", "sglang_router.launch_router", "--policy", policy, *EAGER, *options]
        host, port = self.router.url.removeprefix("http://").split(":")
        address = ["--host", host, "--port", port, "--prometheus-host", host, "--prometheus-port", str(free_port())]
        urls = ["--worker-urls", *(one.url for one in self.servers)]
        self.process = stack.enter_context(Process([*module, *address, *urls], folder / "router.log"))
        until(lambda: self.healthy() == [True, True])

    @staticmethod
    def _serve(one: Server, folder: Path) -> Process:
        port = one.url.rpartition(":")[2]
        command = [PROJECT / "llmc-serve", DEMO, "--port", port, "--threads", "1", "--log-level", "debug"]
        return Process(command, folder / f"{port}.log")

    def healthy(self) -> list[bool]:
        """Whether the router sends requests to each of the servers."""
        try:
            workers = {one["url"]: one["is_healthy"] for one in self.router.get_json("/workers")["workers"]}
        except OSError:
            workers = {}
        return [workers.get(one.url, False) for one in self.servers]

    def counts(self, route: str = "/v1/chat/completions") -> list[int]:
        """How many requests of a route each server has ended."""
        return [len(re.findall(rf"route={re.escape(route)} ", one.log.read_text())) for one in self.processes]

    def routes(self) -> set[str]:
        """Return the routes that both servers were requested, with their status."""
        found = [set(re.findall(r"route=(\S+) status=(\d+)", one.log.read_text())) for one in self.processes]
        return {f"{route} {status}" for route, status in set.intersection(*found)}


@contextmanager
def fleet(folder: Path, policy: str, *options: str | Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, folder, policy, *options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a GET has the status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + STARTS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def chat(server: Server, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", LONG | fields)


def streamed(server: Server, text: str) -> tuple[str, bool]:
    """The text of a stream, and whether the stream is complete."""
    body = json.dumps(LONG | {"messages": user(text), "stream": True}).encode()
    request = urllib.request.Request(f"{server.v1}/chat/completions", body, {"Content-Type": "application/json"})
    pieces = []
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            for line in reply:
                if line.startswith(b"data: [DONE]"):
                    return "".join(pieces), True
                if line.startswith(b"data: "):
                    pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    except (http.client.IncompleteRead, ConnectionError):
        pass
    return "".join(pieces), False


def test_it_finds_every_route_that_it_asks_for(tmp_path: Path) -> None:
    with fleet(tmp_path, "power_of_two", "--health-check-endpoint", "/ready") as all_of_it:
        router = all_of_it.router
        assert [one["load"] for one in router.get_json("/get_loads")["workers"]] == [0, 0]
        assert [one["id"] for one in router.get_json("/v1/models")["data"]] == ["demo"]
        assert router.get_json("/get_model_info") == {"model_path": "demo", "is_generation": True}
        metrics = router.get("/engine_metrics")
        for one in all_of_it.servers:
            assert re.search(rf'^llmc_num_requests_running\{{.*worker_addr="{one.url}"\}} 0$', metrics, re.M)
        until(lambda: all_of_it.counts("/ready")[1] > 1)
        # The router tries HTTP/2 first, for gRPC: the route "*".
        assert all_of_it.routes() - {"* 505", "/health 200", "/metrics 200"} == {
            "/ready 200", "/server_info 200", "/model_info 200", "/get_load 200"
        }  # fmt: skip
        assert not [one.log for one in all_of_it.processes if " ERROR " in one.log.read_text()]


def test_round_robin_sends_the_same_answers_from_both(tmp_path: Path) -> None:
    with fleet(tmp_path, "round_robin") as all_of_it:
        want = text_of(chat(all_of_it.servers[0]))
        until(lambda: all_of_it.counts() == [1, 0])
        assert {text_of(chat(all_of_it.router)) for _ in range(4)} == {want}
        assert {streamed(all_of_it.router, CHAT[0]["content"]) for _ in range(4)} == {(want, True)}
        until(lambda: all_of_it.counts() == [5, 4])


def test_conversations_stay_on_a_server(tmp_path: Path) -> None:
    """The router finds a server by the share of a request's text that it has sent there, so questions are long."""
    with fleet(tmp_path, "cache_aware") as all_of_it:
        conversations = [user(" ".join([str(i), *"abcdefgh"[i:], *"abcdefgh"[:i]] * 20)) for i in range(6)]

        def go_on(messages: list[dict[str, str]]) -> float:
            """Ask, append the answer and the next question, and return the share of cached tokens."""
            answer = chat(all_of_it.router, messages=messages, max_tokens=20)
            messages += [answer["choices"][0]["message"], *user("And then?")]
            usage = answer["usage"]
            return float((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) / usage["prompt_tokens"])

        with ThreadPoolExecutor(6) as threads:  # at the same time, so that they spread
            list(threads.map(go_on, conversations))
        until(lambda: sum(all_of_it.counts()) == 6)
        assert min(all_of_it.counts()) > 0
        shares = [go_on(messages) for _ in range(2) for messages in conversations]
        assert min(shares) > 0.5, shares  # another server has only the template


def test_a_server_that_is_killed_and_one_that_drains(tmp_path: Path) -> None:
    with fleet(tmp_path, "round_robin", "--health-check-endpoint", "/ready") as all_of_it:
        want = {text: text_of(chat(all_of_it.servers[1], messages=user(text))) for text in QUESTIONS}
        for number in (signal.SIGKILL, signal.SIGTERM):
            with ThreadPoolExecutor(16) as threads:
                whole = [threads.submit(chat, all_of_it.router, messages=user(text)) for text in 2 * QUESTIONS]
                parts = [threads.submit(streamed, all_of_it.router, text) for text in 2 * QUESTIONS]
                until(lambda: busy(all_of_it.servers[0]))
                status = all_of_it.processes[0].end(number)
                later = {text: text_of(chat(all_of_it.router, messages=user(text))) for text in QUESTIONS}
                texts = [text_of(one.result()) for one in whole]
                streams = [one.result() for one in parts]
            assert later == want and texts == 2 * [want[text] for text in QUESTIONS]
            for (text, done), question in zip(streams, itertools.cycle(QUESTIONS), strict=False):
                assert text == want[question] if done else want[question].startswith(text)
            assert (status == 0 and all(done for _, done in streams)) or number == signal.SIGKILL
            until(lambda: all_of_it.healthy() == [False, True])
            all_of_it.processes[0].again()
            until(lambda: all_of_it.healthy() == [True, True])
            before = all_of_it.counts()[0]
            until(lambda before=before: text_of(chat(all_of_it.router)) and all_of_it.counts()[0] > before)


def busy(server: Server) -> bool:
    """Whether a server has several open requests."""
    return bool(server.get_json("/get_load")[0]["num_reqs"] >= 4)
