"""The grammar host: a process that builds the vocabulary once and forks a worker for every grammar.

`main` runs with the arguments CONTROL SIZE EOS SOURCE NICE: the descriptor of the engine's socket, the size of the
vocabulary, a JSON list of end-of-sequence tokens, the tokenizer's folder or the descriptor of a file with its JSON, and
the nice value of the workers. The host and its workers exit when the engine closes the socket.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from llmc_runtime.grammar import wire
from llmc_runtime.grammar.definition import first_line
from llmc_runtime.grammar.grammar_worker import run_worker
from llmc_runtime.text.tokenizer import Tokenizer

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Host:
    """Forks and kills workers at the engine's request, and reports how each of them ended."""

    def __init__(self, control: socket.socket, vocabulary: Any, size: int, nice: int) -> None:
        self._control, self._vocabulary, self._size, self._nice = control, vocabulary, size, nice
        self._workers: dict[int, int] = {}  # worker number -> process id

    def run(self) -> None:
        """Serve until the engine closes its end, then kill all workers."""
        ended, wakeup = socket.socketpair()
        for end in (ended, wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is ended:
                    ended.recv(4096)
                    self._reap()
                elif not self._take_order():
                    signal.set_wakeup_fd(-1)  # workers may end after `wakeup` is closed
                    self._kill_all()
                    return

    def _take_order(self) -> bool:
        """Carry out one order. Returns False if the engine has closed the socket."""
        data, descriptors, _, _ = socket.recv_fds(self._control, wire.ORDER.size, 2)
        if not data:
            return False
        kind, number = wire.ORDER.unpack(data)
        if kind == wire.SPAWN:
            self._spawn(number, *descriptors)
        elif number in self._workers:
            os.kill(self._workers[number], signal.SIGKILL)
        return True

    def _spawn(self, number: int, link: int, definition: int) -> None:
        """Fork a worker that reads its grammar from `definition`, and answers on `link`."""
        host = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            self._be_worker(host, link, definition)
        os.close(link)
        os.close(definition)
        if pid > 0:
            self._workers[number] = pid
        else:
            self._report(number, signal.SIGKILL)

    def _be_worker(self, host: int, link: int, definition: int) -> None:
        """Run the worker in the forked child; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            self._control.close()
            if os.getppid() == host:
                end = socket.socket(fileno=link)
                code = run_worker(end, definition, self._vocabulary, self._size, self._nice)
        finally:
            os._exit(code)

    def _reap(self) -> None:
        for number, pid in list(self._workers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._workers[number]
                self._report(number, status)

    def _report(self, number: int, status: int) -> None:
        self._control.send(wire.END.pack(wire.ENDED, number, status))

    def _kill_all(self) -> None:
        for pid in self._workers.values():
            os.kill(pid, signal.SIGKILL)


def _wake(number: int, frame: object) -> None:
    """Do nothing: the signal's number arrives on the wakeup descriptor."""


def build_vocabulary(source: str, size: int, eos: Sequence[int]) -> Any:
    """Build llguidance's vocabulary of at least `size` ids. May raise exceptions of any type.

    It has more if the tokenizer has tokens beyond those of the model, as a padding token that was added to it.
    """
    import llguidance

    if source.isdecimal():
        with open(int(source), encoding="utf-8") as file:
            text = file.read()
    else:
        text = Tokenizer.open(source).backend.to_str()
    ends = list(eos) or None
    try:
        return llguidance.LLTokenizer(text, n_vocab=size, eos_token=ends)
    except ValueError:
        vocabulary = llguidance.LLTokenizer(text, eos_token=ends)
        if vocabulary.vocab_size <= size:
            raise
        return vocabulary


def main(argv: Sequence[str]) -> int:
    """Run the host process with the arguments CONTROL SIZE EOS SOURCE NICE. Return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, size, eos, source, nice = argv
    control = socket.socket(fileno=int(descriptor))
    try:
        vocabulary = build_vocabulary(source, int(size), json.loads(eos))
    except Exception as e:
        control.send(wire.FAILED + first_line(str(e)).encode())
        return 1
    gc.collect()
    gc.freeze()  # garbage collection in the workers leaves the shared pages alone
    try:
        control.send(wire.READY)
        Host(control, vocabulary, int(size), int(nice)).run()
    except OSError:  # the engine has exited
        return 0
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return 1
    return 0
