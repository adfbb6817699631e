"""RowSnapshots: when the scheduler copies the states of recurrent layers to snapshots, and rows start from them.

A prefix can be reused up to the last of its pages at whose end a snapshot was taken. Snapshots are taken
- at the end of the last full page of the tokens that a request is admitted with, so that the same prompt or its
  continuation starts there;
- where its prompt leaves a prefix whose pages are cached without a snapshot, so that the third request with a common
  beginning finds it;
- of a request that decodes, every PAGES_BETWEEN_SNAPSHOTS pages, in place of the last one of this kind.
Chunks of prompts end there. A snapshot is kept when the step that writes it is committed. The device copies in the
order in which steps were planned, so the next plan can reserve an entry again, even if a step in flight reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.kv.prefix import PrefixCache
from llmc_runtime.kv.prefix_match import PrefixMatch
from llmc_runtime.kv.snapshots import SnapshotPool
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.step import RowSave, Step, Work

PAGES_BETWEEN_SNAPSHOTS = 4  # pages between two snapshots of a request that decodes

Saves = list[tuple[RowSave, Request, int]]  # each with its request, and the tokens that this had computed before


class RowSnapshots:
    """The snapshots of one scheduler, whose prefixes are those of `prefix`."""

    def __init__(self, count: int, prefix: PrefixCache, counters: Counters) -> None:
        self.pool, self.prefix, self.counters = SnapshotPool(count), prefix, counters
        self._interval = PAGES_BETWEEN_SNAPSHOTS * prefix.page_size  # the same in tokens
        prefix.forgotten = self.pool.drop

    def usable(self, request: Request, match: PrefixMatch) -> int:
        """Return how many cached pages of a waiting request it can reuse: those up to the last one with a snapshot."""
        request.num_cached_pages = len(match.pages)
        return max(map(match.length_to, self.pool), default=0)

    def start(self, request: Request, hits: int) -> None:
        """Let a request that was admitted with `hits` cached pages start from the snapshot at their end."""
        size = self.prefix.page_size
        if hits:
            request.snapshot = self.pool.use(request.chain[hits])
            self.pool.pin(request.snapshot)
        last = (len(request.tokens) - 1) // size
        request.snapshot_positions = [n * size for n in sorted({request.num_cached_pages, last}) if n > hits]

    def stop(self, request: Request) -> None:
        """Forget the snapshot and the positions of a request that leaves its row."""
        if request.snapshot >= 0:
            self.pool.unpin(request.snapshot)
        request.snapshot, request.snapshot_positions = -1, []

    def plan(self, step: Step, planned: Sequence[Request]) -> None:
        """Add the snapshots that are taken after a step to its plan."""
        for request, item in zip(planned, step.work):
            if request.snapshot >= 0:  # its row is built by this step
                self.pool.unpin(request.snapshot)
                request.snapshot = -1
            position = self._position(request, item)
            if position and (entry := self.pool.reserve()) is not None:
                step.saves.append(RowSave(item.row, entry, position))

    def _position(self, request: Request, item: Work) -> int:
        """Return the position of the snapshot that is taken after this work; 0 if none is."""
        end, interval = request.num_planned, self._interval
        if request.snapshot_positions and end >= request.snapshot_positions[0]:
            position = end
            del request.snapshot_positions[0]
        elif item.emit and end // interval > (end - item.num_tokens) // interval:
            position = end - end % interval
        else:
            return 0
        if position < end and not item.drafts:
            return 0
        if position <= len(request.tokens) and self._is_kept(request, position):
            return 0
        return position

    def _is_kept(self, request: Request, position: int) -> bool:
        """Whether there is a snapshot after this many known tokens of a request; if so, mark it as just used."""
        pages = position // self.prefix.page_size
        self.prefix.extend(request.chain, request.tokens, pages)
        is_cached = request.chain[pages] in self.pool
        if is_cached:
            self.pool.use(request.chain[pages])
        return is_cached

    def begin(self, step: Step, planned: Sequence[Request]) -> Saves:
        """Return the snapshots of a step that is about to be committed."""
        if not step.saves:
            return []
        by_row = {item.row: request for item, request in zip(step.work, planned)}
        return [(save, by_row[save.row], by_row[save.row].num_computed) for save in step.saves]

    def commit(self, saves: Saves) -> None:
        """Keep the snapshots of a step whose tokens are committed and whose pages are published."""
        size = self.prefix.page_size
        for save, request, before in saves:
            reached = before < save.position <= request.num_computed
            if request.status is not Status.RUNNING or not reached:
                self.pool.free(save.entry)  # it ended, or its drafts were rejected
                continue
            digest = request.chain[save.position // size]
            self.pool.keep(save.entry, digest, request.tenant)
            self.counters.state_snapshots_saved += 1
            if save.position > request.num_prompt:
                self._replace(request, digest)

    def _replace(self, request: Request, digest: bytes) -> None:
        """Drop the last snapshot that a decoding request took, unless a row is about to start from it."""
        last = request.last_decode_snapshot
        request.last_decode_snapshot = digest
        if last in self.pool and last != digest:
            self.pool.drop_unpinned(last)

    def drop(self, step: Step) -> None:
        """Free the entries of a step in flight that is dropped."""
        for save in step.saves:
            self.pool.free(save.entry)
