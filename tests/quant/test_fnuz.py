"""Checkpoints and KV caches of 8-bit floats for AMD's CDNA 3, whose 8-bit floats are fnuz: all numbers are preserved,
and GPU programs in Triton's interpreter compute what the reference interpreter does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from llmc_runtime.artifact import open_artifact
from models.cases import SEED
from models.kit import eager_logits, ir_logits, prompts, relative_error, save
from models.test_gpu_programs import SHALLOW, device  # noqa: F401
from models.test_kv_cache import LIMITS, MODEL_OF_KV_SCALES, Rounded, plain, scored
from quant.test_decode import FIXTURES, READ, float_model, opened

from llmc import driver
from llmc.codegen.backends.triton.triton_kernel import INTERPRET
from llmc.driver import compile_model
from llmc.extension import load
from llmc.ir.graph import Module
from llmc.options import Options
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes
from tests.runtime.interpret_device import InterpretDevice

pytestmark = pytest.mark.drawn
TARGET = "hip:gfx942"
FNUZ = "f8e4m3fnuz"
CODED = [name for name in READ if "fp8" in name or name == "ct-mixed"]


@pytest.fixture
def gpu(device: InterpretDevice, monkeypatch: pytest.MonkeyPatch) -> InterpretDevice:  # noqa: F811
    """The target hip:gfx942 with texts for the interpreter."""
    registry = driver.load()
    target = dataclasses.replace(registry.target(TARGET), features=frozenset({INTERPRET}))
    targets = {**registry.targets, TARGET: lambda: target}
    monkeypatch.setattr(driver, "load", lambda: dataclasses.replace(registry, targets=targets))
    return device


def logits(name: str, tokens: np.ndarray, passes: str, target: str = "") -> tuple[np.ndarray, Module]:
    """The logits of a checkpoint by the reference interpreter after passes, for a target if one is named."""
    registry = load()
    with opened(FIXTURES / name) as checkpoint:
        module = checkpoint.traced.module
        use_codes(module, checkpoint, registry.opset())
        ctx = Ctx(registry.opset(), registry.target(target), registry.kernels) if target else Ctx(registry.opset())
        run_pipeline(module, parse_pipeline(f"canonicalize, fuse-linear, {passes}", registry.passes), ctx)
        positions, last = np.arange(len(tokens), dtype=np.int32), np.arange(len(tokens))
        return ir_logits(module, checkpoint.traced, checkpoint, tokens, positions, last), module


def dtypes(module: Module) -> set[str]:
    return {v.type.dtype for n in module.graphs["main"].nodes for v in (*n.operands, *n.results)}


@pytest.mark.parametrize("name", CODED)
def test_no_number_of_a_checkpoint_changes(name: str) -> None:
    """Half the code times twice the scale is the same float32: logits with activations as they are equal by their bits.
    What is left of f8e4m3 are the checkpoint's tensors."""
    tokens = prompts((9,), 64)[0]
    passes = "split-moe{quantized=true}, %slower-quantized{fallback=false}"
    (want, before), (got, after) = (logits(name, tokens, passes % x) for x in ("", "to-fnuz, "))
    np.testing.assert_array_equal(got, want)
    assert FNUZ not in dtypes(before) and (FNUZ in dtypes(after)) == (name != "ct-w4afp8")  # whose codes are integers
    readers = {n.op.name for n in after.graphs["main"].nodes for v in n.operands if v.type.dtype == "f8e4m3"}
    assert readers <= {"fnuz_codes", "slice", "concat", "reshape"}


@pytest.mark.parametrize("name", CODED)
def test_programs_compute_with_the_codes(name: str, tmp_path: Path, gpu: InterpretDevice) -> None:
    """Codes of both factors where the checkpoint asks for it, as on GPUs that have OCP's, and as near to its logits."""
    tokens = prompts((7,), 64)[0]
    want, module = logits(name, tokens, "split-moe, to-fnuz, lower-quantized", TARGET)
    ocp, other = logits(name, tokens, "split-moe, lower-quantized", "hip:gfx950")
    ways = [Counter(n.op.name for n in m.graphs["main"].nodes if "linear" in n.op.name) for m in (module, other)]
    assert ways[0] == ways[1] and "f8e4m3" not in {
        v.type.dtype for n in module.graphs["main"].nodes if "linear" in n.op.name for v in n.operands
    }
    exact = eager_logits(float_model(FIXTURES / name), tokens, (len(tokens),))
    assert relative_error(want, exact) < 1.5 * relative_error(ocp, exact) + 1e-6
    pools = "bf16" if "-kv" in name else "auto"  # those of 8-bit floats, which the reference lacks, are tested below
    options = Options(target=TARGET, dtype="float32", kv_cache_dtype=pools, **LIMITS)
    compile_model(FIXTURES / name, tmp_path / "model.llmc", options)
    got = scored(tmp_path / "model.llmc", tokens, gpu)
    np.testing.assert_allclose(relative_error(got, want[:-1]), 0, atol=6e-2)  # codes at the edge between two


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_pool_holds_halves(dtype: torch.dtype, tmp_path: Path, gpu: InterpretDevice) -> None:
    """The scales of the pool are doubled, so it reaches as far as one of OCP's floats, and rounds as finely."""
    model = save(SHALLOW, tmp_path / "model", SEED, dtype).float()
    ids = np.random.default_rng(SEED).integers(3, 320, 20).astype(np.int32)
    summary = compile_model(
        tmp_path / "model", tmp_path / "model.llmc", Options(target=TARGET, kv_cache_dtype="fp8", **LIMITS)
    )
    assert any("scale of 1" in note for note in summary.notes)
    pools = [b for p in open_artifact(tmp_path / "model.llmc").programs for b in p.buffers if ".kv" in f".{b.name}"]
    assert FNUZ in {b.dtype for b in pools} and "f8e4m3" not in {b.dtype for b in pools}
    found = scored(tmp_path / "model.llmc", ids, gpu)
    limit = 2e-3 if dtype is torch.float32 else 8e-2  # Triton's interpreter cuts bfloat16
    assert relative_error(found, Rounded(model).logits(ids)[:-1]) < limit


def test_scales_of_a_checkpoint(tmp_path: Path, gpu: InterpretDevice) -> None:
    summary = compile_model(
        MODEL_OF_KV_SCALES, tmp_path / "model.llmc", Options(target=TARGET, dtype="float32", **LIMITS)
    )
    assert any("checkpoint's scales" in note for note in summary.notes)
    model, (keys, values) = plain(tmp_path / "plain")
    ids = np.random.default_rng(SEED).integers(3, 80, 50).astype(np.int32)
    found = scored(tmp_path / "model.llmc", ids, gpu)
    rounded = Rounded(model, (2 * keys, 2 * values), torch.float8_e4m3fnuz)
    assert relative_error(found, rounded.logits(ids)[:-1]) < 1e-3
