"""The engine's handle of the grammar host process and its control socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar import wire
from llmc_runtime.grammar.grammar_worker import OUT_OF_MEMORY
from llmc_runtime.grammar.limits import COMPILE_CPU_SECONDS, MEMORY_BYTES, NICE, OPERATION_CPU_SECONDS
from llmc_runtime.python_command import LinkedProcess, memory_file, module_command
from llmc_runtime.text.tokenizer import Tokenizer


class HostProcess(LinkedProcess):
    """A running grammar host. Raises LlmcError E100 if the process cannot be created."""

    def __init__(self, tokenizer: Tokenizer | Path, size: int, eos: Sequence[int]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.ready = False
        with theirs, contextlib.ExitStack() as stack:
            descriptors = [theirs.fileno()]
            if isinstance(tokenizer, Tokenizer):
                file = stack.enter_context(memory_file("llmc-tokenizer", tokenizer.backend.to_str().encode()))
                descriptors.append(file.fileno())
                source = str(file.fileno())
            else:
                source = str(tokenizer.resolve())
            arguments = [str(theirs.fileno()), str(size), json.dumps(list(eos)), source, str(NICE)]
            try:
                super().__init__(self.control, [*module_command("llmc_runtime.grammar.host"), *arguments], descriptors)
            except OSError as e:
                cause = f"the system cannot create a process for grammars: {e.strerror}"
                raise LlmcError("E100", cause, "allow more processes (ulimit -u), files (-n) or memory (-v)") from e

    def spawn(self, number: int, definition: bytes) -> socket.socket:
        """Fork a worker for the definition and return our end of its socket. Raises OSError if the system refuses."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, memory_file("llmc-grammar", definition) as file:
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


def exceeded_limit(status: int, compiled: bool) -> str | None:
    """Return the limit that a worker exceeded, from its wait status; None if it ended for another reason."""
    signaled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if signaled == signal.SIGPROF:
        if compiled:
            return f"{OPERATION_CPU_SECONDS:g} s of CPU time for one token"
        return f"{COMPILE_CPU_SECONDS:g} s of CPU time to compile"
    aborted = signaled in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
    if aborted or (signaled is None and os.WEXITSTATUS(status) == OUT_OF_MEMORY):
        return f"{MEMORY_BYTES >> 20} MiB of memory"
    return None
