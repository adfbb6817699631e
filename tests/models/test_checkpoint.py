"""Weights are found and read by rows whatever the checkpoint's form: sharded, prefixed, tied, one tensor an expert."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from draw import of_test
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from models.cases import LISTED, UNLISTED, Case
from models.kit import eager_logits, fails, ir_logits, loaded, prompts, relative_error, save
from safetensors.numpy import load_file, save_file

from llmc.console import Quiet
from llmc.driver import compile_model
from llmc.dry_run import dry_run
from llmc.frontend.checkpoint import Checkpoint, TiedWeightsDiffer
from llmc.frontend.model_folder import open_source
from llmc.frontend.not_finite import BITS, NotFinite
from llmc.frontend.safetensors_reader import TensorFiles
from llmc.frontend.trace_model import Traced, trace
from llmc.ir.dtype import DTYPES
from llmc.options import Options

BY_NAME = {c.name: c for c in (*LISTED, *UNLISTED)}
FILE = "model.safetensors"


_TRACES: dict[tuple[str, str | None], Traced] = {}


def trace_of(folder: Path, dtype: str | None = None) -> Traced:
    """Trace a model, once for all folders with the same config.json: these tests are of how weights are read."""
    key = (folder / "config.json").read_text(), dtype
    if key not in _TRACES:
        _TRACES[key] = trace(folder, dtype)
    return dataclasses.replace(_TRACES[key], source=open_source(folder))


def rewrite(folder: Path, change: Any) -> None:
    """Save the single file again with its tensors changed by a function of (name, array) -> {name: array}."""
    tensors = load_file(folder / FILE)
    save_file({k: v for name, x in tensors.items() for k, v in change(name, x).items()}, folder / FILE)


def agrees(case: Case, model: Any, folder: Path) -> None:
    traced = trace_of(folder)
    tokens, positions = prompts((9,), 320)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(9))
    assert relative_error(got, eager_logits(model, tokens, (9,))) <= 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_sharded(name: str, tmp_path: Path) -> None:
    model = save(BY_NAME[name], tmp_path, max_shard_size="60KB")
    assert not (tmp_path / FILE).exists()
    assert len(set(json.loads((tmp_path / f"{FILE}.index.json").read_text())["weight_map"].values())) > 1
    agrees(BY_NAME[name], model, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_without_the_base_models_prefix(name: str, tmp_path: Path) -> None:
    """gpt2's own checkpoint names h.0..., not transformer.h.0...; a base model's has no lm_head."""
    model = save(BY_NAME[name], tmp_path)
    prefix = model.base_model_prefix + "."
    rewrite(tmp_path, lambda n, x: {n.removeprefix(prefix): x})
    agrees(BY_NAME[name], model, tmp_path)


def test_old_checkpoints_store_masks_and_frequencies(tmp_path: Path) -> None:
    model = save(BY_NAME["gpt2"], tmp_path)
    mask = np.ones((1, 1, 4, 4), np.float32)
    rewrite(tmp_path, lambda n, x: {n: x, **({"transformer.h.0.attn.bias": mask} if "wte" in n else {})})
    agrees(BY_NAME["gpt2"], model, tmp_path)


def test_tied_head_stored_under_either_name(tmp_path: Path) -> None:
    case = BY_NAME["llama-tied"]
    model = save(case, tmp_path)
    assert trace_of(tmp_path).tied == {"lm_head.weight": "model.embed_tokens.weight"}
    rewrite(tmp_path, lambda n, x: {"lm_head.weight" if "embed" in n else n: x})
    agrees(case, model, tmp_path)


def test_one_tensor_an_expert(tmp_path: Path) -> None:
    """Released mixtral and qwen3_moe checkpoints; save_pretrained writes that form too, so split is checked."""
    for name, gate, down in (("mixtral", "w1", "w2"), ("qwen3_moe", "gate_proj", "down_proj")):
        folder = tmp_path / name
        model = save(BY_NAME[name], folder)
        stored = load_file(folder / FILE)
        assert any(f"experts.3.{gate}.weight" in n for n in stored)
        traced = trace_of(folder)
        experts = model.model.layers[1].mlp.experts
        with Checkpoint(traced) as checkpoint:
            path = "model.layers.1.mlp.experts"
            rows = checkpoint.read(f"{path}.gate_up_proj", slice(1, 3))
            np.testing.assert_array_equal(rows, experts.gate_up_proj.detach().numpy()[1:3])
            whole = checkpoint.read(f"{path}.down_proj")
            np.testing.assert_array_equal(whole, experts.down_proj.detach().numpy())
            assert f"experts.0.{down}.weight and 3 more" in checkpoint.where(f"{path}.down_proj")


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Traced]:
    folder = tmp_path_factory.mktemp("bf16")
    model = save(BY_NAME["gemma2"], folder, dtype=torch.bfloat16)
    return model, trace_of(folder)


def test_rows_come_in_the_graphs_dtype(low: tuple[Any, Traced]) -> None:
    model, traced = low
    name = "model.layers.1.mlp.down_proj.weight"
    want = model.get_parameter(name).detach().float().numpy()
    with Checkpoint(traced) as checkpoint:
        for rows in (None, slice(3, 17), slice(60, 500), slice(5, 5)):
            got = checkpoint.read(name, rows)
            assert got.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(got.astype(np.float32), want[rows or slice(None)])
        with pytest.raises(ValueError, match="step 2"):
            checkpoint.read(name, slice(0, 8, 2))
    with Checkpoint(trace_of(traced.source.folder, dtype="f32")) as checkpoint:
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_have_the_dtypes_that_transformers_gives_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """A router's corrections stay in float32, and in float16 models also the norms of gpt_oss."""
    case = BY_NAME["deepseek_v3" if dtype is torch.bfloat16 else "gpt_oss"]
    save(case, tmp_path, dtype=dtype)
    want = {k: str(v.dtype) for k, v in loaded(tmp_path, dtype).state_dict().items()}
    names = {"f32": "torch.float32", "bf16": "torch.bfloat16", "f16": "torch.float16"}
    got = {k: names[w.type.dtype] for k, w in trace_of(tmp_path).weights.items() if k in want}
    assert got == {k: want[k] for k in got} and len(set(got.values())) == 2


