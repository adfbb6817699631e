"""Records the drafts of a head or draft model while an LLM runs."""

from __future__ import annotations

from typing import Any

import pytest
from llmc_runtime.exec.draft_steps import DraftSteps


def record_drafts(
    monkeypatch: pytest.MonkeyPatch, chances: list[list[float]] | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return a list that gets (known tokens, drafts) of each row for which a step drafts.

    `chances` gets the probabilities of the drafts, in the same order; empty ones if the device does not return them.
    """
    seen: list[tuple[list[int], list[int]]] = []
    run = DraftSteps.run

    def recorded(self: DraftSteps, work: Any, found: Any) -> dict[int, list[float]]:
        likely = run(self, work, found)
        history, length = (self._rows._tables[name].view for name in ("tokens", "length"))
        for index, item in enumerate(work):
            if item.propose and not (item.lookup and found[index]):
                known = int(length[item.row, 0]) + 1
                row, made = history[item.row].tolist(), len(likely.get(index, ())) or item.propose
                seen.append((row[:known], row[known : known + made]))
                if chances is not None:
                    chances.append(likely.get(index, []))
        return likely

    monkeypatch.setattr(DraftSteps, "run", recorded)
    return seen
