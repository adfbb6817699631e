"""The engine's handle of the grammar host process and its control socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar import wire
from llmc_runtime.grammar.grammar_worker import OUT_OF_MEMORY
from llmc_runtime.grammar.limits import COMPILE_CPU_SECONDS, MEMORY_BYTES, NICE, OPERATION_CPU_SECONDS
from llmc_runtime.python_command import module_command
from llmc_runtime.text.tokenizer import Tokenizer


class HostProcess:
    """A running grammar host. Raises LlmcError E100 if the process cannot be created."""

    def __init__(self, tokenizer: Tokenizer | Path, size: int, eos: Sequence[int]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.ready = False
        with theirs, contextlib.ExitStack() as stack:
            source, passed = str(tokenizer), [theirs.fileno()]
            if isinstance(tokenizer, Tokenizer):
                passed.append(stack.enter_context(_memory_file(tokenizer.backend.to_str().encode())).fileno())
                source = str(passed[1])
            else:
                source = str(tokenizer.resolve())
            command = module_command("llmc_runtime.grammar.host")
            arguments = [str(theirs.fileno()), str(size), json.dumps(list(eos)), source, str(NICE)]
            try:
                self._process = subprocess.Popen(
                    [*command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed,
                    process_group=0,  # not affected by Ctrl-C
                )  # fmt: skip
            except OSError as e:
                self.control.close()
                cause = f"the system gives no process for grammars: {e.strerror}"
                raise LlmcError("E100", cause, "more processes (ulimit -u), files (-n) or memory (-v)") from e
        self.close = weakref.finalize(self, _end, self.control, self._process, os.getpid())

    def spawn(self, number: int, definition: bytes) -> socket.socket:
        """Fork a worker for the definition and return our end of its socket. Raises OSError if the system refuses."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, _memory_file(definition) as file:
                order = wire.ORDER.pack(wire.SPAWN, number)
                socket.send_fds(self.control, [order], [theirs.fileno(), file.fileno()])
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return ours

    def kill(self, number: int) -> None:
        """Kill a worker."""
        with contextlib.suppress(OSError):
            self.control.send(wire.ORDER.pack(wire.KILL, number))


def _end(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    control.close()
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        process.kill()  # its workers end with it
        process.wait()


def _memory_file(data: bytes) -> BinaryIO:
    """Return a file in memory with this content, positioned at the start."""
    file = os.fdopen(os.memfd_create("llmc-grammar"), "wb+")
    file.write(data)
    file.seek(0)
    return file


def compile_limit(status: int) -> str | None:
    """Return the limit that a compilation exceeded, from the process's wait status; None if it exceeded none."""
    return _limit(status, f"{COMPILE_CPU_SECONDS:g} s of CPU time to compile")


def operation_limit(status: int) -> str | None:
    """Return the limit that the processing of a token exceeded, from the worker's wait status, or None."""
    return _limit(status, f"{OPERATION_CPU_SECONDS:g} s of CPU time for one token")


def _limit(status: int, cpu: str) -> str | None:
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGPROF:
            return cpu
        if os.WTERMSIG(status) in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
            return f"{MEMORY_BYTES >> 20} MiB of memory"
    elif os.WEXITSTATUS(status) == OUT_OF_MEMORY:
        return f"{MEMORY_BYTES >> 20} MiB of memory"
    return None
