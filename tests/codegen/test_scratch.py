"""Scratch folders are removed after use or their owner's death, or kept on request; unusable caches are errors."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from llmc.cli import main
from llmc.codegen.scratch_dir import keep, scratch

HOLD = (
    "import time\nfrom llmc.codegen.scratch_dir import scratch\n"
    "with scratch() as f: print(f, flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR, for us and for our children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_with_its_work_unless_it_is_kept(place: Path) -> None:
    with scratch() as gone:
        (gone / "a").mkdir()
    with pytest.raises(ValueError), scratch() as failed:
        raise ValueError
    with scratch() as kept:
        keep(kept)
    assert [p for p in place.iterdir() if p.is_dir()] == [kept] and not gone.exists() and not failed.exists()
    with scratch():
        assert kept.is_dir()


def test_folders_of_killed_owners_are_removed_and_those_of_live_ones_kept(place: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, alive = (Path(c.stdout.readline().strip()) for c in children if c.stdout)
        (place / "llmc-of-somebody-else").mkdir()
        children[0].send_signal(signal.SIGKILL)
        children[0].wait()
        assert dead.is_dir()
        with scratch():
            assert not dead.exists() and alive.is_dir()
        assert (place / "llmc-of-somebody-else").is_dir()
    finally:
        for c in children:
            c.kill()
            c.wait()


def test_a_cache_that_cannot_be_written_names_the_remedy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "file").write_text("")
    code = main(["compile", "nowhere", "-o", str(place / "out"), "--cache", str(place / "file" / "cache")])
    output = capsys.readouterr().err
    assert code == 3 and "LLMC-E100" in output and "--cache DIR" in output and "--no-cache" in output
