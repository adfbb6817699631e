"""One engine process as the front sees it: started, spoken to, listened to, checked for life, ended. No restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from llmc_runtime.core.messages import (
    Abort,
    Add,
    Delta,
    Failed,
    Open,
    Outputs,
    Progress,
    Pulse,
    Ready,
    Report,
    Stop,
    error_of,
)
from llmc_runtime.format.errors import LlmcError

TICK = 0.1  # seconds between two looks at the process
_CHUNK = 128  # deltas between two turns of the event loop
_ADDS, _CONTROL, _REPORTS = "adds", "control", "reports"
# What python runs: our own module, found where the front finds it and never in the folder it happens to be in.
_BOOT = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(':'); "
    "from llmc_runtime.core.process import main; sys.exit(main(sys.argv[1:]))"
)


def default_command() -> list[str]:
    """The command of an engine process; the front's id, the sockets' folder and the heartbeat follow."""
    return [sys.executable, "-P", "-c", _BOOT, ":".join(filter(None, sys.path))]


class Channel:
    """An engine process and the sockets to it. `hear` gets what it says of requests, `say` its lines about opening."""

    def __init__(
        self, command: Sequence[str], heartbeat: float, hear: Callable[[list[Delta]], None], say: Callable[[str], None]
    ) -> None:
        self._hear, self._say = hear, say
        self._decoder, self._encode = msgspec.msgpack.Decoder(Report), msgspec.msgpack.Encoder().encode
        self._failed: LlmcError | None = None
        self._silence = 0.0  # seconds of ours in which nothing was heard
        self.pulse: Pulse | None = None
        self.ready: Ready | None = None
        self._came = asyncio.Event()  # Ready, or the end
        self._folder = Path(tempfile.mkdtemp(prefix="llmc-"))  # 0700
        self._context = zmq.asyncio.Context()
        self._listener: asyncio.Task[None] | None = None
        try:
            self._adds, self._control = self._socket(zmq.PUSH, _ADDS), self._socket(zmq.PUSH, _CONTROL)
            self._reports = self._socket(zmq.PULL, _REPORTS)
            self.process = subprocess.Popen(
                [*command, str(os.getpid()), str(self._folder), str(heartbeat)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C is the front's affair
            )
        except BaseException:
            self._context.destroy(linger=0)
            self._forget_folder()
            raise
        self._listener = asyncio.create_task(self._listen())

    def _socket(self, kind: int, name: str) -> Any:
        # Nothing is ever dropped or held back: what can lie in a socket is bounded by the requests that are open.
        socket = self._context.socket(kind) if kind == zmq.PULL else self._plain.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{self._folder / name}")
        return socket

    @property
    def _plain(self) -> Any:
        """The context for sockets that are sent to without waiting."""
        return zmq.Context.shadow(self._context.underlying)

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
        try:
            await asyncio.wait_for(self._came.wait(), 0.02)
            await asyncio.sleep(0.01)
        except TimeoutError:
            pass

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
        event loop took at once count as two ticks at most."""
        error = self._ended()
        if error is not None or self.pulse is None:
            return error
        self._silence += min(seconds, 2 * TICK)
        remedy = "send the request again; if it happens again, report it"
        if self._silence > heartbeat_timeout:
            cause = f"the engine process gave no sign of life for {heartbeat_timeout:g} s"
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
        return LlmcError("E661", f"the engine process {how}", "send the request again; its messages are on stderr")

    async def _listen(self) -> None:
        while True:
            frames = await self._reports.recv_multipart()
            self._silence = 0.0
            try:
                message = self._decoder.decode(b"".join(frames))
            except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
                # What it said may have been tokens: going on could give a wrong text.
                cause = f"the engine process sent a message that makes no sense: {str(e)[:100]}"
                self._failed = self._failed or LlmcError("E661", cause, "send the request again, and report it")
                continue
            await self._take(message)
            await asyncio.sleep(0)

    async def _take(self, message: Report) -> None:
        if isinstance(message, Outputs):
            for i in range(0, len(message.deltas), _CHUNK):
                if i:
                    await asyncio.sleep(0)
                self._hear(message.deltas[i : i + _CHUNK])
        elif isinstance(message, Pulse):
            self.pulse = message
        elif isinstance(message, Failed):
            self._failed = error_of(message.fault)
            self._came.set()
        elif isinstance(message, Ready):
            self.ready = message
            self._came.set()
        elif isinstance(message, Progress):
            self._say(message.line)

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
        if self._listener is not None:
            await asyncio.sleep(0.02)  # what lies in the socket
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
            self._listener = None
        for socket in (self._adds, self._control, self._reports):
            socket.close(linger=0)
        self._context.term()
        self._forget_folder()

    def _forget_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
