"""What light connections ask of load shedding: refusals of requests, and answers to health probes, from their heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Refusal(Protocol):
    """A complete response, the length of the request's body in bytes, whether the connection is closed, and whether the
    request is a health probe."""

    @property
    def data(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def closes(self) -> bool: ...
    @property
    def is_probe(self) -> bool: ...


class Refuse(Protocol):
    """Refuses the requests of one turn, in which nothing is admitted and nothing ends."""

    def __call__(self, head: bytes, last: bool, /) -> Refusal | None:
        """Return the refusal of a request, whose connection is to be closed if it is the `last`; None if the request
        may be served."""

    def repeated(self, data: bytes, /) -> bytes | None:
        """Return the response to `data` if that is one whole request, refused like an earlier one of the turn, whose
        connection stays open; None for anything else. This takes a fraction of the time of a call."""


Probe = Callable[[bytes], Refusal | None]
