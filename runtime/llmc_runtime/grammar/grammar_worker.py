"""A grammar process: compiles one grammar and computes the masks of the outputs that use it, within limits.

The kernel enforces the limits: RLIMIT_AS bounds the memory, and a timer of CPU time (ITIMER_PROF) kills the process,
even inside native code. In addition, every output has its own budget of CPU time; an output that exceeds it fails,
while the others continue. Masks after drafts have another budget; beyond it they are not computed.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from llmc_runtime.grammar import wire
from llmc_runtime.grammar.definition import Definition, Refused, compile_matcher, first_line
from llmc_runtime.grammar.limits import (
    COMPILE_CPU_SECONDS,
    GROWTH_BYTES,
    GUIDE_CPU_SECONDS,
    LOOK_CPU_SECONDS,
    LOOK_TOKEN_CPU_SECONDS,
    MEASURED_OPERATIONS,
    MEMORY_BYTES,
    OPERATION_CPU_SECONDS,
    TOKEN_CPU_SECONDS,
)

_NO_TOKEN = "NoExtensionBias"  # llguidance's reason if no token is allowed
_NO_TEXT = b"no text matches it, for example because a $ref or a rule refers only to itself"
OUT_OF_MEMORY = 3  # exit status; native code that runs out of memory aborts instead


class _Follower:
    """An output: its matcher, the last mask sent, and the tokens and CPU seconds so far, those for drafts apart."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.mask, self.tokens = matcher, b"", 0
        self.seconds = self.look_seconds = 0.0

    @property
    def may_look(self) -> bool:
        """Whether masks after drafts may be computed."""
        return self.look_seconds < LOOK_CPU_SECONDS + LOOK_TOKEN_CPU_SECONDS * self.tokens


