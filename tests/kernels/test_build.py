"""From text to a running step: select, pack, memory, build, and the step unit on pools of several sizes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmc_runtime.format.program import Program

from llmc.codegen.build import build
from llmc.codegen.memory import Memory
from llmc.codegen.pack import Pack
from llmc.codegen.select import Select
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Module
from llmc.ir.interp import round_to_type, run
from llmc.ir.ops import OPS
from llmc.ir.text import parse, show
from llmc.ir.verify import verify
from llmc.passes.base import Ctx
from llmc.passes.weights.lift_weights import LiftWeights

TEXT = """
sym T in [1, 64]
sym R in [1, 8]
graph @step(%x: f32[T, 96], %w: weight f32[96], %m: f32[T, 96], %wq: weight f32[64, 96], %c: state f32[8, 4]) {
  %a = rms_norm(%x, %w) {eps=1e-06} : f32[T, 96]  // l0.norm
  %b = silu(%a) : f32[T, 96]
  %d = mul(%b, %m) : f32[T, 96]
  %f = add(%d, %x) : f32[T, 96]  // l0
  %g = reshape(%f) {shape=[T, 4, 24]} : f32[T, 4, 24]
  %h = transpose(%g) {perm=[1, 0, 2]} : f32[4, T, 24]
  %i = rms_norm(%f, %w) {eps=1e-06} : f32[T, 96]  // l1.norm
  %j = softmax(%i) : f32[T, 96]
  %k = linear(%j, %wq) : f32[T, 64]  // l1.q
  %n = reshape(%k) {shape=[2, T, 32]} : f32[2, T, 32]
  return %h, %j, %n
}
graph @decode(%x: f32[R, 96], %w: weight f32[96], %wq: weight f32[64, 96]) {
  %a = rms_norm(%x, %w) {eps=1e-06} : f32[R, 96]  // l0.norm
  %k = linear(%a, %wq) : f32[R, 64]  // l0.q
  return %k
}
"""


def compiled(text: str, cache: Path, level: str = "cpu:native") -> tuple[Module, Module, Any]:
    """(as written, after the passes, built)."""
    m = parse(text, OPS)
    written = m.clone()
    ctx = Ctx(OPS, load().target(level), load().kernels)
    for p in (Select(), Pack(), LiftWeights(), Memory()):
        p.run(m, ctx)
        verify(m)
    return written, m, build(m, load().target(level), cache, load().kernels, load().toolchains)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(TEXT, tmp_path_factory.mktemp("cache"))


class Loaded:
    """The step functions of a build, loaded."""

    def __init__(self, built: Any, folder: Path):
        self.libs = {}
        for key, k in built.kernels.items():
            path = folder / f"{key}.so"
            path.write_bytes(k.binary)
            self.libs[key] = ctypes.CDLL(str(path))

    def open(self, p: Program, threads: int) -> Any:
        unit = self.libs[p.step[0]]  # type: ignore[index]
        unit.llmc_open.restype, unit.llmc_open.argtypes = ctypes.c_void_p, [ctypes.c_int]
        unit.llmc_close.restype, unit.llmc_close.argtypes = None, [ctypes.c_void_p]
        return unit.llmc_open(threads)

    def call(self, p: Program, pool: Any, values: dict[str, np.ndarray], sizes: dict[str, int], entry: str = "") -> Any:
        """Run one step; answers the outputs by name, and with `entry` of a profile also the nanoseconds."""
        step = self.libs[p.step[0]][entry or p.step[1]]  # type: ignore[index]
        step.argtypes = [ctypes.c_void_p] * (5 if entry else 4)
        table = [ctypes.cast(self.libs[k][e], ctypes.c_void_p).value for k, e in p.kernel_table]
        arena, memory, outs = np.full(p.arena_bytes + 64, 0xCD, np.uint8), [], {}
        base = arena.ctypes.data + -arena.ctypes.data % 64
        pointers = []
        for b in p.buffers:
            if b.kind == "arena":
                pointers.append(base + b.offset)
                continue
            dtype = DTYPES[b.dtype].np
            a = (
                np.ascontiguousarray(values[b.name].astype(dtype))
                if b.name in values
                else np.zeros(b.bytes(sizes), "u1")
            )
            if b.kind == "output":
                outs[b.name] = a.view(dtype).reshape([d(sizes) for d in b.shape])
            memory.append(a)
            pointers.append(a.ctypes.data)
        symbols = np.array([sizes[s] for s in p.symbols], np.int64)
        ns = np.zeros(max(1, len(p.launches)), np.int64)
        args = [pool, (ctypes.c_void_p * len(table))(*table), (ctypes.c_void_p * len(pointers))(*pointers)]
        more = [ns.ctypes.data] if entry else []
        assert step(*args, symbols.ctypes.data, *more) == 0
        return (outs, ns) if entry else outs


def operands(written: Graph, m: Module, sizes: dict[str, int], seed: int) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Return (values of the program's buffers, expected outputs)."""
    rng = np.random.default_rng(seed)
    shapes = [[d.subs(sizes).const or 0 for d in v.type.shape] for v in written.inputs]
    drawn = [round_to_type(rng.standard_normal(s), v.type) for s, v in zip(shapes, written.inputs)]
    values = dict(zip([v.name for v in written.inputs], drawn))
    lifted = m.graphs["weights"]
    packed = run(lifted, [values[v.name] for v in lifted.inputs], sizes)
    return {**values, **dict(zip([v.name for v in lifted.outputs], packed))}, run(written, drawn, sizes)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_steps_equal_the_interpreter(made: Any, threads: int, tmp_path: Path) -> None:
    written, m, built = made
    loaded = Loaded(built, tmp_path)
    for p in built.programs:
        pool = loaded.open(p, threads)
        for seed, sizes in enumerate(({"T": 7, "R": 3}, {"T": 64, "R": 8}, {"T": 1, "R": 1})):
            values, want = operands(written.graphs[p.name], m, sizes, seed)
            for _ in range(20):  # a race would show in some
                outs = loaded.call(p, pool, values, sizes)
                for v, w in zip(m.graphs[p.name].outputs, want):
                    np.testing.assert_allclose(outs[v.name], w, rtol=1e-4, atol=1e-4, err_msg=f"{p.name} {v.name}")
        loaded.libs[p.step[0]].llmc_close(pool)