def test_computed_buffers_are_weights_too(low: tuple[Any, Traced]) -> None:
    _, traced = low
    with Checkpoint(traced) as checkpoint:
        freq = checkpoint.read("model.rotary_emb.inv_freq")
        assert checkpoint.where("model.rotary_emb.inv_freq") == "computed"
        np.testing.assert_allclose(freq, 10000.0 ** -(np.arange(0, 16, 2) / 16), rtol=1e-6)
        assert freq.dtype == np.float32
        scale = checkpoint.read("model.embed_tokens.embed_scale")
        assert scale.shape == () and scale == 8.0
        assert set(checkpoint.names) == set(traced.weights)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    """The index names one of them; transformers reads the other one, the last."""
    case = BY_NAME["llama"]
    model = save(case, tmp_path, max_shard_size="60KB")
    where = json.loads((tmp_path / f"{FILE}.index.json").read_text())["weight_map"]
    other = next(n for n in sorted(set(where.values())) if n != where["model.norm.weight"])
    tensors, norm = load_file(tmp_path / other), model.model.norm.weight.detach().numpy()
    save_file({**tensors, "model.norm.weight": norm}, tmp_path / other)
    agrees(case, model, tmp_path)
    for changed in (norm + np.eye(1, 64, 63, dtype=np.float32)[0], norm.astype(np.float16), norm[:63]):
        save_file({**tensors, "model.norm.weight": changed}, tmp_path / other)
        fails("E322", "model.norm.weight", other, "differ", do=lambda: TensorFiles(tmp_path))


@pytest.mark.parametrize("second", ["norm.weight", "model.layers.1.mlp.experts.down_proj"])
def test_a_weight_that_is_stored_twice(second: str, tmp_path: Path) -> None:
    """A weight under two names, or experts both stacked and separate, is an error; no version takes precedence."""
    save(BY_NAME["qwen3_moe"], tmp_path)
    tensors = load_file(tmp_path / FILE)
    more = np.ones(64 if "norm" in second else (4, 64, 24), np.float32)
    save_file({**tensors, second: more}, tmp_path / FILE)
    fails("E324", "is stored twice", second, do=lambda: Checkpoint(trace_of(tmp_path)))


