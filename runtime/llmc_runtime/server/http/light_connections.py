"""Light connections: sockets without transport and protocol, which are accepted and refused cheaply.

asyncio's transport and protocol and the HTTP parser cost several times as much as accepting a connection or refusing a
request. A new connection is therefore kept as a plain socket. While the server refuses requests (see load_shedding), a
refused request is answered and consumed. A request that may be served converts the connection to an ordinary one, whose
parser receives the data that was read here first; if many connections begin requests at the same time, they wait for
their turn as plain sockets (see read_turns). If the first request has arrived when the connection is accepted, and its
refusal closes the connection, the event loop never watches it. While clients do not use a connection again after a
refusal, most refusals close it (see light_requests.ReturningClients).

An ordinary connection on which a request was refused is lent: its requests are handled here in the same way until one
may be served, and the connection takes it back.

The connections that have sent something are handled in turns of limited time; the others of a turn are handled in the
next iteration of the event loop. The responses of several are sent together, one after the other: sending wakes a
client on the same machine, which costs several times as much as sending to one that is awake.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from llmc_runtime.server.http.fair_selector import FairSelector
from llmc_runtime.server.http.light_requests import (
    LightConnection,
    LightState,
    Probe,
    Refuse,
    ReturningClients,
    accept_waiting,
    answer_waiting,
    refuse_repeated,
    send_now,
)
from llmc_runtime.server.http.read_turns import HeadTurns

_SWEEP_SECONDS = 1.0  # maximum time between two checks of deadlines
_TURN_SECONDS = 0.001  # time of accepting, and of reading and refusing, per iteration of the event loop
_QUEUE_SECONDS = 0.002  # time of accepting if connections were left waiting in the iteration before
_STEP = 32  # connections between two looks at the clock, whose responses are sent together

Promote = Callable[[socket.socket, object, bytes, bool], object]


@dataclass(eq=False, slots=True)
class _Begun:
    """A light connection that has begun a request, and becomes an ordinary one when it is its turn."""

    light: LightConnection
    convert: Callable[[_Begun], None]
    reconsider: Callable[[_Begun], None]

    def parse(self, data: bytes) -> None:
        """See read_turns.Connection."""
        self.convert(self)

    def pause_reading(self) -> None:
        """See read_turns.Connection. Nothing is read while it waits."""

    def resume_reading(self) -> None:
        """See read_turns.Connection. Nothing is read until it is an ordinary connection."""

    def refuse(self, data: bytes) -> None:
        """See read_turns.Connection."""
        self.reconsider(self)


class LightConnections:
    """The light and lent connections of the server whose event loop is running, with the selector `fair`.

    `capacity` returns how many connections may become light now. `refusals` returns the refusals of one turn, or None
    if no request would be refused now. `probe` takes a head and returns the answer to a health probe, or None for
    another request. Requests that may be served begin when it is their turn in `turns`. `timeout_response` is sent to
    a client that sends no request within `head_seconds`; after a response, the next request must begin within
    `keep_alive` seconds. `on_change` is called with +1 and -1 as light connections are opened and closed.
    `full_response` counts a connection that is refused because there are too many, and returns the response.
    """

    def __init__(
        self,
        fair: FairSelector,
        capacity: Callable[[], int],
        refusals: Callable[[], Refuse | None],
        on_change: Callable[[int], None],
        timeout_response: bytes,
        head_seconds: float,
        keep_alive: float,
        turns: HeadTurns,
        full_response: Callable[[], bytes],
        probe: Probe,
    ) -> None:
        self._loop, self._fair = asyncio.get_running_loop(), fair
        self._capacity, self._refusals, self._probe, self._on_change = capacity, refusals, probe, on_change
        self._timeout_response, self._full_response = timeout_response, full_response
        self._head_seconds, self._keep_alive, self._turns = head_seconds, keep_alive, turns
        self._watched: dict[int, LightConnection] = {}  # by descriptor
        self._ready: dict[int, None] = {}  # descriptors of those that have sent something, the first first
        self._begun: set[_Begun] = set()
        self._returning = ReturningClients()
        self._queued = False  # whether connections were left waiting to be accepted
        self._next: asyncio.Handle | None = None  # the call of _turn in the next iteration
        self._sweeping: asyncio.TimerHandle | None = None
        self._sweep_seconds = min(_SWEEP_SECONDS, head_seconds / 10)
        fair.on_input = self._has_input

    def accept(
        self, listener: socket.socket, promote: Promote, count: int, between: Callable[[], object] = lambda: None
    ) -> bool:
        """Accept up to `count` connections that wait at `listener`, within the capacity.

        `promote` takes a socket, the address of its peer, `data` and `passed` (see LightConnection). `between` is
        called after every few connections. Returns False if asyncio has to accept further connections.
        """
        allowed = min(count, self._capacity())
        deadline = self._loop.time() + self._head_seconds
        end = time.monotonic() + (_QUEUE_SECONDS if self._queued else _TURN_SECONDS)
        accepted, failed = 0, False
        more_wait = True  # whether connections may still wait at the listener
        while more_wait and accepted < allowed and not failed and time.monotonic() < end:
            step = min(_STEP, allowed - accepted)
            clients, failed = accept_waiting(listener, step)
            accepted += len(clients)
            more_wait = len(clients) == step
            lights = [
                LightConnection(sock, partial(promote, sock, address), sock.close, deadline)
                for sock, address in clients
            ]
            for light, state in self._respond(lights):
                self._add(light, state)
        self._queued = more_wait and accepted > 0
        if self._queued:
            self._turns.hold_back()
        return not failed and (allowed == count or accepted < allowed)

    def lend(self, sock: socket.socket, promote: Callable[[bytes, bool], object], close: Callable[[], object]) -> None:
        """Handle the requests of an ordinary connection on which one was refused, until `promote` is called.

        `close` ends the connection, which must call `take_back` as it ends.
        """
        self._watch(
            LightConnection(
                sock, promote, close, self._loop.time() + self._keep_alive, lent=True, used=True, fresh=False
            )
        )

    def take_back(self, fd: int) -> None:
        """Forget the lent connection with this descriptor, if there is one."""
        if self._watched.pop(fd, None) is not None:
            self._fair.unwatch(fd)

    def evict(self) -> bool:
        """Close the light connection that was accepted first, but none that is lent. Returns False without one.

        If all of them have begun a request, refuse the latest of the API key that has the most.
        """
        light = next((light for light in self._watched.values() if not light.lent), None)
        if light is not None:
            self._release(light)
            light.close()
            return True
        begun = next((waiting for waiting in self._turns.latest_of_longest() if waiting in self._begun), None)
        if not isinstance(begun, _Begun):
            return False
        self._turns.leave(begun)
        self._begun.remove(begun)
        self._on_change(-1)
        send_now(begun.light.sock, self._full_response(), last=True)
        begun.light.close()
        return True

    def close(self) -> None:
        """Close all light connections. Those that are lent are left to their owners."""
        for light in list(self._watched.values()):
            self._release(light)
            if not light.lent:
                light.close()
        for begun in self._begun:
            self._turns.leave(begun)
            self._on_change(-1)
            begun.light.close()
        self._begun.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    def _add(self, light: LightConnection, state: LightState) -> None:
        """Watch, promote or close a connection that is neither watched nor counted."""
        if state is not LightState.LIGHT:
            self._close_or_promote(light, state)
            return
        self._watch(light)
        self._on_change(1)
        if not light.used:
            self._fair.batches.expect()

    def _watch(self, light: LightConnection) -> None:
        """Wait for the next request."""
        fd = light.sock.fileno()
        self._watched[fd] = light
        self._fair.watch(fd)
        if light.probing:
            self._serve_first(light)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(self._sweep_seconds, self._sweep)

    def _serve_first(self, light: LightConnection) -> None:
        """Have the selector serve a watched connection first if its latest request was a probe."""
        light.first = light.probing
        self._fair.set_probing(light.sock.fileno(), light.probing)

    def _release(self, light: LightConnection) -> None:
        self.take_back(light.sock.fileno())
        if not light.lent:
            self._on_change(-1)

    def _has_input(self, fds: list[int]) -> None:
        """Note that watched connections have sent something."""
        self._ready |= dict.fromkeys(fds)
        if self._next is None:
            self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Handle what watched connections have sent, for a limited time."""
        self._next, end = None, time.monotonic() + _TURN_SECONDS
        while self._ready and time.monotonic() < end:
            fds = list(islice(self._ready, _STEP))
            for fd in fds:
                del self._ready[fd]
            for light, state in self._respond([light for fd in fds if (light := self._watched.get(fd)) is not None]):
                if state is not LightState.LIGHT:
                    self._release(light)
                    self._close_or_promote(light, state)
        if self._ready:
            self._next = self._loop.call_soon(self._turn)

    def _close_or_promote(self, light: LightConnection, state: LightState) -> None:
        """Close or promote a connection that is not watched."""
        if state is LightState.CLOSED:
            light.close()
        elif light.lent:
            light.promote(light.data, light.passed)
        else:
            begun = _Begun(light, self._convert, self._reconsider)
            self._turns.begin(begun, light.data)
            if self._turns.waits(begun):
                self._begun.add(begun)
                self._on_change(1)

    def _convert(self, begun: _Begun) -> None:
        """Make a light connection an ordinary one."""
        if begun in self._begun:
            self._begun.remove(begun)
            self._on_change(-1)
        begun.light.promote(begun.light.data, begun.light.passed)

    def _reconsider(self, begun: _Begun) -> None:
        """Refuse the request of a connection that has waited for its turn."""
        self._begun.remove(begun)
        self._on_change(-1)
        for light, state in self._respond([begun.light]):
            self._add(light, state)

    def _respond(self, lights: list[LightConnection]) -> list[tuple[LightConnection, LightState]]:
        """Refuse the requests that have arrived on these connections, or answer probes, and send the responses."""
        if not lights:
            return []
        refuse = self._refusals()
        deadline = self._loop.time() + self._keep_alive
        results: list[tuple[LightConnection, LightState, bytes]] = []
        for light in lights:
            response = refuse_repeated(light, refuse, deadline)
            if response:
                results.append((light, LightState.LIGHT, response))
            else:
                results.append((light, *answer_waiting(light, refuse, self._probe, deadline, self._returning)))
        refused = 0
        states: list[tuple[LightConnection, LightState]] = []
        for light, state, response in results:
            if response:
                refused += not light.probing
                if light.probing is not light.first and light.sock.fileno() in self._watched:
                    self._serve_first(light)
                if not send_now(light.sock, response, state is LightState.CLOSED):
                    state = LightState.CLOSED
            states.append((light, state))
        if refused:
            self._fair.batches.refused(refused)
        return states

    def _sweep(self) -> None:
        """Close the connections whose next request did not arrive in time; many of them in several iterations."""
        now, end = self._loop.time(), time.monotonic() + _TURN_SECONDS
        late = [light for light in self._watched.values() if light.deadline <= now]
        while late and time.monotonic() < end:
            light = late.pop()
            if not light.used:
                send_now(light.sock, self._timeout_response)
            self._release(light)
            light.close()
        seconds = 0.0 if late else self._sweep_seconds
        self._sweeping = self._loop.call_later(seconds, self._sweep) if self._watched else None
