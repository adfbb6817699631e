"""The server's log on stderr: a line per request, in both formats, without texts, keys or line breaks of clients."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.http.request_log import (
    MAX_WAITING,
    JsonFormatter,
    TextFormatter,
    ThreadedHandler,
    configure_logging,
    startup_printer,
    written_log,
)

from tests.runtime.served import until
from tests.runtime.test_server_load import LONG, Command

PROGRAM = str(Path(__file__).with_name("serve_fake.py"))
KEY = "a-secret-key-that-nobody-sees"


def parsed(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines()]


def test_json_lines_tell_of_each_request_and_of_no_words(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"team-a: {KEY}")
    command = Command(PROGRAM, "0.002", "5", "--log-format", "json", "--api-key-file", str(keys))
    head = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine-7"}
    with httpx.Client(base_url=command.url, headers=head, timeout=30) as client:
        body = {"prompt": "my private words", "max_tokens": 5, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 9, "stream": True}) as reply:
            reply.read()
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as reply:
            next(reply.iter_lines())
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": -3}).status_code == 400
        assert client.get("/v1/evil%0d%0aFAKE: line\u2028?key=private").status_code == 404
        assert client.get("/health").status_code == 200
    assert httpx.get(f"{command.url}/v1/models").status_code == 401
    until(lambda: sum('"request"' in line for line in command.lines) == 6)
    command.process.terminate()
    code, log = command.end()
    assert code == 0 and "private" not in log and KEY not in log
    found = [line for line in parsed(log) if line["message"] == "request"]
    assert all(line["logger"] == "llmc.request" and line["level"] == "info" for line in found)
    whole, stream, left, wrong, evil, refused = found
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", whole["time"])
    expected = {"request_id": "mine-7", "method": "POST", "route": "/v1/completions", "status": 200}
    expected["key"] = "team-a"
    for line, tokens in ((whole, 5), (stream, 9)):
        assert (
            line.items() >= expected.items() and line["output_tokens"] == tokens and line["finish_reason"] == "length"
        )
        assert 0 < line["ttft_ms"] <= line["duration_ms"] and line["id"].startswith("cmpl-")
    assert stream["prompt_tokens"] == 3
    assert left["status"] == 499 and left["output_tokens"] < 200 and "finish_reason" not in left
    assert wrong["status"] == 400 and "output_tokens" not in wrong and wrong["error"] == "invalid_value"
    assert evil["status"] == 404 and (refused["status"], refused["error"]) == (401, "invalid_api_key")
    assert "key" not in refused and "error" not in whole and "error" not in left
    assert "\r\nFAKE" in evil["route"]  # in JSON an escape, not a line end


class Stuck(io.StringIO):
    """It takes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait(20)
        return super().write(text)


def test_a_stalled_reader_delays_no_others_and_lost_lines_are_counted() -> None:
    stream = Stuck()
    lines = ThreadedHandler(stream)
    count = MAX_WAITING + 500
    began = time.monotonic()
    for i in range(count):
        lines.emit(logging.LogRecord("llmc.x", logging.INFO, "x.py", 1, f"line {i}", None, None))
    assert time.monotonic() - began < 10
    stream.go.set()
    until(lambda: (lines.flush(), stream.getvalue().count("\n") > MAX_WAITING)[1])
    lines.flush()
    text = stream.getvalue()
    lost = re.search(r"(\d+) lines were lost", text)
    assert lost and int(lost[1]) + text.count("line ") == count and int(lost[1]) in (499, 500)
    lines.emit(logging.LogRecord("llmc.x", logging.INFO, "x.py", 1, "afterwards", None, None))
    lines.flush()
    assert stream.getvalue().endswith("afterwards\n")
    stream.close()
    lines.emit(logging.LogRecord("llmc.x", logging.INFO, "x.py", 1, "to nobody", None, None))
    lines.flush()


