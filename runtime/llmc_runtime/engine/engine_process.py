"""The engine process: it opens the artifact it is told of, serves two sockets, and gives signs of life. No text.

`python -m llmc_runtime.engine.engine_process PARENT FOLDER HEARTBEAT`: the front's process id, the folder of the
sockets, the seconds between two signs of life. It ends when the front does.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from llmc_runtime.engine.control_rpc import Answers
from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.engine_loop import Loop
from llmc_runtime.engine.messages import (
    Abort,
    Add,
    Ask,
    Control,
    Failed,
    Open,
    Outputs,
    Progress,
    Pulse,
    Ready,
    Reply,
    Stop,
    fault_of,
)
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import as_told, brief
from llmc_runtime.grammar import Grammars
from llmc_runtime.metrics import Stat

ADDS, CONTROL, REPORTS = "adds", "control", "reports"  # the sockets in the folder
_DRAIN = 0.002  # seconds between two steps for new requests, at least
_DRAIN_SHARE = 0.15  # of the last step's, at most: while a long one runs, the next may gather more
_LOOK = 50  # milliseconds between two looks at grammars that are being compiled
_LINGER = 2000  # milliseconds for the last words
_SENSELESS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Session:
    """An open engine: one line about it, the grammars of its vocabulary, how to give everything back, and the seconds
    that each part of opening took."""

    engine: Engine
    summary: str
    grammars: Callable[[], Grammars | None]
    close: Callable[[], None]
    stages: Mapping[str, float] = field(default_factory=dict)


Opener = Callable[[Open, Callable[[str], None]], Session]


def open_session(wanted: Open, say: Callable[[str], None]) -> Session:
    """Open the artifact as `LLM` does; `say` is told what happens. LlmcError E1xx, E2xx."""
    from llmc_runtime.engine.loader import open_engine, open_model
    from llmc_runtime.text.tokenizer import TOKENIZER_FILE

    options = EngineOptions.of_message(wanted.path, wanted.options)
    say(f"opening {options.model}")
    began = time.monotonic()
    artifact = open_model(Path(options.model), options, wanted.digest)
    stages = {"artifact": time.monotonic() - began}
    opened = open_engine(artifact, options, wanted.eos)

    def grammars() -> Grammars | None:
        if f"{artifact.tokenizer_dir.name}/{TOKENIZER_FILE}" not in artifact.manifest.tokenizer:
            return None
        config = opened.engine.scheduler.config
        return Grammars(artifact.tokenizer_dir, config.vocab_size, config.eos_token_ids)

    def close() -> None:
        opened.close()
        if opened.trace is not None:
            opened.trace.finish()

    return Session(opened.engine, opened.summary, grammars, close, {**stages, **opened.stages})


class Age:
    """Seconds that the work under way has taken, of those in which this process could run: all of it may have been
    stopped (a paused container, Ctrl-Z), and a step is not to blame for that. `most`: of a look at the clock."""

    def __init__(self, most: float) -> None:
        self._most, self._began, self._age, self._last = most, 0.0, 0.0, time.monotonic()

    def of(self, began: float) -> float:
        """The age of what began then; 0: nothing is under way. Asked again and again."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, self._most), now
        self._age = self._age + passed if began == self._began else min(now - began, self._most)
        self._began = began
        return self._age if began else 0.0


class _Pulses(threading.Thread):
    """Signs of life from a thread and a socket of its own, so that a long step does not stop them."""

    def __init__(self, process: CoreProcess) -> None:
        super().__init__(name="llmc-pulse", daemon=True)
        self._process, self.ended = process, threading.Event()

    def run(self) -> None:
        process = self._process
        socket = process.socket(zmq.PUSH, REPORTS, linger=0)
        while True:
            if os.getppid() != process.parent:  # whoever is the parent now, the front has gone
                shutil.rmtree(process.folder, ignore_errors=True)
                os._exit(0)
            pulse = process.pulse()
            socket.send(msgspec.msgpack.encode(pulse))
            if self.ended.wait(process.heartbeat):
                break
        socket.close()


