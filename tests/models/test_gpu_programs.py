"""Programs for GPUs without one: small models compiled by the GPU pipeline, their Triton texts run by the interpreter,
tokens and log-probabilities compared with transformers. The GPU tests run binaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels.triton_harness import INTERPRETED
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.artifact import open_artifact
from llmc_runtime.exec.executor import Executor
from llmc_runtime.exec.score_tokens import score_tokens
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.token_guide import mask_of
from models import test_artifacts as artifacts
from models.cases import FURTHER, LISTED, SEED, UNLISTED, Case, sample
from models.eagle import save_head, tensors
from models.kit import eager_logits, relative_error, save

from llmc import driver
from llmc.codegen.backends.triton.triton_toolchain import Compiled, TritonToolchain
from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.interpret_device import InterpretDevice

pytestmark = pytest.mark.drawn(seconds=20)
STEPS = 2
# In bfloat16 what the dtype changes: one layer, no chunks. Programs of products are what takes time in the interpreter.
SHALLOW = dataclasses.replace(LISTED[0], config=LISTED[0].config | {"num_hidden_layers": 1})


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> InterpretDevice:
    """The target "cuda:interpret": the GPU pipeline, texts for the interpreter, a device that runs them."""
    device = InterpretDevice()
    registry = driver.load()
    targets = {**registry.targets, INTERPRETED.name: lambda: INTERPRETED}
    monkeypatch.setattr(driver, "load", lambda: dataclasses.replace(registry, targets=targets))

    def keys_alone(self: TritonToolchain, sources: Any, *args: Any) -> dict[str, Compiled]:
        boxes = {self.key(s): tuple((m.box, 3) for m in s.maps) for s, _ in sources}
        return {key: Compiled(b"not compiled", 32, 0, found) for key, found in boxes.items()}

    monkeypatch.setattr(TritonToolchain, "compile", keys_alone)
    monkeypatch.setattr("llmc_runtime.engine.loader.open_device", lambda *args, **options: device)
    monkeypatch.setattr(artifacts, "STEPS", STEPS)
    return device


def run_case(case: Case, tmp_path: Path, device: InterpretDevice, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Prompts together; in float32 one that shares a page, too, and that one again, from the prefix cache."""
    print(f"seed {SEED}")
    tolerance = 1e-3 if dtype is torch.float32 else 8e-2
    model = save(case, tmp_path / "model", SEED, dtype)
    options = Options(target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(3, 320, n).tolist() for n in lengths]
    if dtype is torch.float32:
        prompts.append([*prompts[-1][:16], 5, 6])  # shares a page with the one before
    llm = LLM(tmp_path / "model.llmc", say=lambda text: None)
    try:
        artifacts.check(llm, model.float(), prompts, tolerance)
        if dtype is torch.float32:
            artifacts.check(llm, model.float(), prompts[-1:], tolerance)
    finally:
        llm.close()
    ran = {op for op, _ in device.launches}
    assert any("attention" in op for op in ran) and any("linear" in op for op in ran) and len(ran) > 5, ran


@pytest.mark.parametrize("case", sample(1, without="rope-longrope-long"), ids=lambda c: c.name)
def test_float32(case: Case, tmp_path: Path, device: InterpretDevice) -> None:
    run_case(case, tmp_path, device, (1, 19), torch.float32)


def test_bfloat16(tmp_path: Path, device: InterpretDevice) -> None:
    run_case(SHALLOW, tmp_path, device, (1, 5), torch.bfloat16)


