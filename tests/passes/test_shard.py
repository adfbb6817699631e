"""A serving step that `shard` divides, interpreted on all ranks with their parts of the KV pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmc.check.random_inputs import draw
from llmc.check.run_ranks import run_ranks
from llmc.extension import load
from llmc.ir.interp import run
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline

TEXT = Path(__file__).with_name("shard_paged.llir")


def test_ranks_of_a_serving_step_agree_with_the_whole_step_and_hold_parts_of_its_pool() -> None:
    registry = load()
    m = parse(TEXT.read_text(), registry.opset())
    ctx = Ctx(registry.opset())
    run_pipeline(m, parse_pipeline("page-attention{rows=8, max_len=64}", registry.passes), ctx)
    g = m.graphs["main"]
    inputs = draw(m, g, np.random.default_rng(0))
    want = run(g, [inputs.arrays[v.name] for v in g.inputs], inputs.sizes, exact=True)
    run_pipeline(m, parse_pipeline("shard{ranks=2}", registry.passes), ctx)
    pool = inputs.arrays["kv.0"]
    arrays = [inputs.arrays | {"kv.0": pool[:, :, r : r + 1]} for r in range(2)]
    both = run_ranks(g, [[own[v.name] for v in g.inputs] for own in arrays], inputs.sizes, exact=True)
    for got in both:
        for x, y in zip(got[:-1], want[:-1], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([got[-1] for got in both], 2), want[-1], rtol=1e-9, atol=1e-12)
