"""Latent attention in absorbed form: the logits of transformers, the tokens of the expanded form, and a small pool."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draw import SEED, of_test
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from models.cases import EXPERTS, FURTHER, MLA, MLA_EXPERTS, UNLISTED, Case
from models.kit import eager_logits, fails, ir_logits, prompts, relative_error, save

from llmc.check.compare_outputs import run_ranks
from llmc.driver import compile_model
from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace
from llmc.ir.interp import run
from llmc.ir.text import parse, show
from llmc.options import Options
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline

FAMILIES = ("minicpm3", "youtu", "deepseek_v3", "glm4_moe_lite", "axk1", "deepseek_v2", "deepseek_v3-yarn")
MIXED = MLA | EXPERTS | MLA_EXPERTS
# Without the queries' latent, rotation of halves, biases, and values of another size than a head's own keys.
VARIANTS = (
    Case("without-q-lora", "deepseek_v3", MIXED | {"q_lora_rank": None}),
    Case("halves", "deepseek_v3", MIXED | {"rope_interleave": False}),
    Case("biases", "deepseek_v3", MIXED | {"attention_bias": True}),
    Case("wide", "deepseek_v2", MIXED | {"topk_method": "greedy", "q_lora_rank": None, "v_head_dim": 20}),
)
CASES = (*(c for c in (*UNLISTED, *FURTHER) if c.name in FAMILIES), *VARIANTS)
BY_NAME = {c.name: c for c in CASES}
FRONT = "canonicalize, fuse-norm, fuse-rope, absorb-latent"
EXPANDED = "serve, without absorb-latent"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.drawn
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_logits_equal_transformers_and_those_of_ranks(case: Case, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    traced, registry = trace(tmp_path, **case.trace), load()
    ctx = Ctx(registry.opset())
    run_pipeline(traced.module, parse_pipeline(FRONT, registry.passes), ctx)
    graph = traced.module.graphs["main"]
    assert Counter(n.op.name for n in graph.nodes)["latent_attention"] == case.config["num_hidden_layers"], ctx.misses
    tokens, positions = prompts(case.lengths, 320)
    every = np.arange(len(tokens), dtype=np.int32)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, every)
        fixed = {"tokens": tokens, "positions": positions, "last": every}
        inputs = [checkpoint.read(v.name) if v.weight else fixed[v.name] for v in graph.inputs]
    assert relative_error(got, eager_logits(model, tokens, case.lengths)) <= 1e-4
    (want,) = run(graph, inputs, exact=True)
    whole = show(traced.module)
    for ranks in (2, 4):
        module = parse(whole, registry.opset())
        run_pipeline(module, parse_pipeline(f"shard{{ranks={ranks}}}", registry.passes), Ctx(registry.opset()))
        main = module.graphs["main"]
        heads = {int(n.operands[0].type.shape[1]) for n in main.nodes if n.op.name == "latent_attention"}
        assert heads == {case.config["num_attention_heads"] // ranks}
        for (mine,) in run_ranks(main, [inputs] * ranks, exact=True):
            assert relative_error(mine, want) <= 1e-12


def compiled(case: Case, folder: Path, name: str, **options: object) -> Path:
    """The case compiled in float32 with 6 rows and 24 tokens a step, so that most prompts are chunked."""
    if not (folder / "model").exists():
        save(case, folder / "model", SEED)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 128}
    out = folder / f"{name}.llmc"
    compile_model(folder / "model", out, Options(cache=CACHE, reuse=False, **(limits | options)))  # type: ignore[arg-type]
    return out


def requests() -> list[dict[str, list[int]]]:
    """Prompts of 1 to 90 tokens, half of which have a shared beginning."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    shared = rng.integers(3, 320, 40).tolist()
    own = [rng.integers(3, 320, int(rng.integers(1, 50))).tolist() for _ in range(12)]
    return [{"prompt_token_ids": (shared if i % 2 else []) + x} for i, x in enumerate(own)]


def tokens_of(artifact: Path, prompts: Sequence[dict[str, list[int]]], times: int = 1) -> list[list[list[int]]]:
    """The greedy tokens after each prompt, all of which run together, so many times in one engine."""
    with LLM(artifact, say=lambda text: None) as llm:
        found = [llm.generate(list(prompts), GREEDY, use_tqdm=False) for _ in range(times)]
        assert times == 1 or llm.stats()["prefix_cache_hits"] > 0
    return [[list(o.outputs[0].token_ids) for o in outs] for outs in found]


