"""Compiles C++ kernels, runs them on this CPU, and compares them with the reference."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmc.codegen.backends.cpp.cpp_kernel import inline_headers, without_headers
from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.kernel import Source
from llmc.targets.target import Target
from llmc.testing.case import Bound, Buffer, Case


class Ctx(ctypes.Structure):
    """The first argument of a kernel: which thread of how many it is, and its scratch memory."""

    _fields_ = (
        ("tid", ctypes.c_int),
        ("nthreads", ctypes.c_int),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("group", ctypes.c_void_p),
    )


def batch(sources: Sequence[Source]) -> str:
    """Join kernels into one text: each in a namespace, headers once, entries made distinct (`k0_...`)."""
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
    """Compile cases; return case name -> (its Source, its loaded function).

    folder: where binaries are written and loaded from; no other process may use it. parts: number of compilations.
    cache: the folder of compiled kernels (`folder`). Raises Diagnostic E502 if a kernel does not compile.
    """
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
    """Run the kernel as `threads` threads would, one after the other, and compare it with the reference.

    Outputs are poisoned before, and the bytes around all buffers and scratch memory are checked after. Raises
    AssertionError if they were written, or if a result is wrong.
    """
    bound = Bound(case)
    buffers = [*bound.operands, *bound.results]
    args = (ctypes.c_void_p * len(buffers))(*(b.body.ctypes.data for b in buffers))
    sizes = [bound.value(d) for d in source.sizes]
    scratch_bytes = bound.value(source.scratch)
    for tid in range(threads):
        scratch = Buffer(scratch_bytes)
        ctx = Ctx(tid, threads, scratch.body.ctypes.data, scratch_bytes)
        function(ctypes.byref(ctx), args, (ctypes.c_int64 * max(1, len(sizes)))(*sizes))
        scratch.check(f"{case.name}: scratch of thread {tid}")
    bound.check()
