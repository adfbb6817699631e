"""All steps of bench.amd with --quick, on the simulated HIP runtime. Its commands run in this process, where the
library calls Triton's interpreter."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu import hip_kernels
from gpu.hip_card import HipCard
from kernel_cache import CACHE
from kernels.triton_harness import interpreting
from llmc_runtime.device.hip.hip_device import HipDevice

from bench import amd
from llmc import cli
from llmc import driver as driver_module
from llmc.artifact.write import write_artifact
from tests.runtime.libamdhip64 import toy
from tests.runtime.libamdhip64.check_model import interpreted
from tests.runtime.libamdhip64.code_objects import CodeObjects
from tests.runtime.libamdhip64.conftest import Driver

STEPS = [
    "environment", "kernels", "parity in float32", "parity in bfloat16", "parity in fp8", "graphs", "canary",
    "another architecture", "too little memory", "speed of tiny", "speed of tiny-fp8-fp8kv", "schedules",
]  # fmt: skip


def program(*args: object, codes: Sequence[int] = (0,)) -> str:
    """Run a program of `amd` as it does, in this process."""
    texts = [str(a) for a in args]
    texts += ["--cache", str(CACHE)] * (texts[2:3] in (["compile"], ["tune"]))
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.main(texts[2:]) if texts[0] == "-m" else hip_kernels.main(texts[1:])
    if code not in codes:
        raise RuntimeError(f"{texts} ends with {code}: {errors.getvalue()[-2000:]}")
    return errors.getvalue() if codes[0] else out.getvalue()


def apart(name: str, argv: Sequence[str]) -> amd.Step:
    """Run a step as `amd` does, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert amd.main([*argv, "--only", name]) == 0
    return amd.Step(**amd.last_json(out.getvalue()))


@pytest.fixture
def objects(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[CodeObjects]:
    """The code objects of everything that is loaded. The interpreter is on while a device or a card is open; kernels
    are compiled before.
    """
    found, open_now = CodeObjects(driver), contextlib.ExitStack()
    load, close, compiled = HipDevice.load, HipDevice.close, hip_kernels.compile_jobs
    begin, end = HipCard.__init__, HipCard.close

    def loaded(self: HipDevice, artifact: Any) -> None:
        found.add(artifact)
        open_now.enter_context(interpreting())
        load(self, artifact)

    def closed(self: HipDevice) -> None:
        close(self)
        open_now.close()

    def begun(self: HipCard) -> None:
        open_now.enter_context(interpreting())
        begin(self)

    def ended(self: HipCard) -> None:
        end(self)
        open_now.close()

    def compile_jobs(jobs: Any, target: Any) -> Any:
        binaries = compiled(jobs, target, CACHE)
        for job in jobs:
            dtypes = tuple(v.type.dtype for v in (*job.case.node.operands, *job.case.node.results))
            if not isinstance(one := binaries[job.key], str):
                found.add_kernel(one.binary, job.source.text, job.source.entry, dtypes)
        return binaries

    for owner, name, function in (
        (HipDevice, "load", loaded), (HipDevice, "close", closed), (HipCard, "__init__", begun),
        (HipCard, "close", ended), (hip_kernels, "compile_jobs", compile_jobs),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, function)
    with open_now:
        yield found


@pytest.mark.drawn
def test_the_whole_program(
    driver: Driver, objects: CodeObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.gpu(arch="gfx942:sramecc+:xnack-", nbytes=256 << 20)
    target = interpreted("gfx942", monkeypatch)
    monkeypatch.setattr(hip_kernels, "load", driver_module.load)
    monkeypatch.setattr(amd, "program", program)
    monkeypatch.setattr(amd, "apart", apart)
    code = amd.main(["--out", str(tmp_path), "--target", target, "--quick", "--tune", "1"])
    text = (tmp_path / "report.json").read_text()
    report = {s["name"]: s for s in json.loads(text)}
    print(json.dumps(report, indent=1))
    assert not objects.errors, objects.errors
    assert list(report) == STEPS and code == 0 and not any(s["error"] for s in report.values())
    found = {name: s["figures"] for name, s in report.items()}
    device = found["environment"]["device"]
    assert device["name"] == "Fake GPU" and device["arch"] == "gfx942:sramecc+:xnack-" and device["rocm"] == "7.2"
    assert found["kernels"]["cases"] > 10 and not found["kernels"]["failed"]
    assert found["parity in float32"]["equal_tokens"] == found["parity in float32"]["tokens"] == 9
    assert found["graphs"]["tokens"] and found["canary"]["ok"]
    assert "E117" in found["another architecture"]["message"] and "E205" in found["too little memory"]["message"]
    for name in ("speed of tiny", "speed of tiny-fp8-fp8kv"):
        assert set(found[name]) == {"batch 1", "batch 2", "offline"}
        assert found[name]["offline"]["output_tokens_per_second"] > 0
    assert "measurements of" in found["schedules"]["output"] or found["schedules"]["output"]
    pages = text + (tmp_path / "report.md").read_text()
    assert str(tmp_path) not in pages and str(amd.ROOT) not in pages and str(Path.home()) not in pages
    assert pages.count("\n| ") >= len(STEPS)


def test_memory_is_taken_and_given_back(driver: Driver, tmp_path: Path) -> None:
    driver.gpu(nbytes=64 << 20)
    write_artifact(tmp_path / "bfloat16.llmc", toy.parts(tmp_path))
    found = amd.Bench(tmp_path, "hip:gfx942", amd.QUICK, 0).too_little_memory()
    assert found["held_bytes"] > 60 << 20 and "E205" in found["message"]
    assert driver.used == 0


def test_a_step_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fault of a GPU does: the next step runs, and the report tells."""
    steps = {"first": "import os; os.abort()", "second": """print('{"name": "second"}')"""}
    monkeypatch.setattr(amd.Bench, "steps", lambda self: dict.fromkeys(steps))
    real = amd.subprocess.run
    monkeypatch.setattr(
        amd.subprocess, "run", lambda words, **options: real([words[0], "-c", steps[words[-1]]], **options)
    )
    assert amd.main(["--out", str(tmp_path)]) == 1
    first, second = json.loads((tmp_path / "report.json").read_text())
    assert first["error"].startswith("the process ended with -6") and not second["error"]