@pytest.mark.parametrize(("name", "layers"), [("qwen3_moe", 2), ("gpt_oss", 1)])
def test_mixtures_choose_and_add_up_experts_in_one_launch_each(
    name: str, layers: int, tmp_path: Path, device: InterpretDevice
) -> None:  # fmt: skip
    """The experts of a single row are not sorted; in the last layer, whose sum the final norm takes, they are sorted by
    the launch that chooses them.
    """
    case = next(c for c in UNLISTED if c.name == name)
    config = case.config | {"num_hidden_layers": layers}
    config |= {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    run_case(dataclasses.replace(case, config=config), tmp_path, device, (5,), torch.bfloat16)
    ran = {op for op, _ in device.launches}
    assert {"topk_map", "topk_route", "moe_route", "moe_up", "moe_down", "moe_combine"} <= ran
    assert ({"norm_moe_gather_up", "moe_gather_down"} <= ran) is (layers > 1)
    assert not {"topk", "softmax", "sum"} & ran


def test_rows_that_decode_beside_prompts_apart(tmp_path: Path, device: InterpretDevice) -> None:
    run_case(SHALLOW, tmp_path, device, (1, 19), torch.float32)
    assert "paged_attention_single" in {op for op, _ in device.launches}


def test_latent_attention(tmp_path: Path, device: InterpretDevice) -> None:
    """Decoding rows in parts, prompts and chunks as a whole; products of heads before and after it."""
    case = next(c for c in UNLISTED if c.name == "minicpm3")
    config = case.config | {"num_hidden_layers": 1}
    run_case(dataclasses.replace(case, config=config), tmp_path, device, (1, 19), torch.float32)
    ran = {op for op, _ in device.launches}
    assert {"head_matmul", "page_put", "paged_latent_attention", "paged_latent_attention_split"} <= ran
    assert not {"paged_attention", "kv_append"} & ran


def test_a_bias_by_distance(tmp_path: Path, device: InterpretDevice) -> None:
    """Prompts, chunks and single tokens by one kernel."""
    case = next(c for c in FURTHER if c.name == "mpt")
    config = case.config | {"n_layers": 1}
    run_case(dataclasses.replace(case, config=config), tmp_path, device, (1, 19), torch.float32)
    ran = {op for op, _ in device.launches}
    assert "paged_alibi_attention" in ran and not {"paged_attention", "paged_attention_single"} & ran


def test_products_by_tensor_maps(tmp_path: Path, device: InterpretDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a model's products, as no other kernel is there for them: maps of inputs, results and weights."""
    registry = driver.load()
    others = ("triton/gemm_small", "triton/gemm", "triton/gemv")
    kernels = {name: k for name, k in registry.kernels.items() if name not in others}
    monkeypatch.setattr(driver, "load", lambda: dataclasses.replace(registry, kernels=kernels))
    run_case(SHALLOW, tmp_path, device, (1, 5), torch.bfloat16)
    artifact = open_artifact(tmp_path / "model.llmc")
    mapped = {x.op for p in artifact.programs for x in p.launches if x.maps}
    assert mapped == {x.op for p in artifact.programs for x in p.launches if x.op.startswith("linear")} != set()
    assert mapped <= {op for op, _ in device.launches}


class Upwards:
    """A guide: each token is one of the three ids that follow the previous one."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.drafts: Sequence[int] = ()

    def mask(self) -> bytes:
        return mask_of(range(self.last + 1, self.last + 4), 320)

    def accept(self, token: int) -> None:
        assert self.last < token < self.last + 4
        self.last, self.drafts = token, self.drafts[1:] if self.drafts[:1] == [token] else ()

    def look_ahead(self, drafts: Sequence[int]) -> None:
        self.drafts = list(drafts)

    def masks_ahead(self) -> list[bytes]:
        allowed = takewhile(lambda pair: pair[0] < pair[1] < pair[0] + 4, pairwise([self.last, *self.drafts]))
        return [mask_of(range(token + 1, token + 4), 320) for _, token in allowed]

    def is_looking_ahead(self) -> bool:
        return False

    def close(self) -> None:
        """There is nothing to release."""


def guided(path: Path, ids: list[int]) -> tuple[list[int], bool]:
    """Return the tokens of a guided and of a free request, and whether a program was split."""
    with LLM(path, say=lambda text: None) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        requests = [Request("guided", ids, params, guide=Upwards(ids[-1])), Request("free", ids[:1], params)]
        for request in requests:
            llm.engine.add(request)
        while llm.engine.has_work():
            llm.engine.step()
        assert llm.engine.error is None
        cut = any(bound.halves for bound in llm.engine.executor._steps.bound)  # type: ignore[attr-defined]
        return [t for r in requests for t in r.output_token_ids], cut


def test_scored_prompts_and_masks(tmp_path: Path, device: InterpretDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scored prompt batched with a row with a mask and a bias; masks that depend on the tokens, in steps that are
    planned one by one, and in programs that are split before sampling."""
    model = save(SHALLOW, tmp_path / "model", SEED).float()
    options = Options(target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    ids = np.random.default_rng(SEED).integers(3, 320, 4).tolist()
    params = [
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=2, allowed_token_ids=[9, 300], logit_bias={9: -100}),
    ]
    with LLM(tmp_path / "model.llmc", say=lambda text: None) as llm:
        scored, masked = llm.generate([ids, ids[:1]], params, use_tqdm=False)
    with torch.no_grad():
        want = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()
    for i, row in enumerate((scored.prompt_logprobs or [])[1:]):
        assert row is not None and set(row) == {ids[i + 1], *np.argsort(-want[i])[:2].tolist()}
        assert all(abs(found.logprob - want[i, token]) < 1e-3 for token, found in row.items())
    assert scored.outputs[0].token_ids == [int(want[-1].argmax())] and masked.outputs[0].token_ids == [300, 300]

    found = []
    for depth in (1, 2):
        made = InterpretDevice()
        made.depth = depth
        monkeypatch.setattr("llmc_runtime.engine.loader.open_device", lambda *args, made=made, **options: made)
        tokens, cut = guided(tmp_path / "model.llmc", [5, 11])
        found.append(tokens)
        assert cut == (depth == 2)
    assert found[0] == found[1] and all(a < b < a + 4 for a, b in pairwise([11, *found[0][:4]]))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("depth", [1, 2])
def test_masks_behind_drafts(tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a guided request are verified with a mask each, also by programs cut in front of their sampling."""
    save(SHALLOW, tmp_path / "model", SEED)
    options = Options(target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3, speculate=2)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    made = InterpretDevice()
    made.depth = depth
    monkeypatch.setattr("llmc_runtime.engine.loader.open_device", lambda *args, made=made, **options: made)
    ids = [5, 6, 7, 8, 9, 10, 11, 30, 5, 6]
    bias = {i: 100.0 - 20 * (i - 7) for i in range(7, 15)}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias=bias)
    found = []
    for speculate in (None, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}):
        with LLM(tmp_path / "model.llmc", say=lambda text: None, speculate=speculate) as llm:
            requests = [Request("guided", ids, params, guide=Upwards(ids[-1])), Request("free", ids[:3], params)]
            for request in requests:
                llm.engine.add(request)
            while llm.engine.has_work():
                llm.engine.step()
            assert llm.engine.error is None
            found.append([request.output_token_ids for request in requests])
            steps, accepted = (llm.stats()[n] for n in ("num_steps", "spec_decode_num_accepted_tokens"))
    assert found[0] == found[1] and found[0][0] == [7, 8, 9, 10, 11, 12]
    assert accepted >= 3 and steps < 7, (accepted, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_read_after_a_step(tmp_path: Path, device: InterpretDevice, dtype: torch.dtype) -> None:
    """Of a scored sequence, also from steps of fewer entries than their program's rows."""
    model = save(SHALLOW, tmp_path / "model", SEED, dtype).float()
    options = Options(target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    ids = np.random.default_rng(SEED).integers(3, 320, 6).astype(np.int32)
    executor = Executor(open_artifact(tmp_path / "model.llmc"), device)
    parts = list(score_tokens(executor, ids.tolist(), 3, logits=True))
    executor.close()
    found = np.concatenate([part.logits for part in parts if part.logits is not None])
    want = eager_logits(model, ids, (6,))[:-1]
    assert found.shape == want.shape
    assert relative_error(found, want) <= (1e-4 if dtype is torch.float32 else 3e-2)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as possible are drafted and verified, whether it pays or not."""
    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: room)
    monkeypatch.setattr(Speculation, "wants", True)


@pytest.mark.usefixtures("eager")
def test_drafts_are_verified(tmp_path: Path, device: InterpretDevice) -> None:
    """With prompt lookup the tokens are those of plain decoding; penalties count the drafts before a token."""
    save(SHALLOW, tmp_path / "model", SEED)
    options = Options(target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3, speculate=2)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    likely = {5: 40.0, 6: 38.5, 7: 37.0}
    params = [
        SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logit_bias={5: 40.0}, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logit_bias=likely, frequency_penalty=1.0),
    ]
    prompts = [{"prompt_token_ids": [9, *[5] * 6]}, {"prompt_token_ids": [5, 6, 7] * 3}]
    found, accepted = [], 0.0
    for speculate in (None, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}):
        with LLM(tmp_path / "model.llmc", say=lambda text: None, speculate=speculate) as llm:
            outs = llm.generate(prompts, params, use_tqdm=False)
            found.append([list(o.outputs[0].token_ids) for o in outs])
            accepted = float(llm.stats()["spec_decode_num_accepted_tokens"])  # type: ignore[arg-type]
    assert found[0] == found[1] and found[0][0] == [5] * 7
    assert accepted > 2 and {"row_accept", "row_propose"} <= {op for op, _ in device.launches}


def check_drafts(path: Path, speculate: str, device: InterpretDevice, ops: set[str]) -> None:
    """Check that tokens are those of plain decoding, that drafts are accepted, and that these ops made them."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={5: 40.0}, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": [9, 4, 5]}, {"prompt_token_ids": [5, 6, 7] * 3}]
    found, accepted = [], 0.0
    for method in (None, speculate):
        with LLM(path, say=lambda text: None, speculate=method) as llm:
            outs = llm.generate(prompts, params, use_tqdm=False)
            found.append([list(o.outputs[0].token_ids) for o in outs])
            accepted = float(llm.stats()["spec_decode_num_accepted_tokens"])  # type: ignore[arg-type]
    assert found[0] == found[1] and found[0][0] == [5] * 6
    assert accepted > 2 and ops <= {op for op, _ in device.launches}


@pytest.mark.usefixtures("eager")
def test_drafts_of_a_model(tmp_path: Path, device: InterpretDevice) -> None:
    """The programs of a draft model give the tokens of plain decoding."""
    save(SHALLOW, tmp_path / "model", SEED)
    save(SHALLOW, tmp_path / "draft", SEED + 1)
    options = Options(
        target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3, speculate=2,
        draft=str(tmp_path / "draft"),
    )  # fmt: skip
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    check_drafts(tmp_path / "model.llmc", "draft", device, {"row_rewind", "row_extend"})


@pytest.mark.drawn(seconds=40)
@pytest.mark.usefixtures("eager")
def test_drafts_of_a_head(tmp_path: Path, device: InterpretDevice) -> None:
    """The programs of an EAGLE-3 head give the tokens of plain decoding."""
    width = int(SHALLOW.config["hidden_size"])
    save(SHALLOW, tmp_path / "model", SEED)
    config = {"vocab_size": SHALLOW.config["vocab_size"], "eagle_aux_hidden_state_layer_ids": [0, 0, 0]}
    save_head(tmp_path / "head", tensors(int(config["vocab_size"]), width, SEED), **config)
    options = Options(
        target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3, speculate=2,
        draft=f"eagle:{tmp_path / 'head'}",
    )  # fmt: skip
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    check_drafts(tmp_path / "model.llmc", "eagle", device, {"page_put", "page_take"})
