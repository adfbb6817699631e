"""bench.amd, the program for someone with an AMD GPU, as a whole on HIP's runtime without one, with small models.

Its commands run in this process, where the library calls Triton's interpreter. Schedules are not measured.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from kernel_cache import CACHE
from kernels.triton_harness import interpreting
from llmc_runtime.artifact import open_artifact

from bench import amd, shapes
from llmc.cli import main
from tests.runtime.libamdhip64.check_model import interpreted
from tests.runtime.libamdhip64.code_objects import CodeObjects
from tests.runtime.libamdhip64.conftest import Driver

LIMITS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--cache", str(CACHE))
ONCE = ("--num-iters", "1", "--num-iters-warmup", "0")
TINY = shapes.Shape(
    "tiny", "llama", 32, 48, 1, 2, 1, 16, 320, 4096, True, MappingProxyType({"rope_theta": 1e4}), eps=1e-5
)


def command(*args: object, code: int = 0) -> str:
    """Run a command as `amd.command` does, with small limits, once, and in this process."""
    texts = [str(a) for a in args]
    texts += LIMITS if texts[0] == "compile" else ONCE if texts[0] == "bench" else ()
    out, errors = io.StringIO(), io.StringIO()
    runs = interpreting() if texts[0] in ("verify", "bench") else contextlib.nullcontext()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), runs:
        found = main(texts)
    if found != code:
        raise RuntimeError(f"llmc {texts} exits with {found}: {errors.getvalue()[-2000:]}")
    return out.getvalue() if code == 0 else errors.getvalue()


@pytest.mark.drawn
def test_the_whole_program(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.gpu(arch="gfx942:sramecc+:xnack-")
    target, objects = interpreted("gfx942", monkeypatch), []
    make, score = amd.compiled, amd.scores

    def compiled(model: Path, out: Path, *options: object) -> Path:
        path = make(model, out, *options)
        if target in options:
            objects.append(CodeObjects(driver, open_artifact(path)))
        return path

    def scores(artifact: Path, prompts: Sequence[str]) -> list[list[tuple[int, float]]]:
        with interpreting():
            return score(artifact, prompts)

    values: dict[str, Any] = {
        "command": command, "compiled": compiled, "scores": scores,
        "DEMO": amd.ROOT / "examples" / "demo-model-small", "TOKENS": 2,
        "PROMPTS": ("When the", "A"), "BATCHES": (1, 2), "LENGTHS": (3, 2),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(amd, name, value)
    for name in ("QWEN3_06B", "LLAMA31_8B"):
        monkeypatch.setattr(shapes, name, TINY)
    monkeypatch.setattr(sys, "argv", ["bench.amd", "--out", str(tmp_path), "--target", target, "--tune", "0"])
    code = amd.main()
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0 and not any(o.errors for o in objects), report
    names = [s["name"] for s in report]
    assert names[:5] == ["environment", "parity in float32", "parity in bfloat16", "canary", "another architecture"]
    assert report[1]["found"]["equal_tokens"] == report[1]["found"]["tokens"] == 4
    assert "E117" in report[4]["found"]["message"] and str(tmp_path) not in (tmp_path / "report.md").read_text()
    assert set(report[5]["found"]) == {"batch 1", "batch 2"} and sum(o.launches != {} for o in objects) >= 3
