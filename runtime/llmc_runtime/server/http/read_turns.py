"""Turns of connections that are sending, so that many at the same time do not delay the tokens of open streams.

`HeadTurns` limits how many beginnings of requests are parsed in one iteration of the event loop, and `BodyTurns` the
number of bodies that are read at a time. The other connections are paused until it is their turn: then the event loop
does not poll them (hundreds of readable sockets make each iteration slow), and TCP's flow control slows their clients
down.

Parsing a head starts a request, whose first steps take place in the next iterations: the longer these take, the fewer
heads are parsed. The connections of each API key wait in a lane of their own, and lanes take turns: a key that sends
thousands of requests delays its own. Probes have a lane that comes first.

Requests for generation that wait here count as open requests of their key (see load_shedding), so that those which it
cannot have admitted are refused as they arrive. If the key is refused while they wait, they are refused at once, before
it is their turn.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from llmc_runtime.fair_queue import KeyCounts
from llmc_runtime.server.http.probes import PROBES

MIN_HEADS, MAX_HEADS = 2, 4  # limits of the heads parsed per iteration of the event loop
MAX_PROBES = 4  # heads of probes parsed per iteration
MAX_CHECKED = 32  # waiting heads of a lane that are checked for a refusal per iteration
HEAD_SECONDS = 0.001  # maximum time of parsing heads per iteration, but for the last one
HELD_ITERATIONS = 4  # while connections wait to be accepted, one head is parsed in this many iterations
# Target of an iteration: after a longer one, half as many heads are parsed; after a shorter one, one more.
ITERATION_SECONDS = 0.002
_PROBES = tuple(f"GET {path} ".encode() for path in PROBES)
_PROBE_LANE = None
MAX_BODIES = 8  # connections whose bodies are read at a time
BODY_BYTES = 512 << 10  # maximum bytes of a turn, if other connections wait
BODY_SECONDS = 0.02  # maximum time of a turn, if other connections wait


def is_probe(head: bytes) -> bool:
    """Return whether this is the head of a health probe, complete: others could be held back in any number."""
    return head.startswith(_PROBES) and b"\r\n\r\n" in head


class PausableConnection(Protocol):
    """A connection whose reading can be paused."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Continue reading, unless the part of the body read so far has not been consumed."""


class Connection(PausableConnection, Protocol):
    """A connection that begins requests."""

    def parse(self, data: bytes) -> None:
        """Parse the beginning of a request."""

    def refuse(self, data: bytes) -> None:
        """Refuse the request that `data` begins with. The connection has left its lane."""


