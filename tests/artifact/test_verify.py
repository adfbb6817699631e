"""`llmc inspect` and `llmc verify`: the reported facts, the damage that is detected, and the canary."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from artifact import tiny
from artifact.test_write import Fuse, Killed, opens
from llmc_runtime.artifact import open_artifact
from llmc_runtime.exec import canary as canaries
from llmc_runtime.exec.load_executor import load_executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Program

from llmc.artifact.amend import put_file
from llmc.artifact.cost_report import typical
from llmc.artifact.hard_link import pack_weights
from llmc.artifact.write import PackedWeights, write_artifact
from llmc.cli import main
from llmc.measure import verify_artifact as verifying
from llmc.measure.verify_artifact import verify_artifact
from llmc.report import inspect as inspection
from llmc.targets.cpu_targets import portable


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


def test_times_of_programs_are_predicted_at_sizes_that_they_serve(toy: Path) -> None:
    decode, step = (Program.load((toy / f"programs/{n}.json").read_bytes(), n, True) for n in ("decode", "step"))
    some = replace(decode, serves=MappingProxyType({"T": (3, 4), "R": (3, 4)}))
    assert {s: typical(some)[s] for s in "TR"} == {"T": 3, "R": 3}
    wide = replace(step, serves=MappingProxyType({"T": (600, 900), "R": (1, 4)}))
    assert {s: typical(wide)[s] for s in "TR"} == {"T": 600, "R": 1}
    pages = typical(decode)["P"]
    assert typical(some)["P"] == 3 * pages


def test_a_machine_without_the_device_checks_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU artifact is verified on a machine without a GPU; running it there fails with exit code 3."""
    there = replace(tiny.parts(tmp_path), target=TargetInfo("hip:gfx942", "gfx942", ()))
    path = tmp_path / "toy.llmc"
    write_artifact(path, there)
    found = verify_artifact(path)
    assert found["ok"] and "E115" in found["not_opened"] and "all hashes are correct" in verifying.render(found)
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
    recorded = canaries.Canary.load((toy / "canary.json").read_bytes())
    assert [len(r.prompt) for r in recorded.runs] == [16, 16, 1] and recorded.device["name"]
    for run in recorded.runs:  # each of its tokens follows from those before it, alone or with other rows
        text = [*run.prompt, *run.tokens]
        for i, token in enumerate(run.tokens):
            assert token == tiny.expected(text[: len(run.prompt) + i], run.tokens[:i].count(1))
        assert run.top_ids[0] == tuple((run.tokens[0] + k) % tiny.V for k in range(5)) and run.margin(0) == 1.0
    found = verify_artifact(toy, canary=True)
    assert found["ok"] and found["canary"]["state"] == "passed" and found["canary"]["checked"] == 48
    assert verify_artifact(toy, record=True)["ok"]  # again
    assert "canary recorded" in verifying.render(verify_artifact(toy))
    out = io.StringIO()
    assert main(["verify", str(toy), "--canary", "--json"], out) == 0
    assert json.loads(out.getvalue())["canary"]["worst"] == 0


def changed(c: canaries.Canary, run: int, **changes: object) -> canaries.Canary:
    runs = list(c.runs)
    runs[run] = replace(runs[run], **changes)  # type: ignore[arg-type]
    return replace(c, runs=tuple(runs))


