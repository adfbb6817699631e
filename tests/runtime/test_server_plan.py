"""llmc-serve --dry-run and llmc collect-env: their output, and that they change nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime import collect_env
from llmc_runtime.artifact import open_artifact
from llmc_runtime.cli import main_collect_env, main_serve
from llmc_runtime.device.device import kv_share
from llmc_runtime.device.open_device import open_device
from llmc_runtime.server import dry_run as planning


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main_serve([*words, "--dry-run", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_tells_what_would_be_served_and_opens_nothing(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # not even the port
        code, output = planned(capsys, str(toy), "--port", str(taken.getsockname()[1]))
    assert (code, output["fits"], output["names"], output["target"]) == (0, True, ["toy"], "cpu:test")
    kv, limits = output["kv"], output["limits"]
    assert kv["tokens"] == kv["pages"] * kv["page_size"]
    assert kv["concurrency_at_max_model_len"] <= limits["max_num_seqs"]
    assert {"/v1/chat/completions", "/health"} <= set(output["server"]["routes"])
    assert main_serve([str(toy), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "fits      yes" in text and f"{kv['tokens']} tokens in {kv['pages']} pages" in text


def test_limits_keys_and_capacity_are_those_of_the_options(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one-key-of-two\nanother-key-1\n")
    admin = tmp_path / "admin"
    admin.write_text("the-admin-key\n")
    whole = planned(capsys, str(toy))[1]
    page = whole["kv"]["bytes"] // whole["kv"]["pages"]
    words = ("--max-num-seqs", "2", "--api-key-file", str(keys), "--admin-key-file", str(admin))
    code, output = planned(capsys, str(toy), *words, "--kv-cache-memory-bytes", str(3 * page + 1))
    assert code == 0 and output["limits"]["max_num_seqs"] == 2 and output["kv"]["pages"] == 3
    assert (output["server"]["api_keys"], output["server"]["admin_keys"]) == (2, 1)
    assert "/admin/*" in output["server"]["routes"] and "key-of" not in json.dumps(output)
    code, output = planned(capsys, str(toy), "--kv-cache-memory-bytes", str(page - 1))
    assert code == 1 and output["fits"] is False and "Try: set at least" in output["why"]
    assert main_serve([str(toy), "--dry-run", "--max-model-len", "99999999"]) == 1
    assert "E204" in capsys.readouterr().err


def test_sampling_defaults_are_checked(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run refuses the defaults that a start would refuse, also of a model that is not compiled."""
    (tmp_path / "config.json").write_text("{}")
    for model in (str(toy), str(tmp_path)):
        for words in (
            ("--override-generation-config", '{"temprature": 1}'),
            ("--override-generation-config", '{"temperature": -1}'),
            ("--generation-config", str(tmp_path / "missing")),
        ):
            assert main_serve([model, "--dry-run", *words]) == 1
            assert "E612" in capsys.readouterr().err
        assert main_serve([model, "--dry-run", "--override-generation-config", '{"temperature": 0.5}']) == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'), "E206"),
        (("--speculate", "ngram:4"), "E204"),
        (("--distributed-executor-backend", "ray"), "E207"),
        (("--chat-template", "no-such-template"), "E630"),
    ],
)
def test_options_that_the_artifact_cannot_have_are_refused(
    words: tuple[str, str], code: str, toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_serve([str(toy), "--dry-run", *words]) == 1
    assert f"LLMC-{code}" in capsys.readouterr().err


def test_a_link_to_itself_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert main_serve([str(tmp_path / "loop"), "--dry-run"]) == 1
    assert "LLMC-E101: there is no folder" in capsys.readouterr().err


def test_a_dry_run_compares_the_needed_memory_with_that_of_the_gpu(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The toy's sizes on machines with several amounts of memory, or nothing in sight."""
    whole = planned(capsys, str(toy))[1]
    need = sum(whole["memory"][name] for name in ("weights", "rows", "intermediate"))
    for free, fits, code in (((need >> 20) + 600, True, 0), ((need >> 20) - 1, False, 1), (None, None, 0)):
        rows = [] if free is None else [{"name": "H200", "memory.free": str(free)}]
        monkeypatch.setattr(planning, "gpus", lambda rows=rows: rows)
        monkeypatch.setattr(planning, "_device", lambda target, real=planning._device: real("cuda:sm_90"))
        got, output = planned(capsys, str(toy))
        monkeypatch.undo()
        assert (got, output["fits"]) == (code, fits), output
        assert ("no GPU is visible" in output["why"]) == (free is None)


def test_engines_and_ranks_on_a_cpu_divide_its_memory(toy: Path) -> None:
    artifact = open_artifact(toy)
    device = open_device(artifact, 1, engines=2)
    try:
        assert device.share == kv_share(separate=False, users=2) == kv_share(separate=False, users=1) / 2
    finally:
        device.close()
    assert kv_share(separate=True, users=2) == kv_share(separate=True, users=1), "each has a GPU"


def test_a_folder_that_is_not_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, output = planned(capsys, str(tmp_path))
    assert code == 0 and output["fits"] is None and "llmc compile" in output["why"]
    code, output = planned(capsys, "owner/name@v1")
    assert code == 0 and output["names"] == ["owner/name"] and "llmc compile owner/name@v1 --dry-run" in output["why"]
    assert main_serve(["./owner/name", "--dry-run"]) == 1 and "E101" in capsys.readouterr().err


def test_collect_env_tells_no_secrets_and_needs_no_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "do-not-tell-this"
    for name in ("LLMC_CACHE", "HF_TOKEN", "OPENAI_API_KEY", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, f"/somewhere/{secret}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert main_collect_env(["--json"]) == 0
    text = capsys.readouterr().out
    result = json.loads(text)
    assert result["environment"]["LLMC_CACHE"] == "set" and result["environment"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert (
        secret not in text
        and str(Path.home()) not in text
        and socket.gethostname() not in text.replace("localhost", "")
    )
    assert result["packages"]["numpy"] and result["cpu"]["physical_cores"] >= 1 and result["memory"]["total_mib"] > 0
    assert main_collect_env([]) == 0
    assert f"numpy                {result['packages']['numpy']}" in capsys.readouterr().out
    code = "import sys; from llmc_runtime.cli import main_collect_env; main_collect_env([]); " \
        "sys.exit(bool({'torch', 'triton', 'transformers'} & set(sys.modules)))"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_gpus_are_read_from_nvidia_smi_whatever_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    for body, count in (
        ("echo 'H200, 143771, 143000, 570.1, 9.0'", 1), ("echo nonsense", 0), ("exit 9", 0), ("echo; echo ,,,,", 1),
    ):  # fmt: skip
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        assert len(collect_env.gpus()) == count
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(collect_env, "_TIMEOUT_SECONDS", 0.2)
    assert collect_env.gpus() == []
    assert shutil.which("nvidia-smi") == str(tool)
