"""Collectives of NCCL: the passes of --collectives nccl, the launches that they become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from kernel_cache import CACHE
from llmc_runtime.format.nccl_call import NcclCall
from models.kit import fails

from llmc.check.compare_outputs import run_ranks
from llmc.check.random_inputs import draw
from llmc.codegen.backends.nccl.nccl_toolchain import NcclToolchain
from llmc.codegen.build import dry_build, place_graphs
from llmc.driver import compile_model
from llmc.extension import load
from llmc.ir.graph import Module
from llmc.ir.text import parse
from llmc.options import Options
from llmc.passes.base import Ctx
from llmc.passes.lower.shard import with_ranks
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.targets.target import with_nccl

DEMO = Path(__file__).parents[2] / "examples" / "demo-model-small"
GATHERS = """
sym T in [1, 8]
sym K in [0, 1]
graph @main(%x: {dtype}[T, 3, 4], %y: {dtype}[1, T, 6], %z: {dtype}[2, T]) {{
  %a = all_gather(%x) {{axis=1, ranks=2}} : {dtype}[T, 6, 4]
  %b = all_gather(%x) {{axis=-1, ranks=2}} : {dtype}[T, 3, 8]
  %c = all_gather(%y) {{axis=1, ranks=2}} : {dtype}[1, 2*T, 6]
  %d = all_gather(%z) {{axis=1, ranks=2}} : {dtype}[2, 2*T]
  return %a, %b, %c, %d
}}
"""
SERVED = """
sym T in [1, 600]
sym K in [0, 3]
graph @main(%x: bf16[T, 4096], %w: weight bf16[4096], %y: i32[T, 5], %z: f8e4m3[T, 16]) {
  %s = all_reduce(%x) {ranks=4} : bf16[T, 4096]
  %n = rms_norm(%s, %w) {eps=1e-5} : bf16[T, 4096]
  %g = all_gather(%n) {axis=0, ranks=4} : bf16[4*T, 4096]
  %h = all_gather(%y) {axis=0, ranks=4} : i32[4*T, 5]
  %i = all_gather(%z) {axis=0, ranks=4} : f8e4m3[4*T, 16]
  return %g, %h, %i
}
"""


def passed(m: Module, text: str, ctx: Ctx) -> Module:
    run_pipeline(m, parse_pipeline(text, load().passes), ctx)
    return m


def test_gathers_along_the_first_axis_have_the_same_results() -> None:
    registry = load()
    rng = np.random.default_rng(0)
    m = parse(GATHERS.format(dtype="f32"), registry.opset())
    (g,) = m.graphs.values()
    drawn = [draw(m, g, rng) for _ in range(2)]
    sizes = drawn[0].sizes | {"T": 5}
    inputs = [[rng.standard_normal([d.subs(sizes).const for d in v.type.shape]) for v in g.inputs] for _ in drawn]
    want = run_ranks(g, inputs, sizes, exact=True)
    passed(m, "gather-first", Ctx(registry.opset()))
    gathers = [n for n in g.nodes if n.op.name == "all_gather"]
    assert [n.attrs["axis"] for n in gathers] == [0, 0, 1, 0]  # that along axis 1 of [1, T, 6] remains
    for got, expected in zip(run_ranks(g, inputs, sizes, exact=True), want, strict=True):
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_launches_call_the_library() -> None:
    """Each passes the operand, the result and the number of elements, and has no blocks of its own."""
    registry = load()
    target = with_nccl(registry.target("cuda:sm_90"), 4)
    ctx = Ctx(registry.opset(), target, registry.kernels)
    m = passed(parse(SERVED, registry.opset()), "select, memory", ctx)
    (program,) = dry_build(m, target, None, registry.kernels, registry.toolchains).programs
    launches = [x for x in program.launches if x.op.startswith("all_")]
    assert [(x.op, x.entry, [s.text for s in x.sizes]) for x in launches] == [
        ("all_reduce", "ncclAllReduce", ["4096*T"]), ("all_gather", "ncclAllGather", ["4096*T"]),
        ("all_gather", "ncclAllGather", ["5*T"]), ("all_gather", "ncclAllGather", ["16*T"]),
    ]  # fmt: skip
    assert not any(x.threads or x.shared or x.pdl for x in launches)
    assert program.ranks == 4 and "group" not in {b.kind for b in program.buffers}
    for x in launches:
        assert len(x.args) == 2
    sources = [s for p in place_graphs(m, target, registry.kernels) for s in p.emitted.sources if s.language == "nccl"]
    made = NcclToolchain.find(target).compile([(s, "") for s in sources], CACHE)
    calls = [NcclCall.load(made[NcclToolchain().key(s)].binary, "x.json") for s in sources]
    assert [c.dtype for c in calls] == ["bf16", "f16", "i32", "u8"]
    assert len(made) == 4 and all(json.loads(c.binary) for c in made.values())


def test_kernels_of_peer_memory_and_of_nccl_exclude_each_other() -> None:
    registry = load()
    plain = registry.target("cuda:sm_90")
    for target, language in ((plain, "triton"), (with_nccl(plain, 4), "nccl")):
        ctx = Ctx(registry.opset(), target, registry.kernels)
        m = passed(parse(SERVED, registry.opset()), "select", ctx)
        chosen = {n.choice["kernel"] for n in m.graphs["main"].nodes if n.op.name.startswith("all_")}
        assert {name.partition("/")[0] for name in chosen} == {language}


def test_passes_of_nccl_leave_sums_and_norms_separate() -> None:
    registry = load()
    target = registry.target("cuda:sm_90")
    passes = parse_pipeline("page-attention, fuse-norm-linear", registry.passes)
    names = [p.name for p in with_ranks(passes, 2, with_nccl(target, 2))]
    assert names == ["page-attention", "shard", "gather-first", "fuse-norm-linear"]
    names = [p.name for p in with_ranks(passes, 2, target)]
    assert names == ["page-attention", "shard", "fuse-reduce", "fuse-reduce-norm", "fuse-norm-linear"]


@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        ("E439", {"target": "cpu:native", "tensor_parallel_size": 2}, ("cpu:native", "NCCL is for NVIDIA GPUs")),
        ("E439", {"target": "cuda:sm_90"}, ("without --tensor-parallel-size", "add --tensor-parallel-size 2")),
        (
            "E512",
            {"target": "cuda:sm_90", "tensor_parallel_size": 2, "deterministic": True},
            ("--deterministic with --collectives nccl", "the order of NCCL's sums"),
        ),
    ],
)
def test_rejected_nodes(code: str, options: dict[str, object], words: tuple[str, ...], tmp_path: Path) -> None:
    made = Options(cache=CACHE, collectives="nccl", **options)  # type: ignore[arg-type]
    fails(code, *words, do=lambda: compile_model(DEMO, tmp_path / "model.llmc", made))
