"""Every Triton kernel as a binary on the GPU beside its op's reference: odd shapes, poisoned outputs, guard zones.

Each case runs twice: alone, and behind a kernel that lets it begin at once and brings its operands 30 microseconds
later. A kernel that touches anything but weights before it waits reads poison then, or has its results overwritten.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from gpu.kernel_cases import Job, all_jobs, compile_jobs, triton_kernels
from gpu.launcher import Card
from kernels.cases import DECODING
from kernels.harness import POISON, Buffer
from kernels.triton_harness import compare

from llmc.codegen.backends.triton.triton_toolchain import Compiled
from llmc.codegen.kernel import Source
from llmc.ir.dtype import DTYPES
from llmc.ir.interp import bind_symbols, round_to_type, run
from llmc.ir.ops import OPS
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
# Never launched on a GPU, or in CUDA C++ (test_cuda_kernels.py): weights in panels are a CPU's, `split-moe` makes
# moe_route, moe_up and moe_down of moe, and the compiler evaluates what decodes stored tensors.
NOT_LAUNCHED = (
    "pack_panel", "packed_linear", "pack_codes", "packed_quantized_linear", "pack_nibbles", "pack_fragments",
    "packed_fragments_linear", "norm_quantized_linear", "norm_fragments_linear", "moe", *DECODING
)  # fmt: skip


@lru_cache(maxsize=1)
def jobs_by_op() -> Mapping[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in all_jobs(sm_90()):
        found.setdefault(job.case.node.op.name, []).append(job)
    return found


@pytest.fixture(scope="session")
def binaries(request: Any) -> dict[str, Compiled | str]:
    """Of the ops whose tests were chosen."""
    chosen = {item.callspec.params.get("op") for item in request.session.items if hasattr(item, "callspec")}
    return compile_jobs([j for op, jobs in jobs_by_op().items() if op in chosen for j in jobs], sm_90())


@dataclass
class Prepared:
    """A case's buffers on the host, in the order of its operands and results, and what it should compute."""

    held: list[np.ndarray]
    operands: list[Buffer]
    results: list[Buffer]
    want: list[np.ndarray]
    sizes: dict[str, int]

    @property
    def distinct(self) -> list[Buffer]:
        return list({id(b): b for b in [*self.operands, *self.results]}.values())


