"""Takes the requests that a light connection has sent, as far as they are refused or are probes."""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable
from dataclasses import dataclass

from llmc_runtime.server.http.light_sockets import receive_now
from llmc_runtime.server.http.refusals import Probe, Refuse
from llmc_runtime.server.http.returning_clients import ReturningClients

_READ = 2 << 10  # bytes read at a time, and the maximum of a head; a longer one is left to the parser
_MAX_READS = 16  # per turn of a connection, so that connections alternate
_MAX_REQUESTS = 4  # in one read; an ordinary connection handles the rest of a pipeline


@dataclass(eq=False, slots=True)
class LightConnection:
    """The state of a light or lent connection.

    `sock` may be in blocking mode. `promote(data, passed)` makes it an ordinary connection (again), which begins with
    `data`; `passed`: load shedding has checked the head of the next request, which may be served. `close` ends
    the connection, at `deadline` (loop time) at the latest. `skip` bytes of a refused body are still to arrive.
    """

    sock: socket.socket
    promote: Callable[[bytes, bool], object]
    close: Callable[[], object]
    deadline: float
    lent: bool = False
    used: bool = False  # whether a request was refused, or a probe answered
    fresh: bool = True  # whether nothing was sent after the first refusal so far
    probing: bool = False  # whether the latest request was a health probe
    first: bool = False  # whether the selector serves it first for that
    skip: int = 0
    data: bytes = b""  # the arguments of `promote`
    passed: bool = False


class LightState(enum.Enum):
    """The state of a light connection after its data was handled: it stays, is promoted, or is closed."""

    LIGHT = enum.auto()
    ORDINARY = enum.auto()
    CLOSED = enum.auto()


def refuse_repeated(light: LightConnection, refuse: Refuse | None, deadline: float) -> bytes | None:
    """Return the refusal of a request on a kept connection that is like others of the turn; most are under overload.
    For anything else, leave what was read to `answer_waiting`, and return None."""
    if refuse is None or light.fresh or light.probing or light.skip or light.data:
        return None
    try:
        data = light.sock.recv(_READ, socket.MSG_DONTWAIT)
    except OSError:
        return None
    response = refuse.repeated(data)
    if response is None:
        light.data = data
        return None
    light.deadline = deadline
    return response


def answer_waiting(
    light: LightConnection, refuse: Refuse | None, probe: Probe, deadline: float, returning: ReturningClients
) -> tuple[LightState, bytes]:
    """Take the requests that are refused, and probes, up to the first that must be served. Return the responses.

    `deadline` is that of the next request.
    """
    responses = b""
    try:
        for _ in range(_MAX_READS):
            data, light.data = light.data, b""
            data = data or light.sock.recv(_READ, socket.MSG_DONTWAIT)
            if light.used and light.fresh:
                light.fresh = False
                returning.saw(bool(data))
            if not data:
                return LightState.CLOSED, responses
            state, response = _answer_from(light, data, refuse, probe, deadline, returning)
            responses += response
            if state is not LightState.LIGHT:
                return state, responses
            if len(data) < _READ:
                break  # most clients wait for the response, so there is nothing to read; if there is, epoll reports it
    except (BlockingIOError, InterruptedError):
        pass
    except OSError:
        return LightState.CLOSED, b""
    return LightState.LIGHT, responses


def _answer_from(
    light: LightConnection,
    data: bytes,
    refuse: Refuse | None,
    probe: Probe,
    deadline: float,
    returning: ReturningClients,
) -> tuple[LightState, bytes]:
    """Take the refused requests and the probes at the start of `data`. Return the responses.

    `light.data` is set to what remains.
    """
    responses, requests = b"", 0
    while data:
        if light.skip:
            skipped = min(light.skip, len(data))
            light.skip, data = light.skip - skipped, data[skipped:]
            continue
        end = data.find(b"\r\n\r\n") + 4
        at_limit = requests == _MAX_REQUESTS
        checks = refuse is not None and end >= 4 and not at_limit
        refusal, missing = probe(data[:end]) if end >= 4 and not at_limit else None, 0
        if refusal is None and refuse is not None and checks:
            is_whole = end < len(data) < _READ  # with its body, as far as one can tell
            refusal = refuse(data[:end], is_whole and light.fresh and not light.used and returning.next_closes())
        if refusal is not None and (missing := end + refusal.length - len(data)) > 0:
            data += receive_now(light.sock, missing)
        if refusal is None or (refusal.closes and refusal.length > len(data) - end):
            light.data, light.passed = data, refusal is None and checks
            return LightState.ORDINARY, responses
        responses += refusal.data
        if refusal.closes:
            return LightState.CLOSED, responses
        light.used, light.probing, light.deadline = True, refusal.is_probe, deadline
        if missing == 0:  # most clients wait for the response
            return LightState.LIGHT, responses
        light.skip, data = refusal.length, data[end:]
        requests += 1
    return LightState.LIGHT, responses
