"""Runs a draft model after the steps of the model that verifies, without a host round trip in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device
from llmc_runtime.exec.buffer_layout import Layout
from llmc_runtime.exec.device_rows import Rows
from llmc_runtime.exec.entry_points import Bound, EntryPoints
from llmc_runtime.format.program import FILL, FIRST, NEXT
from llmc_runtime.sched.step import Work


class DraftSteps:
    """The programs of the artifact's draft model.

    A row's first draft follows its last token. It is sampled by a step over the row's last two tokens, because the
    draft model lacks the KV of the first of them if all drafts were accepted; each further draft by a step of its own.

    A head (EAGLE-3) has no program FILL, as the steps of the model that verifies compute its KV; its first draft is
    sampled by a step over the row's last token.
    """

    def __init__(self, artifact: Artifact, device: Device, layout: Layout, env: Mapping[str, int], rows: Rows) -> None:
        self._rows = rows
        self._fill, self._first, self._next = (
            EntryPoints(artifact, device, layout, env, role) for role in (FILL, FIRST, NEXT)
        )

        self._begins = 1 if self.is_head else 2  # tokens of each row by which its first draft is sampled

    def __bool__(self) -> bool:
        return bool(self._first.bound)

    @property
    def is_head(self) -> bool:
        """Whether they are the programs of a head, which have none that computes KV."""
        return bool(self) and not self._fill.bound

    @property
    def max_rows(self) -> int:
        """The maximum number of rows for which one step drafts."""
        return min(self._first.max_entries // self._begins, self._next.max_entries)

    def run(self, work: Sequence[Work]) -> None:
        """Compute the KV that the draft model lacks, and draft the tokens that a step's work requests."""
        if fills := [w for w in work if w.fill]:
            for w in fills:
                self._rows.place(w.row, w.fill_from)
            self._fill.ready(([w.row for w in fills], [w.fill for w in fills], [0] * len(fills))).run()
        for index, rows in enumerate(_drafting(work)):
            if index:
                self._next.ready((rows, [1] * len(rows), [1] * len(rows))).run()
            else:
                entries = [row for row in rows for _ in range(self._begins)]
                emits = [*[0] * (self._begins - 1), 1] * len(rows)
                self._first.ready((entries, [1] * len(entries), emits)).run()

    def sizes(self) -> Iterator[Bound]:
        """Yield the programs with one token per entry in every size in which they run, with the size set."""
        yield from self._first.sizes()
        yield from self._next.sizes()

    def close(self) -> None:
        """Drop the programs."""
        for points in (self._fill, self._first, self._next):
            points.close()


def _drafting(work: Sequence[Work]) -> Iterator[list[int]]:
    """Yield the rows that draft a first token, then those that draft a second one, and so on."""
    drafting = [w for w in work if w.propose]
    for index in range(max((w.propose for w in drafting), default=0)):
        yield [w.row for w in drafting if w.propose > index]
