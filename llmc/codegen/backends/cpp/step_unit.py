"""The step unit of CPU artifacts: one C++ source with the launch tables of all programs and their thread pool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.codegen.backends.cpp.cpp_kernel import inline_headers
from llmc.codegen.kernel import Source
from llmc.codegen.launch_plan import Placed
from llmc.ir.dim import Dim
from llmc.ir.graph import Module
from llmc.ir.ops.comm import COLLECTIVES


@dataclass(frozen=True)
class LaunchTable:
    """The arguments of one launch: buffer indices, sizes, and whether all threads wait after it."""

    args: tuple[int, ...]
    sizes: tuple[Dim, ...]
    sync: bool


@dataclass(frozen=True)
class StepTable:
    """The launches of one program; `symbols` is the order in which the step function takes their values.

    collectives: whether some launches are collectives between ranks.
    """

    name: str
    symbols: tuple[str, ...]
    launches: tuple[LaunchTable, ...]
    scratch: int
    collectives: bool = False

    @property
    def entry(self) -> str:
        """The name of the step function."""
        return f"llmc_run_{self.name}"


def step_unit(steps: Sequence[StepTable]) -> str:
    """Return the C++ text of the step unit.

    It exports `llmc_open(nthreads)`, `llmc_close(pool)` and, for each program, `int llmc_run_NAME(pool, kernels,
    buffers, symbols)`, where kernels has one function per launch, in order; `llmc_room` and `llmc_open_room` are for
    pools that several units share. `llmc_profile_NAME` takes one more pointer, to which it writes the nanoseconds of
    each launch. If a program has collectives, it also exports the functions of llmc_join.h.
    """
    plans = [_Plan(s) for s in steps]
    head = [
        "// The step functions of one artifact: launches in order on a pool of threads.",
        f"#define LLMC_MAX_ARGS {max([1, *(len(p.args) for p in plans)])}",
        f"#define LLMC_MAX_SIZES {max([1, *(len(p.sizes) for p in plans)])}",
        f"#define LLMC_MAX_LAUNCHES {max([1, *(len(p.rows) for p in plans)])}",
        f"#define LLMC_SCRATCH INT64_C({max([64, *(-(-s.scratch // 64) * 64 for s in steps)])})",
        '#include "llmc_layout.h"',
        '#include "llmc_abi.h"',
        '#include "llmc_pool.h"',
        *(['#include "llmc_join.h"'] if any(s.collectives for s in steps) else []),
        "static inline int64_t llmc_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }",
    ]
    return inline_headers("\n".join([*head, *(p.text() for p in plans), ""]))


class _Plan:
    """The tables of one step; equal size lists are stored once."""

    def __init__(self, step: StepTable):
        self.step = step
        self.args: list[int] = []
        self.sizes: list[Dim] = []
        self.rows: list[tuple[int, int, int]] = []
        at: dict[tuple[Dim, ...], int] = {}
        for x in step.launches:
            if x.sizes not in at:
                at[x.sizes] = len(self.sizes)
                self.sizes += x.sizes
            self.rows.append((len(self.args), at[x.sizes], int(x.sync)))
            self.args += x.args

    def text(self) -> str:
        """Return the C++ text of the tables and the step functions."""
        n, entry = self.step.name, self.step.entry
        symbols = {s: f"s[{i}]" for i, s in enumerate(self.step.symbols)}
        sizes = "".join(f"  z[{i}] = {size_text(d, symbols)};\n" for i, d in enumerate(self.sizes))
        rows = ", ".join(f"{{{a}, {z}, {sync}}}" for a, z, sync in self.rows) or "{0, 0, 0}"
        args = ", ".join(map(str, self.args)) or "0"
        call = "void* pool, void* const* kernels, void* const* buffers, const int64_t* symbols"
        return (
            f"static void {n}_sizes(const int64_t* s, int64_t* z) {{\n  (void)s, (void)z;\n{sizes}}}\n"
            f"static const llmc_launch {n}_launches[] = {{{_wrap(rows)}}};\n"
            f"static const int32_t {n}_args[] = {{{_wrap(args)}}};\n"
            f"static const llmc_step {n}_step = {{\n"
            f"  {n}_launches, {len(self.rows)}, {n}_args, {len(self.args)}, {n}_sizes}};\n"
            f"LLMC_EXPORT int {entry}({call}) {{\n"
            f"  return llmc_go((llmc_pool*)pool, &{n}_step, kernels, buffers, symbols, nullptr);\n}}\n"
            f"LLMC_EXPORT int llmc_profile_{n}({call}, int64_t* ns) {{\n"
            f"  return llmc_go((llmc_pool*)pool, &{n}_step, kernels, buffers, symbols, ns);\n}}"
        )


def size_text(d: Dim, symbols: dict[str, str]) -> str:
    """Print a size as a C++ expression."""
    names = {**symbols, "ceil": "llmc_ceil"}
    return re.sub(r"[A-Za-z_]\w*", lambda m: names[m[0]], str(d))


def _wrap(text: str) -> str:
    """Break a long initializer into lines."""
    lines = [""]
    for item in text.split(", "):
        if len(lines[-1]) + len(item) > 110:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + item
    return ",\n  ".join(lines)


def step_source(placed: Sequence[Placed], m: Module) -> tuple[Source, tuple[str, ...]]:
    """Return the step unit of all programs, and the name of each program's step function."""
    tables = [step_table(p, m) for p in placed]
    entries = tuple(t.entry for t in tables)
    return Source(entries[0] if entries else "", "cpp", step_unit(tables), options=(("O", 2),)), entries


def step_table(p: Placed, m: Module) -> StepTable:
    """Return the launch table of a graph."""
    bounds = m.bounds(p.emitted.graph)
    sources = p.emitted.sources
    launches = [LaunchTable(args, s.sizes, sync) for args, s, sync in zip(p.args, sources, p.sync, strict=True)]
    scratch = max((s.scratch.bounds(bounds)[1] for s in sources), default=0)
    collectives = any(n.op.name in COLLECTIVES for n in p.emitted.nodes)
    return StepTable(p.emitted.graph.name, tuple(m.symbols), tuple(launches), scratch, collectives)
