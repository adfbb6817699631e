"""Every Triton kernel on a GPU against the reference of its op: odd shapes, poisoned outputs, guard zones.

Each case runs alone, after a kernel that starts it at once (programmatic dependent launch) but writes its operands 30
microseconds later, and every fourth one with another launch between the two, which starts it before it waits. A kernel
that accesses anything but weights before its wait then reads poison, or its results are overwritten.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from gpu.kernel_cases import Job, all_jobs, by_op, compile_jobs, sampled, triton_kernels
from gpu.launcher import Card, Packed
from kernels.cases import COLLECTIVES, DECODING, UNPAGED
from kernels.harness import POISON_BYTE, Buffer
from kernels.triton_harness import compare

from llmc.codegen.backends.triton.triton_toolchain import Compiled
from llmc.codegen.kernel import Source
from llmc.ir.dtype import DTYPES
from llmc.ir.interp import bind_symbols, round_to_type
from llmc.ir.ops import OPS
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
RANKS = (*COLLECTIVES, "all_reduce_add", "all_reduce_norm")  # which need other ranks (test_ranks.py)
# Ops without a Triton kernel: those over weights in panels run on CPUs, those over fragments in CUDA C++
# (test_cuda_kernels.py), `split-moe` replaces moe, `page-attention` replaces latent attention over prompts, and the
# compiler evaluates ops that pack or decode weights.
NOT_LAUNCHED = (
    "pack_panel", "packed_linear", "pack_codes", "packed_quantized_linear", "pack_nibbles", "pack_fragments",
    "packed_fragments_linear", "norm_quantized_linear", "norm_fragments_linear", "fragments_moe_up",
    "fragments_moe_down", "moe", *UNPAGED, *DECODING, *RANKS,
)  # fmt: skip


@lru_cache(maxsize=1)
def jobs_by_op() -> Mapping[str, list[Job]]:
    return by_op(all_jobs(sm_90()))


@pytest.fixture(scope="session")
def binaries(request: Any, card: Card) -> dict[str, Compiled | str]:
    """Compile the kernels of the cases that will run; key -> binary or error message."""
    selected = {item.callspec.params.get("op") for item in request.session.items if hasattr(item, "callspec")}
    will_run = [j for op, jobs in jobs_by_op().items() if op in selected for j in sampled(jobs, card.sample)]
    return compile_jobs(will_run, sm_90())


@dataclass
class Prepared:
    """The host buffers of a case, in the order of its operands and results, and the expected results."""

    inputs: list[np.ndarray]
    operands: list[Buffer]
    results: list[Buffer]
    want: list[np.ndarray]
    sizes: dict[str, int]

    @property
    def distinct(self) -> list[Buffer]:
        return list({id(b): b for b in [*self.operands, *self.results]}.values())


def prepare(job: Job) -> Prepared:
    """Make new buffers with poisoned results; the next version of a state has the buffer of its operand."""
    node, g = job.case.node, job.case.graph
    inputs = [round_to_type(x, v.type) for x, v in zip(job.case.inputs, g.inputs, strict=True)]
    sizes = dict(bind_symbols(g, inputs, job.case.sizes))
    want = job.case.expected(inputs, sizes)
    at = {v: Buffer.holding(x, v.type) for v, x in zip(g.inputs, inputs, strict=True)}
    written = iter(node.op.writes)
    names = [s.name for s in node.op.operands]
    results = []
    for r, w in zip(node.results, want, strict=True):
        if r.type.state:
            results.append(at[node.operands[names.index(next(written))]])
        else:
            results.append(Buffer(w.size * DTYPES[r.type.dtype].bits // 8))
    return Prepared(inputs, [at[v] for v in node.operands], results, want, sizes)


HOW = ("alone", "operands late", "operands late, behind another launch")


def launch(card: Card, job: Job, compiled: Compiled, p: Prepared, how: str) -> None:
    """Run once, as one of HOW, and copy all buffers back, guard zones included.

    Operands that are late are neither weights nor settled.
    """
    late = how != HOW[0]
    source, node = job.source, job.case.node
    fn = card.function(compiled, source.entry)
    grid = [int(d.subs(p.sizes).const) for d in source.grid]  # type: ignore[arg-type]
    sizes = [int(d.subs(p.sizes).const) for d in source.sizes]  # type: ignore[arg-type]
    on_time = {id(b) for i, b in enumerate(p.operands) if node.operands[i].weight or i in job.settled}
    buffers = sorted(p.distinct, key=lambda b: id(b) not in on_time)  # delayed operands are contiguous
    where = place(card, buffers)
    for b in buffers:
        raw = _seen(card, b)
        if late and id(b) not in on_time:
            card.write(where[id(b)] - where.base + card.staged, raw)
            card.write(where[id(b)], np.full_like(raw, POISON_BYTE))
        else:
            card.write(where[id(b)], raw)
    if late:
        spans = [(where[id(b)], b.raw.nbytes) for b in buffers if id(b) not in on_time]
        card.produce_delayed(spans, apart=how == HOW[2])
    if 0 not in grid:
        pointers: list[Any] = [where[id(b)] + (0 if card.exact else b.start) for b in [*p.operands, *p.results]]
        maps = []
        for m, (box, swizzle) in zip(source.maps, compiled.boxes, strict=True):
            shape, strides = ([int(d.subs(p.sizes).const or 0) for d in x] for x in (m.shape, m.strides))
            address = pointers[m.param] + int(m.offset.subs(p.sizes).const or 0)
            maps.append(card.mapped(address, node.operands[m.param].type.dtype, shape, box, swizzle, strides))
        if source.passes:
            card.launch_params(fn, compiled, grid, passed(source, pointers, maps, p.sizes), source.pdl, source.cluster)
        else:
            for m, made in zip(source.maps, maps, strict=True):
                pointers[m.param] = made
            card.launch(fn, compiled, grid, pointers, sizes, pdl=source.pdl)
    card.wait()
    for b in buffers:
        card.read(where[id(b)], _seen(card, b))
    card.free()


def passed(
    source: Source, pointers: Sequence[int], maps: Sequence[Any], sizes: Mapping[str, int]
) -> list[tuple[Any, Any]]:
    """Return (value, C type) of each parameter in `Source.passes`; the head of each of `maps` is a tensor map."""
    types = {"i32": ctypes.c_int, "i64": ctypes.c_longlong, "f32": ctypes.c_float, "u8": ctypes.c_ubyte}
    out = []
    for x in source.passes:
        if x.kind == "arg":
            out.append((pointers[x.index] + int(x.offset.subs(sizes).const or 0), ctypes.c_void_p))
        elif x.kind == "tensor":
            address = pointers[x.index] + int(x.offset.subs(sizes).const or 0)
            out.append((Packed(struct.pack("<qi4x", address, int(x.size.subs(sizes).const or 0))), None))
        elif x.kind == "map":
            out.append(maps[x.index][0])
        else:
            value = x.value if x.size is None else int(x.size.subs(sizes).const or 0)
            out.append((value, types[x.type]))
    return out


class Places(dict[int, int]):
    """Maps the id of a buffer to its address; `base` is the address of the card's live memory."""

    base = 0


