"""Kernel measurements stored as JSON lines, and their lookup. `llmc.measure.tune` makes the measurements.

A line records the time of one kernel and schedule for one node at given sizes of the step (T tokens, R rows):

    {"target": "cuda+sm_90+pdl", "node": "linear(bf16[R, 64], bf16[96, 64]) -> bf16[R, 96]", "sizes": {"R": 8},
     "kernel": "triton/gemv", "schedule": {"warps": 4}, "us": 3.1}

A node is identified by its text without names and locations. The shapes of device row tables are omitted from it,
because they vary with the limits that a model is compiled for. Files are sorted, so that they can be compared as text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.text_file import read_text

from llmc.codegen.kernel import Schedule, schedule_text
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Node, Value
from llmc.ir.text import show_attr
from llmc.targets.target import Target

SIZES = ("T", "R")  # symbols of a step; the number of KV pages does not affect a launch
RECORDS = "llmc.targets.records"  # the package with the *.jsonl files that are shipped
_MAX_FILE = 1 << 28  # bytes
MAX_SIZE_DISTANCE = 0.5  # maximum distance of sizes, as a power of two
NO_SIZES: Mapping[str, int] = MappingProxyType({})

Sizes = tuple[tuple[str, int], ...]
Candidate = tuple[str, str]  # kernel, schedule as text


@dataclass(frozen=True)
class Record:
    """A measurement in microseconds."""

    target: str
    node: str
    sizes: Sizes
    kernel: str
    schedule: str
    us: float

    @property
    def key(self) -> tuple[str, str, Sizes, str, str]:
        """The identity of the measurement: all fields except the time."""
        return self.target, self.node, self.sizes, self.kernel, self.schedule

    def line(self) -> str:
        """Return the record as a JSON line."""
        doc = {
            "target": self.target, "node": self.node, "sizes": dict(self.sizes), "kernel": self.kernel,
            "schedule": json.loads(self.schedule), "us": self.us,
        }  # fmt: skip
        return json.dumps(doc)


@dataclass(frozen=True)
class Tuning:
    """Measurements: (target, node) -> sizes -> (kernel, schedule) -> microseconds. `name` is shown to the user."""

    records: Mapping[tuple[str, str], Mapping[Sizes, Mapping[Candidate, float]]] = field(default_factory=dict)
    name: str = ""

    def lookup(
        self, node: Node, kernel: str, schedules: Sequence[Schedule], target: Target, env: Mapping[str, int] = NO_SIZES
    ) -> list[float | None]:
        """Return the measured microseconds of a kernel for a node, at sizes `env`, with each schedule, or None.

        Uses the nearest measured sizes if they are close: at half or twice the rows, the best tile of a product was up
        to 2.8 times slower than the best one there (bench/cost_rule.py). All candidates of a node are compared at the
        same sizes. The node must not have a kernel choice yet.
        """
        times = self._nearest(node, target, env)
        return [times.get((kernel, schedule_text(s))) if times else None for s in schedules]

    def fastest(self, node: Node, target: Target, env: Mapping[str, int] = NO_SIZES) -> float:
        """Return the smallest time measured for a node at these sizes; infinity if there is none."""
        return min(self._nearest(node, target, env).values(), default=math.inf)

    def _nearest(self, node: Node, target: Target, env: Mapping[str, int]) -> Mapping[Candidate, float]:
        """Return the times of a node at the nearest measured sizes; empty if there are no close ones.

        Tokens and rows are equivalent for a node that depends on one of them only: a decode step of 512 rows has the
        products of a step with 512 tokens.
        """
        if not self.records:
            return {}
        text, sizes = node_text(node), sizes_of(node, env)
        close = self._close(text, target, dict(sizes))
        if close or len(sizes) != 1:
            return close
        ((symbol, size),) = sizes
        other = SIZES[1 - SIZES.index(symbol)]
        return self._close(re.sub(rf"\b{symbol}\b", other, text), target, {other: size})

    def _close(self, text: str, target: Target, env: Mapping[str, int]) -> Mapping[Candidate, float]:
        """Return the node's times at the measured sizes that are nearest to `env`; empty if they are not close."""
        points = self.records.get((machine(target), text))
        if not points:
            return {}
        sizes = min(points, key=lambda p: (_distance(p, env), p))
        return points[sizes] if _distance(sizes, env) <= MAX_SIZE_DISTANCE else {}

    def summary(self, measured: int, nodes: int, target: Target) -> str:
        """Describe in one line how the kernels of `nodes` nodes were chosen, `measured` of them by measurements."""
        if not measured:
            reason = f"the measurements of {self.name} contain none of this model's nodes" if self.records else ""
            return f"kernels are chosen by the cost rule: {reason or 'there are no measurements'} for {machine(target)}"
        rest = ", the others by the cost rule" if measured < nodes else ""
        return f"kernels of {measured} of {nodes} nodes are chosen by measurements of {self.name}{rest}"

    @staticmethod
    def load(path: Path) -> Tuning:
        """Load a file; raises Diagnostic E432 if it cannot be read."""
        return Tuning(_indexed(read(path)), str(path))

    @staticmethod
    def shipped(target: Target) -> Tuning:
        """Load the measurements that are shipped for this target; empty if there are none."""
        records: list[Record] = []
        names = []
        for file in sorted(resources.files(RECORDS).iterdir(), key=lambda f: f.name):
            if file.name.endswith(".jsonl"):
                matching = [r for r in parse(file.read_text(), file.name) if r.target == machine(target)]
                if matching:
                    records += matching
                    names.append(file.name.removesuffix(".jsonl"))
        return Tuning(_indexed(records), ", ".join(names))


