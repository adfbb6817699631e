"""Predicted time and memory of programs, from their launches and the target's peaks, as data for report/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmc_runtime.format.manifest import RECURRENT, State, in_snapshot
from llmc_runtime.format.program import GROUP, Launch, Program, weights_of

from llmc.ir.ops.comm import COLLECTIVES
from llmc.targets.target import Target

CONTEXT = 1024
# The cost of ops with these prefixes assumes that every token reads the whole pool.
PAGED = ("paged_attention", "paged_alibi_attention", "paged_latent_attention")


def machine(target: Target) -> dict[str, Any]:
    """Return the peaks that predictions divide by."""
    return {
        "name": target.name,
        "flops": dict(target.peaks),
        "bandwidth": target.bandwidth,
        "launch_us": target.launch_us,
        "link": target.link,
    }


def roofline(programs: Sequence[Program], target: Target) -> dict[str, Any]:
    """Return report/roofline.json: predicted microseconds of each launch of every program at typical sizes."""
    peaks = machine(target)
    return {"machine": peaks, "programs": {p.name: predict(p, peaks, typical(p)) for p in programs}}


def typical(p: Program) -> dict[str, int]:
    """Return the sizes for which the time of a program is predicted.

    Decode programs: the fewest rows they serve, one token each after `CONTEXT` others. Others: one prompt of about 512
    tokens. The pool holds the pages of those rows.
    """
    top = p.top()
    rows = p.serves.get("R", (1, 1))[0]
    fewest = p.serves.get("T", (1, 1))[0]
    tokens = rows if p.uniform else max(fewest, min(512, top.get("T", 1)))
    pages = -(-(CONTEXT if p.uniform else tokens) // _page_size(p)) * rows
    return {s: {"T": tokens, "R": rows, "P": min(pages, high)}.get(s, high) for s, high in top.items()}


def _page_size(p: Program) -> int:
    """Return the tokens per KV page, from a pool's shape [P, ..., page, width]; 16 if there is no pool."""
    pools = (b.shape for b in p.buffers if b.kind == "state" and "P" in b.shape[0].symbols)
    return next((s[-2].const or 16 for s in pools), 16)


def predict(p: Program, peaks: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Predict the time of each launch at `sizes`: the larger of compute and memory time, plus the launch overhead."""
    rows = [_launch(p, x, peaks, sizes) for x in p.launches]
    return {"sizes": dict(sizes), "us": round(sum(r["us"] for r in rows), 3), "launches": rows}


def _launch(p: Program, x: Launch, peaks: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    flops, moved = (e(sizes) if e is not None else 0 for e in (x.flops, x.bytes))
    if x.op.startswith(PAGED):  # a row's tokens read only its own pages
        flops //= max(1, sizes.get("R", 1))
    dtypes = [p.buffers[a].dtype for a in x.args]
    peak = next((peaks["flops"][d] for d in dtypes if d in peaks["flops"]), peaks["flops"]["f32"])
    link = peaks.get("link", 0) if x.op in COLLECTIVES else 0
    rate = 2 * link if link else peaks["bandwidth"]  # a link sends and receives at the same time
    us = max(flops / peak, moved / rate) * 1e6 + peaks["launch_us"]
    return {"op": x.op, "loc": x.loc, "kernel": x.kernel, "us": round(us, 3), "flops": flops, "bytes": moved}


def memory(programs: Sequence[Program], states: Sequence[State], weights: int) -> dict[str, Any]:
    """Return report/memory.json: bytes of weights, arenas and states, of one KV page, of a snapshot of a row's
    recurrent states, and of the memory through which ranks exchange results.
    """
    paged = [s for s in states if any("P" in size.symbols for size in s.shape)]
    fixed = {s.name: s.nbytes({}) for s in states if s not in paged}
    return {
        "weights_bytes": weights,
        "arena_bytes": {p.name: p.arena_bytes for p in programs},
        "state_bytes": fixed,
        "kv_bytes_per_page": sum(s.nbytes({"P": 1}) for s in paged),
        "bytes_per_snapshot": sum(in_snapshot(s) for s in states if s.role == RECURRENT),
        "group_bytes": max((b.bytes({}) for p in programs for b in p.buffers if b.kind == GROUP), default=0),
    }


def weight_bytes(programs: Iterable[Program]) -> int:
    """Return the total bytes of the weights that the programs read, each counted once, packed or not."""
    return sum(b.bytes({}) for b in weights_of(programs).values())
