"""Bugs of snapshots of recurrent layers' states, for the simulator to detect; see bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmc_runtime.kv.snapshots import SnapshotPool
from llmc_runtime.sched.live_requests import LiveRequests
from llmc_runtime.sched.row_snapshots import RowSnapshots
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import Step

from tests.runtime.bugs import after_planning


def restored_from_the_entry_beside(self: Scheduler, step: Step) -> None:
    for init in step.inits:
        if init.snapshot >= 0 and self.snapshots is not None:
            init.snapshot = (init.snapshot + 1) % self.snapshots.pool.count


def not_restored(self: Scheduler, step: Step) -> None:
    for init in step.inits:
        init.snapshot = -1


def kept_of_a_request_that_ended(right: Any) -> Any:
    def commit(self: RowSnapshots, saves: Any) -> None:
        for save, request, _ in saves:
            self.prefix.extend(request.chain, request.tokens, save.position // self.prefix.page_size)
            self.pool.keep(save.entry, request.chain[save.position // self.prefix.page_size], request.tenant)

    return commit


def not_pinned(right: Any) -> Any:
    return lambda self, entry: None


def kept_without_its_pages(right: Any) -> Any:
    return lambda self, digest: None


def lost_with_a_step_that_is_dropped(right: Any) -> Any:
    return lambda self, step: None


def rebuilt_on_states_that_went_on(right: Any) -> Any:
    return lambda self, request: request.restart()


def freed_while_kept(right: Any) -> Any:
    def keep(self: SnapshotPool, entry: int, digest: bytes, tenant: str) -> None:
        right(self, entry, digest, tenant)
        if len(self._tenant) % 5 == 4:
            self._free.append(entry)

    return keep


SNAPSHOT_BUGS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (Scheduler, "next", after_planning(restored_from_the_entry_beside)),
    (Scheduler, "next", after_planning(not_restored)),
    (RowSnapshots, "commit", kept_of_a_request_that_ended),
    (SnapshotPool, "pin", not_pinned),
    (SnapshotPool, "drop", kept_without_its_pages),
    (SnapshotPool, "keep", freed_while_kept),
    (RowSnapshots, "drop", lost_with_a_step_that_is_dropped),
    (LiveRequests, "_rebuild", rebuilt_on_states_that_went_on),
)
