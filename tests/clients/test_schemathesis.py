"""schemathesis: requests generated from the server's OpenAPI description, which must describe every response."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

from kit import Server

# Whether a token id is one of the model's, or what fields mean together, no description can say.
LEFT_OUT = "positive_data_acceptance"
# An X-Request-Timeout that is drawn may be a moment, and the answer 504, as described.
CHECKS = 'checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]\n'


def run(server: Server, folder: Path, *options: str) -> None:
    """One run over all operations; its seed is printed, and its examples are bounded."""
    seed = os.environ.get("SEED") or str(random.SystemRandom().randrange(1 << 31))
    print(f"seed {seed}; again with SEED={seed}")
    config = folder / "checks.toml"
    config.write_text(CHECKS)
    command = [Path(sys.executable).with_name("schemathesis"), "--config-file", config, "run"]
    command += [f"{server.url}/openapi.json", "--seed", seed]
    command += ["--checks", "all", "--exclude-checks", LEFT_OUT, "--no-shrink", "--warnings", "off", *options]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    every = re.search(r"Selected: (\d+)/\1\n.*Tested: \1\n", ended.stdout, re.S)  # every operation of the description
    assert every and int(every[1]) > 13, ended.stdout


def test_without_keys(open_server: Server, tmp_path: Path) -> None:
    run(open_server, tmp_path, "--max-examples", "25")
    open_server.rest()


def test_with_a_key(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, "--max-examples", "10", "--header", f"Authorization: Bearer {server.key}")
    server.rest()
