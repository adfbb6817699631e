"""The writer of artifacts: interrupted before each of its operations, and the paths that it may replace."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.format.errors import LlmcError

from llmc.artifact.files import check_writable
from llmc.artifact.write import write_artifact
from llmc.diagnostics import Diagnostic
from llmc.driver import compile_model
from llmc.report.inspect import facts_of, inspect_artifact, render


class Killed(BaseException):
    """Nothing in the writer may catch and carry on after this."""


class Fuse:
    """Lets `count` operations pass; after that every one is the end, those of clean-ups too."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        self.count, self.error, self.operations = count, error, 0

    def __call__(self, operation: str, path: Path) -> None:
        self.operations += 1
        if self.operations > self.count:
            if self.error is not None:
                error, self.error, self.count = self.error, None, 1 << 30
                raise error
            raise Killed


def opens(path: Path) -> bool:
    try:
        open_artifact(path)
    except LlmcError as error:
        assert error.code in ("E101", "E106", "E107"), str(error)
        return False
    return True


def artifacts(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_dir() and opens(p)]


def operations(tmp_path: Path, force: bool) -> int:
    fuse = Fuse(1 << 30)
    write_artifact(tmp_path / "count.llmc", tiny.parts(tmp_path), force=force, hook=fuse)
    if force:
        fuse.operations = 0
        write_artifact(tmp_path / "count.llmc", tiny.parts(tmp_path), force=force, hook=fuse)
    shutil.rmtree(tmp_path / "count.llmc")
    return fuse.operations


def test_killed_at_every_operation(tmp_path: Path) -> None:
    total = operations(tmp_path, False)
    assert total > 30
    out = tmp_path / "toy.llmc"
    for k in range(total):
        with pytest.raises(Killed):
            write_artifact(out, tiny.parts(tmp_path), hook=Fuse(k))
        assert not artifacts(tmp_path), f"something opens after {k} operations"
    write_artifact(out, tiny.parts(tmp_path))  # over whatever is left, without --force
    assert artifacts(tmp_path) == [out]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "toy.llmc"]


def test_killed_while_replacing(tmp_path: Path) -> None:
    total = operations(tmp_path, True)
    out = tmp_path / "toy.llmc"
    old = write_artifact(out, tiny.parts(tmp_path, weights=1)).digest
    new = tiny.parts(tmp_path, weights=2)
    found = []
    for k in range(total - 4):  # random weights: a few operations less
        try:
            write_artifact(out, new, force=True, hook=Fuse(k))
        except Killed:
            pass
        found.append(open_artifact(out).digest)
        if found[-1] != old:
            break
    assert set(found[:-1]) == {old} and found[-1] != old
    write_artifact(out, new, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "toy.llmc"]


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), ValueError("a bug")])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    for k in (3, 11, 25):
        with pytest.raises((Diagnostic, type(error))):
            write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path), hook=Fuse(k, error))
        assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


CHILD = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from artifact import tiny
from llmc.artifact.files import check_writable
from llmc.artifact.write import write_artifact
left = int(sys.argv[2])
def hook(operation, path):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
write_artifact(sys.argv[1], tiny.parts(Path(sys.argv[1]).parent), hook=hook)
"""


@pytest.mark.parametrize("k", [2, 20])
def test_a_process_killed_for_good(tmp_path: Path, k: int) -> None:
    code = CHILD.format(path=[p for p in sys.path if p])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "toy.llmc"), str(k)], capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    assert not artifacts(tmp_path)
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "toy.llmc"]


def refuse(out: Path, code: str, force: bool = False) -> None:
    with pytest.raises(Diagnostic) as caught:
        write_artifact(out, tiny.parts(out.parent), force=force)
    assert caught.value.code == code and caught.value.remedy


def test_an_existing_folder_is_replaced_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "toy.llmc"
    write_artifact(out, tiny.parts(tmp_path))
    refuse(out, "E120")
    write_artifact(out, tiny.parts(tmp_path), force=True)
    assert artifacts(tmp_path) == [out]


def test_nothing_but_artifacts_is_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    refuse(mine, "E122", force=True)
    file = tmp_path / "file"
    file.write_text("x")
    refuse(file, "E122", force=True)
    link = tmp_path / "link"
    link.symlink_to(mine)
    refuse(link, "E122", force=True)
    (mine / "manifest.json").write_text("{}")
    refuse(mine, "E122", force=True)
    assert (mine / "thesis.txt").read_text() == "years of work" and file.read_text() == "x" and link.is_symlink()


def test_a_note_inside_an_artifact_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "toy.llmc"
    write_artifact(out, tiny.parts(tmp_path))
    (out / "notes.txt").write_text("measured 12 tok/s")
    open_artifact(out)  # it harms nobody
    refuse(out, "E122", force=True)
    assert (out / "notes.txt").exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    fd = os.open(tmp_path / ".toy.llmc.writing", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    refuse(tmp_path / "toy.llmc", "E121")
    os.close(fd)
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Diagnostic, match=r"E123.*cannot write"):
        write_artifact(tmp_path / "file/toy.llmc", tiny.parts(tmp_path))


def test_a_place_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    """Before the model is opened; a place that can be is left as it was."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Diagnostic, match=r"E123.*cannot write"):
        compile_model(tmp_path / "no-model", tmp_path / "file/more/toy.llmc")
    check_writable(tmp_path / "new/more/toy.llmc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_licence_of_another_projects_kernel_is_in_the_artifact(tmp_path: Path) -> None:
    """Here, of an installed package; once, although two kernels have it."""
    plain = tiny.parts(tmp_path)
    (first, *rest) = plain.kernels
    borrowed = [replace(first, license="pytest"), *(replace(k, license="pytest") for k in rest)]
    write_artifact(tmp_path / "a.llmc", replace(plain, kernels=tuple(borrowed)))
    opened = open_artifact(tmp_path / "a.llmc")
    (file,) = {k.license for k in opened.manifest.kernels}
    assert file == f"licenses/pytest-{version('pytest')}.txt" and file in opened.manifest.files
    assert "Holger Krekel" in (tmp_path / "a.llmc" / file).read_text()
    data = inspect_artifact(tmp_path / "a.llmc")
    assert data["kernels"]["licenses"] == {file: len(borrowed)}
    assert f"  licence   {file}: {len(borrowed)} of these kernels" in render(data).splitlines()


def test_no_kernel_is_written_without_its_licence(tmp_path: Path) -> None:
    plain = tiny.parts(tmp_path)
    kernels = tuple(replace(k, license="no-such-package-1234") for k in plain.kernels)
    with pytest.raises(Diagnostic, match=r"E506.*no-such-package-1234"):
        write_artifact(tmp_path / "a.llmc", replace(plain, kernels=kernels))
    assert not (tmp_path / "a.llmc").exists()


@pytest.mark.parametrize(
    ("features", "shown"), [((), ""), (("avx2",), " (1 feature)"), (("avx2", "fma"), " (2 features)")]
)
def test_inspect_counts_the_features_of_the_target(features: tuple[str, ...], shown: str, tmp_path: Path) -> None:
    """In `llmc inspect`, and in the summary of a compile, which also has the architecture."""
    manifest = write_artifact(tmp_path / "a.llmc", tiny.parts(tmp_path, features))
    line = render(inspect_artifact(tmp_path / "a.llmc")).splitlines()[1]
    assert line.endswith(f"for cpu:test{shown}")
    count = f", {shown[2:-1]}" if shown else ""
    assert facts_of(manifest)["target"] == f"cpu:test ({manifest.target.arch}{count})"
