"""Shell completion: the scripts are run by bash, and by fish and zsh if they are installed."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmc.cli import main

ASK = """
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=(); _llmc_complete; printf '%s\\n' "${COMPREPLY[*]}"; }
"""


def script(shell: str) -> str:
    out = io.StringIO()
    assert main(["completion", shell], out) == 0
    return out.getvalue()


def run(command: list[str], text: str, folder: Path) -> list[str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder, timeout=30, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_bash_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "model.llmc").mkdir()
    (tmp_path / "notes.txt").touch()
    options = {
        "llmc comp": {"compile", "completion"},
        "llmc ben": {"bench"},
        "llmc compile --max-model": {"--max-model-len"},
        "llmc compile --dtype ''": {"auto", "float32", "bfloat16"},
        "llmc compile -o m": {"model.llmc"},
        "llmc bench serve --request-ra": {"--request-rate"},
        "llmc serve --sched": {"--scheduling-policy"},
        "llmc run --chat-": {"--chat-template"},
        "/usr/bin/llmc-serve --log-format ''": {"text", "json"},
        "llmc-serve m --log-format = j": {"json"},
        "llmc-serve m --log-format =": {"text", "json"},
        "llmc-serve --ssl-key": {"--ssl-keyfile"},
        "llmc-serve --ssl-keyfile n": {"notes.txt"},
        "llmc-serve --port ''": set(),
        "llmc-serve --enforce": set(),  # vLLM's flags without meaning are not offered
        "llmc-run mod": {"model.llmc"},
        "llmc-run --temp": {"--temperature"},
        "llmc completion ''": {"bash", "zsh", "fish"},
    }
    text = script("bash") + ASK + "\n".join(f"ask {words}" for words in options)
    got = run(["bash", "--norc"], text, tmp_path)
    for (words, wanted), line in zip(options.items(), got, strict=True):
        found = set(line.split())
        assert found >= wanted if "completion ''" in words else found == wanted, (words, found)


@pytest.mark.parametrize("command", ["compile", "opt", "tune", "verify", "run", "serve", "collect-env"])
def test_options_in_the_help_are_completed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = re.findall(r"^ +(?:-\w(?: [A-Z]+)?, )?(--[\w-]+)", capsys.readouterr().out, re.M)
    line = next(line for line in script("bash").splitlines() if line.startswith(f"        'llmc {command}') words="))
    assert len(shown) > 1 and set(shown) <= set(line.replace("'", " ").split())


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(tmp_path: Path) -> None:
    (tmp_path / "script.fish").write_text(script("fish"))
    env = {**os.environ, "HOME": str(tmp_path)}
    for words, wanted in (
        ("llmc comp", {"compile", "completion"}),
        ("llmc-serve --log-format ", {"text", "json"}),
        ("llmc bench serve --request-ra", {"--request-rate"}),
        ("llmc compile --dty", {"--dtype"}),
    ):
        command = ["fish", "-c", f"source {tmp_path}/script.fish; complete -C '{words}'"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env, check=True)
        assert {line.split("\t")[0] for line in done.stdout.splitlines() if line.strip()} == wanted, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    (tmp_path / "_llmc").write_text(script("zsh"))
    run(["zsh", "-f", "-n", str(tmp_path / "_llmc")], "", tmp_path)


def test_commands_of_the_runtime_are_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--print-config"]) == 0
    assert 'model: "m"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "llmc serve: error: " in capsys.readouterr().err
    assert main(["collect-env"]) == 0 and "artifact_format" in capsys.readouterr().out


def test_another_shell_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "tcsh"])
    assert end.value.code == 2
