"""A model that `shard` divides over ranks, interpreted rank by rank, is the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.cases import FURTHER, LISTED, ROPES, UNLISTED, Case
from models.kit import prompts, relative_error, save
from models.recurrent_cases import RECURRENT

from llmc.check.compare_outputs import run_ranks
from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace
from llmc.ir.graph import Graph
from llmc.ir.interp import run
from llmc.ir.text import parse, show
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline

pytestmark = pytest.mark.drawn
SIX_HEADS = ("bloom", "mpt-clipped")
PADDED = ("vocab_size", "intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in (*LISTED, *UNLISTED, *ROPES, *FURTHER)])
def test_all_ranks_together_are_the_whole_model(case: Case, tmp_path: Path) -> None:
    for graph in compare(case, tmp_path):
        count = Counter(n.op.name for n in graph.nodes)
        normed = case.model_type == "bitnet"  # norms before the products by rows keep those whole
        shared = 2 if case.model_type == "diffllama" else 1  # two of its attentions share a product
        assert (normed or count["all_reduce"] >= count["attention"] // shared) and count["all_gather"] >= 1


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in (*LISTED, *UNLISTED, *FURTHER)])
def test_sizes_that_do_not_divide_are_padded(case: Case, tmp_path: Path) -> None:
    """The inner sizes of MLPs and experts, and the vocabulary, are odd."""
    config = with_odd_sizes(case.config)
    assert config != case.config
    for graph in compare(replace(case, config=config), tmp_path):
        count = Counter(n.op.name for n in graph.nodes)
        assert count["all_gather"] >= 1 and count["take_part"] >= 1


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in RECURRENT])
def test_recurrent_layers_are_divided(case: Case, tmp_path: Path) -> None:
    """Each rank has its heads and channels, and adds up its part of the output. Four ranks cannot share the two groups
    of heads in which qwen3_next stores its products, so that every rank computes them all."""
    for ranks, graph in zip((2, 4), compare(case, tmp_path), strict=True):
        whole = ranks == 4 and case.name == "qwen3_next"
        heads = {int(n.operands[2].type.shape[1]) for n in graph.nodes if n.op.name == "linear_recurrence"}
        sizes = ("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
        known = case.config.get("text_config", case.config)
        all_heads = next((known[name] for name in sizes if name in known), 128 if case.name == "jamba" else 4)
        assert heads <= {all_heads if whole else all_heads // ranks}
        channels = [n for n in graph.nodes if n.op.name == "causal_conv"]
        parts = [n for n in channels if any(x.node and x.node.op.name == "slice" for x in n.operands)]
        assert channels or heads
        assert whole or len(parts) == len(channels), "weights of convolutions are sliced"


def with_odd_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, whose text model may have one of its own, with each size of PADDED larger by one."""
    odd = {name: config[name] + 1 for name in PADDED if isinstance(config.get(name), int)}
    inner = {name: with_odd_sizes(value) for name, value in config.items() if name == "text_config"}
    return {**config, **odd, **inner}


def compare(case: Case, tmp_path: Path) -> Iterator[Graph]:
    """Compare two ranks, and then four, with the whole model; yield the graph of a rank.

    The six heads of some models divide over three ranks instead of four.
    """
    save(case, tmp_path)
    traced = trace(tmp_path, **case.trace)
    registry = load()
    passes = parse_pipeline("canonicalize, fuse-norm, fuse-rope", registry.passes)
    run_pipeline(traced.module, passes, Ctx(registry.opset()))
    tokens, positions = prompts((5, 4), 320)
    fixed = {"tokens": tokens, "positions": positions, "last": np.arange(9, dtype=np.int32)}
    with Checkpoint(traced) as checkpoint:
        graph = traced.module.graphs["main"]
        inputs = [checkpoint.read(v.name) if v.weight else fixed[v.name] for v in graph.inputs]
    (want,) = run(graph, inputs, exact=True)
    whole = show(traced.module)
    for ranks in (2, 3 if case.name in SIX_HEADS else 4):
        module = parse(whole, registry.opset())
        run_pipeline(module, parse_pipeline(f"shard{{ranks={ranks}}}", registry.passes), Ctx(registry.opset()))
        assert show(parse(show(module), registry.opset())) == show(module)
        for (got,) in run_ranks(module.graphs["main"], [inputs] * ranks, exact=True):
            assert relative_error(got, want) <= 1e-12
        yield module.graphs["main"]
