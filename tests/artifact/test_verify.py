"""Looking into artifacts: what `inspect` says, what `verify` finds, and the canary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from artifact import tiny
from artifact.test_write import Fuse, Killed, opens
from llmc_runtime.artifact import open_artifact
from llmc_runtime.exec import canary as canaries
from llmc_runtime.exec.load import load_executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Program

from llmc.artifact import inspect as inspection
from llmc.artifact.amend import put_file
from llmc.artifact.report import typical
from llmc.artifact.write import write_artifact
from llmc.cli import main
from llmc.lab import verify as verifying
from llmc.lab.verify import verify_artifact
from llmc.targets.cpu import portable


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    parts = tiny.parts(tmp_path)
    write_artifact(tmp_path / "toy.llmc", replace(parts, machine=portable()))
    return tmp_path / "toy.llmc"


def test_inspect_says_what_is_inside(toy: Path) -> None:
    found = inspection.inspect_artifact(toy)
    json.dumps(found)
    assert found["kv"]["tokens"] == tiny.ROWS * tiny.MAXLEN and found["kv"]["bytes_per_token"] == 4
    assert found["memory"]["state_bytes"]["counts"] == tiny.ROWS * tiny.V * 4
    assert found["memory"]["kv_bytes_per_page"] == 16
    assert found["kernels"]["count"] == 2 and found["folders"]["kernels"]["files"] == 4
    assert {r["program"]: r["launches"] for r in found["kernels"]["largest"]} == {"decode": 1, "step": 1}
    assert found["kernels"]["largest"][0]["source"].startswith("kernels/")
    assert found["bytes"] == sum(p.stat().st_size for p in toy.rglob("*") if p.is_file() and p.name != "manifest.json")
    text = inspection.render(found)
    assert "KV pool   512 B: 128 tokens in 32 pages of 4" in text and "x toy" in text and "not recorded" in text


def test_the_predictions_name_the_machine(toy: Path) -> None:
    assert json.loads((toy / "report/roofline.json").read_text())["machine"]["name"] == "cpu:portable"


def test_inspect_sizes_the_pool_for_given_memory(toy: Path) -> None:
    assert inspection.inspect_artifact(toy, kv_bytes=16 * 5 + 3)["kv"]["tokens"] == 20
    assert len(inspection.inspect_artifact(toy, kernels=1)["kernels"]["largest"]) == 2  # of each program one


def test_inspect_refuses_what_does_not_open(toy: Path) -> None:
    (toy / "programs/step.json").write_text("{}")
    with pytest.raises(LlmcError, match="E106"):
        inspection.inspect_artifact(toy)


def test_programs_are_priced_at_sizes_that_they_serve(toy: Path) -> None:
    decode, step = (Program.load((toy / f"programs/{n}.json").read_bytes(), n, True) for n in ("decode", "step"))
    some = replace(decode, serves=MappingProxyType({"T": (3, 4), "R": (3, 4)}))
    assert {s: typical(some)[s] for s in "TR"} == {"T": 3, "R": 3}
    wide = replace(step, serves=MappingProxyType({"T": (600, 900), "R": (1, 4)}))
    assert {s: typical(wide)[s] for s in "TR"} == {"T": 600, "R": 1}
    pages = typical(decode)["P"]
    assert typical(some)["P"] == 3 * pages


def test_a_machine_without_the_device_checks_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was compiled for a GPU is verified where there is none; to run it there is refused with exit code 3."""
    there = replace(tiny.parts(tmp_path), target=TargetInfo("hip:gfx942", "gfx942", ()))
    path = tmp_path / "toy.llmc"
    write_artifact(path, there)
    found = verify_artifact(path)
    assert found["ok"] and "E115" in found["not_opened"] and "every hash is right" in verifying.render(found)
    assert main(["verify", str(path), "--record"]) == 3 and "E115" in capsys.readouterr().err
    data = bytearray((path / "weights/00000.safetensors").read_bytes())
    data[-2] ^= 1
    (path / "weights/00000.safetensors").write_bytes(data)
    assert [p["code"] for p in verify_artifact(path)["problems"]] == ["E107"]


