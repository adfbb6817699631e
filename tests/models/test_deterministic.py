"""Deterministic artifacts: a request's log-probabilities are bitwise equal in any batch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError
from llmc_runtime.format.manifest import Manifest
from mixtures import check, draw, quiet
from models.cases import FURTHER, LISTED, SMALL, UNLISTED, Case
from models.kit import fails, save

from llmc import driver
from llmc.codegen.backends.cpp.row_kernels import Rows
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.codegen.row_program import RowProgram, expressions
from llmc.driver import compile_model
from llmc.dry_run import dry_run
from llmc.ir.dim import product
from llmc.ir.graph import Node
from llmc.options import Options
from llmc.report.inspect import inspect_artifact, render
from llmc.targets.target import Target

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
LIMITS: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 96}
WINDOW = 40


@dataclass(frozen=True)
class Family:
    """A small random model, and the options of its compile."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @property
    def case(self) -> Case:
        """The model's configuration, with long texts and a window that tiles of keys do not divide."""
        case = next(c for c in (*LISTED, *UNLISTED, *FURTHER) if c.name == self.name)
        window = {"sliding_window": WINDOW} if "sliding_window" in case.config else {}
        return replace(case, config=case.config | {"max_position_embeddings": 1024} | window)


FAMILIES = (
    Family("qwen3"),
    Family("qwen3", {"quant": "int4", "group_size": 32}),
    Family("mistral"),
    Family("mixtral"),
    Family("llama", {"tensor_parallel_size": 2}),
    Family("gemma2", {"speculate": 4}, torch.float32),
)


def compiled(family: Family, folder: Path, **more: Any) -> Path:
    save(family.case, folder / "model", SEED, family.dtype)
    options = Options(cache=CACHE, reuse=False, deterministic=True, **LIMITS, **family.options, **more)
    compile_model(folder / "model", folder / "model.llmc", options)
    return folder / "model.llmc"


def manifest(path: Path) -> Manifest:
    return Manifest.load((path / "manifest.json").read_bytes())


def differences(path: Path, count: int, longest: int) -> list[str]:
    """Compare requests alone and in mixtures; they are preempted and take pages from the prefix cache."""
    print(f"seed {SEED}")
    requests = draw(np.random.default_rng(SEED), count, manifest(path), longest)
    report = check(path, requests, SEED)
    assert report.compared > 50 * count and report.preemptions and report.hits, report
    return report.differences


@pytest.mark.slow(seconds=30)
def test_demonstration_model(tmp_path: Path) -> None:
    compile_model(DEMO, tmp_path / "demo.llmc", Options(cache=CACHE, deterministic=True, **LIMITS))
    assert differences(tmp_path / "demo.llmc", 24, 600) == []
    found = inspect_artifact(tmp_path / "demo.llmc")
    assert found["deterministic"] and "deterministic: the same bits in every batch" in render(found)
    LLM(tmp_path / "demo.llmc", say=quiet, deterministic=True).close()


@pytest.mark.drawn(seconds=30)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.name}{''.join(f'-{v}' for v in f.options.values())}")
def test_families(family: Family, tmp_path: Path) -> None:
    assert differences(compiled(family, tmp_path), 24, 600) == []


class Halved(Rows):
    """Sums of a row in two passes, over every second vector, if a step has more than four rows."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        text = super().body(node, schedule, target, sizes)
        outer = product(RowProgram(node, expressions(node) or []).space.outer)
        loop, halves = "for (int64_t j = 0; j < n; j += VN) {", "for (int64_t j = half * VN; j < n; j += 2 * VN) {"
        split = text.replace(loop, f"for (int64_t half = 0; half < 2; half++)\n{halves}")
        return f"if ({sizes(outer)} > 4) {{\n{split}\n}} else {{\n{text}\n}}"


@pytest.mark.slow(seconds=20)
def test_a_split_that_depends_on_the_batch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = driver.load()
    kernels = {**registry.kernels, "cpu/rows": Halved("cpu/rows")}
    monkeypatch.setattr(driver, "load", lambda: replace(registry, kernels=kernels))
    path = compiled(Family("qwen3", dtype=torch.float32), tmp_path)
    assert differences(path, 12, 200)


def model(folder: Path) -> Path:
    folder.mkdir()
    config = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(folder: Path, **options: Any) -> None:
    dry_run(folder, Options(weights="none", deterministic=True, **LIMITS, **options), None, driver.Quiet())


@pytest.mark.slow
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets, pipelines, kernels and artifacts that are not deterministic: one clear error each."""
    folder = model(tmp_path / "model")
    for target in ("hip:gfx942", "cuda:sm_100"):
        fails("E512", "--deterministic", target, do=lambda t=target: planned(folder, target=t))
    planned(folder, target="cuda:sm_90")
    fails("E512", "--speculate", do=lambda: planned(folder, target="cuda:sm_90", speculate=4))
    split = "serve, before select: split-kv{splits=2}"
    fails("E430", "paged_attention_split", do=lambda: planned(folder, target="cuda:sm_90", pipeline=split))
    registry = driver.load()

    class Unknown(Rows):
        constant_reduction_order = None

    kernels = {**registry.kernels, "cpu/rows": Unknown("cpu/rows"), "cpu/elements": Unknown("cpu/elements")}
    monkeypatch.setattr(driver, "load", lambda: replace(registry, kernels=kernels))
    fails("E430", "cpu/rows: its results may depend on the batch", do=lambda: planned(folder))


@pytest.mark.drawn(seconds=10)
def test_an_artifact_without_it_is_refused(tmp_path: Path) -> None:
    compile_model(DEMO, tmp_path / "demo.llmc", Options(cache=CACHE))
    assert not manifest(tmp_path / "demo.llmc").deterministic
    with pytest.raises(LlmcError, match="without --deterministic") as e:
        LLM(tmp_path / "demo.llmc", say=quiet, deterministic=True)
    assert e.value.code == "E204"
