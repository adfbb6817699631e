"""The engine process: opens an artifact, serves requests from two sockets, sends outputs and heartbeats.

`python -m llmc_runtime.engine.engine_process PARENT FOLDER HEARTBEAT`: the front end's process id, the folder of the
sockets, and the seconds between two heartbeats. The process exits when the front end does.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from llmc_runtime.engine.control_rpc import ControlServer
from llmc_runtime.engine.core import EngineCore
from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.engine_loop import EngineLoop
from llmc_runtime.engine.messages import (
    ADDS,
    CONTROL,
    LIMITS,
    REPORTS,
    Abort,
    Add,
    Control,
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
    Stop,
    error_message,
    open_socket,
)
from llmc_runtime.engine.session import Opener, Session, open_session
from llmc_runtime.format.errors import LlmcError, as_llmc_error, brief
from llmc_runtime.gc_pause import lasting_objects
from llmc_runtime.host_info import usable_cpus
from llmc_runtime.metrics import Stat

if TYPE_CHECKING:
    from llmc_runtime.exec.rank_group import RankGroup

NICE = 5  # niceness of CPU engines whose threads fill the machine
_MIN_ADD_TIME = 0.002  # seconds for new requests between two steps
_ADD_STEP_SHARE = 0.15  # alternatively this share of the last step's duration, if that is more
_COMPILE_POLL_MS = 50  # interval between two checks of grammars that are being compiled
_LINGER_MS = 2000  # time for sending the last messages
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


def leave_time_for_front(compute_threads: int, processes: Sequence[int] = ()) -> None:
    """Lower the priority of this process's threads and of `processes` if `compute_threads` threads fill the machine.

    The front end then answers within milliseconds while the engine is busy: threads of equal priority that wake from a
    wait for each other would run before it.
    """
    if compute_threads < usable_cpus():
        return
    for process in (os.getpid(), *processes):
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            for thread in map(int, os.listdir(f"/proc/{process}/task")):
                niceness = max(NICE, os.getpriority(os.PRIO_PROCESS, thread))
                os.setpriority(os.PRIO_PROCESS, thread, niceness)


class StepAge:
    """Measures how long the current step has run, without the time in which the whole process was stopped (a paused
    container, Ctrl-Z): each call adds at most `max_interval` seconds."""

    def __init__(self, max_interval: float) -> None:
        self._max_interval = max_interval
        self._began = 0.0  # start of the current step; 0: none runs
        self._age = 0.0  # of the current step at the last call
        self._last_call = time.monotonic()

    def of(self, began: float) -> float:
        """Return the age in seconds of the step that began at `began`; 0 means that none runs. Call it regularly."""
        now = time.monotonic()
        passed = min(now - self._last_call, self._max_interval)
        self._last_call = now
        self._age = self._age + passed if began == self._began else min(now - began, self._max_interval)
        self._began = began
        return self._age if began else 0.0


class _IdleTime:
    """The time without work. The engine's thread begins and ends it; the heartbeat thread reads it at any moment."""

    def __init__(self) -> None:
        self._state = (0.0, 0.0)  # seconds of earlier periods, start of the current one (0: none); replaced as a whole

    def begin(self) -> None:
        """Begin a period."""
        self._state = (self._state[0], time.monotonic())

    def end(self) -> None:
        """End the period."""
        self._state = (self.seconds(), 0.0)

    def seconds(self) -> float:
        """Return the sum of all periods."""
        total, began = self._state
        return total + (time.monotonic() - began if began else 0.0)


class _HeartbeatThread(threading.Thread):
    """Sends heartbeats from a separate thread and socket, so that a long step does not delay them."""

    def __init__(self, process: EngineProcess) -> None:
        super().__init__(name="llmc-heartbeat", daemon=True)
        self._process, self.ended = process, threading.Event()

    def run(self) -> None:
        process = self._process
        socket = process.socket(zmq.PUSH, REPORTS, linger=0)
        while True:
            if os.getppid() != process.parent:  # the front end has ended
                shutil.rmtree(process.folder, ignore_errors=True)
                os._exit(0)
            socket.send(msgspec.msgpack.encode(process.heartbeat()))
            if self.ended.wait(process.interval):
                break
        socket.close()