def test_a_profile_has_a_time_for_every_launch(made: Any, tmp_path: Path) -> None:
    written, m, built = made
    loaded, sizes = Loaded(built, tmp_path), {"T": 9, "R": 2}
    p = built.programs[-1]
    pool = loaded.open(p, 2)
    values, _ = operands(written.graphs[p.name], m, sizes, 0)
    _, ns = loaded.call(p, pool, values, sizes, entry=f"llmc_profile_{p.name}")
    loaded.libs[p.step[0]].llmc_close(pool)
    assert len(ns) == len(p.launches) and (ns > 0).all()


def test_pools_that_cannot_be_made_are_null(made: Any, tmp_path: Path) -> None:
    _, _, built = made
    loaded = Loaded(built, tmp_path)
    assert loaded.open(built.programs[0], 0) is None
    loaded.libs[built.programs[0].step[0]].llmc_close(None)


def test_programs_are_data(made: Any) -> None:
    _, m, built = made
    assert show(parse(show(m), OPS)) == show(m)
    decode, step = built.programs
    assert (decode.name, decode.uniform, decode.serves["T"]) == ("decode", True, (1, 8))
    assert (step.name, step.uniform, dict(step.serves)) == ("step", False, {"T": (1, 64), "R": (1, 8)})
    for p in built.programs:
        assert Program.load(p.dump(), "x") == p
        assert {x.kernel for x in p.launches} <= set(built.kernels)
    assert [x.loc for x in step.launches if x.op == "rms_norm"] == ["l0.norm", "l1.norm"]
    kinds = {b.name: b.kind for b in step.buffers}
    assert (kinds["c"], kinds["j"], kinds["n"], kinds["f"]) == ("state", "output", "output", "arena")
    assert "k" not in kinds  # the reshape's operand is the output's own memory
    assert step.buffers[[b.name for b in step.buffers].index("wq.pack_panel")].kind == "weight"


def test_equal_nodes_share_a_binary(made: Any) -> None:
    _, _, built = made
    decode, step = built.programs
    norms = {x.kernel for p in (decode, step) for x in p.launches if x.op == "rms_norm"}
    assert len(norms) == 1, "the norms of both layers and both entry points are one kernel"
    for k in built.kernels.values():
        assert not {"T", "R"} & {w for line in k.source.splitlines()[:1] for w in line.split()}


def test_a_node_that_no_kernel_fits_names_every_reason() -> None:
    m = parse("graph @main(%x: f64[3]) {\n  %y = exp(%x) : f64[3]  // model.act\n  return %y\n}", OPS)
    with pytest.raises(Diagnostic) as e:
        Select().run(m, Ctx(OPS, load().target("cpu:native"), load().kernels))
    text = str(e.value)
    assert "E430" in text and "model.act" in text and "cpu/rows: dtype f64" in text and "cpu/elements" in text


def test_passes_out_of_order_say_which_is_missing(tmp_path: Path) -> None:
    m = parse("graph @main(%x: f32[3]) {\n  %y = exp(%x) : f32[3]\n  %z = neg(%y) : f32[3]\n  return %z\n}", OPS)
    ctx = Ctx(OPS, load().target("cpu:native"), load().kernels)
    with pytest.raises(Diagnostic, match="E433"):
        Memory().run(m, ctx)
    with pytest.raises(Diagnostic, match="E433"):
        build(m, ctx.target, tmp_path, load().kernels, load().toolchains)
    Select().run(m, ctx)
    with pytest.raises(Diagnostic, match="E441"):
        build(m, ctx.target, tmp_path, load().kernels, load().toolchains)
    with pytest.raises(Diagnostic, match="E431"):
        Pack().run(m, Ctx(OPS, None, load().kernels))


@pytest.mark.parametrize("take", ("take", "take_part"))
def test_a_tied_embedding_reads_the_packed_weight_of_the_output_projection(take: str) -> None:
    start = " {start=96*K}" if take == "take_part" else ""
    m = parse(
        "sym T in [1, 64]\nsym K in [0, 1]\n"
        "graph @step(%ids: i32[T], %w: weight f32[96, 64]) {\n"
        f"  %x = {take}(%w, %ids){start} : f32[T, 64]\n  %y = linear(%x, %w) : f32[T, 96]\n  return %y\n}}\n",
        OPS,
    )
    ctx = Ctx(OPS, load().target("cpu:native"), load().kernels)
    for p in (Select(), Pack()):
        p.run(m, ctx)
        verify(m)
    nodes = {n.op.name: n for n in m.graphs["step"].nodes}
    assert nodes.keys() == {"pack_panel", f"packed_{take}", "packed_linear"}
    assert nodes[f"packed_{take}"].choice == {"kernel": "cpu/packed_take"}
