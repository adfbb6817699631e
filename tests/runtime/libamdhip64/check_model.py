"""Models compiled for an AMD GPU, on the simulated HIP runtime: code objects are loaded and launched through graphs,
the kernels run in Triton's interpreter, and tokens and log-probabilities are compared with transformers.

    pytest --every tests/runtime/libamdhip64/check_model.py        all families for all GPUs; test_hip_driver.py draws
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cache import CACHE
from kernels.triton_harness import interpreting
from llmc_runtime import LLM
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.hip.hip_device import HipDevice
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import TargetInfo
from models import test_artifacts as artifacts
from models.cases import LISTED, ROPES, SEED, UNLISTED, Case
from models.kit import save

from llmc import driver as driver_module
from llmc.codegen.backends.triton.triton_kernel import INTERPRET
from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.libamdhip64.code_objects import CodeObjects
from tests.runtime.libamdhip64.conftest import Driver

ARCHES = ("gfx90a", "gfx942", "gfx950")
# transformers takes the short frequencies of rope-longrope-long for short prompts.
FAMILIES = [c for c in (*LISTED, *UNLISTED, *ROPES) if c.name != "rope-longrope-long"]
STEPS = 2


def interpreted(arch: str, patch: pytest.MonkeyPatch) -> str:
    """Let compiles for an AMD GPU emit texts for the interpreter, whose binaries are as real; return the target."""
    registry = driver_module.load()
    target = dataclasses.replace(registry.target(f"hip:{arch}"), features=frozenset({INTERPRET}))
    registry = dataclasses.replace(registry, targets={**registry.targets, target.name: lambda: target})
    patch.setattr(driver_module, "load", lambda: registry)
    return target.name


def compiled(case: Case, arch: str, folder: Path) -> Any:
    """Compile a model to folder / "model.llmc", and return transformers' own."""
    print(f"seed {SEED}, {case.name} for {arch}")
    own = save(case, folder / "model", SEED, torch.float32)
    length = min(case.trace.get("max_positions", 64), 64)
    with pytest.MonkeyPatch.context() as patch:
        options = Options(
            target=interpreted(arch, patch), dtype="float32", max_model_len=length, max_num_batched_tokens=16,
            max_num_seqs=2, cache=CACHE,
        )  # fmt: skip
        compile_model(folder / "model", folder / "model.llmc", options)
    return own


@pytest.mark.drawn
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", FAMILIES, ids=lambda c: c.name)
def test_tokens_of_a_family(
    driver: Driver, case: Case, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "STEPS", STEPS)
    own = compiled(case, arch, tmp_path)
    path = tmp_path / "model.llmc"
    driver.gpu(arch=f"{arch}:sramecc+:xnack-")
    objects = CodeObjects(driver, open_artifact(path))
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(3, 320, n).tolist() for n in (1, 19)]
    with interpreting(), LLM(path, say=lambda text: None) as llm:
        driver.log()
        artifacts.check(llm, own.float(), prompts, 1e-3)
    assert not objects.errors, objects.errors
    log = driver.log()
    assert "replay" in log and "launch" in log
    assert any("attention" in entry for entry in objects.launches) and len(objects.launches) > 5


def test_code_objects_for_another_gpu(driver: Driver, tmp_path: Path) -> None:
    """They are rejected by the architecture that they name, not by that of the manifest."""
    arch, other = Random(SEED).sample(ARCHES, 2)
    compiled(dataclasses.replace(LISTED[0], config=LISTED[0].config | {"num_hidden_layers": 1}), arch, tmp_path)
    driver.gpu(arch=other)
    device = HipDevice(TargetInfo(f"hip:{other}", other, ()), 1)
    with pytest.raises(LlmcError, match=r"E112.*hsaco cannot be loaded: hipErrorNoBinaryForGpu"):
        device.load(open_artifact(tmp_path / "model.llmc"))
    device.close()
