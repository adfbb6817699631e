"""Time attention of a prompt's part and of the rows that decode beside it: as one launch, and as the two of a step.

    python -m bench.gpu.pairs -o FOLDER [--compile-only]

The two launches overlap as in a step: they run in a graph, with programmatic dependent launch. FOLDER gets
`pairs.jsonl`, a row for every way, and the binaries, so that a machine without compilers can repeat the run. The
results of all ways are compared with those of the first pair.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.attention import Bench, Card, compile_all, entry_path, floor_us, read_entry
from bench.gpu.attention_ways import CASES, Heads, Launch, Setting, Way, node_of
from llmc.codegen.backends.triton.decode_attention import SINGLE_TOKEN_ATTENTION
from llmc.codegen.backends.triton.prefill_attention import MIXED_ATTENTION, PREFILL_ATTENTION
from llmc.codegen.backends.triton.triton_kernel import TritonKernel
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.extension import load

SCALE = f"scale={128**-0.5!r}"
# (tokens of the prompt's part, tokens up to its end, context of each of 64 rows)
CHUNKS = (
    (576, 1152, 1100),
    (576, 1728, 1100),
    (576, 1728, 2000),
    (448, 1728, 1600),
    (704, 1728, 300),
    (576, 576, 1100),
)
TILES = ((64, 64, 4, 3), (64, 32, 4, 3))  # rows, keys, warps, stages of the prompt's tiles
SINGLES = ((32, 4, 2), (32, 3, 2), (64, 2, 4))  # keys, stages, warps
# Tiles as above, and the keys of the tiles of single tokens
MIXED = (
    (64, 64, 4, 3, 64), (64, 64, 4, 2, 64), (64, 32, 4, 3, 64), (64, 32, 4, 3, 32), (64, 64, 4, 3, 32),
    (64, 64, 4, 4, 32), (128, 64, 8, 3, 64), (128, 64, 8, 2, 64),
)  # fmt: skip


def ways(case: str, s: Setting) -> Iterator[Way]:
    """Yield the kernels of prompts and of single tokens alone, pairs of them, and the kernel of both."""

    def launch(kernel: TritonKernel, op: str, attrs: str, **schedule: int) -> Launch:
        node = node_of(op, "T", f"{{{SCALE}{attrs}}}", s)
        return Launch(node, kernel.emit(node, schedule, s.target), (*s.operands(op), "y"))

    singles = [
        launch(SINGLE_TOKEN_ATTENTION, "paged_attention_single", "", keys=keys, stages=stages, warps=warps,
               **{READ_BEFORE_WAIT: 1})
        for keys, stages, warps in SINGLES
    ]  # fmt: skip
    for shape, single in zip(SINGLES, singles, strict=True):
        yield Way(case, f"single {shape}", (single,))
    for rows, keys, warps, stages in TILES:
        tile = {"rows": rows, "keys": keys, "warps": warps, "stages": stages}
        prompt = launch(PREFILL_ATTENTION, "paged_attention", ", least=2", **tile)
        yield Way(case, f"prompt {rows, keys, warps, stages}", (prompt,))
        for shape, single in zip(SINGLES, singles, strict=True):
            yield Way(case, f"prompt {rows, keys, warps, stages}, single {shape}", (prompt, single))
    for rows, keys, warps, stages, min_rows in MIXED:
        tile = {"rows": rows, "keys": keys, "warps": warps, "stages": stages, "single": min_rows}
        both = launch(MIXED_ATTENTION, "paged_attention", "", **tile)
        yield Way(case, f"one launch {rows, keys, warps, stages, min_rows}", (both,))


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ap.add_argument("-o", "--out", type=Path, required=True, help="folder of the results and binaries")
    ap.add_argument("--compile-only", action="store_true", help="compile and measure nothing")
    args = ap.parse_args()
    registry = load()
    s = Setting(Heads(), registry, registry.target("cuda:sm_90"))
    spans = {f"{new}-of-{total}-and-64x{rest}": [*[(1, rest)] * 64, (new, total)] for new, total, rest in CHUNKS}
    CASES.update(spans)
    ways_of = {case: list(ways(case, s)) for case in spans}
    binaries = args.out / "binaries"
    compile_all((x for some in ways_of.values() for way in some for x in way.launches), s, binaries)
    if args.compile_only:
        return
    card = Card(nbytes=1 << 20)
    with (args.out / "pairs.jsonl").open("w") as out:
        for case, some in ways_of.items():
            bench, first = Bench(case, s, card), None
            for way in some:
                entries = {x.key: entry for x in way.launches if (entry := read_entry(entry_path(binaries, x.key)))}
                row: dict[str, object] = {"case": case, "way": way.name}
                if len(way.launches) == 2 or "one" in way.name:
                    got = bench.result(way, entries)
                    first = got if first is None else first
                    row["error"] = float((got - first).norm() / first.norm())
                row |= {"us": round(bench.microseconds(way, entries), 1), "floor": round(floor_us(case, s), 1)}
                print(json.dumps(row), file=out, flush=True)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
