"""Programs for GPUs without one: small models compiled with the GPU pipeline, their Triton texts run by the interpreter,
tokens and log-probabilities held against transformers. No binary is made here; the GPU tests run those."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels.triton_harness import INTERPRETED
from llmc_runtime import LLM
from models import test_artifacts as artifacts
from models.cases import LISTED, SEED, Case, sample
from models.kit import save

from llmc import driver
from llmc.codegen.triton.toolchain import Compiled, TritonToolchain
from llmc.driver import Options, compile_model
from tests.runtime.interpret_device import InterpretDevice

STEPS = 3
LENGTHS = (1, 19)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target "cuda:interpret": the GPU pipeline, texts for the interpreter, a device that runs them."""
    registry = driver.load()
    targets = {**registry.targets, INTERPRETED.name: lambda: INTERPRETED}
    monkeypatch.setattr(driver, "load", lambda: dataclasses.replace(registry, targets=targets))

    def keys_alone(self: TritonToolchain, sources: Any, *args: Any) -> dict[str, Compiled]:
        return {self.key(s): Compiled(b"not compiled", 32, 0) for s, _ in sources}

    monkeypatch.setattr(TritonToolchain, "compile", keys_alone)
    monkeypatch.setattr("llmc_runtime.open.open_device", lambda artifact, threads: InterpretDevice())
    monkeypatch.setattr(artifacts, "STEPS", STEPS)


def run_case(case: Case, tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    print(f"seed {SEED}")
    model = save(case, tmp_path / "model", SEED, dtype)
    options = Options(target=INTERPRETED.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(3, 320, n).tolist() for n in LENGTHS]
    prompts.append([*prompts[-1][:16], 5, 6])  # shares a page with the one before
    llm = LLM(tmp_path / "model.llmc", say=lambda text: None)
    try:
        artifacts.check(llm, model.float(), prompts, tolerance)
        artifacts.check(llm, model.float(), prompts[-1:], tolerance)  # alone, from the prefix cache
    finally:
        llm.close()


@pytest.mark.parametrize("case", sample(2, without="rope-longrope-long"), ids=lambda c: c.name)
def test_float32(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path, torch.float32, 1e-3)


@pytest.mark.parametrize("case", LISTED[:1], ids=lambda c: c.name)
def test_bfloat16(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path, torch.bfloat16, 8e-2)
