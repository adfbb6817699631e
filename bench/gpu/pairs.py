"""Time attention of a prompt's part and of the rows that decode beside it, as the two launches of a step.

    python -m bench.gpu.pairs -o FOLDER [--compile-only]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.gpu import attention as base
from bench.gpu.attention import Bench, Card, Heads, Launch, Setting, Way, compile_all, entry_path, floor_us, read_entry
from llmc.codegen.backends.triton.mixed_attention import MIXED_ATTENTION
from llmc.codegen.backends.triton.prefill_attention import PREFILL_ATTENTION
from llmc.codegen.backends.triton.single_token_attention import SINGLE_TOKEN_ATTENTION
from llmc.extension import load

SCALE = f"scale={128**-0.5!r}"
TILES = ((64, 64, 4, 3), (64, 32, 4, 3))
SINGLES = ((32, 4, 2), (32, 3, 2), (64, 2, 4))
MIXED = ((64, 64, 4, 3, 64), (64, 64, 4, 2, 64), (64, 32, 4, 3, 64), (64, 32, 4, 3, 32), (64, 64, 4, 3, 32),
         (64, 64, 4, 4, 32), (128, 64, 8, 3, 64), (128, 64, 8, 2, 64))  # fmt: skip
CHUNKS = ((576, 1152, 1100), (576, 1728, 1100), (576, 1728, 2000), (448, 1728, 1600), (704, 1728, 300), (576, 576, 1100))
for new, total, context in CHUNKS:
    base.CASES[f"{new}-of-{total}-and-64x{context}"] = [*[(1, context)] * 64, (new, total)]


def old_order(launch: Launch) -> Launch:
    """Return the launch with tiles along the first axis of the grid."""
    text = launch.source.text.replace("TILE_AXIS=1", "TILE_AXIS=0")
    assert text != launch.source.text
    x, y, z = launch.source.grid
    return replace(launch, source=replace(launch.source, text=text, grid=(y, x, z)))


def ways(case: str, s: Setting) -> Iterator[Way]:
    """Yield each schedule of the prompt's kernel alone, and before the kernel of single tokens."""
    many = base.node_of("paged_attention", "T", f"{{{SCALE}, least=2}}", s)
    one = base.node_of("paged_attention_single", "T", f"{{{SCALE}}}", s)
    singles = {}
    for keys, stages, warps in SINGLES:
        for settled in (0, 1):
            source = SINGLE_TOKEN_ATTENTION.emit(one, {"keys": keys, "stages": stages, "warps": warps, "settled": settled}, s.target)
            singles[keys, stages, warps, settled] = Launch(one, source, (*s.operands("paged_attention_single"), "y"))
    first = singles[32, 4, 2, 1]
    for key, single in singles.items():
        yield Way(case, f"single {key}", (single,))
    for rows, keys, warps, stages in TILES:
        schedule = {"rows": rows, "keys": keys, "warps": warps, "stages": stages}
        source = PREFILL_ATTENTION.emit(many, schedule, s.target)
        launch = Launch(many, source, (*s.operands("paged_attention"), "y"))
        name = f"{rows},{keys},{warps},{stages}"
        for order, x in (("new", launch), ("old", old_order(launch))):
            yield Way(case, f"{name} {order}", (x,))
            yield Way(case, f"{name} {order} + single", (x, first))
        yield Way(case, f"{name} new + single 32,3,2", (launch, singles[32, 3, 2, 1]))
        yield Way(case, f"{name} new + single 64,2,4", (launch, singles[64, 2, 4, 1]))
        yield Way(case, f"{name} new + single, waits", (launch, singles[32, 4, 2, 0]))
    every = base.node_of("paged_attention", "T", f"{{{SCALE}}}", s)
    for rows, keys, warps, stages, single in MIXED:
        schedule = {"rows": rows, "keys": keys, "warps": warps, "stages": stages, "single": single}
        mixed = Launch(every, MIXED_ATTENTION.emit(every, schedule, s.target), (*s.operands("paged_attention"), "y"))
        yield Way(case, f"mixed {rows},{keys},{warps},{stages},{single}", (mixed,))


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("-o", "--out", type=Path, required=True)
    ap.add_argument("--compile-only", action="store_true")
    args = ap.parse_args()
    registry = load()
    s = Setting(Heads(), registry, registry.target("cuda:sm_90"))
    cases = list(base.CASES)[-len(CHUNKS) :]
    found = {case: list(ways(case, s)) for case in cases}
    binaries = args.out / "binaries"
    compile_all((x for some in found.values() for way in some for x in way.launches), s, binaries)
    if args.compile_only:
        return
    card = Card(nbytes=1 << 20)
    base.SECONDS = 0.012
    with (args.out / "pairs.jsonl").open("w") as out:
        for case, some in found.items():
            bench, want = Bench(case, s, card), {}
            for way in some:
                made = {x.key: read_entry(entry_path(binaries, x.key)) for x in way.launches}
                error = -1.0
                if len(way.launches) == 2 or way.name.startswith("mixed"):
                    got = bench.result(way, made)
                    first = want.setdefault("y", got)
                    error = float((got - first).norm() / first.norm())
                us = bench.microseconds(way, made)
                print(json.dumps({"case": case, "way": way.name, "us": round(us, 1), "error": error}), file=out, flush=True)
                print(f"{case:26} {way.name:40} {us:8.1f} us, floor {floor_us(case, s):7.1f}, error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