def place(card: Card, buffers: Sequence[Buffer]) -> Places:
    if card.exact:
        return Places({id(b): card.allocate(b.body.nbytes) for b in buffers})
    addresses = card.place([(b.raw.nbytes, b.start) for b in buffers])
    places = Places(zip(map(id, buffers), addresses, strict=True))
    places.base = card.live
    return places


def _seen(card: Card, b: Buffer) -> np.ndarray:
    """Return the part of a buffer that is copied: with its guard zones, or the body alone if buffers are exact."""
    return b.body if card.exact else b.raw


def verify(job: Job, p: Prepared, shown: str) -> None:
    """Check that guard zones are intact, operands unchanged and results correct; `shown` begins the messages."""
    case, g = job.case, job.case.graph
    for i, b in enumerate([*p.operands, *p.results]):
        b.check(f"{shown}: buffer {i}")
    outputs = {id(b) for b in p.results}
    for b, v in zip(p.operands, case.node.operands, strict=True):
        if id(b) not in outputs:
            x = p.inputs[g.inputs.index(v)]
            np.testing.assert_array_equal(b.body, Buffer.holding(x, v.type).body, f"{case.name}: an operand changed")
    for r, w, b in zip(case.node.results, p.want, p.results, strict=True):
        compare(case, r.type.dtype, round_to_type(b.get(r.type, w.shape), r.type), w)


def failures(card: Card, jobs: Sequence[Job], binaries: Mapping[str, Compiled | str]) -> list[str]:
    """Run all jobs and return one line per failure. A case that destroys the context ends the test session."""
    found = []
    for number, job in enumerate(jobs):
        compiled = binaries[job.key]
        if isinstance(compiled, str):
            found.append(f"{job.case.name}: {compiled}")
            continue
        ways = len(HOW) - bool(number % 4) if card.producer is not None and job.source.pdl else 1
        for how in HOW[:ways]:
            shown = f"{job.case.name}, {how}{', settled' if job.settled else ''}"
            p = prepare(job)
            try:
                launch(card, job, compiled, p, how)
            except RuntimeError as e:
                lost = f"{shown}: {e}; the context is lost"
                print(lost, file=sys.__stderr__, flush=True)  # pytest-xdist does not report why a worker exits
                pytest.exit(lost, returncode=1)
            try:
                verify(job, p, shown)
            except AssertionError as e:
                found.append(f"{shown}: {' '.join(str(e).split())[:500]}")
    return found


@pytest.mark.parametrize("op", list(OPS))
def test_kernel(op: str, card: Card, binaries: dict[str, Any]) -> None:
    """All cases of one op."""
    jobs = jobs_by_op().get(op, [])
    assert jobs or op in NOT_LAUNCHED, f"no Triton kernel runs {op}"
    found = failures(card, sampled(jobs, card.sample), binaries)
    assert not found, f"{len(found)} of {len(jobs)} cases:\n" + "\n".join(found[:20])


def test_every_kernel_is_tested(card: Card) -> None:
    tested = {j.case.kernel.name for jobs in jobs_by_op().values() for j in jobs}
    assert tested == set(triton_kernels()) - {f"triton/{op}" for op in RANKS}
