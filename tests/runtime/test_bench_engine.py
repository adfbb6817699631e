"""`llmc bench offline | latency | start` on a small artifact: the requested work is done; the figures are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from llmc_runtime.bench import engine_arguments
from llmc_runtime.cli import bench_parser, main_bench

from tests.runtime.test_cli_run import ROOT


def report(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert main_bench([*map(str, words), "--json", "--disable-tqdm"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", [(), ("--async-engine",)])
def test_offline_counts_the_requested_work(
    toy: Path, capsys: pytest.CaptureFixture[str], engine: tuple[str, ...], tmp_path: Path
) -> None:
    work = ("--num-prompts", 7, "--input-len", 6, "--output-len", 5, "--rounds", 2, "--prefix-len", 3)
    output = report(capsys, "offline", toy, *work, *engine, "--output-json", tmp_path / "o")
    assert (output["num_requests"], output["total_input_tokens"], output["total_output_tokens"]) == (7, 63, 35)
    assert output["elapsed_time"] == min(output["all_elapsed_times"]) and len(output["all_elapsed_times"]) == 2
    assert output["tokens_per_second"] == pytest.approx(98 / output["elapsed_time"])
    assert 5 <= output["steps"] <= 40
    assert json.loads((tmp_path / "o").read_text()) == output


def test_latency_tells_a_step_from_a_batch(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ("--batch-size", 2, "--input-len", 4, "--output-len", 9, "--num-iters", 3, "--num-iters-warmup", 1)
    output = report(capsys, "latency", toy, *work)
    assert len(output["latencies"]) == 3 and output["p50_latency"] == sorted(output["latencies"])[1]
    assert output["ms_per_step"] == pytest.approx(1e3 * (output["p50_latency"] - output["first_token"]) / 8)


def test_start_has_stages_that_make_up_the_whole(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = report(capsys, "start", toy, "--num-iters", 2, "--input-len", 3)
    assert len(output["all"]) == 3 and output["first"] == output["all"][0]["seconds"]
    for one in output["all"]:
        stages = [one[stage] for stage in ("interpreter", "modules", "opening", "first token")]
        assert sum(stages) == pytest.approx(one["seconds"]) and min(stages) > 0


def test_errors_are_reported_with_their_codes(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in (
        (["start", str(tmp_path)], "E101"),
        (["start", str(toy), "--input-len", "100000"], "E602"),
        (["offline", str(toy), "--num-prompts", "0"], "E670"),
        (["serve", "--api-key-env", "NO_SUCH_VARIABLE"], "E670"),
        (["serve", "--mix", "rate=1"], "E670"),
    ):
        assert main_bench(words) == 1
        assert f"LLMC-{code}" in capsys.readouterr().err, words


def test_prompts_are_of_the_vocabulary_and_differ_but_for_their_prefix() -> None:
    made = engine_arguments.prompts(3, [5, 5, 9], 100, 4)
    assert made == engine_arguments.prompts(3, [5, 5, 9], 100, 4) != engine_arguments.prompts(4, [5, 5, 9], 100, 4)
    assert [len(ids) for ids in made] == [9, 9, 13] and len({tuple(ids[:4]) for ids in made}) == 1
    assert len({tuple(ids[4:]) for ids in made}) == 3 and all(16 <= i < 90 for ids in made for i in ids)
    assert all(0 <= i < 2 for ids in engine_arguments.prompts(3, [50], 2) for i in ids)


def test_it_runs_as_a_module(toy: Path) -> None:
    words = ["latency", str(toy), "--num-iters", "1", "--input-len", "4", "--output-len", "2"]
    command = [sys.executable, "-m", "llmc_runtime.bench", *words]
    done = subprocess.run(command, cwd=ROOT / "runtime", capture_output=True, text=True, check=True)
    assert "ms per decode step" in done.stdout and "output tokens/s" in done.stdout


def test_latency_caches_no_prefixes_unless_asked_to() -> None:
    words = {"latency": False, "latency --enable-prefix-caching": True, "offline": None, "start": None}
    for line, cached in words.items():
        what, *flags = line.split()
        assert bench_parser().parse_args([what, "m", *flags]).enable_prefix_caching is cached
