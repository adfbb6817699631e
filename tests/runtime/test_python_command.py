"""The command that runs a module of this package in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmc_runtime.python_command import module_command

MODULE = """
import os

AT_IMPORT = os.nice(0)


def main(argv):
    print(AT_IMPORT, *argv)
    return 7
"""


@pytest.mark.parametrize("nice", [0, 3])
def test_a_module_is_imported_with_its_niceness(nice: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    done = subprocess.run(
        [*module_command("some_module", nice), "a", "b c"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == [str(min(19, os.nice(0) + nice)), "a", "b", "c"]