def test_biases_of_zeros(tmp_path: Path) -> None:
    """Products that have no bias may store zeros as one; other numbers would change the result."""
    case = BY_NAME["llama"]
    model = save(case, tmp_path)
    name = "model.layers.1.self_attn.o_proj.bias"
    tensors = load_file(tmp_path / FILE)
    save_file({**tensors, name: np.zeros(64, np.float16)}, tmp_path / FILE)
    agrees(case, model, tmp_path)
    bias = np.zeros(64, np.float16)
    bias[63] = 1e-7
    save_file({**tensors, name: bias}, tmp_path / FILE)
    fails("E324", name, do=lambda: Checkpoint(trace_of(tmp_path)))
    unknown = {"model.layers.1.nothing.bias": np.zeros(64, np.float32)}
    save_file({**tensors, **unknown}, tmp_path / FILE)
    fails("E324", "model.layers.1.nothing.bias", do=lambda: Checkpoint(trace_of(tmp_path)))


def test_names_of_another_prefix(tmp_path: Path) -> None:
    save(BY_NAME["llama"], tmp_path)
    rewrite(tmp_path, lambda n, x: {f"module.{n}": x})
    words = "lacks tensors", "one named module.", "begin with 'module.'", "save the model inside of the wrapper"
    fails("E323", *words, do=lambda: Checkpoint(trace_of(tmp_path)))


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_numbers_that_are_not_finite_are_counted(dtype: str) -> None:
    """Of every bit pattern of narrow dtypes, and of random ones of wide dtypes with each that is special."""
    kind, _, least = BITS[dtype]
    bits = np.dtype(kind).itemsize * 8
    if bits <= 16:
        patterns = np.arange(1 << bits).astype(kind)
    else:
        rng = np.random.default_rng(of_test())
        patterns = rng.integers(0, 1 << bits, 5000, np.dtype(kind), endpoint=False)
        patterns = np.concatenate([patterns, np.array([least - 1, least, least + 1, (1 << bits) - 1], kind)])
    values = patterns.view(DTYPES[dtype].np)
    not_finite = NotFinite()
    not_finite.count("w", values, dtype)
    assert not_finite.counts == [("w", int((~np.isfinite(values.astype(np.float64))).sum()))]
    not_finite = NotFinite()
    not_finite.count("w", values[np.isfinite(values.astype(np.float64))], dtype)
    not_finite.count("codes", np.array([255], np.uint8), "u8")
    assert not not_finite.counts and not_finite.note == ""
    not_finite.count("w", np.array([np.inf, 1.0], np.float32), "f32")
    assert not_finite.note.startswith("1 number of w is NaN or infinite")


def test_a_note_names_weights_that_are_not_finite(tmp_path: Path) -> None:
    """As they are stored, or because the dtype of the compiled model does not hold them."""
    save(BY_NAME["llama"], tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"

    def change(n: str, x: np.ndarray) -> dict[str, np.ndarray]:
        if n == name:
            x[3, 4], x[5, 6] = np.nan, -np.inf
        if n == "model.norm.weight":
            x[7] = 1e6
        return {n: x}

    rewrite(tmp_path, change)
    for dtype, count, words in (("f32", 2, name), ("f16", 3, f"{name}, model.norm.weight")):
        with Checkpoint(trace_of(tmp_path, dtype=dtype)) as checkpoint:
            assert not checkpoint.not_finite.note
            for one in sorted(checkpoint.names):
                checkpoint.read(one)
            assert checkpoint.not_finite.note.startswith(f"{count} numbers of {words} are NaN or infinite")


def test_reading_rows_of_a_big_tensor_takes_little_memory(tmp_path: Path) -> None:
    """Rows are copied from the mapped file: 2 MiB of 256 MiB grow anonymous memory by far less than 256 MiB."""
    case = Case("wide", "llama", BY_NAME["llama"].config | {"vocab_size": 1 << 20, "tie_word_embeddings": True})
    folder = tmp_path
    save(Case("small", "llama", case.config | {"vocab_size": 320}), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1 << 20}))
    big = np.zeros((1 << 20, 64), np.float32)
    rewrite(folder, lambda n, x, big=big: {n: big if "embed" in n else x})
    del big
    traced = trace_of(folder)
    with Checkpoint(traced) as checkpoint:
        before = anonymous()
        held = [checkpoint.read("model.embed_tokens.weight", slice(i, i + 4096)) for i in (0, 1 << 19)]
        grown = anonymous() - before
    assert sum(x.nbytes for x in held) == 2 << 20
    assert grown < 32 << 20


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    line = next(x for x in Path("/proc/self/smaps_rollup").read_text().splitlines() if x.startswith("Anonymous:"))
    return int(line.split()[1]) << 10