class HeadTurns:
    """The connections of one server that have begun a request.

    `lane_of` returns the lane of a head: an identifier of its API key, "" without a valid one. `sheds` returns
    whether it can be refused without the parser, and `blocked` whether those of a lane are refused now. `waiting`
    counts those that wait, by lane; it has no lane without one. `refused` is called with the lane of each that is
    refused.
    """

    def __init__(self) -> None:
        self.lane_of: Callable[[bytes], str] = lambda head: ""
        self.sheds: Callable[[bytes], bool] = lambda data: False
        self.blocked: Callable[[str], bool] = lambda lane: False
        self.refused: Callable[[str], object] = lambda lane: None
        self.waiting = KeyCounts()
        self._lanes = OrderedDict[str | None, OrderedDict[Connection, bytes]]()  # the next lane first; none is empty
        self._waiting: dict[Connection, str | None] = {}  # the lanes of connections
        self._counted: set[Connection] = set()  # connections that `waiting` counts
        self._maximum = MAX_HEADS  # heads of an iteration
        self._held_back = False
        self._num_held = 0  # iterations that were held back
        self._begun = self._begun_probes = 0  # heads parsed in this iteration
        self._spent = 0.0  # seconds of parsing in this iteration
        self._turned = -math.inf  # when it began
        self._next: asyncio.Handle | None = None  # the call of _turn in the next iteration

    def begin(self, connection: Connection, data: bytes, head: bytes | None = None) -> None:
        """Parse `data`, the beginning of a request, in this iteration or a later one.

        `head`: the beginning of the head, if the connection has received it before.
        """
        probe = is_probe(data if head is None else head)
        if connection in self._waiting:  # TLS may hand over several pieces before the pause takes effect
            self._lanes[self._waiting[connection]][connection] += data
        elif self._may_begin(probe) and (_PROBE_LANE not in self._lanes if probe else not self._lanes):
            self._parse(connection, data, probe)
        else:
            self._wait(connection, data, _PROBE_LANE if probe else self.lane_of(data if head is None else head))
            connection.pause_reading()
        if self._next is None:
            self._turned = time.monotonic()
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def waits(self, connection: Connection) -> bool:
        """Return whether the beginning of a request of this connection is still to be parsed."""
        return connection in self._waiting

    def leave(self, connection: Connection) -> None:
        """Forget a closed connection."""
        if connection in self._waiting:
            self._take(connection)

    def hold_back(self) -> None:
        """Parse at most one head in HELD_ITERATIONS iterations such as the next one, because more connections wait to
        be accepted: a probe may be the last of them.
        """
        self._held_back = True

    def latest_of_longest(self) -> Iterable[Connection]:
        """Return the connections of the longest lane, the latest first."""
        longest = max(self._lanes.values(), key=len) if self._lanes else OrderedDict[Connection, bytes]()
        return reversed(longest)

    def _wait(self, connection: Connection, data: bytes, lane: str | None) -> None:
        self._waiting[connection] = lane
        self._lanes.setdefault(lane, OrderedDict())[connection] = data
        if lane is not None and self.sheds(data):
            self._counted.add(connection)
            self.waiting.change(lane, 1)

    def _may_begin(self, probe: bool) -> bool:
        """Return whether another head may be parsed in this iteration."""
        if probe:
            return self._begun_probes < MAX_PROBES
        return self._begun < self._maximum and self._spent < HEAD_SECONDS

    def _turn(self) -> None:
        """Begin a new iteration: parse heads that wait, of each lane in turn."""
        now = time.monotonic()
        slow = now - self._turned > ITERATION_SECONDS
        if self._held_back:
            self._maximum, self._held_back = int(self._num_held % HELD_ITERATIONS == 0), False
            self._num_held += 1
        else:
            self._maximum = max(MIN_HEADS, self._maximum // 2) if slow else min(MAX_HEADS, self._maximum + 1)
        self._begun, self._begun_probes, self._spent, self._turned = 0, 0, 0.0, now
        self._next = asyncio.get_running_loop().call_soon(self._turn) if self._waiting else None
        while (probes := self._lanes.get(_PROBE_LANE)) and self._may_begin(True):
            self._continue(next(iter(probes)), True)
        self._refuse_blocked(now + HEAD_SECONDS)
        while self._may_begin(False):
            lane = next((lane for lane in self._lanes if lane is not _PROBE_LANE), None)
            if lane is None:
                break
            self._lanes.move_to_end(lane)
            self._continue(next(iter(self._lanes[lane])), False)

    def _refuse_blocked(self, end: float) -> None:
        """Refuse waiting requests whose key is refused now, the first of each lane, until the time `end`."""
        for lane in list(self.waiting):
            if time.monotonic() >= end:
                return
            if not self.blocked(lane):
                continue
            for connection in list(islice(self._lanes.get(lane, ()), MAX_CHECKED)):
                if time.monotonic() >= end:
                    return
                if connection in self._counted:
                    data = self._take(connection)
                    self.refused(lane)
                    connection.resume_reading()
                    connection.refuse(data)

    def _continue(self, connection: Connection, probe: bool) -> None:
        data = self._take(connection)
        connection.resume_reading()
        self._parse(connection, data, probe)

    def _take(self, connection: Connection) -> bytes:
        """Remove a waiting connection and return its data."""
        lane = self._waiting.pop(connection)
        data = self._lanes[lane].pop(connection)
        if connection in self._counted and lane is not None:
            self._counted.remove(connection)
            self.waiting.change(lane, -1)
        if not self._lanes[lane]:
            del self._lanes[lane]
        return data

    def _parse(self, connection: Connection, data: bytes, probe: bool) -> None:
        if probe:
            self._begun_probes += 1
            connection.parse(data)
            return
        self._begun += 1
        began = time.monotonic()
        connection.parse(data)
        self._spent += time.monotonic() - began


class BodyTurns:
    """The connections of one server that are sending a body: at most MAX_BODIES are active, the others are paused.

    An active connection becomes the last waiting one after BODY_BYTES bytes or BODY_SECONDS seconds, if others wait.
    """

    def __init__(self) -> None:
        self._active: OrderedDict[PausableConnection, int] = OrderedDict()  # -> bytes read in its turn
        self._waiting: OrderedDict[PausableConnection, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def read(self, connection: PausableConnection, size: int) -> None:
        """Count `size` bytes of a body that were read from this connection."""
        if connection in self._active:
            self._active[connection] += size
            if self._active[connection] >= BODY_BYTES:
                self._pass_on(connection)
        elif len(self._active) < MAX_BODIES and connection not in self._waiting:
            self._active[connection] = size
        else:
            self._wait(connection)
            self._watch()

    def leave(self, connection: PausableConnection) -> None:
        """Remove a connection that is closed or whose body is complete."""
        if connection in self._waiting:
            del self._waiting[connection]
            connection.resume_reading()
        elif self._active.pop(connection, None) is not None:
            self._next()

    def _wait(self, connection: PausableConnection) -> None:
        self._waiting[connection] = None
        connection.pause_reading()

    def _pass_on(self, connection: PausableConnection) -> None:
        """End the connection's turn, if others wait."""
        self._active[connection] = 0
        if self._waiting:
            del self._active[connection]
            self._wait(connection)
            self._next()

    def _next(self) -> None:
        """Give the turn to the first waiting connection."""
        if self._waiting and len(self._active) < MAX_BODIES:
            connection, _ = self._waiting.popitem(last=False)
            self._active[connection] = 0
            connection.resume_reading()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BODY_SECONDS, self._tick)

    def _tick(self) -> None:
        """End the turns of as many active connections as others wait."""
        self._timer = None
        for connection in list(self._active)[: len(self._waiting)]:
            self._pass_on(connection)
        if self._waiting:
            self._watch()
