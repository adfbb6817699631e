"""The executor of rank 0, which leads a group: the other ranks run every step that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device
from llmc_runtime.exec.buffer_layout import kv_capacity
from llmc_runtime.exec.executor import Executor, Ticket, digest_of
from llmc_runtime.exec.rank_group import RankGroup
from llmc_runtime.exec.rank_messages import Guide, Launch, Meet, Prepare
from llmc_runtime.format.errors import LlmcError, as_llmc_error
from llmc_runtime.sched.step import RowMasks, Step, StepOutput
from llmc_runtime.signals import uninterrupted

# Errors of rank 0 that may be due to another rank: a GPU fails when the memory of a rank that was killed goes away, and
# NCCL when a rank does not answer.
_OF_OTHERS = ("E114", "E119", "E143")


class GroupExecutor(Executor):
    """An Executor whose device is rank 0 of `group`; the arguments are those of Executor.

    All ranks have the numbers of KV pages and snapshots that rank 0 computes, and sample the same tokens. When a rank
    fails, ends or samples another token, the call that notices it raises LlmcError, and so do all calls after it.
    Raises the errors of Executor, of any rank.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        group: RankGroup,
        kv_bytes: int | None = None,
        snapshots: int | None = 0,
    ) -> None:
        self.group = group
        self._failure: LlmcError | None = None
        capacity = kv_capacity(artifact, device, kv_bytes, snapshots)
        group.join(capacity.nbytes, capacity.snapshots)
        super().__init__(artifact, device, capacity.nbytes, capacity.snapshots)
        handles = [device.group_handle, *group.await_joined()]
        group.watch(device.cancel)
        with self._together():
            group.send(Meet(handles))
            device.connect(handles)
            group.await_settled()

    def launch(self, step: Step) -> Ticket:
        """Start the step on all ranks."""
        with self._together():
            self.group.send(Launch(step))
            return super().launch(step)

    def guide(self, ticket: Ticket, masks: Sequence[RowMasks]) -> None:
        """Supply the token masks of an open step on all ranks."""
        with self._together():
            self.group.send(Guide(list(masks)))
            super().guide(ticket, masks)

    def wait(self, ticket: Ticket) -> StepOutput:
        """Wait until all ranks have run the oldest step in flight and return its output."""
        with self._together():
            output = super().wait(ticket)
            self.group.collect(digest_of(ticket))
            return output

    def settle(self) -> None:
        """Wait for all steps in flight on all ranks and discard their outputs."""
        with self._together():
            super().settle()
            self.group.settle()

    def prepare(self) -> int:
        """Prepare every size of decode step on all ranks."""
        with self._together():
            self.group.send(Prepare())
            count = super().prepare()
            self.group.await_settled()
            return count

    def close(self) -> None:
        """End the other ranks, and release the memory and threads of rank 0."""
        self.group.close()
        super().close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A context that Ctrl-C does not interrupt, because the ranks would no longer be at the same step. If it fails
        or is interrupted in another way, the group ends."""
        with uninterrupted():
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except BaseException as e:
                self.device.cancel()
                error = as_llmc_error(e)
                self._failure = self.group.cause(error) if error.code in _OF_OTHERS else error
                if isinstance(e, Exception):
                    raise self._failure from e
                raise
