"""Compare the cost rule's choices for products with measurements: its first choice with the best measured one of the
kernels that it may choose. Kernels that are used only where they were measured (`opt_in`) do not count.

    python -m bench.cost_rule [FILE]          a tuning file; default: the one shipped for the H200. Needs no GPU.

The table's last lines: the mean ratio, and how much the best choice of one size costs at half or twice the size.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmc.codegen.candidates import candidates
from llmc.codegen.kernel import schedule_text
from llmc.codegen.tuning_records import Record, Tuning, machine, read
from llmc.extension import load
from llmc.ir.graph import Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.types import parse_type, split_commas
from llmc.targets.gpu_targets import sm_90

SHIPPED = Path(__file__).resolve().parent.parent / "llmc/targets/records/h200.jsonl"
_NODE = re.compile(r"(linear|linear_map|norm_linear)\((.*?)\)(?: \{(.*)\})? -> ")
Ways = dict[tuple[str, str], float]


def product(text: str) -> Node | None:
    """Return the product in a record's node text; None for other ops."""
    m = _NODE.match(text)
    if not m:
        return None
    g = Graph("record")
    types = [parse_type(t.strip(), {}) for t in split_commas(m[2])]
    values = [g.input(f"x{i}", t, i == 1 or t.rank == 1) for i, t in enumerate(types)]
    attrs = dict(re.findall(r'(\w+)=("[^"]*"|[^,]+)', m[3] or ""))
    return g.add(OPS[m[1]], values, {k: json.loads(v) for k, v in attrs.items()})


def measured(records: list[Record]) -> dict[str, dict[int, Ways]]:
    """Return node -> tokens -> schedule -> microseconds."""
    times: dict[str, dict[int, Ways]] = {}
    for r in records:
        if r.target == machine(sm_90()) and len(r.sizes) <= 1:
            tokens = r.sizes[0][1] if r.sizes else 1
            times.setdefault(r.node, {}).setdefault(tokens, {})[r.kernel, r.schedule] = r.us
    return times


def rows(points: Mapping[str, Mapping[int, Ways]]) -> Iterator[tuple[float, str]]:
    """Yield (first choice / best, a line) for every product and size whose first choice was measured."""
    kernels = load().kernels
    for text, sizes in sorted(points.items()):
        node = product(text)
        for tokens, ways in sorted(sizes.items()) if node else ():
            first = candidates(node, kernels, sm_90(), {"T": tokens, "R": tokens, "P": 1}, Tuning())[0]
            us = ways.get((first.kernel.name, schedule_text(first.schedule)))
            if us is not None:
                best = min(us for (kernel, _), us in ways.items() if not kernels[kernel].opt_in)
                line = f"{us / best:5.2f}  {us:8.2f} {best:8.2f}  {tokens:6d}  {first.kernel.name}  {text[:90]}"
                yield us / best, line


def moved(points: Mapping[str, Mapping[int, Ways]]) -> list[float]:
    """Return the cost of one size's best schedule at half or twice the size, relative to the best one there."""
    out = []
    for text, sizes in points.items():
        for a, b in ((a, b) for a in sizes for b in sizes if _NODE.match(text) and (a == 2 * b or b == 2 * a)):
            best = min(sizes[a], key=lambda w: sizes[a][w])
            out += [sizes[b][best] / min(sizes[b].values())] if best in sizes[b] else []
    return out


def main(argv: list[str]) -> None:
    points = measured(read(Path(argv[0]) if argv else SHIPPED))
    ratios = list(rows(points))
    print("ratio     first     best  tokens  kernel\n" + "\n".join(line for _, line in ratios))
    print(f"mean of {len(ratios)}: {sum(r for r, _ in ratios) / len(ratios):.3f}")
    print(f"the best of one size at half or twice the size: up to {max(moved(points)):.2f} times the best there")


if __name__ == "__main__":
    main(sys.argv[1:])