def machine(target: Target) -> str:
    """Return the instruction set for which measurements are valid, independent of the target's name."""
    return "+".join([target.family, target.arch, *sorted(target.features)])


def node_text(n: Node) -> str:
    """Return the node's text without names and locations; measurements apply to all nodes with equal texts."""
    operands = ", ".join(map(_type_text, n.operands))
    results = ", ".join(map(_type_text, n.results))
    attrs = ", ".join(f"{k}={show_attr(v)}" for k, v in n.attrs.items())
    braced = f" {{{attrs}}}" if attrs else ""
    return f"{n.op.name}({operands}){braced} -> {results}"


def _type_text(v: Value) -> str:
    table = v.type.state and not any("P" in d.symbols for d in v.type.shape)
    return f"state {v.type.dtype}" if table else str(v.type)


def sizes_of(n: Node, env: Mapping[str, int]) -> Sizes:
    """Return the sizes of the step on which a node's types depend."""
    used = {s for v in [*n.operands, *n.results] for d in v.type.shape for s in d.symbols}
    return tuple((s, env[s]) for s in SIZES if s in used and s in env)


def record(
    node: Node, kernel: str, schedule: Schedule, target: Target, us: float, env: Mapping[str, int] = NO_SIZES
) -> Record:
    """Return a measurement of a node without a choice as a Record."""
    sizes = sizes_of(node, env)
    return Record(machine(target), node_text(node), sizes, kernel, schedule_text(schedule), float(f"{us:.4g}"))


def read(path: Path) -> list[Record]:
    """Read the records of a file, in order; raises Diagnostic E432."""
    try:
        text = read_text(path, _MAX_FILE)
    except ValueError as e:
        raise Diagnostic("E432", f"the tuning file {path} cannot be read: {e}", "choose another file") from None
    return parse(text, f"the tuning file {path}")


def parse(text: str, name: str) -> list[Record]:
    """Parse the records of a file's text; raises Diagnostic E432 for a malformed line."""
    out = []
    for i, line in enumerate(text.splitlines()):
        if not line.strip():
            continue
        try:
            out.append(_record(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            remedy = "remove the line, or tune again"
            raise Diagnostic("E432", f"{name}, line {i + 1}, is not a record: {e}", remedy) from None
    return out


def save(path: Path, new: Iterable[Record]) -> list[Record]:
    """Merge records into a file, replacing equal keys, and keep it sorted; returns all records of the file."""
    by_key = {r.key: r for r in (read(path) if path.exists() else [])}
    by_key |= {r.key: r for r in new}
    records = sorted(by_key.values(), key=lambda r: r.key)
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(f"{r.line()}\n" for r in records))
    part.replace(path)
    return records


def _record(r: Mapping[str, Any]) -> Record:
    """Parse one line of a tuning file. Raises an exception if a field is missing or invalid."""
    sizes = tuple((s, int(r["sizes"][s])) for s in SIZES if s in r["sizes"])
    if set(r["sizes"]) - set(SIZES) or not isinstance(r["schedule"], dict) or not math.isfinite(float(r["us"])):
        raise ValueError("its sizes, schedule or time are invalid")
    return Record(
        str(r["target"]), str(r["node"]), sizes, str(r["kernel"]), schedule_text(r["schedule"]), float(r["us"])
    )


def _indexed(records: Iterable[Record]) -> dict[tuple[str, str], dict[Sizes, dict[Candidate, float]]]:
    out: dict[tuple[str, str], dict[Sizes, dict[Candidate, float]]] = {}
    for r in records:
        out.setdefault((r.target, r.node), {}).setdefault(r.sizes, {})[r.kernel, r.schedule] = r.us
    return out


def _distance(sizes: Sizes, env: Mapping[str, int]) -> float:
    """The sum of |log2| of the ratios of sizes."""
    return sum(abs(math.log2(n / env[s])) for s, n in sizes if env.get(s, 0) > 0)
