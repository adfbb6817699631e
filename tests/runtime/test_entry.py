"""The console scripts: Ctrl-C while a command is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED_IMPORT = """
import signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "llmc_runtime.engine_options":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler if sys.argv.pop(1) == "heard" else signal.SIG_IGN)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("script", ["llmc", "llmc-run", "llmc-serve"])
def test_ctrl_c_during_imports_leaves_no_traceback(script: str) -> None:
    """It ends the process by the signal, and is ignored if it was before (nohup)."""
    module, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][script].split(":")
    code = f"{INTERRUPTED_IMPORT}from {module} import {function}; sys.exit({function}())"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}"}
    for how, status in (("heard", -signal.SIGINT), ("ignored", 0)):
        words = [sys.executable, "-c", code, how, "--version"]
        done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
        assert (done.returncode, done.stderr) == (status, ""), how
