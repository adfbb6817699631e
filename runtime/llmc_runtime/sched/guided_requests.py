"""GuidedRequests: the requests whose next token depends on a guide, such as a grammar.

Guides compute masks asynchronously (see token_guide). A request whose mask is late is left out of steps, without effect
on others. A step waits a short time for masks, since most of them come soon. After a late mask, steps do not wait for
that request for a number of tokens that doubles each time.

A step that verifies drafts of a guided request samples each of its tokens with the mask that follows the draft before
it. Once the drafts are known, these masks are requested from the guide. A plan made then verifies the drafts whose
masks have come. An open step verifies drafts that the host does not know yet: if some masks are late, the tokens after
the last one that came are dropped. If a mask excludes a draft, the later masks do not matter, since the draft is
rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.step import RowMasks, Step, StepOutput, Work
from llmc_runtime.sched.token_guide import Guide, allows
from llmc_runtime.sched.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from llmc_runtime.sched.host_drafts import HostDrafts
    from llmc_runtime.sched.speculation import Speculation

_MAX_IDLE_PLANS = 8  # plans that leave out a request before its row may go to another tenant
_TOKENS_WITHOUT_WAIT = 8  # tokens for which steps do not wait after the first late mask


class GuidedRequests:
    """The live requests that have a guide. A step looks only at those that have started."""

    def __init__(self) -> None:
        self._live: dict[Request, None] = {}
        self._started: dict[Request, None] = {}  # requests that have had a row
        self.left_out = False  # whether the last plan left out a request because its mask is not known

    def __bool__(self) -> bool:
        return bool(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live)

    def add(self, request: Request) -> None:
        """Add a new request if it has a guide."""
        if request.guide is not None:
            self._live[request] = None

    def start(self, request: Request) -> None:
        """Note that a request has a row, if it has a guide."""
        if request.guide is not None:
            self._started[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, and close its guide."""
        if request.guide is not None:
            self._live.pop(request, None)
            self._started.pop(request, None)
            request.guide.close()

    def clear(self) -> None:
        """Remove all requests, and close their guides."""
        for request in self._live:
            assert request.guide is not None
            request.guide.close()
        self._live.clear()
        self._started.clear()

    def ended(self) -> list[tuple[Request, LlmcError | None]]:
        """Return the started requests whose guides have ended or failed, with the error."""
        ended: list[tuple[Request, LlmcError | None]] = []
        for request in self._started:
            assert request.guide is not None
            try:
                if request.guide.mask() == b"":
                    ended.append((request, None))
            except LlmcError as error:
                ended.append((request, error))
        return ended

    def leave_out(self, request: Request) -> None:
        """Note that the current plan leaves out this request because its mask is not known."""
        self.left_out = True
        request.idle_plans += 1

    def park(self, running: list[Request], waiting: WaitingQueue, free: Callable[[Request], None]) -> None:
        """Free the rows of requests with late masks if requests of other tenants wait.

        A parked request returns to the waiting queue as a preempted one when its mask is known.
        """
        self.left_out = False
        for request in self._started:
            if request.status is Status.PARKED and known_mask(request) is not None:
                request.status = Status.PREEMPTED
                waiting.add(request)
            elif _is_idle(request) and waiting.has_other(request.tenant) and known_mask(request) is None:
                running.remove(request)
                free(request)
                request.status, request.idle_plans = Status.PARKED, 0
            self.left_out |= request.status is Status.PARKED

    def look(self, speculation: Speculation, host: HostDrafts | None) -> None:
        """Let the guides compute the masks after drafts that the next plan, or the open step, may verify."""
        for request in self._started:
            if request.status is not Status.RUNNING or not request.may_draft:
                continue
            num_in_flight = request.num_total - len(request.tokens)
            if num_in_flight:
                count = num_in_flight - 1  # the drafts that the step in flight verifies
            else:
                if host is not None:
                    host.look(request)
                count = speculation.num_masked_drafts(request, request.num_drafts or len(request.drafted))
            if request.drafted and count > 0 and not request.masks_requested:
                assert request.guide is not None
                request.guide.look_ahead(request.drafted[:count])
                request.masks_requested = True

    def fill(self, step: Step, planned: Sequence[Request], lookup_drafts: int, full_mask: bytes) -> None:
        """Add the known masks to a plan. It is open if one is not known yet.

        lookup_drafts: the number of tokens that prompt lookup drafts for a row in every step, regardless of the plan.
        full_mask: the mask that allows every token; it replaces those after drafts that are not known.
        """
        for request, work in zip(planned, step.work):
            if request.guide is None or not work.emit:
                continue
            request.idle_plans = 0
            all_tokens_known = request.num_total - work.drafts == len(request.tokens) + 1
            mask = known_mask(request) if all_tokens_known else None
            if mask is None:
                step.open = True
            else:
                step.masks.append(_masks_of(request, work, mask, lookup_drafts, full_mask))

    def complete(self, step: Step, planned: Sequence[Request], lookup_drafts: int, full_mask: bytes) -> list[RowMasks]:
        """Close an open step: return the masks that it lacks.

        A row whose mask is late, or whose request has ended, gets `full_mask`; tokens without masks are dropped.
        """
        sent = {mask.row for mask in step.masks}
        masks: list[RowMasks] = []
        step.open = False
        for request, work in zip(planned, step.work):
            if request.guide is None or not work.emit or work.row in sent:
                continue
            if request.status is not Status.RUNNING:
                masks.append(RowMasks(work.row, 0, [full_mask] * request.row_params.guided))
                continue
            mask = known_mask(request)
            masks.append(_masks_of(request, work, mask or full_mask, lookup_drafts, full_mask))
            request.num_masked = 0 if mask is None else _num_masked(request, work, mask)
        return masks

    def awaited(self) -> bool:
        """Whether planning should wait for a mask that is expected soon."""
        return any(expects(r) and r.status is Status.RUNNING and not is_slow(r) for r in self._started)

    def stop_waiting(self) -> None:
        """Note that the awaited masks are late."""
        for request in self._started:
            if pending(request) and request.status is Status.RUNNING and not is_slow(request):
                request.late_masks += 1
                request.slow_until = len(request.tokens) + (_TOKENS_WITHOUT_WAIT << min(request.late_masks, 16))