def test_a_wrong_token_is_seen_and_a_near_tie_excused(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify_artifact(toy, record=True)
    good = canaries.Canary.load((toy / "canary.json").read_bytes())
    tokens = list(good.runs[1].tokens)
    tokens[-1] = (tokens[-1] + 1) % tiny.V  # the toy's second choice
    wrong = changed(good, 1, tokens=tuple(tokens))
    put_file(toy, "canary.json", wrong.dump())
    assert main(["verify", str(toy), "--canary"]) == 4
    output = capsys.readouterr().out
    assert "LLMC-E125: the canary fails at 1 of 48 tokens on " in output and "recorded on " in output
    assert f"prompt 2, token 15: got {good.runs[1].tokens[-1]}, recorded {tokens[-1]}" in output
    tops = [*good.runs[1].top_logprobs[:-1], (-1.0, -1.06, -2.0, -3.0, -4.0)]
    executor = load_executor(toy)
    verdict = canaries.check(executor, changed(wrong, 1, top_logprobs=tuple(tops)))
    assert (verdict.ties, verdict.problems) == (1, ())
    executor.close()


def test_log_probabilities_are_compared_within_the_tolerance(toy: Path) -> None:
    """Of the token and of the likeliest others; an id that is no longer reported is at most as likely as the last
    reported one.
    """
    verify_artifact(toy, record=True)
    good = canaries.Canary.load((toy / "canary.json").read_bytes())
    executor = load_executor(toy)

    def worst(**changes: object) -> tuple[float, tuple[str, ...]]:
        verdict = canaries.check(executor, changed(good, 2, **changes))
        return verdict.worst, verdict.problems

    run = good.runs[2]
    logprobs = [*run.logprobs[:5], run.logprobs[5] + 0.04, *run.logprobs[6:]]
    assert worst(logprobs=tuple(logprobs)) == (pytest.approx(0.04), ())
    logprobs[5] += 0.16
    off, problems = worst(logprobs=tuple(logprobs))
    assert off == pytest.approx(0.2) and len(problems) == 1
    assert (
        f"prompt 3, token 5: log-probability of {run.tokens[5]} is" in problems[0] and "tolerance 0.05" in problems[0]
    )
    tops = [list(t) for t in run.top_logprobs]
    tops[0][3] -= 1
    assert "token 0: log-probability of" in worst(top_logprobs=tuple(map(tuple, tops)))[1][0]
    ids = [list(t) for t in run.top_ids]
    ids[0][4] = (ids[0][0] - 1) % tiny.V  # reported by none; as likely as the last reported one
    assert worst(top_ids=tuple(map(tuple, ids)))[1] == ()
    ids[0][2] = (ids[0][0] - 2) % tiny.V  # recorded as likelier than that
    assert "below" in worst(top_ids=tuple(map(tuple, ids)))[1][0]
    loose = replace(changed(good, 2, logprobs=tuple(logprobs)), tolerance=0.3)
    assert canaries.check(executor, loose).problems == ()
    executor.close()


def test_a_canary_without_room_is_reported(toy: Path) -> None:
    verify_artifact(toy, record=True)
    good = canaries.Canary.load((toy / "canary.json").read_bytes())
    executor = load_executor(toy, kv_bytes=16 * 9)
    with pytest.raises(LlmcError, match=r"E202.*need 13 KV pages; the cache has 9"):
        canaries.check(executor, good)
    small = canaries.record(executor)  # of what there is
    assert canaries.check(executor, small).problems == () and max(len(r.prompt) for r in small.runs) == 6
    executor.close()


def test_packing_other_weights_drops_the_canary(toy: Path) -> None:
    verify_artifact(toy, record=True)
    parts = tiny.parts(toy.parent)
    assert isinstance(parts.weights, PackedWeights)
    pack_weights(toy, parts.weights.graph, tiny.Checkpoint(table=tiny.table()[::-1].copy()))
    found = verify_artifact(toy)
    assert found["ok"] and found["canary"] == {"state": "absent"} and not (toy / "canary.json").exists()


def test_a_canary_file_that_is_none(toy: Path) -> None:
    verify_artifact(toy, record=True)
    doc = json.loads((toy / "canary.json").read_bytes())
    canaries.Canary.load(json.dumps(doc).encode())
    run = doc["runs"][0]
    for wrong in (
        {}, {**doc, "runs": []}, {**doc, "tolerance": 0}, {**doc, "tolerance": "0.1"}, {**doc, "more": 1},
        {**doc, "runs": [{**run, "tokens": run["tokens"][:-1]}]}, {**doc, "runs": [{**run, "prompt": []}]},
        {**doc, "runs": [{**run, "logprobs": ["x"] * 16}]}, {**doc, "runs": [{**run, "top_ids": [[1]] * 16}]},
        {**doc, "runs": [run, {k: v if k == "prompt" else [] for k, v in run.items()}]},
    ):  # fmt: skip
        with pytest.raises(LlmcError, match="E103"):
            canaries.Canary.load(json.dumps(wrong).encode())


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
