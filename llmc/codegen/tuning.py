"""Measurements of kernels as a file of JSON lines, and looking them up; measuring is done elsewhere (llmc.lab.tune).

A line says how long one kernel under one schedule took for one node at given sizes of the step (T tokens, R rows):

    {"target": "cuda+sm_90+pdl", "node": "linear(bf16[R, 64], bf16[96, 64]) -> bf16[R, 96]", "sizes": {"R": 8},
     "kernel": "triton/stream", "schedule": {"warps": 4}, "us": 3.1}

A node is known by its text, without places and names; tables of the device's rows are left out of it, whose length is
another with every limit that a model is compiled for. A file is sorted, a line a measurement, so that two tunings
compare as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc.codegen.kernel import Schedule, schedule_text
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Node, Value
from llmc.ir.text import show_attr
from llmc.targets.target import Target

SIZES = ("T", "R")  # of a step; the pages of the KV pool do not change what a launch does
RECORDS = "llmc.targets.records"  # the package whose *.jsonl files ship with us
CLOSE = 0.5  # how far apart sizes may be, in factors of two
NOTHING: Mapping[str, int] = MappingProxyType({})

Sizes = tuple[tuple[str, int], ...]
Way = tuple[str, str]  # kernel, schedule as text


@dataclass(frozen=True)
class Record:
    """One measurement, in microseconds."""

    target: str
    node: str
    sizes: Sizes
    kernel: str
    schedule: str
    us: float

    @property
    def key(self) -> tuple[str, str, Sizes, str, str]:
        return self.target, self.node, self.sizes, self.kernel, self.schedule

    def line(self) -> str:
        doc = {
            "target": self.target, "node": self.node, "sizes": dict(self.sizes), "kernel": self.kernel,
            "schedule": json.loads(self.schedule), "us": self.us,
        }  # fmt: skip
        return json.dumps(doc)


@dataclass(frozen=True)
class Tuning:
    """What was measured: (target, node) -> sizes -> (kernel, schedule) -> microseconds; `name` is for people."""

    records: Mapping[tuple[str, str], Mapping[Sizes, Mapping[Way, float]]] = field(default_factory=dict)
    name: str = ""

    def lookup(
        self, node: Node, kernel: str, schedule: Schedule, target: Target, env: Mapping[str, int] = NOTHING
    ) -> float | None:
        """The measurement of one way to run a node that has no choice yet, at the sizes `env`; else None.

        Taken are the sizes that were measured for the node, or else the nearest ones, if those are close: at half or
        twice the rows the best tile of a product was up to 2.8 times slower than the best there (bench/cost_rule.py).
        All ways to run a node are compared at the same sizes.
        """
        points = self.records.get((machine(target), node_text(node))) if self.records else None
        if not points:
            return None
        sizes = min(points, key=lambda p: (_distance(p, env), p))
        return points[sizes].get((kernel, schedule_text(schedule))) if _distance(sizes, env) <= CLOSE else None

    def decided(self, measured: int, nodes: int, target: Target) -> str:
        """One line for people: what chose the kernels of `nodes` nodes, `measured` of them by these measurements."""
        if not measured:
            what = f"the measurements of {self.name} hold none of this model's nodes" if self.records else ""
            return f"kernels are chosen by the cost rule: {what or 'nothing is measured'} for {machine(target)}"
        rest = ", the others' by the cost rule" if measured < nodes else ""
        return f"kernels of {measured} of {nodes} nodes are chosen by the measurements of {self.name}{rest}"

    @staticmethod
    def load(path: Path) -> Tuning:
        """The measurements of a file; Diagnostic E432 where it cannot be read."""
        return Tuning(_indexed(read(path)), str(path))

    @staticmethod
    def shipped(target: Target) -> Tuning:
        """The measurements that come with us for this target; empty where there are none."""
        found: list[Record] = []
        names = []
        for file in sorted(resources.files(RECORDS).iterdir(), key=lambda f: f.name):
            if file.name.endswith(".jsonl"):
                mine = [r for r in parse(file.read_text(), file.name) if r.target == machine(target)]
                found += mine
                names += [file.name.removesuffix(".jsonl")] * bool(mine)
        return Tuning(_indexed(found), ", ".join(names))


def machine(target: Target) -> str:
    """What measurements hold for: the instruction set, whatever the target was called."""
    return "+".join([target.family, target.arch, *sorted(target.features)])


def node_text(n: Node) -> str:
    """The node without places and names: equal for nodes that one measurement holds for."""
    attrs = ", ".join(f"{k}={show_attr(v)}" for k, v in n.attrs.items())
    results = ", ".join(_type_text(r) for r in n.results)
    return f"{n.op.name}({', '.join(map(_type_text, n.operands))}){f' {{{attrs}}}' if attrs else ''} -> {results}"


def _type_text(v: Value) -> str:
    table = v.type.state and not any("P" in d.symbols for d in v.type.shape)
    return f"state {v.type.dtype}" if table else str(v.type)


def sizes_of(n: Node, env: Mapping[str, int]) -> Sizes:
    """The sizes of the step that a node's types depend on."""
    used = {s for v in [*n.operands, *n.results] for d in v.type.shape for s in d.symbols}
    return tuple((s, env[s]) for s in SIZES if s in used and s in env)


