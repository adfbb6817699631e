"""A group of ranks without processes: fake devices that get every step in the messages of the real protocol.

Rank 0 is the device that the scheduler sees. The others decode their messages and run the steps on their own devices,
which draw the same random numbers, so that all ranks sample the same tokens. A fault ends the group with E119, as
RankGroup does.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from llmc_runtime.device.device import group_ended
from llmc_runtime.exec.rank_messages import Call, Guide, Launch, Link, Settle
from llmc_runtime.format.errors import LlmcError

from tests.runtime.fake_executor import FakeExecutor

FAULTS = ("dead", "late", "diverges", "lost")
EVERY = 700  # calls until a fault, on average


class _Rank:
    """A rank above 0. `link` decodes as a process does."""

    def __init__(self, device: FakeExecutor) -> None:
        self.device, self.fault = device, ""
        self.tickets: deque[Any] = deque()  # of the steps that it has launched
        self._wire = _Wire()
        self.link = Link(self._wire, Call)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        """Deliver a message. Raises LlmcError E119 if the rank is dead."""
        if self.fault == "dead":
            raise group_ended("the process of a rank was ended by SIGKILL")
        if self.fault == "lost":
            return
        self._wire.data += data
        self._run(self.link.receive())

    def _run(self, call: Any) -> None:
        if isinstance(call, Launch):
            self.tickets.append(self.device.launch(call.step))
        elif isinstance(call, Guide):
            self.device.guide(self.tickets[0], call.masks)
        else:
            self.tickets.clear()
            self.device.settle()

    def done(self) -> int:
        """Return the digest of the oldest step. Raises LlmcError E119 if the rank does not answer."""
        if self.fault in ("late", "lost") or not self.tickets:
            raise group_ended("a rank did not answer")
        return digest(self.device.wait(self.tickets.popleft())) ^ (self.fault == "diverges")


class _Wire:
    """The receiving side of a socket, with the messages that were sent."""

    def __init__(self) -> None:
        self.data = bytearray()

    def recv_into(self, view: memoryview) -> int:
        """Move the first bytes into `view`."""
        count = min(len(view), len(self.data))
        view[:count] = self.data[:count]
        del self.data[:count]
        return count


class FakeRanks:
    """An executor of several ranks: the device of rank 0, and those of the others.

    `rng` draws when a rank fails, and how; without it, none does.
    """

    def __init__(self, first: FakeExecutor, others: Sequence[FakeExecutor], rng: random.Random | None) -> None:
        self.first, self.depth, self._rng = first, first.depth, rng
        self._others = [_Rank(device) for device in others]
        self._encode = self._others[0].link.encode
        self.fault = ""

    def launch(self, step: Any) -> Any:
        """Launch the step on all ranks."""
        self._perhaps()
        self._send(Launch(step))
        return self.first.launch(step)

    def guide(self, ticket: Any, masks: Any) -> None:
        """Guide the step on all ranks."""
        self._send(Guide(list(masks)))
        self.first.guide(ticket, masks)

    def wait(self, ticket: Any) -> Any:
        """Return the output of rank 0 once all ranks have computed the same."""
        self._perhaps()
        output = self.first.wait(ticket)
        for rank in self._others:
            if rank.done() != digest(output):
                raise LlmcError("E119", "a rank computed other tokens than rank 0", "")
        return output

    def settle(self) -> None:
        """Settle all ranks."""
        self._send(Settle())
        self.first.settle()

    def _send(self, call: Any) -> None:
        data = self._encode(call)
        for rank in self._others:
            rank.send(data)

    def _perhaps(self) -> None:
        """Let a rank fail, once."""
        if self._rng is not None and not self.fault and self._rng.randrange(EVERY) == 0:
            self.fault = self._rng.choice(FAULTS)
            self._rng.choice(self._others).fault = self.fault


def digest(output: Any) -> int:
    """The CRC-32 of the tokens of a step, and of those of its drafts."""
    runs = [(i, [token for token, _ in run]) for i, run in sorted((output.accepted or {}).items())]
    return zlib.crc32(repr((output.tokens, runs)).encode())
