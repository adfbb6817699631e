"""Full audits of a scheduler and a fake device between two steps. They are slow, so the simulator samples them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from llmc_runtime.engine.engine import Engine
from llmc_runtime.kv.pages import PagePool
from llmc_runtime.sched.request import Request, RequestDelta, Status
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import Step, Work

from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.oracle import Expected


def audit(scheduler: Scheduler, device: FakeExecutor, expected: dict[str, Expected]) -> None:
    """Raise AssertionError if pages, rows, queues or the device's state do not follow from the live requests."""
    audit_pages(scheduler.pool, [*(request.pages for request in scheduler.running), *scheduler.pool._retired])
    audit_prefixes(scheduler)
    audit_snapshots(scheduler)
    audit_queues(scheduler, expected)
    audit_device(scheduler, device, expected)


def audit_pages(pool: PagePool, tables: list[list[int]]) -> None:
    """Check that references match the tables, that every other page is free exactly once, and that all links agree."""
    used = Counter(page for table in tables for page in table)
    assert all(len(set(table)) == len(table) for table in tables), "a table lists a page twice"
    assert pool.refs == [used[page] for page in range(pool.num_pages)], f"references {pool.refs}, tables {tables}"
    assert pool._num_retired == sum(map(len, pool._retired)), "retired pages"
    free = pool.free_list()
    assert sorted(free) == [page for page in range(pool.num_pages) if not used[page]], f"free list {free}"
    assert len(free) == pool.num_free, f"{len(free)} free pages, counted {pool.num_free}"
    kept = [pool.cached[page] for page in free]
    assert kept == sorted(kept), "a page with a prefix goes before one without"
    for end, pages in pool.free_lists().items():
        for before, after in pairwise([end, *pages, end]):
            assert pool._next[before] == after and pool._prev[after] == before, f"links around {before}"
    by_end = {own.end: (tenant, own.length) for tenant, own in pool._lists.items()}
    for end, pages in list(pool.free_lists().items())[1:]:
        tenant, length = by_end[end]
        assert pages and len(pages) == length, f"{tenant} has {len(pages)} free pages with prefixes, counted {length}"
        assert all(pool._tenants[page] == tenant for page in pages), f"another tenant's page is on the list of {tenant}"


def audit_prefixes(scheduler: Scheduler) -> None:
    """Check that exactly the pages of the prefix cache are marked as kept, and that other pages are in one table
    only.
    """
    held, pool = scheduler.prefix.content(), scheduler.pool
    assert sorted(held) == [page for page in range(pool.num_pages) if pool.cached[page]], (
        "kept pages are not those held"
    )
    assert {digest for digest, _ in held.values()} == set(scheduler.prefix._page), "digests"
    assert all(pool.refs[page] <= 1 or page in held for page in range(pool.num_pages)), "an unpublished page is shared"
    for match in scheduler.prefix._matches:
        known = [scheduler.prefix._page.get(digest) for digest in match.chain[1 : len(match.pages) + 1]]
        assert match.pages == known, "pages of a request that waits"
        in_use = sum(pool.refs[page] > 0 for page in match.pages)
        assert in_use <= match.max_in_use(len(match.pages), pool), "its pages that are in use"
    size = scheduler.config.page_size
    for request in scheduler.running:
        assert request.num_published * size <= request.num_computed, f"{request.id} published what is not computed"
        for index, page in enumerate(request.pages):
            if page in held:
                own = tuple(request.tokens[index * size : (index + 1) * size])
                assert held[page] == (request.chain[index + 1], own), f"{request.id}: page {page} holds another prefix"


def audit_snapshots(scheduler: Scheduler) -> None:
    """Check that every snapshot is free, kept at the end of a cached prefix or written by a step in flight, and that
    those are pinned from which rows will start.
    """
    if scheduler.snapshots is None:
        assert not any(request.snapshot >= 0 or request.snapshot_positions for request in scheduler.requests.values())
        return
    pool, kept = scheduler.snapshots.pool, scheduler.snapshots.pool.content()
    assert kept.keys() <= scheduler.prefix._page.keys(), "a snapshot without its pages"
    written = [save.entry for step, _ in scheduler._in_flight for save in step.saves]
    assert sorted([*pool._free, *kept.values(), *written]) == list(range(pool.count)), "entries"
    pins = Counter(request.snapshot for request in scheduler.running if request.snapshot >= 0)
    assert +pool._pins == pins, f"pinned: {+pool._pins}, rows start from {pins}"
    idle = [r for r in scheduler.requests.values() if r.status is not Status.RUNNING]
    assert not any(r.snapshot_positions or r.snapshot >= 0 for r in idle)


