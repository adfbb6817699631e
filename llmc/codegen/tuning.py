"""Measurements of kernels as a file of JSON lines, and looking them up; measuring is done elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmc.codegen.kernel import Schedule, schedule_text
from llmc.diagnostics import Diagnostic
from llmc.ir.digest import node_digest
from llmc.ir.graph import Node
from llmc.targets.target import Target

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Tuning:
    """(target, node, kernel, schedule) -> measured microseconds."""

    records: Mapping[Key, float] = field(default_factory=dict)

    def lookup(self, node: Node, kernel: str, schedule: Schedule, target: Target) -> float | None:
        """The measurement of one way to run a node that has no choice yet, or None."""
        if not self.records:
            return None
        return self.records.get((machine(target), node_digest(node), kernel, schedule_text(schedule)))

    @staticmethod
    def load(path: Path) -> Tuning:
        """Read a file of lines {"target", "node", "kernel", "schedule", "us"}; the last of equal keys holds."""
        records: dict[Key, float] = {}
        try:
            lines = path.read_text().splitlines()
        except OSError as e:
            raise Diagnostic("E432", f"the tuning file {path} cannot be read: {e.strerror}", "name another") from None
        for i, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                r = json.loads(line)
                key = (str(r["target"]), str(r["node"]), str(r["kernel"]), schedule_text(r["schedule"]))
                records[key] = float(r["us"])
            except (ValueError, KeyError, TypeError) as e:
                cause = f"the tuning file {path}, line {i + 1}, is not a record: {e}"
                raise Diagnostic("E432", cause, "remove the line, or tune again") from None
        return Tuning(records)


def machine(target: Target) -> str:
    """What measurements hold for: the instruction set, whatever the target was called."""
    return "+".join([target.family, target.arch, *sorted(target.features)])


def record(node: Node, kernel: str, schedule: Schedule, target: Target, us: float) -> str:
    """One line of a tuning file; the node has no choice on it."""
    line = {"target": machine(target), "node": node_digest(node), "kernel": kernel, "schedule": schedule, "us": us}
    return json.dumps(line)


def save(path: Path, lines: Iterable[str]) -> None:
    """Append records."""
    with path.open("a") as f:
        f.writelines(f"{line}\n" for line in lines)
