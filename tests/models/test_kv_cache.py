"""KV caches of 8-bit floats: interpreted GPU programs compared with transformers whose cache rounds alike."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from kernels.triton_harness import INTERPRETED
from llmc_runtime import LLM
from llmc_runtime.artifact import open_artifact
from llmc_runtime.exec.executor import Executor
from llmc_runtime.exec.score_tokens import score_tokens
from models import test_artifacts as artifacts
from models.cases import SEED
from models.kit import eager_logits, fails, relative_error, save
from models.test_gpu_programs import SHALLOW, device  # noqa: F401
from safetensors.numpy import load_file, save_file

from llmc.console import Console
from llmc.driver import compile_model
from llmc.dry_run import dry_run
from llmc.options import Options
from tests.runtime.interpret_device import InterpretDevice

LIMITS: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 3}
MODEL_OF_KV_SCALES = Path(__file__).parents[1] / "quant" / "fixtures" / "ct-kv-only"


class RoundedCache(transformers.DynamicCache):
    """Holds keys and values as a pool of 8-bit floats does. scales: of keys and values."""

    def __init__(self, scales: tuple[float, float], dtype: torch.dtype) -> None:
        super().__init__()
        self.scales, self.dtype = scales, dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        limit = torch.finfo(self.dtype).max
        rounded = [
            (x / s).clamp(-limit, limit).to(self.dtype).to(x.dtype) * s
            for x, s in zip((keys, values), self.scales, strict=True)
        ]
        return super().update(*rounded, *args, **kwargs)


class Rounded:
    """A model that is called without a cache, and reads keys and values from one that rounds."""

    def __init__(
        self, model: Any, scales: tuple[float, float] = (1.0, 1.0), dtype: torch.dtype = torch.float8_e4m3fn
    ) -> None:
        self.model, self.scales, self.dtype = model, scales, dtype

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> Any:
        return self.model(input_ids=ids, past_key_values=RoundedCache(self.scales, self.dtype), use_cache=True)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self(torch.from_numpy(ids.astype(np.int64))[None], False).logits[0].float().numpy()


def scored(path: Path, ids: np.ndarray, device: InterpretDevice) -> np.ndarray:  # noqa: F811
    """The logits of all tokens but the last."""
    executor = Executor(open_artifact(path), device)
    parts = list(score_tokens(executor, ids.tolist(), 3, logits=True))
    executor.close()
    return np.concatenate([part.logits for part in parts if part.logits is not None])


@pytest.mark.drawn
def test_served_tokens(tmp_path: Path, device: InterpretDevice) -> None:  # noqa: F811
    """Chunked prompts batched with single tokens, and a page from the prefix cache."""
    print(f"seed {SEED}")
    model = save(SHALLOW, tmp_path / "model", SEED).float()
    options = Options(target=INTERPRETED.name, kv_cache_dtype="fp8", **LIMITS)
    summary = compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    assert any("scale of 1" in note for note in summary.notes)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(3, 320, n).tolist() for n in (1, 19)]
    prompts.append([*prompts[-1][:16], 5, 6])
    with LLM(tmp_path / "model.llmc", say=lambda text: None) as llm:
        artifacts.check(llm, Rounded(model), prompts, 2e-3)
        artifacts.check(llm, Rounded(model), prompts[-1:], 2e-3)
    ran = {op for op, _ in device.launches}
    assert "paged_attention_single" in ran and ran & {"rope_append", "kv_append"}


@pytest.mark.drawn
def test_a_pool_takes_half_the_bytes_and_rounds(tmp_path: Path, device: InterpretDevice) -> None:  # noqa: F811
    """Logits as those of a cache that rounds, and near those of one that does not."""
    model = save(SHALLOW, tmp_path / "model", SEED, torch.bfloat16).float()
    ids = np.random.default_rng(SEED).integers(3, 320, 20).astype(np.int32)
    bytes_per_page = {}
    for option in ("auto", "fp8_e4m3"):
        path = tmp_path / f"{option}.llmc"
        compile_model(tmp_path / "model", path, Options(target=INTERPRETED.name, kv_cache_dtype=option, **LIMITS))
        bytes_per_page[option] = json.loads((path / "manifest.json").read_text())["kv"]["bytes_per_page"]
    assert bytes_per_page["auto"] == 2 * bytes_per_page["fp8_e4m3"]
    found = scored(tmp_path / "fp8_e4m3.llmc", ids, device)
    assert relative_error(found, Rounded(model).logits(ids)[:-1]) < 8e-2  # Triton's interpreter cuts bfloat16
    assert relative_error(found, eager_logits(model, ids, (len(ids),))[:-1]) < 0.12


def plain(folder: Path) -> tuple[Any, tuple[float, float]]:
    """The model of MODEL_OF_KV_SCALES in float32 without scales, saved in a folder, and the scales."""
    config = json.loads((MODEL_OF_KV_SCALES / "config.json").read_text())
    del config["quantization_config"]
    stored = load_file(MODEL_OF_KV_SCALES / "model.safetensors")
    keys, values = (float(stored.pop(f"model.layers.0.self_attn.{x}_scale").item()) for x in "kv")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model, (keys, values)


@pytest.mark.drawn
def test_scales_of_a_checkpoint(tmp_path: Path, device: InterpretDevice) -> None:  # noqa: F811
    """Those of llmcompressor; without an option, as the checkpoint asks."""
    options = Options(target=INTERPRETED.name, dtype="float32", **LIMITS)
    summary = compile_model(MODEL_OF_KV_SCALES, tmp_path / "model.llmc", options)
    assert any("checkpoint's scales" in note for note in summary.notes)
    model, scales = plain(tmp_path / "plain")
    ids = np.random.default_rng(SEED).integers(3, 80, 50).astype(np.int32)
    found = scored(tmp_path / "model.llmc", ids, device)
    want = Rounded(model, scales).logits(ids)[:-1]
    assert relative_error(found, want) < 1e-3
    exact = eager_logits(model, ids, (len(ids),))[:-1]
    assert 2 * relative_error(found, want) < relative_error(found, exact) < 0.25


def test_checkpoint_requests_unsupported_kv_dtype() -> None:
    """CPUs have no kernels for it: the option is rejected; the checkpoint is compiled without it, with a note."""
    o = {"target": "cpu:native", "cache": None, "max_model_len": 64}
    output = io.StringIO()
    plan = dry_run(MODEL_OF_KV_SCALES, Options(**o), None, Console(output))
    assert "which cpu:native does not support" in output.getvalue() and plan["kv"]["dtype"] == "bf16"
    option = Options(**o, kv_cache_dtype="fp8")
    fails("E511", "fp8", "f8e4m3", do=lambda: dry_run(MODEL_OF_KV_SCALES, option, None, Console(output)))