def prepare(job: Job) -> Prepared:
    """Fresh poisoned buffers; a state's result is its operand's buffer."""
    node, g = job.case.node, job.case.graph
    held = [round_to_type(x, v.type) for x, v in zip(job.case.inputs, g.inputs, strict=True)]
    sizes = dict(bind_symbols(g, held, job.case.sizes))
    want = run(g, held, sizes)
    at = {v: Buffer.holding(x, v.type) for v, x in zip(g.inputs, held, strict=True)}
    written = iter(node.op.writes)
    names = [s.name for s in node.op.operands]
    results = []
    for r, w in zip(node.results, want, strict=True):
        if r.type.state:
            results.append(at[node.operands[names.index(next(written))]])
        else:
            results.append(Buffer(w.size * DTYPES[r.type.dtype].bits // 8))
    return Prepared(held, [at[v] for v in node.operands], results, want, sizes)


def launch(card: Card, job: Job, compiled: Compiled, p: Prepared, late: bool) -> None:
    """Run once and bring every buffer back, guards included. late: operands that are neither weights nor settled come
    late."""
    source, node = job.source, job.case.node
    fn = card.function(compiled, source.entry)
    grid = [int(d.subs(p.sizes).const) for d in source.grid]  # type: ignore[arg-type]
    sizes = [int(d.subs(p.sizes).const) for d in source.sizes]  # type: ignore[arg-type]
    on_time = {id(b) for i, b in enumerate(p.operands) if node.operands[i].weight or i in job.settled}
    buffers = sorted(p.distinct, key=lambda b: id(b) not in on_time)  # what comes late is one span
    where = place(card, buffers)
    for b in buffers:
        raw = _seen(card, b)
        if late and id(b) not in on_time:
            card.write(where[id(b)] - where.base + card.staged, raw)
            card.write(where[id(b)], np.full_like(raw, POISON))
        else:
            card.write(where[id(b)], raw)
    if late:
        card.produce_later([(where[id(b)], b.raw.nbytes) for b in buffers if id(b) not in on_time])
    if 0 not in grid:
        pointers: list[Any] = [where[id(b)] + (0 if card.exact else b.start) for b in [*p.operands, *p.results]]
        plain = not any(m.strides or m.offset != 0 for m in source.maps)
        assert plain, "tests/gpu/launcher.py makes row-major maps"
        for m, (box, swizzle) in zip(source.maps, compiled.boxes, strict=True):
            shape = [int(d.subs(p.sizes).const) for d in m.shape]  # type: ignore[arg-type]
            pointers[m.param] = card.mapped(pointers[m.param], node.operands[m.param].type.dtype, shape, box, swizzle)
        if source.passes:
            card.launch_params(fn, compiled, grid, passed(source, pointers, p.sizes), source.pdl, source.cluster)
        else:
            card.launch(fn, compiled, grid, pointers, sizes, pdl=source.pdl)
    card.wait()
    for b in buffers:
        card.read(where[id(b)], _seen(card, b))
    card.free()


def passed(source: Source, pointers: Sequence[Any], sizes: Mapping[str, int]) -> list[tuple[Any, Any]]:
    """(value, C type) of each parameter that `Source.passes` names; a mapped pointer is a list that its map begins."""
    types = {"i32": ctypes.c_int, "i64": ctypes.c_longlong, "f32": ctypes.c_float}
    out = []
    for x in source.passes:
        if x.kind == "arg":
            out.append((pointers[x.index] + int(x.offset.subs(sizes).const or 0), ctypes.c_void_p))
        elif x.kind == "map":
            out.append(pointers[source.maps[x.index].param][0])
        else:
            value = x.value if x.size is None else int(x.size.subs(sizes).const or 0)
            out.append((value, types[x.type]))
    return out


class Places(dict[int, int]):
    """id of a buffer -> its address; `base` is where the card's live memory begins."""

    base = 0


def place(card: Card, buffers: Sequence[Buffer]) -> Places:
    if card.exact:
        return Places({id(b): card.alone(b.body.nbytes) for b in buffers})
    addresses = card.place([(b.raw.nbytes, b.start) for b in buffers])
    places = Places(zip(map(id, buffers), addresses, strict=True))
    places.base = card.live
    return places


def _seen(card: Card, b: Buffer) -> np.ndarray:
    """What of a buffer goes to the card: all with its guards, or the body alone."""
    return b.body if card.exact else b.raw


def verify(job: Job, p: Prepared, how: str) -> None:
    """Guards whole, operands unchanged, results right."""
    case, g = job.case, job.case.graph
    for i, b in enumerate([*p.operands, *p.results]):
        b.check(f"{case.name}, {how}: buffer {i}")
    outputs = {id(b) for b in p.results}
    for b, v in zip(p.operands, case.node.operands, strict=True):
        if id(b) not in outputs:
            x = p.held[g.inputs.index(v)]
            np.testing.assert_array_equal(b.body, Buffer.holding(x, v.type).body, f"{case.name}: an operand changed")
    for r, w, b in zip(case.node.results, p.want, p.results, strict=True):
        compare(case, r.type.dtype, round_to_type(b.get(r.type, w.shape), r.type), w)


def failures(card: Card, jobs: Sequence[Job], binaries: Mapping[str, Compiled | str]) -> list[str]:
    """What is wrong, a line a case; a case that breaks the context ends the run, because nothing after it can work."""
    found = []
    for job in jobs:
        compiled = binaries[job.key]
        if isinstance(compiled, str):
            found.append(f"{job.case.name}: {compiled}")
            continue
        for late in (False, True) if card.producer is not None and job.source.pdl else (False,):
            how = f"{'operands late' if late else 'alone'}{', settled' if job.settled else ''}"
            p = prepare(job)
            try:
                launch(card, job, compiled, p, late)
            except RuntimeError as e:
                pytest.exit(f"{job.case.name}, {how}: {e}; the context is lost", returncode=1)
            try:
                verify(job, p, how)
            except AssertionError as e:
                found.append(f"{job.case.name}, {how}: {' '.join(str(e).split())[:500]}")
    return found


@pytest.mark.parametrize("op", list(OPS))
def test_kernel(op: str, card: Card, binaries: dict[str, Any], request: Any) -> None:
    """All cases of one op."""
    jobs = jobs_by_op().get(op, [])
    assert jobs or op in NOT_LAUNCHED, f"no Triton kernel runs {op}"
    found = failures(card, jobs[:: request.config.getoption("--sample", default=1)], binaries)
    assert not found, f"{len(found)} of {len(jobs)} cases:\n" + "\n".join(found[:20])


def test_every_kernel_is_tested(card: Card) -> None:
    tested = {j.case.kernel.name for jobs in jobs_by_op().values() for j in jobs}
    assert tested == set(triton_kernels())