class Worker:
    """Serves one grammar on `link` until the other end closes it. Masks have a bit for each of the first `size` ids."""

    def __init__(self, link: socket.socket, vocabulary: Any, size: int) -> None:
        self._link, self._vocabulary, self._size = link, vocabulary, size
        self._followers: dict[int, _Follower] = {}
        self._inherited = _resident_bytes()  # the vocabulary's, shared with the host
        self._reported = self._operations = 0  # bytes of private memory last reported, and all operations

    def run(self, definition: bytes) -> None:
        """Compile the grammar, then process operations until the engine closes the link."""
        import llguidance

        _limit_cpu(COMPILE_CPU_SECONDS)
        try:
            matcher = compile_matcher(llguidance, self._vocabulary, Definition.decode(definition))
        except Refused as e:
            self._send(0, wire.REFUSED, 0, str(e).encode())
            return
        _limit_cpu(0.0)
        self._report(wire.COMPILED, self._private_bytes())
        while data := self._link.recv(wire.MAX_DATAGRAM_BYTES):
            number, kind, serial = wire.OPERATION.unpack_from(data)
            tokens = wire.unpack_tokens(data[wire.OPERATION.size :])
            if kind == wire.CLOSE:
                self._followers.pop(number, None)
                continue
            self._report_growth()
            if kind == wire.LOOK:
                self._look(number, serial, tokens)
                continue
            _limit_cpu(OPERATION_CPU_SECONDS)
            if kind == wire.OPEN:
                self._followers[number] = _Follower(matcher.deep_copy())
            self._advance(number, serial, tokens)
            _limit_cpu(0.0)

    def _private_bytes(self) -> int:
        """Return approximately the memory that is not shared with the host, in bytes."""
        return max(0, _resident_bytes() - self._inherited)

    def _report(self, kind: int, private_bytes: int) -> None:
        self._reported = private_bytes
        self._send(0, kind, 0, str(private_bytes).encode())

    def _report_growth(self) -> None:
        """Report the private memory if it has grown by GROWTH_BYTES: a parser keeps its states of all tokens."""
        self._operations += 1
        if self._operations % MEASURED_OPERATIONS == 0:
            private_bytes = self._private_bytes()
            if private_bytes >= self._reported + GROWTH_BYTES:
                self._report(wire.GREW, private_bytes)

    def _advance(self, number: int, serial: int, tokens: Sequence[int]) -> None:
        """Accept tokens and send the next mask."""
        follower = self._followers[number]
        began = time.thread_time()
        kind, payload = self._next(follower, tokens)
        follower.seconds += time.thread_time() - began
        follower.tokens += len(tokens)
        budget = GUIDE_CPU_SECONDS + TOKEN_CPU_SECONDS * follower.tokens
        if follower.seconds > budget and kind in (wire.MASK, wire.SAME):
            kind = wire.BROKEN
            payload = f"it took {follower.seconds:.1f} s of CPU time for {follower.tokens} tokens".encode()
        if kind in (wire.STOPPED, wire.BROKEN):
            del self._followers[number]
        self._send(number, kind, serial, payload)

    def _look(self, number: int, serial: int, drafts: Sequence[int]) -> None:
        """Send the masks after drafts. The matcher does not advance; a copy of it follows the drafts."""
        follower = self._followers.get(number)
        matcher = None if follower is None else follower.matcher.deep_copy()
        for draft in drafts:
            if follower is None or not follower.may_look:
                break
            _limit_cpu(OPERATION_CPU_SECONDS)
            began = time.thread_time()
            mask = self._mask_after(matcher, draft)
            follower.look_seconds += time.thread_time() - began
            _limit_cpu(0.0)
            if mask is None:
                break
            same = mask == follower.mask
            self._send(number, wire.SAME_AHEAD if same else wire.AHEAD, serial, b"" if same else mask)
            if not mask:
                break
            follower.mask = mask
        if follower is not None:
            self._send(number, wire.AHEAD_END, serial, b"")

    def _mask_after(self, matcher: Any, draft: int) -> bytes | None:
        """Accept a draft; return the next mask, empty if the text has ended, None if the draft is not allowed."""
        if not matcher.validate_tokens([draft]):
            return None
        matcher.consume_token(draft)
        if matcher.is_error():
            return None
        return b"" if matcher.is_stopped() else self._mask_of(matcher)

    def _mask_of(self, matcher: Any) -> bytes | None:
        """Return the next mask; None if no token is allowed."""
        mask: bytes = matcher.compute_bitmask()
        whole, bits = divmod(self._size, 8)
        if 8 * len(mask) > self._size:
            mask = mask[:whole] + (bytes([mask[whole] & (1 << bits) - 1]) if bits else b"")
        if matcher.is_error() or mask.count(0) == len(mask):
            return None
        return mask.ljust(-(-self._size // 32) * 4, b"\0")

    def _next(self, follower: _Follower, tokens: Sequence[int]) -> tuple[int, bytes]:
        """Accept tokens of an output; return the kind of the result, and the next mask or the reason of a failure."""
        matcher = follower.matcher
        for token in tokens:
            matcher.consume_token(token)
            if matcher.is_error():
                return wire.BROKEN, _reason(matcher)
            if matcher.is_stopped():
                return wire.STOPPED, b""
        mask = self._mask_of(matcher)
        if mask is None:
            return wire.BROKEN, _reason(matcher, at_start=not follower.mask)
        if mask == follower.mask:
            return wire.SAME, b""
        follower.mask = mask
        return wire.MASK, mask

    def _send(self, number: int, kind: int, serial: int, payload: bytes) -> None:
        self._link.send(wire.RESULT.pack(number, kind, serial) + payload)


def run_worker(link: socket.socket, definition: int, vocabulary: Any, size: int, nice: int) -> int:
    """Run the worker for the definition in the file descriptor `definition`. Returns the exit status."""
    _confine(nice)
    try:
        with open(definition, "rb") as file:
            Worker(link, vocabulary, size).run(file.read())
    except MemoryError:
        return OUT_OF_MEMORY
    except OSError:  # the engine has exited
        return 0
    return 0


def _confine(nice: int) -> None:
    """Set the priority, limit the memory, silence the standard streams, and volunteer for the OOM killer."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    used = int(_read("/proc/self/statm").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # not permitted on this system
        pass
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)


def _limit_cpu(seconds: float) -> None:
    """Kill the process once it has used this many more seconds of CPU time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _resident_bytes() -> int:
    """Return the resident memory without that of files, in bytes. In a forked process, it includes the pages that it
    shares with its parent."""
    resident, shared = _read("/proc/self/statm").split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _reason(matcher: Any, at_start: bool = False) -> bytes:
    """Return why no mask follows: llguidance's reason, or that no token continues the text."""
    reason = first_line(matcher.get_error())
    if reason not in ("", _NO_TOKEN):
        return reason.encode()
    return _NO_TEXT if at_start else b"no token of the vocabulary continues the text"