class CoreProcess:
    """One engine and its sockets, from the front's first word to its last."""

    def __init__(self, parent: int, folder: Path, heartbeat: float, opener: Opener) -> None:
        self.parent, self.folder, self.heartbeat, self._opener = parent, folder, heartbeat, opener
        self._context = zmq.Context()
        self._began = 0.0  # when the work under way began; 0: none is
        self._session: Session | None = None
        self._loop: Loop | None = None
        self._nonsense = 0
        self._age = Age(2 * heartbeat)
        self._idle = (0.0, 0.0)  # seconds without work, and since when there is none; 0: there is some
        self._encode = msgspec.msgpack.Encoder().encode
        self._add_of, self._control_of = msgspec.msgpack.Decoder(Add), msgspec.msgpack.Decoder(Control)

    def socket(self, kind: int, name: str, linger: int = _LINGER) -> Any:
        """A socket that is connected to the front's of this name."""
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, linger)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(f"ipc://{self.folder / name}")
        return socket

    def pulse(self) -> Pulse:
        """How it is; asked once a heartbeat, from another thread than the one that works."""
        loop = self._loop
        stats: dict[str, Stat] = {}
        if loop is not None:
            total, since = self._idle
            idle = total + (time.monotonic() - since if since else 0.0)
            stats = {**loop.stats(), "scheduler_idle_seconds": idle}
        nonsense = self._nonsense + (0 if loop is None else loop.nonsense)
        return Pulse(self._age.of(self._began), nonsense, stats)

    def run(self) -> int:
        """Serve until told to stop, or until the engine has ended. The exit code."""
        self._adds, self._control = self.socket(zmq.PULL, ADDS), self.socket(zmq.PULL, CONTROL)
        self._reports = self.socket(zmq.PUSH, REPORTS)
        pulses = _Pulses(self)
        pulses.start()
        code = 0
        try:
            code = self._open_and_serve()
        except Exception as e:
            traceback.print_exc()
            self._say(Failed(fault_of(as_told(e))))
            code = 1
        pulses.ended.set()
        pulses.join(1.0)
        for socket in (self._adds, self._control, self._reports):
            socket.close()
        self._context.term()
        return code

    def _open_and_serve(self) -> int:
        wanted = self._control_message()
        if not isinstance(wanted, Open):
            return 0
        try:
            session = self._session = self._opener(wanted, lambda line: self._say(Progress(brief(line, 4))))
        except Exception as e:
            error = as_told(e)
            if error.code == "E000":
                traceback.print_exc()
            self._say(Failed(fault_of(error)))
            return 1
        config = session.engine.scheduler.config
        sizes = (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens)
        pool = (config.num_pages, config.page_size, config.vocab_size)
        self._loop = Loop(session.engine, session.grammars)
        if wanted.options.get("prepare") and (why := self._loop.prepare()):
            self._say(Progress(brief(why, 4)))
        gc.collect()
        gc.freeze()  # what is there stays: no collection, which no step can hide, looks at it again
        self._say(Ready(*sizes, *pool, session.summary, config.prefix_caching, dict(session.stages)))
        try:
            return self._serve(self._loop, session.engine, Answers(session.engine))
        finally:
            self._loop.close()
            session.close()

    def _serve(self, loop: Loop, engine: Engine, answers: Answers) -> int:
        poller = zmq.Poller()
        poller.register(self._adds, zmq.POLLIN)
        poller.register(self._control, zmq.POLLIN)
        last = 0.0  # seconds of the last step
        grammars = None
        while True:
            self._began = time.monotonic()
            if self._take_control(loop, answers):
                return 0
            self._take_adds(loop, max(_DRAIN, _DRAIN_SHARE * last))
            if loop.busy or loop.waiting:
                begun = time.monotonic()
                deltas = loop.step()
                last = time.monotonic() - begun
                error = engine.error
                if error is not None:  # said first, so that nothing new comes
                    self._say(Failed(fault_of(error)))
                if deltas:
                    self._say(Outputs(deltas))
                if error is not None:
                    return 1
            if (reply := answers.due()) is not None:
                self._say(reply)
            if not loop.busy:
                self._began = 0.0
                if grammars is None and (grammars := loop.grammars_fd) is not None:
                    poller.register(grammars, zmq.POLLIN)
                self._rest(poller, _LOOK if loop.waiting else answers.patience)

    def _rest(self, poller: Any, patience: float | None) -> None:
        """Wait for news, `patience` milliseconds at most."""
        began, total = time.monotonic(), self._idle[0]
        self._idle = (total, began)
        poller.poll(patience)
        self._idle = (total + time.monotonic() - began, 0.0)

    def _take_control(self, loop: Loop, answers: Answers) -> bool:
        """Do all that is asked for now. True: to stop."""
        while self._control.get(zmq.EVENTS) & zmq.POLLIN:
            message = self._control_message()
            if isinstance(message, Stop):
                return True
            if isinstance(message, Abort):
                loop.abort(message.ids)
            elif isinstance(message, Ask):
                if (reply := answers.take(message)) is not None:
                    self._say(reply)
            else:
                self._nonsense += 1
        return False

    def _take_adds(self, loop: Loop, seconds: float) -> None:
        """Queue new requests, for so long: no step has to wait for all of them."""
        until = time.monotonic() + seconds
        while self._adds.get(zmq.EVENTS) & zmq.POLLIN:
            frames = self._adds.recv_multipart()
            try:
                loop.add(self._add_of.decode(b"".join(frames)))
            except _SENSELESS:
                self._nonsense += 1
            if time.monotonic() >= until:
                break

    def _control_message(self) -> Control | None:
        """The next one; None where it made no sense, which is counted by the caller."""
        frames = self._control.recv_multipart()
        try:
            message: Control = self._control_of.decode(b"".join(frames))
            return message
        except _SENSELESS:
            return None

    def _say(self, message: Progress | Ready | Failed | Outputs | Reply) -> None:
        self._reports.send(self._encode(message))


def main(argv: Sequence[str], opener: Opener = open_session) -> int:
    """What the engine process runs. The exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the front's affair; whoever ends a whole service tells us, too
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # our group is in the background of the terminal that stderr may be
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # the front asks where we are
    parent, folder, heartbeat = argv
    return CoreProcess(int(parent), Path(folder), float(heartbeat), opener).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
