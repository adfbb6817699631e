"""`llmc compile --dry-run` of quantised models: the plan is that of the artifact which a compile makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernel_cache import CACHE
from models.kit import fails
from quant.handmade import write
from quant.make.common import tokenizer
from quant.test_decode import FIXTURES
from quant.test_handmade import CASES, made

from llmc.artifact.cost_report import weight_bytes
from llmc.console import Quiet
from llmc.driver import compile_model
from llmc.dry_run import dry_run, render
from llmc.options import Options
from llmc.report.inspect import program_facts
from llmc.report.open_artifact import open_artifact


class Notes(Quiet):
    """A console that keeps its notes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def planned(folder: Path, console: Quiet | None = None, **options: Any) -> dict[str, Any]:
    return dry_run(folder, Options(**{"cache": CACHE, "reuse": False, **options}), 1 << 30, console or Quiet())


def model(folder: Path, source: str = "llama256") -> Path:
    """A model that is not quantised, with its tokenizer."""
    made = write(folder, lambda module: None, {}, source=source)
    tokenizer().save_pretrained(folder)
    return made.folder


def texts(folder: Path) -> Path:
    (folder / "texts.txt").write_text(" ".join(f"w{3 + i % 77}" for i in range(3000)))
    return folder / "texts.txt"


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["gptq-dynamic", "ct-embedding-tied", "fp8-stacks", "ct-mixture", "gptq-conv1d"])
def test_the_plan_of_a_quantised_checkpoint(name: str, tmp_path: Path) -> None:
    folder = made(CASES[name], tmp_path / "model").folder
    same_as_compiled(folder, tmp_path, {})


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("llama256", {"quant": "int4", "quant_head": "int8"}),
        ("llama256", {"quant": "awq", "calibrate": True, "quant_head": "int8"}),
        ("llama256", {"quant": "w8a8", "calibrate": True}),
        ("qwen3_moe", {"quant": "awq", "calibrate": True, "group_size": 32}),
        ("qwen3_moe", {"quant": "fp8"}),
    ],
)
def test_the_plan_of_a_recipe(source: str, options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("calibrate"):
        options = options | {"calibrate": texts(tmp_path)}
    same_as_compiled(model(tmp_path / "model", source), tmp_path, options)


def same_as_compiled(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    plan = planned(folder, **options)
    compile_model(folder, tmp_path / "model.llmc", Options(cache=CACHE, reuse=False, **options))
    artifact = open_artifact(tmp_path / "model.llmc")
    assert plan["programs"] == [program_facts(p) for p in artifact.programs]
    assert plan["memory"]["weights"] == weight_bytes(artifact.programs)
    kv = artifact.manifest.kv
    assert plan["kv"]["bytes_per_token"] == kv.bytes_per_page // kv.page_size


def test_a_plan_says_how_weights_are_quantised(tmp_path: Path) -> None:
    """The plan has the same number of parameters, and fewer bytes, than that of the model in bf16."""
    case = CASES["gptq-dynamic"]
    plain = planned(write(tmp_path / "plain", lambda module: None, {}).folder)
    plan = planned(made(case, tmp_path / "model").folder)
    assert plan["model"]["quantised"] == ["11 in gptq 4 bit", "2 in gptq 8 bit"]
    assert plan["model"]["parameters"] == plain["model"]["parameters"]
    assert plan["memory"]["weights"] < 0.6 * plain["memory"]["weights"]
    assert "weights   11 in gptq 4 bit; 2 in gptq 8 bit" in render(plan, ["compile"])
    assert (
        planned(made(case, tmp_path / "none").folder, weights="none")["memory"]["weights"]
        >= (plain["memory"]["weights"])
    )  # such an artifact computes with bf16


def test_a_plan_notes_a_configuration_without_quantised_weights(tmp_path: Path) -> None:
    """Such as that of bitsandbytes, with which other tools round plain weights when they load them."""
    noted = Notes()
    planned(write(tmp_path / "model", lambda module: None, {"quant_method": "bitsandbytes"}).folder, noted)
    assert any("quantised weights by bitsandbytes, but the checkpoint has none" in note for note in noted.notes)


@pytest.mark.parametrize("option", ["auto", pytest.param("fp8", marks=pytest.mark.drawn)])
def test_a_plan_has_the_kv_cache_of_the_checkpoint(option: str) -> None:
    folder = FIXTURES / ("ct-fp8-kv" if option == "auto" else "ct-kv-only")
    sizes = [
        planned(folder, target="cuda:sm_90", kv_cache_dtype=dtype)["kv"] for dtype in (option, "bf16")
    ]  # fmt: skip
    assert [kv["dtype"] for kv in sizes] == ["f8e4m3", "bf16"]
    assert 2 * sizes[0]["bytes_per_token"] == sizes[1]["bytes_per_token"]


def test_a_plan_without_weights(tmp_path: Path) -> None:
    """Of a quantised checkpoint, and of one that a recipe quantises, with the memory of rounding to nearest."""
    folder = model(tmp_path / "model")
    rounded = planned(folder, quant="int4")
    (folder / "model.safetensors").unlink()
    console = Notes()
    assert planned(folder, console, quant="gptq")["memory"] == rounded["memory"]
    assert any("lacks weights" in note and "rounded to nearest" in note for note in console.notes)


def test_a_plan_to_quantise_what_is_quantised(tmp_path: Path) -> None:
    folder = made(CASES["gptq-dynamic"], tmp_path / "model").folder
    fails("E350", "quantised already", do=lambda: planned(folder, quant="awq"))


def test_a_plan_of_weights_that_are_no_whole_groups(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", "llama")  # 160 columns
    fails("E352", "down_proj", "groups of 128", do=lambda: planned(folder, quant="awq"))