def audit_queues(scheduler: Scheduler, expected: dict[str, Expected]) -> None:
    """Check that every live request is in one queue, in order, with a row if it runs and without resources if it
    waits.
    """
    running, waiting, config = scheduler.running, list(scheduler.waiting), scheduler.config
    audit_tenants(scheduler)
    parked = [r for r in scheduler.requests.values() if r.status is Status.PARKED]
    assert {r.id for r in running + waiting + parked} == set(scheduler.requests) == set(expected), "live requests"
    assert len(running) + len(waiting) + len(parked) == len(expected), "a request is in two queues"
    assert scheduler.waiting.num_tokens == sum(r.num_prompt for r in waiting), "tokens that wait"
    assert all(r.row == -1 and not r.pages and r.guide is not None for r in parked), "a parked request holds something"
    for queue in (running, waiting):
        assert all(a.key < b.key for a, b in pairwise(queue)), "a queue is out of order"
    if config.policy == "fcfs":
        pairs = ((r, w) for r in running for w in waiting if r.tenant == w.tenant)
        for mine, late in (pair for pair in pairs if pair[1].guide is None):  # the others may have waited for a mask
            # A request without a mask is in no step, so a rollback leaves it its row, and takes those of others.
            kept = mine.guide is not None and late.status is Status.PREEMPTED
            assert kept or mine.key < late.key, "a later request overtook an earlier one of its tenant"
    assert sorted([r.row for r in running] + scheduler.free_rows) == list(range(config.max_num_seqs)), "rows"
    for request in running:
        assert request.status is Status.RUNNING and len(request.pages) == len(set(request.pages))
        assert request.num_computed < len(request.tokens) <= request.limit - 1 <= config.pool_tokens
        assert request.num_computed <= request.num_planned < request.num_total <= request.limit
        assert (
            len(request.tokens)
            <= request.num_total
            < len(request.tokens) + scheduler.depth + drafts(scheduler, request)
        )
        assert len(request.pages) >= config.pages_for(request.num_planned)
    for request in waiting:
        assert request.status in (Status.WAITING, Status.PREEMPTED)
        assert not request.pages and request.row == -1 and not request.num_computed and not request.num_planned


def drafts(scheduler: Scheduler, request: Request) -> int:
    """The drafts of the request in flight, any number of which may be rejected."""
    found = ((item, one) for step, planned in scheduler._in_flight for item, one in zip(step.work, planned))
    return sum(item.drafts for item, one in found if one is request)


def audit_tenants(scheduler: Scheduler) -> None:
    """Check that tenants count their live requests, that their queues are in order, and that the heap lists each of
    them.
    """
    waiting = scheduler.waiting
    live = Counter(request.tenant for request in scheduler.requests.values())
    assert {name: tenant.live for name, tenant in waiting.tenants.items() if tenant.live} == live, "tenants' requests"
    turns = {turn for _, turn, _ in waiting._heap}
    for name, tenant in waiting.tenants.items():
        assert all(a.key < b.key for a, b in pairwise(tenant.queue)), f"the queue of {name!r} is out of order"
        assert all(r.tenant == name for r in tenant.queue) and (tenant.turn in turns or not tenant.queue), name
    assert all(service <= tenant.service for service, _, tenant in waiting._heap), "service that was taken back"
    assert len(waiting) == sum(len(tenant.queue) for tenant in waiting.tenants.values()), "how many wait"


def audit_device(scheduler: Scheduler, device: FakeExecutor, expected: dict[str, Expected]) -> None:
    """Check that the device's rows agree with the host once all steps in flight, except an open one, have run, and that
    their KV is that of the true prefix, as far as the host knows it.
    """
    device.catch_up()
    size = device.page_size
    late = next((step for step, _ in scheduler._in_flight if step.open), Step())
    built, work = {init.row for init in late.inits}, {item.row: item for item in late.work}
    grown = {grow.row: len(grow.pages) for grow in late.pages}
    for request in scheduler.running:
        if request.row in built or request.needs_init:
            continue
        item = work.get(request.row, Work(request.row, 0, False))
        total, planned = request.num_total - item.emit - item.drafts, request.num_planned - item.num_tokens
        pages = request.pages[: len(request.pages) - grown.get(request.row, 0)]
        row = device.rows[request.row]
        assert row is not None and row.tokens[: len(request.tokens)] == request.tokens, f"{request.id}: tokens there"
        rejected = total - len(row.tokens)
        assert 0 <= rejected <= drafts(scheduler, request), f"{request.id}: {len(row.tokens)} tokens, not {total}"
        assert row.length == planned - rejected, f"{request.id}: {row.length} computed, not {planned - rejected}"
        assert row.table[: len(pages)] == pages, f"{request.id}: the page table on the device"
        chain = expected[request.id].chain
        for position in range(min(row.length, len(request.tokens))):
            slot = row.table[position // size] * size + position % size
            assert device._kv[slot] == chain[position + 1], f"{request.id}: KV at position {position}"


def idle(engine: Engine) -> bool:
    """Whether an engine's gauges show no request and no page in use."""
    kept = ("step_token_budget", "num_state_snapshots")
    return not any(value for name, value in engine.stats().items() if name not in kept)


def check_logprobs(delta: RequestDelta, most: int | None) -> None:
    """Check that every token has log-probabilities if they are requested."""
    assert (delta.logprobs is None) == (most is None), f"{delta.id}: log-probabilities"
    if delta.logprobs is not None:
        assert len(delta.logprobs) == len(delta.new_token_ids), f"{delta.id}: {delta.logprobs}"
        assert all(len(one.top_ids) == most for one in delta.logprobs), f"{delta.id}: {delta.logprobs}"
