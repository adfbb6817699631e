"""The messages between rank 0 of a group and the processes of the others, over a socket pair each.

Rank 0 sends Join first, then Meet once all have joined, then the calls of its executor: Launch, Guide, Settle and
Prepare. A process answers Join by Joined, a step that has ended by Done, the others by Settled. If something fails, it
sends Failed and ends.

If Ray places the ranks, rank 0 sends Place to the process that talks to Ray, which answers by Placed or Failed; before
Join, each rank sends Hello, and gets the memory of the group as a file descriptor.
"""

from __future__ import annotations

import select
import socket
import struct
from array import array
from functools import cached_property
from typing import Any

import msgspec

from llmc_runtime.sched.step import RowMasks, Step

_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A message whose first element is the name of its class."""


class Join(_Message):
    """Open the artifact at `path`, with that of the draft model at `draft` if it is not empty (both percent-encoded).
    They have this digest together. The process is `rank` of `ranks`.

    threads:   compute threads of each rank
    kv_bytes:  size of the KV cache
    limit:     seconds that a rank waits for the others
    verify:    whether to check the hashes of the weights
    engine:    number of the engine, whose ranks these are
    snapshots: number of snapshots of recurrent layers' states
    """

    path: str
    digest: str
    rank: int
    ranks: int
    threads: int
    kv_bytes: int
    limit: float
    verify: bool
    engine: int = 0
    snapshots: int = 0
    draft: str = ""


class Meet(_Message):
    """Open the memories of all ranks by their handles, in the order of the ranks."""

    handles: list[bytes]


class Launch(_Message):
    """Launch a step and, unless it is open, wait for it."""

    step: Step


class Guide(_Message):
    """Supply the masks of the open step and wait for it."""

    masks: list[RowMasks]


class Settle(_Message):
    """Discard the steps in flight."""


class Prepare(_Message):
    """Prepare every size of decode step."""


class Joined(_Message):
    """The rank has opened the artifact; `handle` is that of the memory to which the other ranks write."""

    handle: bytes


class Done(_Message):
    """A step has ended; `digest` is the CRC-32 of the sampled ids."""

    digest: int


class Settled(_Message):
    """The call of rank 0 is done, and no step is in flight."""


class Failed(_Message):
    """The LlmcError that ended the process."""

    code: str
    cause: str
    remedy: str


class Place(_Message):
    """Start an actor for each of the ranks above 0, which connects to the Unix socket `path` and sends Hello.

    threads:  CPUs to reserve for each rank, also for rank 0
    seconds:  time limit of waiting for CPUs that others use
    """

    path: str
    ranks: int
    threads: int
    seconds: float


class Placed(_Message):
    """Every actor has connected."""


class Hello(_Message):
    """The first message of an actor."""

    rank: int


Call = Join | Meet | Launch | Guide | Settle | Prepare
Reply = Joined | Done | Settled | Failed | Hello
Placement = Placed | Failed


def _listed(value: object) -> list[int]:
    """Return the tokens of a prompt, which msgspec encodes as a list only."""
    if not isinstance(value, array):
        raise NotImplementedError(f"a message contains a {type(value).__name__}")
    return value.tolist()


class Link:
    """One end of the socket pair. `kinds` are the messages that it receives."""

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        self.socket = connection
        self._encode, self._decoder = msgspec.msgpack.Encoder(enc_hook=_listed).encode, msgspec.msgpack.Decoder(kinds)

    def encode(self, message: _Message) -> bytes:
        """Return the bytes of a message, which `send` takes."""
        data = self._encode(message)
        return _LENGTH.pack(len(data)) + data

    def send(self, data: bytes) -> None:
        """Send an encoded message. Raises OSError if the other end is closed, or after the socket's timeout."""
        self.socket.sendall(data)

    def receive(self) -> Any:
        """Return the next message, None if the other end is closed. Raises TimeoutError after the socket's timeout."""
        head = self._read(_LENGTH.size)
        data = head and self._read(*_LENGTH.unpack(head))
        return self._decoder.decode(data) if data else None

    @cached_property
    def _poller(self) -> select.poll:
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return poller

    def ready(self) -> bool:
        """Return whether a message, or the end of the connection, can be received without waiting."""
        return bool(self._poller.poll(0))

    def _read(self, count: int) -> bytearray | None:
        """Receive exactly `count` bytes; None if the connection ends before."""
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                received = self.socket.recv_into(view[at:])
            except ConnectionError:
                return None
            if not received:
                return None
            at += received
        return data
