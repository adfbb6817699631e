"""Splits IR text into lines and fields without using op declarations, so that unknown ops can be read, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmc_runtime.format.json_fields import damaged

_GRAPH = re.compile(r"graph @([\w.-]+)\(")
_NODE = re.compile(r"  (?P<results>%.*?) = (?P<op>\w+)\((?P<operands>[^)]*)\)(?P<rest>.*)")
_INPUT = re.compile(r"(%[^\s:,()]+): ([^%]+?)(?:,\s*$|\).*$|,\s*(?=%))")


@dataclass(frozen=True)
class Line:
    """A node: op, operands, results, attributes, types and location; `choice` is its kernel and arena, or ""."""

    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: str
    choice: str
    types: str
    loc: str

    @property
    def text(self) -> str:
        """The node without value names and without its kernel choice."""
        return f"{self.op}{f' {{{self.attributes}}}' if self.attributes else ''} : {self.types}"


@dataclass(frozen=True)
class Stage:
    """A module: its symbols and formats by name, and its graphs."""

    head: Mapping[str, str]
    graphs: Mapping[str, GraphText]


@dataclass(frozen=True)
class GraphText:
    """A graph: inputs as "name: type" (and "where: ranges", if it has any), nodes, and returned values."""

    name: str
    inputs: tuple[str, ...]
    nodes: tuple[Line, ...]
    outputs: tuple[str, ...]


def stage(text: str, where: str) -> Stage:
    """Parse a module's text; raises LlmcError E103 for a malformed line."""
    lines = (line.split(maxsplit=2) for line in text.partition("graph @")[0].splitlines())
    head = {" ".join(fields[:2]): fields[2] for fields in lines if len(fields) == 3 and fields[0] in ("sym", "format")}
    return Stage(head, {g.name: g for g in _graphs(text, where)})


def _graphs(text: str, where: str) -> Iterator[GraphText]:
    """Yield the graphs of a stage's text; raises LlmcError E103 for one without an end."""
    for block in re.split(r"^(?=graph @)", text, flags=re.M):
        if not (head := _GRAPH.match(block)):
            continue
        lines = block.splitlines()
        opening = next((i for i, line in enumerate(lines) if line.endswith("{")), None)
        if opening is None:
            raise damaged(where, f"graph @{head[1]} has no end")
        signature, body = lines[: opening + 1], lines[opening + 1 :]
        nodes = tuple(_line(line, where) for line in body if line.startswith("  %"))
        returned = next((line.removeprefix("  return") for line in body if line.startswith("  return")), None)
        outputs = () if returned is None else tuple(name.strip() for name in returned.split(","))
        yield GraphText(head[1], _inputs(signature), nodes, outputs)


def _inputs(signature: Sequence[str]) -> tuple[str, ...]:
    """Return the inputs of a graph as "name: type", followed by the ranges that it is specialized for."""
    inputs = [f"{name}: {kind.strip()}" for line in signature for name, kind in _INPUT.findall(line)]
    ranges = signature[-1].removesuffix("{").partition(") where ")[2].strip()
    return (*inputs, f"where: {ranges}") if ranges else tuple(inputs)


def _line(line: str, where: str) -> Line:
    m = _NODE.fullmatch(line)
    if not m:
        raise damaged(where, f"cannot read {line.strip()[:80]!r}")
    rest, _, loc = m["rest"].partition("  // ")
    braces, _, types = rest.rpartition(" : ")
    attributes, choice = _choice(braces.strip().removeprefix("{").removesuffix("}"))
    return Line(m["op"], _names(m["operands"]), _names(m["results"]), attributes, choice, types.strip(), loc)


def _choice(braces: str) -> tuple[str, str]:
    """Split into (attributes, choice): `select` and `memory` append theirs, beginning with kernel= or arena=."""
    at = re.search(r'(?:^|, )(?=kernel="|arena=\[)', braces)
    return (braces, "") if at is None else (braces[: at.start()], braces[at.end() :])


def _names(text: str) -> tuple[str, ...]:
    return tuple(x.strip() for x in text.split(",") if x.strip())
