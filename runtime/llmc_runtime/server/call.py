"""One HTTP request to the model: its identity, and the resources that it holds until its response is sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmc_runtime.server.http.request_log import Record
from llmc_runtime.server.operations.admission import AdmissionSlot, ResponseReservation
from llmc_runtime.server.stored_responses import PendingResponse

_TOKEN_BYTES = 80  # bytes of memory a generated token of an output: its id and its text


@dataclass
class Resources:
    """The resources of a call until its response is sent.

    seconds, deadline:  its timeout, and when that ends (time.monotonic)
    slot:               its admission slot
    response_memory:    the reservation for the bytes of its response
    stored:             the entry under which the response will be stored
    running, tokens:    prompts that the engine has not completed, and tokens that it has generated for the others
    """

    seconds: float | None = None
    deadline: float | None = None
    slot: AdmissionSlot | None = None
    response_memory: ResponseReservation | None = None
    stored: PendingResponse | None = None
    running: int = 0
    tokens: int = 0

    @property
    def remaining(self) -> float | None:
        """The remaining seconds; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def release_slot(self, tokens: int = 0) -> None:
        """Release the admission slot after `tokens` generated tokens."""
        if self.slot is not None:
            self.slot.close(tokens)

    def release_response(self) -> None:
        """Release what the response needs, once it was sent or is no longer wanted."""
        if self.response_memory is not None:
            self.response_memory.close()
        if self.stored is not None:
            self.stored.close()


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    `key` identifies the API key ("" for none), `prompt_param` the field that contains the prompt, and `request_id` the
    request in the log and for the client. The special tokens in `visible` appear in the response's text. Updates of an
    output are at least `interval` seconds apart, except the last one. The response has its log-probabilities `repeats`
    times. `hold` is called with bytes of complete outputs that the client may not have read yet.
    """

    id: str
    key: str
    prompt_param: str
    record: Record | None = None
    request_id: str = ""
    visible: frozenset[int] = frozenset()
    interval: float = 0.0
    repeats: int = 1
    hold: Callable[[int], object] = lambda size: None
    resources: Resources = field(default_factory=Resources)

    def cache_salt(self, salt: str | None) -> str:
        """Return the salt of the prefixes of a request with this `cache_salt`: keys share none."""
        return f"{self.key}/{salt or ''}"

    def end_prompt(self, tokens: int) -> None:
        """Record that the engine has completed a prompt with `tokens` generated tokens.

        Once it has completed all, the admission slot is released: a client that reads slowly keeps no other request
        waiting. Its memory counts as that of unsent responses then.
        """
        resources = self.resources
        resources.running -= 1
        resources.tokens += tokens
        self.hold(tokens * _TOKEN_BYTES)
        if resources.slot is not None and not resources.running:
            if resources.tokens:
                resources.slot.begin()
            resources.release_slot(resources.tokens)

    @property
    def logged_characters(self) -> int:
        """The number of characters of a prompt's text to log."""
        return 0 if self.record is None else self.record.prompt_characters
