"""A model compiled for an AMD GPU, on HIP's runtime without one: its code objects are loaded and launched through
graphs, their texts run in Triton's interpreter, and tokens and log-probabilities are held against transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
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
from models.cases import LISTED, SEED
from models.kit import save

from llmc import driver as driver_module
from llmc.codegen.backends.triton.triton_kernel import INTERPRET
from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.libamdhip64.code_objects import CodeObjects
from tests.runtime.libamdhip64.conftest import Driver

CASE = dataclasses.replace(LISTED[0], config=LISTED[0].config | {"num_hidden_layers": 1})
ARCHES = ("gfx90a", "gfx942", "gfx950")
ARCH = Random(SEED).choice(ARCHES)
STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A compiled model and transformers' own. The texts are those for the interpreter, whose binaries are as real."""
    print(f"seed {SEED}, {ARCH}")
    folder = tmp_path_factory.mktemp("model")
    own = save(CASE, folder / "model", SEED, torch.float32)
    registry = driver_module.load()
    target = dataclasses.replace(registry.target(f"hip:{ARCH}"), features=frozenset({INTERPRET}))
    registry = dataclasses.replace(registry, targets={**registry.targets, target.name: lambda: target})
    options = Options(target=target.name, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=2, cache=CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_module, "load", lambda: registry)
        compile_model(folder / "model", folder / "model.llmc", options)
    yield folder / "model.llmc", own


def test_tokens_of_a_model(driver: Driver, model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "STEPS", STEPS)
    path, own = model
    driver.gpu(arch=f"{ARCH}:sramecc+:xnack-")
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


def test_code_objects_for_another_gpu(driver: Driver, model: tuple[Path, Any]) -> None:
    """They name their architecture, whatever the manifest says."""
    other = next(a for a in ARCHES if a != ARCH)
    driver.gpu(arch=other)
    device = HipDevice(TargetInfo(f"hip:{other}", other, ()), 1)
    with pytest.raises(LlmcError, match=r"E112.*hsaco cannot be loaded: hipErrorNoBinaryForGpu"):
        device.load(open_artifact(model[0]))
    device.close()
