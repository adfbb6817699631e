"""The model's modules as a tree: weights, traced ops, launches and predicted time. Equal siblings are merged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from llmc.report.formatting import count_noun, count_text, runs

_WEIGHT = re.compile(r"%([^\s:%]+): weight ([\w.]+)\[([\d, ]*)\]")
_NODE = re.compile(r"^  %[^=]*= (\w+)\(.*?(?:  // (\S+))?$", re.M)


@dataclass
class Part:
    """A module. `weights`: (name, dtype, shape). `ops`: traced ops. `time`: column -> (launches, microseconds)."""

    name: str
    weights: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    time: dict[str, tuple[int, float]] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def at(self, path: str) -> Part:
        """Return the module at a path below this one, creating it if necessary."""
        part = self
        for name in filter(None, path.split(".")):
            part = part.parts.setdefault(name, Part(name))
        return part

    def params(self) -> int:
        """Return the number of parameters in the module and below."""
        return sum(prod(s) for _, _, s in self.weights) + sum(p.params() for p in self.parts.values())

    def total(self, column: str) -> tuple[int, float]:
        """Return (launches, microseconds) of the module and below."""
        n, us = self.time.get(column, (0, 0.0))
        for p in self.parts.values():
            n = n + p.total(column)[0]
            us = us + p.total(column)[1]
        return n, us

    def form(self) -> Any:
        """Return a key that two modules share exactly if they are equal up to their own names."""
        time = {k: (n, round(us, 2)) for k, (n, us) in self.time.items()}
        parts = [(name, p.form()) for name, p in self.parts.items()]
        return repr((sorted(self.weights), sorted(self.ops.items()), sorted(time.items()), parts))


def tree(traced: str, launches: Mapping[str, Sequence[Mapping[str, Any]]]) -> Part:
    """Build the tree from the first IR text. `launches`: column -> predicted launches with "loc" and "us"."""
    root = Part("")
    for name, dtype, shape in _WEIGHT.findall(traced):
        path, _, last = name.rpartition(".")
        size = tuple(int(n) for n in shape.split(",") if n.strip())
        root.at(path).weights.append((last, dtype, size))
    for op, loc in _NODE.findall(traced):
        root.at(loc).ops[op] += 1
    for column, column_launches in launches.items():
        for x in column_launches:
            part = root.at(x["loc"])
            n, us = part.time.get(column, (0, 0.0))
            part.time[column] = n + 1, us + x["us"]
    return root


def group_modules(parts: Iterable[Part]) -> list[list[Part]]:
    """Group equal modules with numeric names, such as layers; others form groups of their own."""
    groups: dict[Any, list[Part]] = {}
    for p in parts:
        key = p.form() if p.name.isdigit() else (p.name,)
        groups.setdefault(key, []).append(p)
    return list(groups.values())


def group_name(group: Sequence[Part]) -> str:
    """Return the name of a group of equal modules, such as "0-31 (32 equal modules)"."""
    first = group[0].name
    return first if len(group) == 1 else f"{runs([int(p.name) for p in group])} ({len(group)} equal modules)"


def module_facts(group: Sequence[Part], columns: Sequence[str], alone: bool = False) -> str:
    """Format parameters, launches and time of a group; `alone` leaves out the parameters and the submodules."""
    params = 0 if alone else sum(p.params() for p in group)
    facts = [f"{count_text(params)} parameters"] if params else []
    for c in columns:
        totals = [p.time.get(c, (0, 0.0)) if alone else p.total(c) for p in group]
        n = sum(n for n, _ in totals)
        us = sum(us for _, us in totals)
        facts += [f"{c}: {count_noun(n, 'launch', 'launches')}, {us:,.1f} us"] if n else []
    return " · ".join(facts)
