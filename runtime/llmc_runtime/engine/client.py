"""One engine process as the front sees it: started, spoken to, listened to, checked for life, ended. No restarts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import zmq

from llmc_runtime.engine.messages import (
    Abort,
    Add,
    Ask,
    Delta,
    Failed,
    Open,
    Outputs,
    Progress,
    Pulse,
    Ready,
    Reply,
    Report,
    Stop,
    error_of,
)
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.python_command import module_command

TICK = 0.1  # seconds between two looks at the process
_STARVED = 5.0  # times as long may be silent who waits for a processor: a busy machine is no hang
_CHUNK = 128  # messages and deltas between two turns of the event loop
_SOCKET_NAME = 107  # bytes of a Unix socket's name
_PLACES = ("/tmp", "/dev/shm")  # for sockets, where the system's own place for such does not do
_REASONS: Mapping[int, str] = MappingProxyType(
    {
        signal.SIGKILL: "if nobody did that, the machine's memory ran out (see dmesg)",
        signal.SIGBUS: "a file of the artifact may have been cut short: they are read in place, replace folders",
    }
)
_ADDS, _CONTROL, _REPORTS = "adds", "control", "reports"


def default_command() -> list[str]:
    """The command of an engine process; the front's id, the sockets' folder and the heartbeat follow."""
    return module_command("llmc_runtime.engine.engine_process")


class Channel:
    """An engine process and the sockets to it. `hear` gets what it says of requests, `answer` its replies to questions,
    `say` its lines about opening."""

    def __init__(
        self,
        command: Sequence[str],
        heartbeat: float,
        hear: Callable[[list[Delta]], None],
        answer: Callable[[Reply], None],
        say: Callable[[str], None],
    ) -> None:
        self._hear, self._answer, self._say = hear, answer, say
        self._decoder, self._encode = msgspec.msgpack.Decoder(Report), msgspec.msgpack.Encoder().encode
        self._failed: LlmcError | None = None
        self._silence = 0.0  # seconds of ours in which nothing was heard
        self.pulse: Pulse | None = None
        self.ready: Ready | None = None
        self._chunks: deque[list[Delta]] = deque()  # received, not heard
        self._folder = _folder()
        self._context = zmq.Context()
        self._turns = asyncio.get_running_loop()
        sockets: list[Any] = []
        try:
            for kind, name in ((zmq.PUSH, _ADDS), (zmq.PUSH, _CONTROL), (zmq.PULL, _REPORTS)):
                sockets.append(self._socket(kind, name))
            self.process = subprocess.Popen(
                [*command, str(os.getpid()), str(self._folder), str(heartbeat)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,  # closed when we were started
                process_group=0,  # a Ctrl-C is the front's affair
            )
        except BaseException as e:
            self._context.destroy(linger=0)
            self._forget_folder()
            if isinstance(e, OSError | zmq.ZMQError):
                raise _refused(e) from e
            raise
        self._adds, self._control, self._reports = sockets
        self._let_go = weakref.finalize(self, _let_go, os.getpid(), self.process, sockets, self._context)
        self._fd = int(self._reports.get(zmq.FD))
        self._turns.add_reader(self._fd, self._listen)
        self._turns.call_soon(self._listen)

    def _socket(self, kind: int, name: str) -> Any:
        # Nothing is ever dropped or held back: what can lie in a socket is bounded by the requests that are open.
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{self._folder / name}")
        return socket

    async def open(self, wanted: Open, timeout: float) -> Ready:
        """Have the engine opened. LlmcError: its own, E661 where the process ends, E662 after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        message = self._encode(wanted)
        while not self._push(self._control, message):
            await self._pause(deadline, timeout)
        while self.ready is None or self.pulse is None:
            await self._pause(deadline, timeout)
        self._forget_folder()  # every socket is connected
        self._silence = 0.0
        return self.ready

    async def _pause(self, deadline: float, timeout: float) -> None:
        error = self._ended()
        if error is None and time.monotonic() > deadline:
            error = LlmcError("E662", f"the engine did not open within {timeout:g} s", "raise start_timeout")
        if error is not None:
            raise error
        await asyncio.sleep(0.01)

    def add(self, add: Add) -> None:
        """Send a request. LlmcError E601 where it holds what no message can."""
        try:
            message = self._encode(add)
        except (ValueError, OverflowError, TypeError) as e:  # unpaired surrogates, integers beyond 64 bits
            cause = f"the request holds a value that no message can: {str(e)[:100]}"
            raise LlmcError("E601", cause, "texts of valid Unicode, integers of 64 bits") from None
        self._push(self._adds, message)

    def abort(self, ids: list[int]) -> None:
        """Say that nobody waits for these any more."""
        self._push(self._control, self._encode(Abort(ids)))

    def ask(self, ask: Ask) -> None:
        """Send a question."""
        self._push(self._control, self._encode(ask))

    def _push(self, socket: Any, message: bytes) -> bool:
        try:
            socket.send(message, zmq.NOBLOCK)
        except zmq.ZMQError:  # nobody is connected: not yet, or the process has ended, which `check` sees
            return False
        return True

    @property
    def alive(self) -> bool:
        """Whether nothing is known against it; `check` finds out."""
        return self._failed is None and self.process.returncode is None

    def check(self, seconds: float, heartbeat_timeout: float, step_timeout: float) -> LlmcError | None:
        """Why the engine no longer serves; `seconds` have passed since the last call. Ours that the machine or the
        event loop took at once count as two ticks at most; a process that would run and may not has longer."""
        error = self._ended()
        if error is not None or self.pulse is None:
            return error
        self._silence += min(seconds, 2 * TICK)
        remedy = "send the request again; if it happens again, report it"
        patience = heartbeat_timeout
        if self._silence > patience and wants_processor(self.process.pid):
            patience *= _STARVED
        if self._silence > patience:
            cause = f"the engine process gave no sign of life for {patience:g} s"
            return LlmcError("E662", cause, remedy)
        if self.pulse.age + self._silence > step_timeout and self.pulse.age:
            return LlmcError("E662", f"a step of the engine took longer than {step_timeout:g} s", remedy)
        return None

    def _ended(self) -> LlmcError | None:
        if self._failed is not None:
            return self._failed
        code = self.process.poll()
        if code is None:
            return None
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        why = _REASONS.get(-code, "its messages are on stderr")
        return LlmcError("E661", f"the engine process {how}", f"send the request again; {why}")

    def _listen(self) -> None:
        """Hear what has come, for a while; the socket tells of news once, so that what is left needs another turn."""
        if self._let_go.alive and self._hear_some(_CHUNK):
            self._turns.call_soon(self._listen)

    def _hear_some(self, budget: float) -> bool:
        """Hear what has come, and stop after so many messages and deltas: True where something may be left."""
        while budget > 0:
            if self._chunks:
                chunk = self._chunks.popleft()
                self._hear(chunk)
                budget -= len(chunk)
                continue
            try:
                frames = self._reports.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._silence = 0.0
            self._take(b"".join(frames))
            budget -= 1
        return True

    def _take(self, data: bytes) -> None:
        try:
            message: Report = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
            # What it said may have been tokens: going on could give a wrong text.
            cause = f"the engine process sent a message that makes no sense: {str(e)[:100]}"
            self._failed = self._failed or LlmcError("E661", cause, "send the request again, and report it")
            return
        if isinstance(message, Outputs):
            deltas = message.deltas
            self._chunks.extend(deltas[i : i + _CHUNK] for i in range(0, len(deltas), _CHUNK))
        elif isinstance(message, Pulse):
            self.pulse = message
        elif isinstance(message, Failed):
            self._failed = error_of(message.fault)
        elif isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, Progress):
            self._say(message.line)
        elif isinstance(message, Reply):
            self._answer(message)

    async def stop(self, timeout: float) -> None:
        """Ask the process to end, and end it after `timeout` seconds."""
        self._push(self._control, self._encode(Stop()))
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.kill()

    async def kill(self) -> None:
        """End the process now, if it lives; what it has said before is still heard."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        while self.process.poll() is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # what is on its way
        if self._let_go.alive:
            self._hear_some(math.inf)
            self._turns.remove_reader(self._fd)
            self._let_go()
        self._forget_folder()

    def _forget_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _let_go(owner: int, process: subprocess.Popen[bytes], sockets: Sequence[Any], context: Any) -> None:
    """End the process, if it lives, and close the sockets; in a fork of the front nothing."""
    if os.getpid() != owner:
        return
    process.kill()
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def _folder() -> Path:
    """A new folder, ours alone, for sockets: their names may have so many bytes, and are texts. LlmcError E100."""
    last: Exception | None = None
    for place in (None, *_PLACES):
        try:
            found = tempfile.mkdtemp(prefix="llmc-", dir=place)  # 0700
            if len(f"{found}/{_CONTROL}".encode()) <= _SOCKET_NAME:
                return Path(found)
            last = OSError(f"{found} is too long for the name of a socket")
        except OSError as e:
            last = e
            continue
        except UnicodeEncodeError as e:
            last = e
        os.rmdir(found)
    assert last is not None
    raise _refused(last) from last


def _refused(error: Exception) -> LlmcError:
    cause = f"the system refuses what a new engine process needs: {str(error)[:200]}"
    remedy = "a TMPDIR of a short name that can be written; more files (ulimit -n), processes (-u), memory (-v)"
    return LlmcError("E100", cause, remedy)


def wants_processor(pid: int) -> bool:
    """Whether a thread of the process runs, or waits for a processor or for memory that is read from a disk alone.
    False where the system does not say."""
    threads = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        for thread in os.listdir(threads):
            with contextlib.suppress(OSError):
                if (threads / thread / "stat").read_text().rpartition(")")[2].split()[:1] in (["R"], ["D"]):
                    return True
    return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