class _WakeUps:
    """What an idle engine process waits for: messages, grammars that were compiled, and the end of another rank."""

    def __init__(self, sockets: Sequence[Any], core: EngineCore, group: RankGroup | None) -> None:
        self._core, self._group = core, group
        self._poller = zmq.Poller()
        self._grammars_fd: int | None = None  # registered once the first grammar process runs
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        if group is not None:
            self._poller.register(group.failure_fd, zmq.POLLIN)

    def wait(self, timeout_ms: int | None) -> LlmcError | None:
        """Wait up to `timeout_ms` milliseconds; None: without limit. Return the error if a rank has ended."""
        if self._grammars_fd is None and self._core.grammars_fd is not None:
            self._grammars_fd = self._core.grammars_fd
            self._poller.register(self._grammars_fd, zmq.POLLIN)
        ready = {source for source, _ in self._poller.poll(timeout_ms)}
        if self._grammars_fd in ready:
            self._core.grammars().pump()  # otherwise the next wait would end at once
        if self._group is not None and self._group.failure_fd in ready:
            return self._group.failure()
        return None


class EngineProcess:
    """One engine and its sockets. `interval`: seconds between two heartbeats.

    The main thread owns everything but `heartbeat`, which the heartbeat thread calls: it only reads attributes that the
    main thread replaces as a whole.
    """

    def __init__(self, parent: int, folder: Path, interval: float, opener: Opener) -> None:
        self.parent, self.folder, self.interval, self._opener = parent, folder, interval, opener
        self._context = zmq.Context()
        self._began = 0.0  # start of the current step; 0: none runs
        self._loop: EngineLoop | None = None
        self._invalid_messages = 0
        self._age = StepAge(2 * interval)
        self._idle = _IdleTime()
        self._encode = msgspec.msgpack.Encoder().encode
        self._add_decoder, self._control_decoder = msgspec.msgpack.Decoder(Add), msgspec.msgpack.Decoder(Control)

    def socket(self, kind: int, name: str, linger: int = _LINGER_MS) -> Any:
        """Return a socket connected to the front end's socket with this name; `linger` is in milliseconds."""
        return open_socket(self._context, kind, self.folder, name, binds=False, linger=linger)

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat. Called from the heartbeat thread."""
        loop = self._loop
        stats: dict[str, Stat] = {}
        if loop is not None:
            stats = {**loop.stats(), "scheduler_idle_seconds": self._idle.seconds()}
        invalid = self._invalid_messages + (0 if loop is None else loop.invalid_messages)
        return Heartbeat(self._age.of(self._began), invalid, stats)

    def run(self) -> int:
        """Serve until a Stop message, or until the engine has ended. Return the exit code."""
        self._adds, self._control = self.socket(zmq.PULL, ADDS), self.socket(zmq.PULL, CONTROL)
        self._reports = self.socket(zmq.PUSH, REPORTS)
        heartbeats = _HeartbeatThread(self)
        heartbeats.start()
        code = 0
        try:
            code = self._open_and_serve()
        except Exception as e:
            traceback.print_exc()
            self._send(Failed(error_message(as_llmc_error(e))))
            code = 1
        heartbeats.ended.set()
        heartbeats.join(1.0)
        for socket in (self._adds, self._control, self._reports):
            socket.close()
        self._context.term()
        return code

    def _open_and_serve(self) -> int:
        """Open the model that the first message names, report its sizes, and serve it; return the exit status.

        If it cannot be opened, the error is sent instead.
        """
        opening = self._control_message()
        if not isinstance(opening, Open):
            return 0
        try:
            with lasting_objects():
                session, loop = self._open(opening)
        except Exception as e:
            error = as_llmc_error(e)
            if error.code == "E000":
                traceback.print_exc()
            self._send(Failed(error_message(error)))
            return 1
        config = session.engine.scheduler.config
        limits = {name: getattr(config, name) for name in LIMITS}
        self._send(Ready(**limits, summary=session.summary, stages=dict(session.stages), threads=session.threads))
        try:
            return self._serve(loop, session.engine, ControlServer(session.engine), session.group)
        finally:
            loop.core.close()
            session.close()

    def _open(self, opening: Open) -> tuple[Session, EngineLoop]:
        session = self._opener(opening, lambda line: self._send(Progress(brief(line, 4))))
        if opening.eos is None:
            message = self._control_message()
            if not isinstance(message, Eos):
                raise LlmcError("E663", "the engine is shutting down", "send the request to another server, or later")
            session.engine.scheduler.add_eos(message.token_ids)
        group, engines = session.group, int(opening.options.get("data_parallel_size", 1))
        leave_time_for_front(session.threads * engines, group.pids if group else ())
        self._loop = loop = EngineLoop(session.engine, session.grammars)
        if opening.options.get("prepare") and (failure := loop.core.prepare()):
            self._send(Progress(brief(failure, 4)))
        return session, loop

    def _serve(self, loop: EngineLoop, engine: Engine, control: ControlServer, group: RankGroup | None) -> int:
        """Run steps, and receive requests and control messages between them, until a message ends the process.

        Return the exit status: 1 if a step fails or a rank ends. While nothing is to be computed, wait for the sockets.
        """
        messages = zmq.Poller()
        for link in (self._adds, self._control):
            messages.register(link, zmq.POLLIN)
        wake_ups = _WakeUps((self._adds, self._control), loop.core, group)
        last = 0.0  # duration of the last step in seconds
        while True:
            self._began = time.monotonic()
            if self._take_control(loop, control):
                return 0
            self._take_adds(loop, max(_MIN_ADD_TIME, _ADD_STEP_SHARE * last))
            while (spare_ms := int(1e3 * engine.spare_seconds())) > 0 and messages.poll(spare_ms):
                if self._take_control(loop, control):
                    return 0
                self._take_adds(loop, _MIN_ADD_TIME)
            if loop.busy or loop.compiling:
                began = time.monotonic()
                deltas = loop.step()
                last = time.monotonic() - began
                if not self._report(deltas, engine.error):
                    return 1
            reply = control.finished_recording()
            if reply is not None:
                self._send(reply)
            if loop.busy:
                continue
            self._began = 0.0
            self._idle.begin()
            failure = wake_ups.wait(_COMPILE_POLL_MS if loop.compiling else control.wait_ms)
            self._idle.end()
            if failure is not None:
                self._send(Failed(error_message(failure)))
                return 1

    def _report(self, deltas: list[Delta], error: LlmcError | None) -> bool:
        """Send the outputs of a step, and its error, if there is one. Return whether the engine still works."""
        if error is not None:  # sent first, so that the front end sends no new requests
            self._send(Failed(error_message(error)))
        if deltas:
            self._send(Outputs(deltas))
        return error is None

    def _take_control(self, loop: EngineLoop, control: ControlServer) -> bool:
        """Handle the control messages that have arrived. Return True for Stop."""
        while self._control.get(zmq.EVENTS) & zmq.POLLIN:
            message = self._control_message()
            if isinstance(message, Stop):
                return True
            if isinstance(message, Abort):
                loop.abort(message.ids)
            elif isinstance(message, ControlRequest):
                if (reply := control.handle(message)) is not None:
                    self._send(reply)
            else:
                self._invalid_messages += 1
        return False

    def _take_adds(self, loop: EngineLoop, seconds: float) -> None:
        """Queue new requests for up to `seconds`, so that many of them do not delay the next step."""
        until = time.monotonic() + seconds
        while self._adds.get(zmq.EVENTS) & zmq.POLLIN:
            frames = self._adds.recv_multipart()
            try:
                loop.add(self._add_decoder.decode(b"".join(frames)))
            except _DECODE_ERRORS:
                self._invalid_messages += 1
            if time.monotonic() >= until:
                break

    def _control_message(self) -> Control | None:
        """Return the next control message, None for an invalid one, which the caller counts."""
        frames = self._control.recv_multipart()
        try:
            return self._control_decoder.decode(b"".join(frames))
        except _DECODE_ERRORS:
            return None

    def _send(self, message: Progress | Ready | Failed | Outputs | ControlReply) -> None:
        self._reports.send(self._encode(message))


def main(argv: Sequence[str], opener: Opener = open_session) -> int:
    """Run the engine process with the arguments PARENT FOLDER HEARTBEAT. Return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # handled by the front end; a service manager signals all processes
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # stderr may be a terminal with this process group in the background
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # the front end requests stack traces
    parent, folder, heartbeat = argv
    return EngineProcess(int(parent), Path(folder), float(heartbeat), opener).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