def test_verify_finds_everything_that_is_wrong(toy: Path) -> None:
    found = verify_artifact(toy)
    assert found["ok"] and found["canary"] == {"state": "absent"} and "ok, digest" in verifying.render(found)
    for name in ("programs/step.json", "weights/00000.safetensors", "tokenizer/tokenizer.json"):
        data = bytearray((toy / name).read_bytes())
        data[-2] ^= 1
        (toy / name).write_bytes(data)
    found = verify_artifact(toy)
    assert not found["ok"] and [p["code"] for p in found["problems"]] == ["E107"] * 3
    text = verifying.render(found)
    assert "3 problems" in text and "weights/00000.safetensors is damaged: block 1 of 1" in text


def test_the_canary_is_recorded_and_compared(toy: Path) -> None:
    before = open_artifact(toy).digest
    assert [p["code"] for p in verify_artifact(toy, canary=True)["problems"]] == ["E126"]
    found = verify_artifact(toy, record=True)
    assert found["ok"] and found["canary"]["state"] == "recorded" and found["digest"] != before
    prompt = [(i * 7919 + 11) % tiny.V for i in range(16)]
    recorded = canaries.Canary.load((toy / "canary.json").read_bytes())
    assert list(recorded.prompt) == prompt and recorded.tokens[0] == tiny.expected(prompt)
    assert len(recorded.tokens) == 16 and set(recorded.margins) == {1.0}
    found = verify_artifact(toy, canary=True)
    assert found["ok"] and found["canary"]["state"] == "passed" and found["canary"]["checked"] == 16
    assert verify_artifact(toy, record=True)["ok"]  # again
    assert "canary recorded" in verifying.render(verify_artifact(toy))


def test_a_wrong_token_is_seen_and_a_near_tie_excused(toy: Path) -> None:
    verify_artifact(toy, record=True)
    good = canaries.Canary.load((toy / "canary.json").read_bytes())
    tokens = list(good.tokens)
    tokens[3] = (tokens[3] + 1) % tiny.V  # the toy's second choice
    wrong = replace(good, tokens=tuple(tokens))
    put_file(toy, "canary.json", wrong.dump())
    found = verify_artifact(toy, canary=True)
    assert not found["ok"] and found["problems"][0]["code"] == "E125" and "token 3 is" in found["problems"][0]["cause"]
    margins = list(good.margins)
    margins[3] = 0.01
    executor = load_executor(toy)
    verdict = canaries.check(executor, replace(wrong, margins=tuple(margins)))
    assert verdict.ties == 1 and not any("token 3" in p for p in verdict.problems)
    logprobs = list(good.logprobs)
    logprobs[5] += 0.2
    verdict = canaries.check(executor, replace(good, logprobs=tuple(logprobs)))
    assert len(verdict.problems) == 1 and verdict.worst == pytest.approx(0.2)
    executor.close()


def test_a_canary_file_that_is_none(toy: Path) -> None:
    for data in (b"{}", b'{"prompt": [], "tokens": [], "logprobs": [], "margins": [], "device": {}}',
                 b'{"prompt": [1], "tokens": [1], "logprobs": [], "margins": [], "device": {}}'):  # fmt: skip
        with pytest.raises(LlmcError, match="E103"):
            canaries.Canary.load(data)


def test_recording_killed_at_every_operation(toy: Path) -> None:
    """The artifact opens at every moment, whatever canary it has."""
    put_file(toy, "canary.json", b"{}")
    fuse = Fuse(1 << 30)
    put_file(toy, "canary.json", b'{"x": 1}', hook=fuse)
    for k in range(fuse.operations):
        put_file(toy, "canary.json", b'{"x": 1}')
        with pytest.raises(Killed):
            put_file(toy, "canary.json", b'{"x": 2, "y": 3}', hook=Fuse(k))
        assert opens(toy), k
    put_file(toy, "canary.json", b"{}")
    write_artifact(toy, tiny.parts(toy.parent), force=True)  # nothing foreign is left behind
