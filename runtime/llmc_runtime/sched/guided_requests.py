"""The requests whose next token depends on a guide: which of them may sample now, and which have ended by it.

A guide may take its time (see sched.guide). Its request then misses steps, and nobody else does: it is left out of a
step whose mask would not be there. For a short while a step does wait, since most masks come at once; a request whose
mask came late is not waited for again for a number of tokens that doubles each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.step import RowMask, Step
from llmc_runtime.sched.token_guide import Guide
from llmc_runtime.sched.waiting_queue import Waiting

_IDLE = 8  # plans that leave out a request before its row may go to another tenant's
_FIRST = 8  # tokens for which a request whose mask was late is not waited for


class Guided:
    """The live requests that have a guide."""

    def __init__(self) -> None:
        self._live: dict[Request, None] = {}  # in order of arrival
        self.left_out = False  # whether the last plan left out a request whose mask is not known

    def __bool__(self) -> bool:
        return bool(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live)

    def add(self, request: Request) -> None:
        """It has been added; one without a guide is passed over."""
        if request.guide is not None:
            self._live[request] = None

    def remove(self, request: Request) -> None:
        """It has ended."""
        if request.guide is not None:
            self._live.pop(request, None)
            request.guide.close()

    def clear(self) -> None:
        """All have ended."""
        for request in self._live:
            assert request.guide is not None
            request.guide.close()
        self._live.clear()

    def ended(self) -> list[tuple[Request, LlmcError | None]]:
        """Those that their guides have ended or failed, in order of arrival."""
        found: list[tuple[Request, LlmcError | None]] = []
        for request in self._live:
            if request.status is Status.WAITING:
                continue  # its guide may not have begun
            assert request.guide is not None
            try:
                if request.guide.mask() == b"":
                    found.append((request, None))
            except LlmcError as error:
                found.append((request, error))
        return found

    def leave_out(self, request: Request) -> None:
        """The plan that is being made leaves this one out: its mask is not known."""
        self.left_out = True
        request.idle_plans += 1

    def park(self, running: list[Request], waiting: Waiting, free: Callable[[Request], None]) -> None:
        """Rows of requests whose masks are late go to other tenants' requests that wait; `free` gives a row back. A
        request waits again, before those that never ran, when its mask is there."""
        self.left_out = False
        for request in self._live:
            if request.status is Status.PARKED and known_mask(request) is not None:
                request.status = Status.PREEMPTED
                waiting.add(request)
            elif request.idle_plans >= _IDLE and request.status is Status.RUNNING and waiting.has_other(request.tenant):
                if request.num_total == len(request.tokens) and known_mask(request) is None:
                    running.remove(request)
                    free(request)
                    request.status, request.idle_plans = Status.PARKED, 0
            self.left_out |= request.status is Status.PARKED

    def fill(self, step: Step, planned: Sequence[Request]) -> None:
        """Add the masks that are known to a plan; it stays open where one is not."""
        for request, work in zip(planned, step.work):
            if request.guide is None or not work.emit:
                continue
            request.idle_plans = 0
            mask = known_mask(request) if request.num_total == len(request.tokens) + 1 else None
            if mask:
                step.masks.append(RowMask(request.row, mask))
            else:
                step.open = True

    def complete(self, step: Step, planned: Sequence[Request], anything: bytes) -> list[RowMask]:
        """The masks that an open step lacks; it is open no more. A row whose mask is late, or whose request has ended,
        gets `anything`, and its token is dropped."""
        sent, masks = {mask.row for mask in step.masks}, []
        step.open = False
        for request, work in zip(planned, step.work):
            if request.guide is None or not work.emit or work.row in sent:
                continue
            mask = known_mask(request) if request.status is Status.RUNNING else anything
            request.dropped = mask is None
            masks.append(RowMask(work.row, mask or anything))
        return masks

    def awaited(self) -> bool:
        """Whether a step that is planned now should wait for a mask."""
        return any(pending(r) and r.status is Status.RUNNING and not is_slow(r) for r in self._live)

    def stop_waiting(self) -> None:
        """The masks that are awaited are late."""
        for request in self._live:
            if pending(request) and request.status is Status.RUNNING and not is_slow(request):
                request.late_masks += 1
                request.slow_until = len(request.tokens) + (_FIRST << min(request.late_masks, 16))


def known_mask(request: Request) -> bytes | None:
    """The mask of the next token of a guided request; None where it is not known, or nothing may follow."""
    assert request.guide is not None
    try:
        return request.guide.mask() or None
    except LlmcError:  # it has failed, which `ended` tells
        return None


def pending(request: Request) -> bool:
    """Whether its next mask is not known yet."""
    try:
        return request.guide is not None and request.guide.mask() is None
    except LlmcError:  # it has failed, which `ended` tells
        return False


def follow(guide: Guide, token: int) -> tuple[tuple[str, None] | None, LlmcError | None]:
    """Have the guide follow a token: how the request ends by that, as far as it is known at once, and why if it
    fails."""
    guide.accept(token)
    try:
        return (("stop", None) if guide.mask() == b"" else None), None
    except LlmcError as error:
        return ("error", None), error


def is_slow(request: Request) -> bool:
    """Whether no step waits for its mask."""
    return len(request.tokens) < request.slow_until


def may_sample(request: Request) -> bool:
    """Whether a step may sample its next token: its mask is there, or a token is under way and the mask that follows it
    is expected in time."""
    if request.dropped:
        return False
    if request.num_total > len(request.tokens):
        return not is_slow(request)
    return known_mask(request) is not None
