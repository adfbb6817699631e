"""Failures of the machine in the front of an engine: folders, names, sockets. A stopped process is not a failure."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import psutil
import pytest
from llmc_runtime import AsyncLLM, LlmcError, SamplingParams
from llmc_runtime.api.llm import to_stderr
from llmc_runtime.engine.client import _folder
from llmc_runtime.engine.engine_process import NICE, StepAge
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.session import open_session
from llmc_runtime.heartbeat import is_runnable
from llmc_runtime.python_command import quoted

from tests.runtime.async_kit import fake, last, run
from tests.runtime.fake_core import CRASH
from tests.runtime.test_core_faults import FRONT, ready_again

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class Full(io.StringIO):
    """A file on a full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


IDS = {"prompt_token_ids": [40, 41]}


def test_an_artifact_whose_name_is_no_text(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"50% caf\xe9 \xff ") / "\u00fc.llmc"
    copytree(toy, folder)
    lines: list[str] = []

    async def ours(path: Path) -> list[int]:
        options: dict[str, Any] = {"seed": None, "enable_prefix_caching": 0, "trace": folder / "t"}  # taken like LLM's
        async with AsyncLLM(path, threads=1, heartbeat_timeout=20.0, say=lines.append, **options) as llm:
            return list((await last(llm, "abc", SHORT)).outputs[0].token_ids)

    assert run(ours(folder)) == run(ours(toy))
    assert (folder / "t").stat().st_size
    assert "\\udcff" in lines[0]


def test_an_artifact_that_was_replaced_is_not_opened_under_the_other_s_texts(toy: Path) -> None:
    opening = Open(quoted(toy), {"threads": 1}, digest="0" * 64)
    with pytest.raises(LlmcError, match="E118"):
        open_session(opening, lambda line: None)


@pytest.mark.parametrize("name", ["x" * 100, os.fsdecode(b"\xff")])
def test_sockets_have_a_place_with_a_name_that_they_can_have(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    folder = _folder()
    assert tmp_path not in folder.parents and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    monkeypatch.setattr("llmc_runtime.python_command._FALLBACK_FOLDERS", (str(tmp_path / "none"),))
    with pytest.raises(LlmcError, match="E100"):
        _folder()
    assert not list((tmp_path / name).iterdir())


def test_an_engine_is_replaced_without_open_requests() -> None:
    def say(line: str) -> None:
        raise BrokenPipeError(line)

    async def strike() -> None:
        async with fake(say=say) as llm:
            with pytest.raises(LlmcError, match="E661"):
                await last(llm, {"prompt_token_ids": CRASH})
            await ready_again(llm)
            assert (await last(llm, IDS, SHORT)).finished and llm.restarts == 1

    run(strike())


def test_a_failed_fork_is_retried_before_the_engine_is_given_up() -> None:
    async def strike(restarts: int) -> None:
        llm = fake(max_restarts=restarts)
        async with llm:
            supervisor = llm._running()
            command, supervisor._command = supervisor._command, ["/nowhere/python"]
            with pytest.raises(LlmcError, match="E661"):
                await last(llm, {"prompt_token_ids": CRASH})
            if restarts == 1:
                while not llm.errored:
                    await asyncio.sleep(0.01)
                assert llm.dead_error is not None and "No such file" in str(llm.dead_error)
                return
            while llm.restarts < 3:
                await asyncio.sleep(0)
            supervisor._command = command
            await ready_again(llm)
            assert (await last(llm, IDS, SHORT)).finished

    run(strike(1))
    run(strike(1000))


def test_without_a_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    places = f"{FRONT.parents[2]}{os.pathsep}{FRONT.parents[1]}"
    program = ["sh", "-c", '"$0" "$@" 0<&- 2>&-', sys.executable, str(FRONT), "3"]
    done = subprocess.run(program, capture_output=True, env={**os.environ, "PYTHONPATH": places}, timeout=60)
    assert done.stdout.endswith(b"\n3 finished\n") and done.returncode == 0
    monkeypatch.setattr("sys.stderr", None)
    to_stderr("a line")
    monkeypatch.setattr("sys.stderr", Full())
    to_stderr("a line")
    assert not capsys.readouterr().out


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.4])
def test_shutdown_ends_a_start(moment: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    never = [sys.executable, "-c", "import time; time.sleep(600)"]
    before = {p.pid for p in psutil.Process().children()}  # servers that other tests share

    async def stops() -> None:
        llm = fake()
        assert llm._front is not None
        if moment == 0.0:  # while the folder is read
            monkeypatch.setattr("llmc_runtime.api.async_llm.read_front", lambda *a, f=llm._front: time.sleep(0.2) or f)
            llm._front = None
        else:
            llm._front = replace(llm._front, command=never)
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(moment)
        with pytest.raises(LlmcError, match="E660"):
            await llm.start()
        await llm.shutdown()
        with pytest.raises(LlmcError, match="E663"):
            await asyncio.wait_for(starting, 10)
        assert llm.errored
        other = fake()
        assert other._front is not None
        other._front = replace(other._front, command=never)
        starting = asyncio.create_task(other.start())
        await asyncio.sleep(moment)
        starting.cancel()  # its caller does not wait any more
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(stops())
    assert not list(tmp_path.iterdir())
    left = [p for p in psutil.Process().children() if p.pid not in before]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_a_process_whose_state_cannot_be_read_does_not_count_as_runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> list[str]:
        raise OSError(24, "Too many open files")

    for name in ("listdir", "scandir", "open"):
        monkeypatch.setattr(os, name, refuse)
    assert not is_runnable(os.getpid())


def test_a_step_is_as_old_as_the_time_in_which_it_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("llmc_runtime.engine.engine_process.time.monotonic", lambda: now)
    age = StepAge(0.4)
    assert age.of(0.0) == 0.0
    found = []
    for passed in (0.2, 0.2, 600.0, 0.2):  # all of it is stopped for ten minutes
        now += passed
        found.append(age.of(1000.1))
    assert found == pytest.approx([0.1, 0.3, 0.7, 0.9])
    assert age.of(0.0) == 0.0
    now += 0.2
    assert age.of(now - 0.1) == pytest.approx(0.1)


PRIORITIES = """
import os, sys
from llmc_runtime.engine.engine_process import leave_time_for_front
from llmc_runtime.host_info import usable_cpus
leave_time_for_front(usable_cpus() + int(sys.argv[1]))
print(*{os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir("/proc/self/task")})
"""


@pytest.mark.parametrize(("spare", "lower"), [("0", True), ("1", True), ("-1", False)])
def test_threads_that_fill_the_machine_leave_time_for_the_front_end(spare: str, lower: bool) -> None:
    """Of threads beyond the processors; the priorities of a process's threads."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    out = subprocess.run([sys.executable, "-c", PRIORITIES, spare], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(max(before, NICE) if lower else before)]
