"""`llmc roofline`: flops and minimum bytes of a model, symbolic and at given sizes, against a machine's peaks."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from llmc_runtime.format.errors import require_compiler

from llmc.console import Console, erase_line
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.frontend.model_folder import open_source
from llmc.ir.cost import Row, graph_cost, rows
from llmc.ir.graph import Graph, Module
from llmc.ir.text import parse_file


def main_roofline(args: Namespace, out: IO[str]) -> int:
    """Run `llmc roofline`: print one table (or JSON object) per graph."""
    sizes, target = parse_sizes(args.bind), load().target(args.target)  # checked before the trace, which takes seconds
    module = load_module(args.model)
    peak = args.peak or target.peaks.get(_dtype(module), target.peaks["f32"])
    bandwidth = args.bandwidth or target.bandwidth
    costs = [time_table(g, sizes, peak, bandwidth, args.by) for g in module.graphs.values()]
    erase_line(sys.stderr)
    if args.json:
        print(json.dumps({"peak": peak, "bandwidth": bandwidth, "sizes": sizes, "graphs": costs}, indent=2), file=out)
    else:
        print("\n\n".join(_table(f, sizes, peak, bandwidth) for f in costs), file=out)
    return 0


def load_module(path: str) -> Module:
    """Parse an .llir file, or trace a Hugging Face folder or config.json without reading weights."""
    p = Path(path)
    if p.suffix == ".llir":
        return parse_file(p, load().opset())
    folder = p.parent if p.name == "config.json" else p
    open_source(folder)  # report an unsuitable folder before slow modules are imported
    require_compiler()
    Console().begin("trace", f"{path} (imports torch and transformers)")
    from llmc.frontend.trace_model import trace

    return trace(folder).module


def parse_sizes(text: str) -> dict[str, int]:
    """Parse sizes such as T=128,R=4 into a dict; raises Diagnostic E426 if the text is malformed."""
    out = {}
    for item in filter(None, text.split(",")):
        name, eq, value = item.partition("=")
        if not eq or not value.strip().isdigit():
            raise Diagnostic("E426", f"--bind {item!r} is not a size", "write --bind T=128,R=4")
        out[name.strip()] = int(value)
    return out


def _dtype(m: Module) -> str:
    weights = [v.type.dtype for g in m.graphs.values() for v in g.inputs if v.weight]
    return max(set(weights), key=weights.count) if weights else "f32"


def time_table(g: Graph, sizes: Mapping[str, int], peak: float, bandwidth: float, by: str) -> dict[str, Any]:
    """Predict the time of every node of `g` at `sizes` and merge the rows by op, node or module, slowest first.

    `peak` is in flop/s and `bandwidth` in byte/s. The result also holds the symbolic totals.
    """
    flops, moved = graph_cost(g)
    try:
        costs = rows(g, sizes, peak, bandwidth)
    except ValueError as e:
        raise Diagnostic("E426", f"@{g.name}: {e}", "add it to --bind, as in --bind T=128,R=1") from None
    merged: dict[str, dict[str, Any]] = {}
    for i, r in enumerate(costs):
        _merge(merged.setdefault(_key(r, by, i), {"count": 0, "flops": 0, "bytes": 0, "seconds": 0.0}), r, sizes)
    table = [{"name": k.split("\0")[0], **v} for k, v in merged.items()]
    table.sort(key=lambda row: -row["seconds"])
    total = sum(row["seconds"] for row in table)
    return {"graph": g.name, "flops": str(flops), "bytes": str(moved), "seconds": total, "rows": table}


def _key(r: Row, by: str, index: int) -> str:
    if by == "op":
        return r.op
    return r.loc or "(inputs)" if by == "module" else f"{r.op} {r.loc}\0{index}"


def _merge(into: dict[str, Any], r: Row, sizes: Mapping[str, int]) -> None:
    into["count"] += 1
    into["flops"] += r.flops.subs(sizes).const or 0
    into["bytes"] += r.bytes.subs(sizes).const or 0
    into["seconds"] += r.seconds
    into["bound"] = r.bound


def _table(cost: dict[str, Any], sizes: Mapping[str, int], peak: float, bandwidth: float) -> str:
    at = ", ".join(f"{k}={v}" for k, v in sizes.items())
    lines = [
        f"@{cost['graph']}",
        f"  flops = {cost['flops']}",
        f"  bytes = {cost['bytes']}",
        f"  at {at}, {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s: {cost['seconds'] * 1e3:.3f} ms",
        f"  {'ms':>9} {'GFLOP':>10} {'MB':>10} {'count':>6}  bound    what",
    ]
    for r in cost["rows"]:
        lines.append(
            f"  {r['seconds'] * 1e3:9.3f} {r['flops'] / 1e9:10.3f} {r['bytes'] / 1e6:10.2f} {r['count']:6d}"
            f"  {r['bound']:8} {r['name']}"
        )
    return "\n".join(lines)
