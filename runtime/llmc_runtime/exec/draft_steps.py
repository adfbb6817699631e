"""Runs a draft model after the steps of the model that verifies, without a host round trip in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device
from llmc_runtime.exec.buffer_layout import Layout
from llmc_runtime.exec.device_rows import Rows
from llmc_runtime.exec.entry_points import Bound, EntryPoints
from llmc_runtime.format.program import DRAFT_LOGPROB, FILL, FIRST, NEXT
from llmc_runtime.sched.step import Work


class DraftSteps:
    """The programs of the artifact's draft model.

    A row's first draft follows its last token. It is sampled by a step over the row's last two tokens, because the
    draft model lacks the KV of the first of them if all drafts were accepted; each further draft by a step of its own.

    A head (EAGLE-3) has no program FILL, as the steps of the model that verifies compute its KV; its first draft is
    sampled by a step over the row's last token.

    If the device's calls return after completion, each draft's probability is known before the next one is made, and
    rows stop drafting (see sched.draft_stops). Programs launched in advance, as on a GPU, draft a fixed number.
    """

    def __init__(self, artifact: Artifact, device: Device, layout: Layout, env: Mapping[str, int], rows: Rows) -> None:
        self._rows = rows
        self._fill, self._first, self._next = (
            EntryPoints(artifact, device, layout, env, role) for role in (FILL, FIRST, NEXT)
        )
        self._first_entries = 1 if self.is_head else 2  # entries of each row in the step that samples its first draft
        alone = artifact.manifest.ranks == 1  # ranks must run the same programs
        known = layout.outputs.get(DRAFT_LOGPROB) if device.depth == 1 and alone else None
        self._logprobs = np.empty(0, np.float32) if known is None else known.host.view(np.float32)

    def __bool__(self) -> bool:
        return bool(self._first.bound)

    @property
    def is_head(self) -> bool:
        """Whether they are the programs of a head, which have none that computes KV."""
        return bool(self) and not self._fill.bound

    @property
    def max_rows(self) -> int:
        """The maximum number of rows for which one step drafts."""
        return min(self._first.max_entries // self._first_entries, self._next.max_entries)

    @property
    def stops(self) -> bool:
        """Whether drafting can stop after an unlikely token."""
        return self._logprobs.size > 0

    def run(self, work: Sequence[Work], lookups: Sequence[int] = ()) -> dict[int, list[float]]:
        """Compute the KV that the draft model lacks, and draft the tokens that a step's work requests.

        lookups: the number of drafts that prompt lookup has found for each index of `work`, if one has `lookup`.
        Returns the probabilities of the drafts of each index of `work`, as many as were made; empty unless `stops`.
        """
        fills = [w for w in work if w.fill]
        if fills:
            for w in fills:
                self._rows.place(w.row, w.fill_from)
            self._fill.ready(([w.row for w in fills], [w.fill for w in fills], [0] * len(fills))).run()
        drafting = [i for i, w in enumerate(work) if w.propose and not (w.lookup and lookups[i])]
        if len(drafting) == 1:
            probabilities = {drafting[0]: self._run_single(work[drafting[0]])}
        else:
            probabilities = self._run_rows(work, drafting)
        return probabilities if self.stops else {}

    def _run_single(self, item: Work) -> list[float]:
        """Draft for a single row, for which all drafts but the first one have the same inputs."""
        num_entries = self._first_entries
        chance = 1.0  # probability that all drafts so far are accepted
        probabilities: list[float] = []
        bound = self._first.ready(([item.row] * num_entries, [1] * num_entries, [*[0] * (num_entries - 1), 1]))
        for count in range(1, item.propose + 1):
            bound.run()
            if self.stops:
                probabilities.append(exp(self._logprobs[num_entries - 1]))
                if item.stop is not None:
                    chance *= item.stop.chance(probabilities[-1])
                if _ends(item, chance):
                    break
            if count == 1 < item.propose:
                num_entries = 1
                bound = self._next.ready(([item.row], [1], [1]))
        return probabilities

    def _run_rows(self, work: Sequence[Work], drafting: list[int]) -> dict[int, list[float]]:
        """Draft for the rows of these indices of `work`, a token of each at a time."""
        probabilities: dict[int, list[float]] = {i: [] for i in drafting}
        chances = dict.fromkeys(drafting, 1.0)  # row -> probability that all its drafts so far are accepted
        points, entries_per_row, count = self._first, self._first_entries, 0
        while drafting:
            entries = [work[i].row for i in drafting for _ in range(entries_per_row)]
            points.ready((entries, [1] * len(entries), [*[0] * (entries_per_row - 1), 1] * len(drafting))).run()
            count += 1
            if self.stops:
                sampled = self._logprobs[entries_per_row - 1 : len(entries) : entries_per_row]
                for i, logprob in zip(drafting, sampled.tolist()):
                    probabilities[i].append(exp(logprob))
                    stop = work[i].stop
                    if stop is not None:
                        chances[i] *= stop.chance(probabilities[i][-1])
            drafting = [i for i in drafting if count < work[i].propose and not _ends(work[i], chances[i])]
            points, entries_per_row = self._next, 1
        return probabilities

    def sizes(self) -> Iterator[Bound]:
        """Yield the programs with one token per entry in every size in which they run, with the size set."""
        yield from self._first.sizes()
        yield from self._next.sizes()

    def close(self) -> None:
        """Drop the programs."""
        for points in (self._fill, self._first, self._next):
            points.close()


def _ends(work: Work, chance: float) -> bool:
    """Whether drafting ends for a row whose drafts are all accepted with this probability."""
    return work.stop is not None and chance < work.stop.min_chance