def record(
    node: Node, kernel: str, schedule: Schedule, target: Target, us: float, env: Mapping[str, int] = NOTHING
) -> Record:
    """A measurement of a node that has no choice on it."""
    sizes = sizes_of(node, env)
    return Record(machine(target), node_text(node), sizes, kernel, schedule_text(schedule), float(f"{us:.4g}"))


def read(path: Path) -> list[Record]:
    """The records of a file, in its order."""
    try:
        text = path.read_text()
    except OSError as e:
        raise Diagnostic("E432", f"the tuning file {path} cannot be read: {e.strerror}", "name another") from None
    return parse(text, f"the tuning file {path}")


def parse(text: str, what: str) -> list[Record]:
    """The records of a file's text; Diagnostic E432 names the line that is none."""
    out = []
    for i, line in enumerate(text.splitlines()):
        if not line.strip():
            continue
        try:
            out.append(_record(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            remedy = "remove the line, or tune again"
            raise Diagnostic("E432", f"{what}, line {i + 1}, is not a record: {e}", remedy) from None
    return out


def save(path: Path, new: Iterable[Record]) -> list[Record]:
    """Put records into a file, replacing those of equal keys, and sort it; answers all that it then holds."""
    kept = {r.key: r for r in (read(path) if path.exists() else [])}
    kept |= {r.key: r for r in new}
    found = sorted(kept.values(), key=lambda r: r.key)
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(f"{r.line()}\n" for r in found))
    part.replace(path)
    return found


def _record(r: Mapping[str, Any]) -> Record:
    sizes = tuple((s, int(r["sizes"][s])) for s in SIZES if s in r["sizes"])
    if set(r["sizes"]) - set(SIZES) or not isinstance(r["schedule"], dict) or not math.isfinite(float(r["us"])):
        raise ValueError("its sizes, schedule or time are none")
    return Record(
        str(r["target"]), str(r["node"]), sizes, str(r["kernel"]), schedule_text(r["schedule"]), float(r["us"])
    )


def _indexed(found: Iterable[Record]) -> dict[tuple[str, str], dict[Sizes, dict[Way, float]]]:
    out: dict[tuple[str, str], dict[Sizes, dict[Way, float]]] = {}
    for r in found:
        out.setdefault((r.target, r.node), {}).setdefault(r.sizes, {})[r.kernel, r.schedule] = r.us
    return out


def _distance(sizes: Sizes, env: Mapping[str, int]) -> float:
    """The sum of |log2| of the sizes' ratios."""
    return sum(abs(math.log2(n / env[s])) for s, n in sizes if env.get(s, 0) > 0)
