"""A rank above 0, as rank 0 sees it: its link, and whether its process runs."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from typing import Any

from llmc_runtime.device.device import group_ended
from llmc_runtime.exec.rank_messages import Failed, Link, Reply
from llmc_runtime.format.errors import LlmcError

REPORT_SECONDS = 0.5  # seconds to wait for the reports of ranks that have failed
_ARRIVED_SECONDS = 0.001  # seconds to read a report that has arrived


class Rank(ABC):
    """The process of one rank, at the other end of a socket. `closed`: whether `report` has found its end."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.link, self.closed = rank, Link(connection, Reply), False

    @property
    @abstractmethod
    def pid(self) -> int:
        """The id of the process."""

    @property
    @abstractmethod
    def killed(self) -> bool:
        """Whether the process has ended without a report."""

    @abstractmethod
    def ended(self) -> LlmcError | None:
        """Return the error of a process that has ended, None while it runs."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process, which may be stopped."""

    @abstractmethod
    def close(self) -> None:
        """Close the link, and end the process."""

    def receive(self, *kinds: type[Any]) -> Any:
        """Return the next message, which has one of these kinds. Raises the rank's LlmcError, and E119 if it has ended
        or does not answer."""
        try:
            message = self.link.receive()
        except TimeoutError:
            raise group_ended(f"rank {self.rank} did not answer") from None
        if isinstance(message, Failed):
            raise self._error(message)
        if message is None:
            raise self.ended() or group_ended(f"rank {self.rank} has closed its link")
        if not isinstance(message, kinds):
            raise RuntimeError(f"rank {self.rank} sent {message!r:.80} out of turn")
        return message

    def report(self, until: float) -> LlmcError | None:
        """Return the failure that the process reports before the time `until`, if it was not received yet."""
        self.link.socket.settimeout(max(_ARRIVED_SECONDS, until - time.monotonic()))
        try:
            while (message := self.link.receive()) is not None:
                if isinstance(message, Failed):
                    return self._error(message)
            self.closed = True
        except OSError:
            pass
        return None

    def _error(self, message: Failed) -> LlmcError:
        return LlmcError(message.code, f"rank {self.rank}: {message.cause}", message.remedy)
