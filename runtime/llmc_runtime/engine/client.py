"""EngineClient: starts one engine process, exchanges messages with it, checks its health, and ends it."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import zmq

from llmc_runtime.engine.messages import (
    ADDS,
    CONTROL,
    REPORTS,
    Abort,
    Add,
    ControlReply,
    ControlRequest,
    Delta,
    Eos,
    Failed,
    Heartbeat,
    Open,
    Outputs,
    Progress,
    Ready,
    Report,
    Stop,
    error_of,
    open_socket,
)
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.heartbeat import Silence
from llmc_runtime.python_command import socket_folder

EosSource = Callable[[], Awaitable[list[int]]]  # returns the token ids of the message Eos
_MAX_PER_TURN = 128  # messages and deltas that are handled in one turn of the event loop
_REASONS: Mapping[int, str] = MappingProxyType(
    {
        signal.SIGKILL: "unless someone killed it, the machine ran out of memory (see dmesg)",
        signal.SIGBUS: "a file of the artifact may have been truncated: files are read in place, replace whole folders",
    }
)


class EngineClient:
    """An engine process and the sockets to it. Belongs to the event loop in which it is made.

    command:    the process's, without its last arguments: the pid of this process, the folder of the sockets and
                `heartbeat`
    heartbeat:  seconds between two heartbeats of the process
    on_deltas:  called with the deltas of requests
    say:        called with log lines about opening
    pause:      returns how many seconds further outputs may wait, so that those of several steps are read together;
                called when all that have arrived are read

    Raises LlmcError E100 if the process or the sockets cannot be made.
    """

    def __init__(
        self,
        command: Sequence[str],
        heartbeat: float,
        on_deltas: Callable[[list[Delta]], None],
        say: Callable[[str], None],
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._pause_reading = pause
        self._on_deltas, self._say = on_deltas, say
        self._decoder, self._encode = msgspec.msgpack.Decoder(Report), msgspec.msgpack.Encoder().encode
        self._error: LlmcError | None = None
        self._silence = Silence()  # since the last message
        self.heartbeat: Heartbeat | None = None  # the last one
        self.ready: Ready | None = None
        self._chunks: deque[list[Delta]] = deque()  # received and not handled yet
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}  # open control RPCs, by number
        self._call_numbers = itertools.count()
        self._folder = _folder()
        self._context = zmq.Context()
        self._loop = asyncio.get_running_loop()
        sockets: list[Any] = []
        try:
            for kind, name in ((zmq.PUSH, ADDS), (zmq.PUSH, CONTROL), (zmq.PULL, REPORTS)):
                sockets.append(open_socket(self._context, kind, self._folder, name, binds=True, linger=0))
            self.process = subprocess.Popen(
                [*command, str(os.getpid()), str(self._folder), str(heartbeat)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,  # stderr was closed at startup
                process_group=0,  # Ctrl-C goes to the front end only
            )
        except BaseException as e:
            self._context.destroy(linger=0)
            self._remove_folder()
            if isinstance(e, OSError | zmq.ZMQError):
                raise _os_error(e) from e
            raise
        self._adds, self._control, self._reports = sockets
        self._release = weakref.finalize(self, _release, os.getpid(), self.process, sockets, self._context)
        self._fd = int(self._reports.get(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        self._loop.call_soon(self._on_readable)

    async def open(self, opening: Open, timeout: float, eos: EosSource | None = None) -> Ready:
        """Open the artifact. If `opening.eos` is None, `eos` is called while the engine opens.

        Raises the engine's LlmcError, that of `eos`, E661 if the process ends, E662 after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        await self._push_control(opening, deadline, timeout)
        if opening.eos is None and eos is not None:
            await self._push_control(Eos(await eos()), deadline, timeout)
        while self.ready is None or self.heartbeat is None:
            await self._pause(deadline, timeout)
        self._remove_folder()  # every socket is connected
        self._silence.end()
        return self.ready

    async def _push_control(self, message: Open | Eos, deadline: float, timeout: float) -> None:
        encoded = self._encode(message)
        while not self._push(self._control, encoded):
            await self._pause(deadline, timeout)

    async def _pause(self, deadline: float, timeout: float) -> None:
        error = self._exit_error()
        if error is None and time.monotonic() > deadline:
            error = LlmcError("E662", f"the engine did not open within {timeout:g} s", "increase start_timeout")
        if error is not None:
            raise error
        await asyncio.sleep(0.01)

    def add(self, add: Add) -> None:
        """Send a request. Raises LlmcError E601 if it contains a value that cannot be encoded."""
        try:
            message = self._encode(add)
        except (ValueError, OverflowError, TypeError) as e:  # unpaired surrogates, integers beyond 64 bits
            cause = f"the request contains a value that cannot be sent: {str(e)[:100]}"
            raise LlmcError("E601", cause, "use valid Unicode and integers of 64 bits") from None
        self._push(self._adds, message)

    def abort(self, ids: list[int]) -> None:
        """Abort these outputs."""
        self._push(self._control, self._encode(Abort(ids)))

    async def call(self, method: str, seconds: float, timeout: float) -> ControlReply:
        """Call a control RPC (see ControlRequest) that takes `seconds`, and return the reply.

        Raises LlmcError E662 if none comes within `timeout` more seconds, and the error of `fail_calls`.
        """
        number = next(self._call_numbers)
        future = self._calls[number] = self._loop.create_future()
        try:
            self._push(self._control, self._encode(ControlRequest(number, method, seconds)))
            async with asyncio.timeout(seconds + timeout):
                return await future
        except TimeoutError:
            cause = f"the engine did not answer within {seconds + timeout:g} s"
            raise LlmcError("E662", cause, "try again when its step has ended") from None
        finally:
            del self._calls[number]

    def fail_calls(self, error: LlmcError) -> None:
        """Fail all open control RPCs."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _push(self, socket: Any, message: bytes) -> bool:
        try:
            socket.send(message, zmq.NOBLOCK)
        except zmq.ZMQError:  # not connected yet, or the process has ended, which `check` detects
            return False
        return True

    @property
    def alive(self) -> bool:
        """Whether the process was running and healthy at the last check."""
        return self._error is None and self.process.returncode is None

    def check(self, seconds: float, heartbeat_timeout: float, step_timeout: float) -> LlmcError | None:
        """Return the error of an engine that has ended or hangs, else None. `seconds` have passed since the last call.

        A pause of this event loop counts as two ticks at most.
        """
        error = self._exit_error()
        if error is not None or self.heartbeat is None:
            return error
        remedy = "send the request again; if it happens again, report it"
        timeout = self._silence.exceeded(seconds, self.process.pid, heartbeat_timeout)
        if timeout is not None:
            return LlmcError("E662", f"the engine process sent no heartbeat for {timeout:g} s", remedy)
        if self.heartbeat.age + self._silence.seconds > step_timeout and self.heartbeat.age:
            return LlmcError("E662", f"a step of the engine took longer than {step_timeout:g} s", remedy)
        return None

    def _exit_error(self) -> LlmcError | None:
        if self._error is not None:
            return self._error
        code = self.process.poll()
        if code is None:
            return None
        end = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        why = _REASONS.get(-code, "see its messages on stderr")
        return LlmcError("E661", f"the engine process {end}", f"send the request again; {why}")

    def _on_readable(self) -> None:
        """Handle messages. The file descriptor is signalled once, so the rest is handled in another turn."""
        if not self._release.alive:
            return
        if self._receive(_MAX_PER_TURN):
            self._loop.call_soon(self._on_readable)
        elif (seconds := self._pause_reading()) > 0:
            self._loop.remove_reader(self._fd)
            self._loop.call_later(seconds, self._resume_reading)

    def _resume_reading(self) -> None:
        if self._release.alive:
            self._loop.add_reader(self._fd, self._on_readable)
            self._on_readable()

    def _receive(self, budget: float) -> bool:
        """Handle up to `budget` messages and deltas. Return whether there may be more."""
        while budget > 0:
            if self._chunks:
                chunk = self._chunks.popleft()
                self._on_deltas(chunk)
                budget -= len(chunk)
                continue
            try:
                frames = self._reports.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._silence.end()
            self._handle(b"".join(frames))
            budget -= 1
        return True

    def _handle(self, data: bytes) -> None:
        try:
            message: Report = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
            # The message may have held tokens: continuing could produce a wrong text.
            cause = f"the engine process sent an invalid message: {str(e)[:100]}"
            self._error = self._error or LlmcError("E661", cause, "send the request again, and report it")
            return
        match message:
            case Outputs(deltas=deltas):
                self._chunks.extend(deltas[i : i + _MAX_PER_TURN] for i in range(0, len(deltas), _MAX_PER_TURN))
            case Heartbeat():
                self.heartbeat = message
            case Failed(error=error):
                self._error = error_of(error)
            case Ready():
                self.ready = message
            case Progress(line=line):
                self._say(line)
            case ControlReply(number=number):
                if (future := self._calls.get(number)) is not None and not future.done():
                    future.set_result(message)

    async def stop(self, timeout: float) -> None:
        """Send the process a message to exit, and kill it after `timeout` seconds."""
        self._push(self._control, self._encode(Stop()))
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process. Messages that it has sent before are still handled."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        while self.process.poll() is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # time for messages in flight to arrive
        if self._release.alive:
            self._receive(math.inf)
            self._loop.remove_reader(self._fd)
            self._release()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _release(owner: int, process: subprocess.Popen[bytes], sockets: Sequence[Any], context: Any) -> None:
    """Kill the process and close the sockets. Does nothing in a fork of the front end."""
    if os.getpid() != owner:
        return
    process.kill()
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def _folder() -> Path:
    """Make the folder of the sockets. Raises LlmcError E100."""
    try:
        return socket_folder(CONTROL)
    except (OSError, UnicodeEncodeError) as e:
        raise _os_error(e) from e


def _os_error(error: Exception) -> LlmcError:
    cause = f"the engine process cannot be started: {str(error)[:200]}"
    remedy = "check TMPDIR (short, writable) and the limits of files (ulimit -n), processes (-u) and memory (-v)"
    return LlmcError("E100", cause, remedy)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