def known_mask(request: Request) -> bytes | None:
    """Return the mask of a guided request's next token; None if it is not known or no token may follow."""
    assert request.guide is not None
    try:
        return request.guide.mask() or None
    except LlmcError:  # `ended` returns the error
        return None


def pending(request: Request) -> bool:
    """Whether the request's next mask is not known yet."""
    try:
        return request.guide is not None and request.guide.mask() is None
    except LlmcError:  # `ended` returns the error
        return False


def expects(request: Request) -> bool:
    """Whether more masks of the request will be known, of its next token or after drafts."""
    return pending(request) or (request.guide is not None and request.guide.is_looking_ahead())


def max_masked_drafts(request: Request, speculation: Speculation, room: int) -> int:
    """Return how many drafts of a request a plan may verify, up to `room`: those whose masks are known."""
    if request.num_total > len(request.tokens):
        return room  # its tokens are not known: the step will be open
    assert request.guide is not None
    if not request.verifiable and request.masks_requested and not request.guide.is_looking_ahead():
        speculation.record_excluded(request)
    return min(room, request.verifiable)


def take_drafts(
    request: Request, work: Work, output: StepOutput, lookup_drafts: int, count: int = 1, whole: bool = True
) -> None:
    """Store the tokens that a step drafted after the `count` tokens that it gave a request with a guide.

    lookup_drafts: see GuidedRequests.fill. While a later step is in flight, it is not known how many of the tokens are
    drafts, and the largest possible number is stored. whole: all tokens that the step sampled were sampled with their
    masks; otherwise the row is rebuilt.
    """
    request.num_masked = None
    if request.guide is None or request.status is not Status.RUNNING:
        return
    if whole:
        tokens = output.looked.get(work.row, ())  # the row's tokens from the step's first one on
        in_flight = request.num_total > len(request.tokens)
        num_drafts = max(work.propose, lookup_drafts) if in_flight else request.num_drafts
        request.take_drafts(tokens[count : count + num_drafts])
    else:
        request.restart()


def _masks_of(request: Request, work: Work, mask: bytes, lookup_drafts: int, full_mask: bytes) -> RowMasks:
    """Return the masks of the tokens that a step samples for a request; `mask` is that of the first one."""
    ahead = [mask_after or full_mask for mask_after in request.masks_ahead()[: work.drafts]]
    masks = [mask, *ahead, *[full_mask] * (work.drafts - len(ahead))]
    new_drafts = max(work.propose, lookup_drafts if request.may_draft else 0)
    return RowMasks(work.row, len(request.tokens), masks, len(masks) + new_drafts if new_drafts else 0)


def _num_masked(request: Request, work: Work, mask: bytes) -> int | None:
    """Return how many tokens of an open step are sampled with their masks; None for all, as far as they can come."""
    ahead = request.masks_ahead()
    num_known = len(ahead)
    last_mask = ahead[-1] if ahead else mask
    if num_known >= work.drafts or not last_mask:
        return None
    next_is_excluded = num_known < len(request.drafted) and not allows(last_mask, request.drafted[num_known])
    return None if next_is_excluded else 1 + num_known


def follow(guide: Guide, token: int) -> tuple[tuple[str, None] | None, LlmcError | None]:
    """Pass a token to the guide. Return why the request ends with it, if that is known at once, and the error."""
    guide.accept(token)
    try:
        return (("stop", None) if guide.mask() == b"" else None), None
    except LlmcError as error:
        return ("error", None), error


def is_slow(request: Request) -> bool:
    """Whether steps do not wait for the request's mask."""
    return len(request.tokens) < request.slow_until


def may_sample(request: Request) -> bool:
    """Whether a step may sample the request's next token: its mask is known, or a token is in flight and the mask after
    it is expected in time."""
    if request.num_masked is not None:
        return False  # tokens of the step in flight may be dropped
    if request.num_total > len(request.tokens):
        return not is_slow(request)
    return known_mask(request) is not None


def _is_idle(request: Request) -> bool:
    """Whether plans have left out a running request for long, and all of its tokens are committed."""
    is_left_out = request.status is Status.RUNNING and request.idle_plans >= _MAX_IDLE_PLANS
    return is_left_out and request.num_total == len(request.tokens)
