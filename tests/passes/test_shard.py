"""What `shard` divides, interpreted on all ranks: a serving step with parts of its KV pool, and groups of codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.check.compare_outputs import run_ranks
from llmc.check.random_inputs import draw
from llmc.extension import load
from llmc.ir.graph import Module
from llmc.ir.interp import run
from llmc.ir.text import parse, show
from llmc.passes.base import Ctx
from llmc.passes.lower.shard import Shard, with_ranks
from llmc.passes.pipeline import parse_pipeline, run_pipeline

TEXT = Path(__file__).with_name("shard_paged.llir")
RECURRENT = TEXT.with_name("shard_recurrent.llir")
MLP = """
sym T in [1, 8]
graph @main(%x: f32[T, 64], %gu: weight f32[{both}, 64], %d: weight f32[64, {columns}], %h: weight f32[8, 64]) {{
  %a = linear(%x, %gu) : f32[T, {both}]
  %g = slice(%a) {{axis=1, start=0, stop={columns}}} : f32[T, {columns}]
  %u = slice(%a) {{axis=1, start={columns}, stop={both}}} : f32[T, {columns}]
  %s = sigmoid(%g) : f32[T, {columns}]
  %m = mul(%s, %u) : f32[T, {columns}]
  %y = linear(%m, %d) : f32[T, 64]
  %z = linear(%y, %h) : f32[T, 8]
  return %z
}}
"""
OTHERS = ("row.memory.0", "row.base.0", "row.log.0")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("pool", "further"), [("bf16", ""), ("f8e4m3", ""), ("bf16", ", gather-first")])
def test_ranks_of_a_serving_step_agree_with_the_whole_step_and_hold_parts_of_its_pool(
    pool: str, further: str, ranks: int
) -> None:
    """Scales of a pool of 8-bit floats, one for each head of the keys and of the values, go with the heads. Four ranks
    share two of them."""
    registry = load()
    m = parse(TEXT.read_text(), registry.opset())
    ctx = Ctx(registry.opset())
    run_pipeline(m, parse_pipeline(f"page-attention{{rows=8, max_len=64, kv={pool}}}", registry.passes), ctx)
    g = m.graphs["main"]
    inputs = draw(m, g, np.random.default_rng(0))
    assert (pool == "bf16") != any(v.name == "kv_scales.0" for v in g.inputs)
    want = run(g, [inputs.arrays[v.name] for v in g.inputs], inputs.sizes, exact=True)
    run_pipeline(m, parse_pipeline(f"shard{{ranks={ranks}}}{further}", registry.passes), ctx)
    assert (further == "") == any(n.attrs["axis"] == 1 for n in g.nodes if n.op.name == "all_gather")
    whole, heads = inputs.arrays["kv.0"], [r * 2 // ranks for r in range(ranks)]
    arrays = [inputs.arrays | {"kv.0": whole[:, :, head : head + 1]} for head in heads]
    found = run_ranks(g, [[own[v.name] for v in g.inputs] for own in arrays], inputs.sizes, exact=True)
    for head, got in zip(heads, found, strict=True):
        for x, y in zip(got[:-1], want[:-1], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(got[-1], want[-1][:, :, head : head + 1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("columns", "ranks", "part"), [(96, 2, 64), (96, 4, 32), (128, 2, 64), (64, 4, 32), (90, 2, 45)]
)
def test_parts_of_an_mlp_are_whole_groups_of_codes(columns: int, ranks: int, part: int) -> None:
    """The ranks of a quantised MLP agree with the whole one; columns that are no whole groups are divided evenly."""
    registry = load()

    def passes(m: Module, text: str) -> None:
        run_pipeline(m, parse_pipeline(text, registry.passes), Ctx(registry.opset()))

    whole, divided = (parse(MLP.format(columns=columns, both=2 * columns), registry.opset()) for _ in range(2))
    inputs = draw(whole, whole.graphs["main"], np.random.default_rng(0))
    arrays = [inputs.arrays[v.name] for v in whole.graphs["main"].inputs]
    passes(whole, "quantize{weights=int4, group=32}")
    passes(divided, f"shard{{ranks={ranks}, group=32}}, quantize{{weights=int4, group=32}}")
    want = run(whole.graphs["main"], arrays, inputs.sizes, exact=True)
    for got in run_ranks(divided.graphs["main"], [arrays] * ranks, inputs.sizes, exact=True):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-9, atol=1e-12)
    text = show(divided)
    assert f"f32[T, {part}]" in text
    assert text.count("= quantize(") == (3 if columns % 32 == 0 else 2)


@pytest.mark.parametrize(("quantize", "group"), [("int4", 128), ("int4, group=32", 32), ("int8", 0), ("none", 0)])
def test_the_groups_of_parts_are_those_of_quantize(quantize: str, group: int) -> None:
    registry = load()
    pipeline = parse_pipeline(f"page-attention, quantize{{weights={quantize}}}", registry.passes)
    assert Shard(ranks=2, group=group) in with_ranks(pipeline, 2, registry.target("cpu:native"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_parts_of_the_states_of_recurrent_layers(ranks: int) -> None:
    """The inputs of a convolution, the memory and the log of a recurrence. Four ranks share two groups of keys."""
    registry = load()
    m = parse(RECURRENT.read_text(), registry.opset())
    g = m.graphs["main"]
    inputs = draw(m, g, np.random.default_rng(0))
    want = run(g, [inputs.arrays[v.name] for v in g.inputs], inputs.sizes, exact=True)
    run_pipeline(m, parse_pipeline(f"shard{{ranks={ranks}}}", registry.passes), Ctx(registry.opset()))
    own = [inputs.arrays | parts(inputs.arrays, rank, ranks) for rank in range(ranks)]
    rings = [v.node.operands[2].name for v in g.outputs if v.node and v.node.op.name == "row_conv"]
    assert sorted(rings) == [f"row.recent.0.{at}" for at in (0, 16, 8)]
    names = ["z", *rings, *OTHERS]
    whole = dict(zip(("z", "row.recent.0", *OTHERS), want, strict=True))
    for rank, got in enumerate(run_ranks(g, [[mine[v.name] for v in g.inputs] for mine in own], inputs.sizes, True)):
        expected = whole | parts(whole, rank, ranks)
        for name, x in zip(names, got, strict=True):
            np.testing.assert_allclose(x, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def parts(states: dict[str, np.ndarray], rank: int, ranks: int) -> dict[str, np.ndarray]:
    """Return a rank's parts of the states of RECURRENT, by their names."""
    keys, heads, group = 8 // min(ranks, 2), 4 // ranks, rank * 2 // max(ranks, 2)
    recent, memory, log = (states[name] for name in ("row.recent.0", "row.memory.0", "row.log.0"))
    mine = np.s_[rank * heads : (rank + 1) * heads]

    def of_keys(x: np.ndarray) -> np.ndarray:
        return x[..., group * keys : (group + 1) * keys]

    def of_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], 4, -1)[:, :, mine].reshape(*x.shape[:2], -1)

    of_log = [of_keys(log[..., :8]), *(of_heads(x) for x in np.split(log[..., 8:], [24, 28], 2))]
    return {
        "row.recent.0.0": of_keys(recent[..., :8]),
        "row.recent.0.8": of_keys(recent[..., 8:16]),
        "row.recent.0.16": of_heads(recent[..., 16:]),
        "row.memory.0": memory[:, mine],
        "row.log.0": np.concatenate(of_log, 2),
    }