def kv_of(artifact: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((artifact / "manifest.json").read_text())["kv"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("deepseek_v3", marks=pytest.mark.slow(seconds=20)),
        *(pytest.param(n, marks=pytest.mark.drawn(seconds=20)) for n in ("minicpm3", "deepseek_v2", "without-q-lora")),
    ],
)
def test_tokens_equal_those_of_the_expanded_form(name: str, tmp_path: Path) -> None:
    """In mixed batches, of chunked prompts and from the prefix cache; a page holds a latent and a key per token."""
    case, work = BY_NAME[name], requests()
    absorbed = compiled(case, tmp_path, "absorbed")
    expanded = compiled(case, tmp_path, "expanded", pipeline=EXPANDED)
    first, warm = tokens_of(absorbed, work, times=2)
    (want,) = tokens_of(expanded, work)
    assert first == want and warm == want
    layers, heads, page = (case.config["num_hidden_layers"], case.config["num_attention_heads"], 16)
    stored = case.config["kv_lora_rank"] + case.config["qk_rope_head_dim"]
    size = case.config["qk_nope_head_dim"] + case.config["qk_rope_head_dim"]
    assert kv_of(absorbed)["bytes_per_page"] == layers * page * stored * 4
    assert kv_of(expanded)["bytes_per_page"] == layers * page * 2 * heads * size * 4


@pytest.mark.drawn
@pytest.mark.parametrize("options", [{"speculate": 3}, {"deterministic": True}], ids=lambda o: next(iter(o)))
def test_tokens_with_speculation_and_fixed_sums(options: dict[str, object], tmp_path: Path) -> None:
    """Repeated tokens are drafted and verified; fixed sums give the same bits in any batch."""
    rng = np.random.default_rng(of_test())
    work = requests()[:6]
    words = [rng.integers(3, 320, 3).tolist() for _ in range(3)]
    work += [{"prompt_token_ids": (w * 20)[:50]} for w in words]
    plain = compiled(BY_NAME["deepseek_v3"], tmp_path, "plain")
    changed = compiled(BY_NAME["deepseek_v3"], tmp_path, "changed", **options)
    assert tokens_of(changed, work) == tokens_of(plain, work)
    if "deterministic" in options:
        assert [tokens_of(changed, [p])[0][0] for p in work[:3]] == tokens_of(changed, work)[0][:3]


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_two_ranks_sample_the_tokens_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Each rank has half of the heads and the whole pool."""
    work = requests()[:6]
    whole = compiled(BY_NAME[name], tmp_path, "whole")
    ranks = compiled(BY_NAME[name], tmp_path, "ranks", tensor_parallel_size=2)
    assert tokens_of(ranks, work) == tokens_of(whole, work)
    assert kv_of(ranks) == kv_of(whole)


@pytest.mark.drawn
def test_bfloat16_is_as_exact_as_the_expanded_form(tmp_path: Path) -> None:
    """Beside float32, the products before and after attention round no more than those of keys and values do."""
    import torch

    case = BY_NAME["youtu"]  # it has no experts, of which rounding may select others
    low = save(case, tmp_path, dtype=torch.bfloat16)
    tokens, positions = prompts(case.lengths, 320)
    every = np.arange(len(tokens))
    exact = eager_logits(low.float(), tokens, case.lengths)
    errors = []
    for text in (FRONT, FRONT.removesuffix(", absorb-latent")):
        traced, registry = trace(tmp_path), load()
        run_pipeline(traced.module, parse_pipeline(text, registry.passes), Ctx(registry.opset()))
        with Checkpoint(traced) as checkpoint:
            errors.append(relative_error(ir_logits(traced.module, traced, checkpoint, tokens, positions, every), exact))
    assert errors[0] <= 1.5 * errors[1]


def test_latents_that_stay_expanded(tmp_path: Path) -> None:
    """A latent that is larger than the keys and values of all heads."""
    case = replace(BY_NAME["minicpm3"], config=MLA | {"kv_lora_rank": 400, "num_hidden_layers": 1})
    save(case, tmp_path)
    traced, registry = trace(tmp_path), load()
    ctx = Ctx(registry.opset())
    run_pipeline(traced.module, parse_pipeline(FRONT, registry.passes), ctx)
    assert [n.op.name for n in traced.module.graphs["main"].nodes].count("attention") == 1
    assert any("408 numbers per token are not fewer" in str(miss) for miss in ctx.misses)


def test_pools_of_8_bit_floats_are_refused(tmp_path: Path) -> None:
    save(BY_NAME["deepseek_v3"], tmp_path)
    options = Options(target="cuda:sm_90", weights="none", kv_cache_dtype="fp8")
    try:
        fails("E435", "latents", "8-bit floats", do=lambda: compile_model(tmp_path, tmp_path / "x.llmc", options))
    except Exception as error:
        if "E501" in str(error):
            pytest.skip("Triton is not installed")
        raise