@pytest.fixture
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test configure the logs; afterwards, they are as before."""
    for name in ("llmc", "uvicorn", "asyncio", "opentelemetry"):
        logger = logging.getLogger(name)
        for attribute in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
        monkeypatch.setattr(logger, "handlers", [])


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.usefixtures("no_handlers")
def test_messages_about_the_engine_do_not_wait_for_a_stalled_reader(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is replaced while nobody reads stderr: the event loop prints that, and must not wait."""
    stream = Stuck()
    monkeypatch.setattr(sys, "stderr", stream)
    say = startup_printer(form)
    configure_logging("info", form)
    with written_log():
        began = time.monotonic()
        say("the engine process was killed")
        say("the engine process was replaced")
        assert time.monotonic() - began < 5
        stream.go.set()
    until(lambda: stream.getvalue().count("\n") == 2)
    first, second = stream.getvalue().splitlines()
    if form == "json":
        first, second = (f"llmc: {json.loads(line)['message']}" for line in (first, second))
    assert (first, second) == ("llmc: the engine process was killed", "llmc: the engine process was replaced")


class Full(io.StringIO):
    """A file on a disk that is full, for a while."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_loses_lines_for_a_while_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Full()
    lines = ThreadedHandler(stream)
    for i in range(4):
        if i == 3:
            stream.full = False
        lines.emit(logging.LogRecord("llmc.x", logging.INFO, "x.py", 1, f"line {i}", None, None))
        lines.flush()
    assert stream.getvalue().splitlines()[0] == "line 3" and "3 lines were lost" in stream.getvalue()
    for form in ("text", "json"):
        for place in (Full(), None):
            monkeypatch.setattr(sys, "stderr", place)
            startup_printer(form)("nobody hears it")
    monkeypatch.undo()


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_a_line_is_a_line_whatever_it_is_made_of(form: logging.Formatter) -> None:
    odd = 'a\r\nb\x1b[2J\u2028\ud800 = "quoted" ' * 3000
    try:
        raise ValueError("private words")
    except ValueError:
        info: Any = sys.exc_info()
    record = logging.LogRecord("llmc.x", logging.ERROR, "x.py", 1, "odd %s", (odd,), info)
    record.fields = {"route": odd[:200], "none": None, "count": 3}
    line = form.format(record)
    assert len(line.splitlines()) == 1 and line.isprintable() and len(line) < 30_000
    assert "private" not in line and "None" not in line and "count" in line
    if isinstance(form, JsonFormatter):
        assert json.loads(line)["level"] == "error" and "ValueError at test_server_logs.py" in form.format(
            logging.LogRecord("llmc.x", logging.ERROR, "x.py", 1, "short", (), info)
        )


def test_sigquit_prints_the_state_and_prompts_are_logged_if_requested() -> None:
    command = Command(PROGRAM, "0.01", "5", "--enable-log-requests")
    body = {"prompt": "their words\nline two", "max_tokens": 30, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=command.url, headers={"X-Request-Id": "q"}, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGQUIT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert client.get("/health").status_code == 200
    command.process.terminate()
    code, log = command.end()
    assert code == 0 and "Traceback" not in log
    state = json.loads(log.partition("llmc: state at SIGQUIT: ")[2].splitlines()[0])
    assert state["requests"][0]["prompt_tokens"] > 3 and state["tasks"]
    assert log.count("most recent call first") >= 3  # the server's threads, and the engine's
    assert 'process.py", line' in log and "in _serve" in log
    assert "llmc.request: prompt request_id=q id=cmpl-" in log and 'prompt="their words\\nline two"' in log
    assert "POST" in log and "/health" not in log


@pytest.mark.parametrize(("number", "second"), [(signal.SIGHUP, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
def test_a_second_signal_ends_it_at_once_and_the_access_log_can_be_off(number: int, second: int) -> None:
    command = Command(PROGRAM, "0.05", "60", "--disable-access-log")
    with httpx.stream("POST", f"{command.url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        command.process.send_signal(number)
        time.sleep(0.3)
        assert command.process.poll() is None
        began = time.monotonic()
        command.process.send_signal(second)
        code, log = command.end()
        assert time.monotonic() - began < 8.0, log
    assert code == (130 if number == signal.SIGINT else 0) and "Traceback" not in log and "llmc.request" not in log
