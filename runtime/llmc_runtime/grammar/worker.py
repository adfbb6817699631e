"""One grammar process: it compiles one grammar and follows the outputs that use it, within limits.

The kernel enforces the limits: RLIMIT_AS bounds the memory, and a timer of CPU time (ITIMER_PROF) ends the process,
whatever native code it is in. Beside that every output has a CPU budget of its own; the one that passes it fails, and
the others go on.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from typing import Any

from llmc_runtime.grammar import wire
from llmc_runtime.grammar.definition import Definition, Refused, compile_matcher, first_line
from llmc_runtime.grammar.limits import (
    COMPILE_CPU_SECONDS,
    GUIDE_CPU_SECONDS,
    MEMORY_BYTES,
    OPERATION_CPU_SECONDS,
    TOKEN_CPU_SECONDS,
)

OUT_OF_MEMORY = 3  # exit code; native code that finds no memory aborts instead


class _Follower:
    """One output: its matcher, the last mask that was sent, tokens and CPU seconds so far."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.mask, self.tokens, self.seconds = matcher, b"", 0, 0.0


class Worker:
    """The grammar of one definition, served on `link` until the other end closes it."""

    def __init__(self, link: socket.socket, vocabulary: Any, mask_bytes: int) -> None:
        self._link, self._vocabulary, self._size = link, vocabulary, mask_bytes
        self._followers: dict[int, _Follower] = {}

    def run(self, definition: bytes) -> None:
        """Compile, then answer operations. Returns when the engine has closed the link."""
        import llguidance

        _limit_cpu(COMPILE_CPU_SECONDS)
        try:
            matcher = compile_matcher(llguidance, self._vocabulary, Definition.decode(definition))
        except Refused as e:
            self._send(0, wire.REFUSED, str(e).encode())
            return
        _limit_cpu(0.0)
        self._send(0, wire.COMPILED, str(_private_bytes()).encode())
        while data := self._link.recv(wire.OPERATION.size):
            number, what, token = wire.OPERATION.unpack(data)
            if what == wire.CLOSE:
                self._followers.pop(number, None)
                continue
            _limit_cpu(OPERATION_CPU_SECONDS)
            if what == wire.OPEN:
                self._followers[number] = _Follower(matcher.deep_copy())
            self._advance(number, token if what == wire.ACCEPT else None)
            _limit_cpu(0.0)

    def _advance(self, number: int, token: int | None) -> None:
        """Follow a token, if there is one, and send what may come next."""
        follower = self._followers[number]
        began = time.thread_time()
        what, payload = self._next(follower, token)
        follower.seconds += time.thread_time() - began
        follower.tokens += token is not None
        budget = GUIDE_CPU_SECONDS + TOKEN_CPU_SECONDS * follower.tokens
        if follower.seconds > budget and what in (wire.MASK, wire.SAME):
            what = wire.BROKEN
            payload = f"it took {follower.seconds:.1f} s of CPU time for {follower.tokens} tokens".encode()
        if what in (wire.STOPPED, wire.BROKEN):
            del self._followers[number]
        self._send(number, what, payload)

    def _next(self, follower: _Follower, token: int | None) -> tuple[int, bytes]:
        matcher = follower.matcher
        if token is not None:
            matcher.consume_token(token)
            if matcher.is_error():
                return wire.BROKEN, _reason(matcher)
            if matcher.is_stopped():
                return wire.STOPPED, b""
        mask: bytes = matcher.compute_bitmask()
        if matcher.is_error() or mask.count(0) == len(mask):
            return wire.BROKEN, _reason(matcher)
        if mask == follower.mask:
            return wire.SAME, b""
        follower.mask = mask
        return wire.MASK, mask[: self._size].ljust(self._size, b"\0")

    def _send(self, number: int, what: int, payload: bytes) -> None:
        self._link.send(wire.RESULT.pack(number, what) + payload)


def run_worker(link: socket.socket, definition: int, vocabulary: Any, mask_bytes: int, nice: int) -> int:
    """Be the worker of a definition that is in the file `definition`. The exit code."""
    _confine(nice)
    try:
        with open(definition, "rb") as file:
            Worker(link, vocabulary, mask_bytes).run(file.read())
    except MemoryError:
        return OUT_OF_MEMORY
    except OSError:  # the engine has gone
        return 0
    return 0


def _confine(nice: int) -> None:
    """Take the priority and the limit of memory; be silent, and the first to go where memory runs out."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    used = int(_read("/proc/self/statm").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # a system that does not let it
        pass
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)


def _limit_cpu(seconds: float) -> None:
    """End the process when it has used so much more CPU time; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _private_bytes() -> int:
    """Resident memory that is not shared with the host, about."""
    resident, shared = _read("/proc/self/statm").split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _reason(matcher: Any) -> bytes:
    return (first_line(matcher.get_error()) or "no token of the vocabulary continues the text").encode()