def with_a_head_of_its_own(folder: Path, token: int) -> None:
    """Store a head next to the embedding that config.json ties it to; they differ in one element of one token's row."""

    def change(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
        if name != "model.embed_tokens.weight":
            return {name: x}
        head = x.copy()
        head[token, 3] += 40.0
        return {name: x, "lm_head.weight": head}

    rewrite(folder, change)


@pytest.mark.drawn
@pytest.mark.parametrize("token", [0, 1, 30, 319])
def test_a_stored_head_beside_a_tied_embedding_is_used(token: int, tmp_path: Path) -> None:
    """As transformers does, even if they differ in a single element."""
    case = BY_NAME["llama"]
    case = dataclasses.replace(case, config=case.config | {"tie_word_embeddings": True})
    save(case, tmp_path)
    with Checkpoint(trace_of(tmp_path)) as checkpoint:
        assert "lm_head.weight" not in checkpoint.names
    with_a_head_of_its_own(tmp_path, token)
    with pytest.raises(TiedWeightsDiffer, match="E327") as e:
        Checkpoint(trace_of(tmp_path))
    assert e.value.names == ("lm_head.weight",)
    traced = trace(tmp_path, untied=e.value.names)
    tokens, positions = prompts((9,), 320)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(9))
    want = eager_logits(loaded(tmp_path, torch.float32), tokens, (9,))
    assert relative_error(got, want) <= 1e-4
    same = trace(tmp_path)  # tied: what was compiled if the row was not looked at
    assert len(same.weights) == len(traced.weights) - 1


def test_equal_heads_of_another_dtype_stay_tied(tmp_path: Path) -> None:
    case = BY_NAME["llama"]
    save(dataclasses.replace(case, config=case.config | {"tie_word_embeddings": True}), tmp_path, dtype=torch.bfloat16)

    def change(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
        return {name: x, "lm_head.weight": x.astype(np.float32)} if "embed_tokens" in name else {name: x}

    rewrite(tmp_path, change)
    with Checkpoint(trace_of(tmp_path)) as checkpoint:
        assert "lm_head.weight" not in checkpoint.names


@pytest.mark.slow(seconds=20)
def test_a_compile_uses_the_stored_head_and_reports_it(tmp_path: Path) -> None:
    case = BY_NAME["llama"]
    folder = tmp_path / "model"
    save(dataclasses.replace(case, config=case.config | {"tie_word_embeddings": True}), folder)
    options = Options(cache=CACHE, reuse=False, max_num_seqs=4, max_num_batched_tokens=24)
    planned = dry_run(folder, options, None, Quiet())
    with_a_head_of_its_own(folder, 30)
    summary = compile_model(folder, tmp_path / "model.llmc", options)
    assert sum("stores two different tensors; each is used" in note for note in summary.notes) == 1
    assert len(set(summary.notes)) == len(summary.notes)
    head = 320 * 64 * 4
    assert dry_run(folder, options, None, Quiet())["memory"]["weights"] - planned["memory"]["weights"] >= head
    with LLM(tmp_path / "model.llmc", say=lambda line: None) as llm:
        (output,) = llm.generate([[1, 5, 9]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    model = loaded(folder, torch.float32)
    tokens = [1, 5, 9]
    for _ in range(4):
        tokens.append(int(eager_logits(model, np.array(tokens, np.int32), (len(tokens),))[-1].argmax()))
    assert list(output.outputs[0].token_ids) == tokens[3:]
