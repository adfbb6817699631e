"""Runs compiled kernels on drawn inputs beside the reference interpreter; what the kernel tests share."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmc.codegen.backends.cpp.cpp_kernel import inline_headers, without_headers
from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.kernel import Kernel, Source
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Node
from llmc.ir.interp import bind_symbols, round_to_type, run
from llmc.ir.types import Type
from llmc.targets.target import Target

GUARD = 256  # bytes before and behind every buffer, which must stay as they were
POISON = 0xFF  # NaN in every float width


class Ctx(ctypes.Structure):
    _fields_ = (
        ("tid", ctypes.c_int),
        ("nthreads", ctypes.c_int),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
    )


@dataclass
class Case:
    """One node in a graph of its own, the kernel and schedule to run it with, and concrete inputs."""

    name: str
    graph: Graph
    kernel: Kernel
    schedule: dict[str, Any]
    inputs: list[np.ndarray]
    rtol: float = 1e-5
    atol: float = 1e-5
    sizes: dict[str, int] = field(default_factory=dict)  # of symbols that no input's shape binds
    exact: bool = False  # compare with the reference in float64, whose result is not rounded

    @property
    def node(self) -> Node:
        (node,) = self.graph.nodes
        return node


class Buffer:
    """Bytes for one value between two guard zones."""

    def __init__(self, nbytes: int):
        self.raw = np.full(nbytes + 2 * GUARD + 64, POISON, np.uint8)
        start = GUARD + (-(self.raw.ctypes.data + GUARD)) % 64
        self.body = self.raw[start : start + nbytes]
        self.start, self.end = start, start + nbytes

    def put(self, x: np.ndarray, t: Type) -> Buffer:
        self.body[:] = np.ascontiguousarray(x.astype(DTYPES[t.dtype].np)).reshape(-1).view(np.uint8)
        return self

    @staticmethod
    def holding(x: np.ndarray, t: Type) -> Buffer:
        return Buffer(x.size * DTYPES[t.dtype].bits // 8).put(x, t)

    def get(self, t: Type, shape: tuple[int, ...]) -> np.ndarray:
        return self.body.view(DTYPES[t.dtype].np).reshape(shape)

    def check(self, what: str) -> None:
        assert (self.raw[: self.start] == POISON).all(), f"{what}: bytes before the buffer were written"
        assert (self.raw[self.end :] == POISON).all(), f"{what}: bytes behind the buffer were written"


def batch(sources: Sequence[Source]) -> str:
    """Many kernels as one text: each in a namespace, the headers once, entries made distinct (`k0_...`)."""
    headers: dict[str, None] = {}
    bodies = []
    for i, s in enumerate(sources):
        text = without_headers(s.text)
        for h in re.findall(r'^#include ["<][^\n]+', text, re.M):
            headers[h] = None
        text = re.sub(r'^#include ["<][^\n]+\n', "", text, flags=re.M)
        bodies.append(f"namespace k{i} {{\n{text.replace(s.entry + '(', f'k{i}_{s.entry}(')}\n}}")
    return inline_headers("\n".join([*headers, *bodies, ""]))


def compile_cases(
    cases: Sequence[Case], target: Target, folder: Path, parts: int = 4, cache: Path | None = None
) -> dict[str, Any]:
    """Case name -> (its Source, its loaded function). Binaries are loaded from `folder`, which no other process has."""
    toolchain = CppToolchain.find(target)
    sources = [c.kernel.emit(c.node, c.schedule, target) for c in cases]
    groups = [list(range(i, len(cases), parts)) for i in range(min(parts, len(cases)))]
    units = [Source("tests", "cpp", batch([sources[i] for i in g])) for g in groups]
    binaries = toolchain.compile([(u, "") for u in units], cache or folder)
    out: dict[str, Any] = {}
    for g, u in zip(groups, units, strict=True):
        path = folder / f"{hashlib.sha256(u.text.encode()).hexdigest()[:16]}-{target.arch}.test.so"
        path.write_bytes(binaries[toolchain.key(u)].binary)
        lib = ctypes.CDLL(str(path))
        for at, i in enumerate(g):
            out[cases[i].name] = (sources[i], getattr(lib, f"k{at}_{sources[i].entry}"))
    return out


def run_case(case: Case, source: Source, function: Any, threads: int = 3) -> None:
    """Run the kernel as `threads` threads would, one after the other, and hold it against the interpreter."""
    node, g = case.node, case.graph
    held = [round_to_type(x, v.type) for x, v in zip(case.inputs, g.inputs, strict=True)]
    sizes = bind_symbols(g, held, case.sizes)
    want = run(g, held, sizes, exact=case.exact)
    at = {v: Buffer.holding(x, v.type) for v, x in zip(g.inputs, held, strict=True)}
    buffers = [at[v] for v in node.operands]
    written = iter(node.op.writes)
    for r, w in zip(node.results, want, strict=True):
        if r.type.state:
            buffers.append(at[node.operands[[s.name for s in node.op.operands].index(next(written))]])
        else:
            buffers.append(Buffer(w.size * DTYPES[r.type.dtype].bits // 8))
    args = (ctypes.c_void_p * len(buffers))(*(b.body.ctypes.data for b in buffers))
    given = [int(d.subs(sizes).const) for d in source.sizes]  # type: ignore[arg-type]
    nscratch = int(source.scratch.subs(sizes).const)  # type: ignore[arg-type]
    for tid in range(threads):
        scratch = Buffer(nscratch)
        ctx = Ctx(tid, threads, scratch.body.ctypes.data, nscratch)
        function(ctypes.byref(ctx), args, (ctypes.c_int64 * max(1, len(given)))(*given))
        scratch.check(f"{case.name}: scratch of thread {tid}")
    outputs = buffers[len(node.operands) :]
    for i, b in enumerate(buffers):
        b.check(f"{case.name}: buffer {i}")
    for x, v in zip(held, g.inputs, strict=True):
        if at[v] not in outputs:
            np.testing.assert_array_equal(at[v].body, Buffer.holding(x, v.type).body, "an operand changed")
    for r, w, b in zip(node.results, want, outputs, strict=True):
        got = round_to_type(b.get(r.type, w.shape), r.type)
        if DTYPES[r.type.dtype].kind == "f":
            unit = {"bf16": 2.0**-7, "f16": 2.0**-10}.get(r.type.dtype, 0.0)  # one unit in the last place
            np.testing.assert_allclose(got, w, rtol=case.rtol + unit, atol=case.atol, err_msg=case.name)
        else:
            np.testing.assert_array_equal(got, w, err_msg=case.name)
