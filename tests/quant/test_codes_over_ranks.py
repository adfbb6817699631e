"""Weights that a checkpoint stores as codes, divided over ranks: products, embeddings and output projections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from models.kit import prompts, relative_error
from models.recurrent_cases import BAMBA
from quant.make import common
from quant.test_compiled import compiled, scored
from quant.test_decode import opened
from quant.test_handmade import CASES, made

from llmc.check.compare_outputs import run_ranks
from llmc.extension import load
from llmc.ir.graph import Graph
from llmc.ir.interp import run
from llmc.ir.text import parse, show
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes

NAMES = ("ct-embedding", "ct-embedding-tied", "ct-head")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}  # the parts are whole blocks
PASSES = "canonicalize, fuse-norm, fuse-rope"


@pytest.fixture(params=(320, 321))
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the base models' tables large enough to be divided; return their rows, which need not divide."""
    rows: int = request.param
    sizes = common.SMALL | HEADS | {"vocab_size": rows}
    tied = sizes | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    monkeypatch.setattr(common, "BASES", {**common.BASES, "llama": ("llama", sizes), "qwen2": ("qwen2", tied)})
    return rows


@pytest.mark.drawn
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_together_are_the_whole_model(name: str, model: int, tmp_path: Path) -> None:
    """A table that is looked up is divided as numbers, and takes 1/W of the memory; a projection's codes are divided
    where their rows divide."""
    for ranks, graph in parts(made(CASES[name], tmp_path / "model").folder, model, (2, 4)):
        (lookup,) = [n for n in graph.nodes if n.op.name == "take_part"]
        assert lookup.operands[0].type.shape[0].const == -(-model // ranks)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["ct-mixed", "ct-order-of-targets", "ct-mixture", "fbgemm", "gptq-8-bit-rows"])
def test_parts_of_a_row_keep_its_scale(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products by rows, which have parts of the columns: scales of rows or of the whole tensor, and of groups."""
    sizes = common.SMALL | HEADS | {"head_dim": 64}
    experts = {name: common.BASES["qwen3_moe"][1][name] for name in ("num_experts", "num_experts_per_tok")}
    routed = sizes | experts | {"moe_intermediate_size": 64, "mlp_only_layers": [1]}
    bases = {"llama": ("llama", sizes), "qwen3_moe": ("qwen3_moe", routed), "mixtral": ("mixtral", sizes | experts)}
    monkeypatch.setattr(common, "BASES", {**common.BASES, **bases})
    for _, graph in parts(made(CASES[name], tmp_path / "model").folder, 80, (2,)):
        assert sum(n.op.name == "all_reduce" for n in graph.nodes) >= 2


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "block"),
    [("gptq-dynamic", (1, 16)), ("awq-plain-modules", (1, 16)), ("fp8-odd-tiles", (40, 8)), ("fp8-experts", (32, 8))],
)
def test_parts_inside_of_a_block_repeat_its_scale(
    name: str, block: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns of an MLP, or 24 of an expert, are no whole groups or tiles."""
    sizes = common.SMALL | HEADS | {"head_dim": 64, "intermediate_size": 160}
    routed = common.BASES["qwen3_moe"][1] | sizes | {"moe_intermediate_size": 48}
    monkeypatch.setattr(
        common, "BASES", {**common.BASES, "llama": ("llama", sizes), "qwen3_moe": ("qwen3_moe", routed)}
    )
    for _, graph in parts(made(CASES[name], tmp_path / "model").folder, 80, (2,)):
        assert block in {tuple(n.attrs["block"]) for n in graph.nodes if n.op.name == "assemble"}


@pytest.mark.drawn
def test_parts_of_a_recurrent_layer_cut_its_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product in front of a recurrence computes gates, channels and steps, which begin inside of a tile."""
    monkeypatch.setattr(common, "BASES", {**common.BASES, "llama": ("bamba", BAMBA | {"num_hidden_layers": 2})})
    for _, graph in parts(made(CASES["fp8-odd-tiles"], tmp_path / "model").folder, 80, (2,)):
        heads = {int(n.operands[2].type.shape[1]) for n in graph.nodes if n.op.name == "linear_recurrence"}
        assert heads == {BAMBA["mamba_n_heads"] // 2}


@pytest.mark.drawn
def test_a_projection_whose_tiles_do_not_divide_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """320 rows over two ranks are 2.5 tiles of 64 rows each."""
    sizes = common.SMALL | HEADS | {"head_dim": 64, "vocab_size": 320}
    monkeypatch.setattr(common, "BASES", {**common.BASES, "llama": ("llama", sizes)})
    for _, graph in parts(made(CASES["fp8-embedding"], tmp_path / "model").folder, 320, (2,)):
        assert not any(n.op.name == "all_gather" for n in graph.nodes)


def parts(folder: Path, vocab: int, counts: Sequence[int]) -> Iterator[tuple[int, Graph]]:
    """Compare the ranks of a model, for each number of them, with the whole model; yield the number and the graph."""
    tokens, positions = prompts((9,), vocab)
    passes, ops = load().passes, load().opset()
    with opened(folder) as checkpoint:
        module = checkpoint.traced.module
        use_codes(module, checkpoint, ops)
        run_pipeline(module, parse_pipeline(PASSES, passes), Ctx(ops))
        fixed = {"tokens": tokens, "positions": positions, "last": np.arange(9, dtype=np.int32)}
        graph = module.graphs["main"]
        inputs = [checkpoint.read(v.name) if v.weight else fixed[v.name] for v in graph.inputs]
    (want,) = run(graph, inputs, exact=True)
    whole = show(module)
    for ranks in counts:
        part = parse(whole, ops)
        run_pipeline(part, parse_pipeline(f"shard{{ranks={ranks}}}", passes), Ctx(ops))
        for (got,) in run_ranks(part.graphs["main"], [inputs] * ranks, exact=True):
            assert relative_error(got, want) <= 1e-12
        yield ranks, part.graphs["main"]


@pytest.mark.drawn
def test_an_artifact_of_two_ranks_scores_as_the_whole_model(model: int, tmp_path: Path) -> None:
    """A few activations are rounded to another code than by one rank, hence the mean."""
    tokens, _ = prompts((37,), model)
    folder = made(CASES["ct-embedding-tied"], tmp_path / "model").folder
    one = scored(compiled(folder, tmp_path / "one.llmc"), tokens)
    two = scored(compiled(folder, tmp_path / "two.llmc", tensor_parallel_size=2), tokens)
    assert np.abs(one - two).mean() < 1e-3
