"""The server after repeated ends of its engine: it exits with its own exit code, or, with an option, keeps trying."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.supervisor import Supervisor
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.run_server import ENGINE_FAILED

from tests.runtime.async_kit import fake, last, run
from tests.runtime.served import until
from tests.runtime.test_server_load import LONG, Command

ENGINE = "fake_engine.py"  # of the engine's command
SERVE = str(Path(__file__).parents[1] / "attacks" / "fake_serve.py")
CALM = {"heartbeat_timeout": 20.0, "restart_delay": 0.0}


def serving(max_restarts: int, *options: str, **settings: Any) -> Command:
    """llmc-serve over a slow simulated device; `settings` are further ones of fake_serve.py."""
    settings |= {"engine": {"pace": 0.05}, "front": {**CALM, "max_restarts": max_restarts}}
    return Command(SERVE, json.dumps(settings), *options)


def engine_of(command: Command) -> int:
    """The id of the engine process; a child that is about to become a text process still has the server's command."""
    children = psutil.Process(command.process.pid).children()
    return next(child.pid for child in children if any(ENGINE in word for word in child.cmdline()))


def healthy(url: str) -> bool:
    """Whether an engine runs."""
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


class Answers:
    """A stream and a whole answer, begun before the engine ends, each from a thread of its own."""

    def __init__(self, url: str) -> None:
        self.url, self.begun = url, threading.Event()
        self.event: dict[str, Any] = {}
        self.whole: list[httpx.Response] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._stream, self._ask)]
        for thread in self._threads:
            thread.start()
        assert self.begun.wait(60)
        until(lambda: " 2.0" in re.findall(r"num_requests_open\{.*", httpx.get(f"{url}/metrics").text)[0], 60)

    def _stream(self) -> None:
        with httpx.stream("POST", f"{self.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as reply:
            for line in filter(None, reply.iter_lines()):
                self.begun.set()
                self.event = {} if line == "data: [DONE]" else json.loads(line[6:])

    def _ask(self) -> None:
        self.whole.append(httpx.post(f"{self.url}/v1/completions", json=LONG, timeout=60))

    def message(self) -> str:
        """The error message of both responses, which is the same."""
        for thread in self._threads:
            thread.join(60)
        reply, error = self.whole[0], self.event["error"]
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["code"] == error["code"] == "engine_unavailable"
        assert reply.json()["error"]["message"] == error["message"]
        return str(error["message"])


def test_after_the_last_restart_the_server_answers_and_ends_with_its_own_code() -> None:
    command = serving(1)
    try:
        os.kill(engine_of(command), signal.SIGKILL)
        until(lambda: "was replaced" in "".join(command.lines) and healthy(command.url), 60)
        answers = Answers(command.url)
        os.kill(engine_of(command), signal.SIGKILL)
        assert answers.message() == "the engine ended 2 times within an hour; the server is ending"
        try:  # its end has begun, and until the door is shut it says so
            late = httpx.post(f"{command.url}/v1/completions", json=LONG, timeout=30)
            assert late.status_code == 503 and "the server is ending" in late.text
            assert not healthy(command.url)
        except httpx.TransportError:
            pass
        code, log = command.end()
        assert code == ENGINE_FAILED, log
        assert log.count(f"exit code {ENGINE_FAILED}") == 1 and "Traceback" not in log
    finally:
        command.process.kill()


def test_with_retries_the_server_stays_says_when_and_recovers() -> None:
    command = serving(0, "--on-engine-failure", "retry")
    try:
        for ended in (1, 2):
            answers = Answers(command.url)
            os.kill(engine_of(command), signal.SIGKILL)
            words = r"the engine ended (\d) times within an hour; the next try is in (\d+) s"
            found = re.fullmatch(words, answers.message())
            assert found is not None and int(found[1]) == ended and int(found[2]) <= ended
            until(lambda: healthy(command.url), 60)
        assert "".join(command.lines).count("llmc: the engine ended") == 2
        command.process.send_signal(signal.SIGTERM)
        assert command.end()[0] == 0
    finally:
        command.process.kill()


def test_a_signal_ends_the_server_with_0_while_it_waits_for_the_next_try() -> None:
    command = serving(0, "--on-engine-failure", "retry", first_interval=60.0)  # longer than the test
    try:
        os.kill(engine_of(command), signal.SIGKILL)
        until(lambda: "the next try is in 60 s" in "".join(command.lines), 60)
        for path in ("/health", "/ready"):
            assert httpx.get(f"{command.url}{path}", timeout=30).status_code == 503
        command.process.send_signal(signal.SIGTERM)
        code, log = command.end()
        assert code == 0, log
    finally:
        command.process.kill()


def test_intervals_double_up_to_the_limit_and_without_one_there_is_an_end() -> None:
    wanted = Open("ok")

    async def delays(**options: Any) -> list[float | None]:
        supervisor = Supervisor([], wanted, EngineArgs("", **options), 1.0, lambda line: None)
        return [supervisor._delay() for _ in range(7)]

    assert run(delays(max_restarts=2, max_restart_delay=5.0)) == [0.5, 1.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert run(delays(max_restarts=3))[2:5] == [2.0, None, None]
    with pytest.raises(LlmcError, match="max_restart_delay"):
        EngineArgs("", max_restart_delay=0)


def test_in_process_an_engine_that_is_tried_again_is_starting(tmp_path: Path) -> None:
    async def strike() -> None:
        async with fake(path=str(tmp_path / "once"), max_restarts=0, max_restart_delay=0.1) as llm:
            assert llm.engine_pid is not None and llm.retry_in is None and llm.failures == 0
            os.kill(llm.engine_pid, signal.SIGKILL)
            wait = time.monotonic() + 60
            while llm.failures < 3 and time.monotonic() < wait:
                with pytest.raises(LlmcError) as refused:
                    await last(llm, {"prompt_token_ids": [40]})
                assert refused.value.code in ("E660", "E661")
                await asyncio.sleep(0.02)
            assert llm.failures >= 3 and llm.state == "starting" and not llm.gave_up

    run(strike())
