"""The packages in examples, installed as far as finding them goes; tests/test_pages.py installs them by pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llmc.diagnostics import Diagnostic
from llmc.extension import Extension, combine

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def install(folder: Path, project: Path) -> None:
    """Write the metadata that an installer writes for a package in `folder`: its name and its entry points."""
    data = tomllib.loads(project.read_text())["project"]
    info = folder / f"{data['name'].replace('-', '_')}-{data['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {data['name']}\nVersion: {data['version']}\n")
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in data["entry-points"].items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def llmc(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command line, with the packages of `folder` installed."""
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "runtime")))
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "llmc.cli", *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def copied(name: str, folder: Path) -> None:
    """An example's files in a folder, as an installed package."""
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    install(folder, folder / "pyproject.toml")


def test_a_pass_is_there_when_its_package_is(tmp_path: Path) -> None:
    file = str(EXAMPLES / "pass" / "norm_last.llir")
    without = llmc(tmp_path, "opt", file, "-p", "norm-last")
    assert without.returncode == 1
    assert "there is no pass 'norm-last'" in without.stderr
    copied("pass", tmp_path)
    done = llmc(tmp_path, "opt", file, "-p", "serve, without page-attention, after fuse-norm: norm-last", "--check")
    assert done.returncode == 0, done.stderr
    done = llmc(tmp_path, "opt", file, "-p", "norm-last", "--explain", "--check")
    assert "rms_norm(%0, %w) {eps=1e-05} : bf16[R, 64]  // model.norm" in done.stdout
    assert "miss: norm-last: take at permuted: no row is left out" in done.stdout
    assert "check: @last: 1 output agrees" in done.stdout
    assert "norm-last" in llmc(tmp_path, "passes").stdout


@pytest.mark.parametrize(
    "kinds, words",
    [
        ({"passes": {"mine": 5}}, "extension 'bad': passes has 5"),
        ({"ops": [print]}, "extension 'bad': ops has [<built-in"),
        ({"pipelines": {"serve": ("a", "b")}}, "extension 'bad': pipelines has ('a', 'b')"),
    ],
)
def test_kinds_map_names_to_texts(kinds: dict[str, Any], words: str) -> None:
    with pytest.raises(Diagnostic, match="E423") as e:
        combine([Extension("bad", **kinds)])
    assert e.value.cause.startswith(words) and "map names to texts" in e.value.remedy


@pytest.mark.parametrize(
    "target, choice", [("cpu:portable", 'kernel="take-norm/cpp"'), ("cuda:sm_90", 'kernel="take-norm/triton", warps=4')]
)
def test_an_op_its_pass_and_its_kernels(target: str, choice: str, tmp_path: Path) -> None:
    copied("fused-op", tmp_path)
    file = str(EXAMPLES / "fused-op" / "take_norm.llir")
    done = llmc(tmp_path, "opt", file, "-p", "fuse-take-norm, select", "--target", target)
    assert f"take_norm(%x, %last, %w) {{eps=1e-05, {choice}}} : bf16[R, 64]" in done.stdout, done.stderr
    assert "a negative index yields a row of zeros" in llmc(tmp_path, "ops", "take_norm").stdout


def test_a_kernel_in_cuda_from_outside(tmp_path: Path) -> None:
    """The kernel is a candidate only if it is named, and its tests compile it for every NVIDIA target."""
    copied("cuda-kernel", tmp_path)
    file = str(EXAMPLES / "cuda-kernel" / "rms_norm.llir")
    for prefer, choice in (
        ("", 'kernel="triton/rows"'),
        ('{prefer=["rms-norm/cuda"]}', 'kernel="rms-norm/cuda", threads=256'),
    ):
        done = llmc(tmp_path, "opt", file, "-p", f"select{prefer}", "--target", "cuda:sm_90")
        assert choice in done.stdout, done.stderr
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "runtime", ROOT / "tests")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0 and "11 passed" in run.stdout, run.stdout


def test_targets_from_outside(tmp_path: Path) -> None:
    copied("target", tmp_path)
    listed = llmc(tmp_path, "passes").stdout
    assert re.search(r"pipeline serve of .*cpu:small-box", listed) and re.search(r"serve of .*cuda:sm_86", listed)


def test_two_packages_with_one_name_are_an_error(tmp_path: Path) -> None:
    copied("pass", tmp_path)
    project = (tmp_path / "pyproject.toml").read_text().replace("llmc-norm-last", "another")
    (tmp_path / "pyproject.toml").write_text(project.replace("norm_last:EXTENSION", "another:EXTENSION"))
    (tmp_path / "another.py").write_text(
        (tmp_path / "norm_last.py").read_text().replace('"norm-last", p', '"other", p')
    )
    install(tmp_path, tmp_path / "pyproject.toml")
    done = llmc(tmp_path, "passes")
    assert done.returncode == 1
    assert re.search(r"E422: pass 'norm-last' is provided by both (other|norm-last) and", done.stderr)


def test_the_cache_sees_what_an_extension_changes(tmp_path: Path) -> None:
    """A cached artifact is reused until a package that extends the compiler changes."""
    script = tmp_path / "key.py"
    script.write_text("from llmc_runtime.format.cache_key import extension_hashes\nprint(extension_hashes())\n")

    def hashes() -> str:
        path = os.pathsep.join(map(str, (tmp_path, ROOT / "runtime")))
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True).stdout

    assert "norm_last" not in hashes()
    copied("pass", tmp_path)
    first = hashes()
    assert "norm_last" in first and hashes() == first
    with open(tmp_path / "norm_last.py", "a") as file:
        file.write("# changed\n")
    second = hashes()
    assert second != first
    (tmp_path / "beside.py").write_text("# another module of the package\n")
    assert hashes() == second
    (info,) = tmp_path.glob("*.dist-info")
    (info / "RECORD").write_text("norm_last.py,,\nbeside.py,,\n../bin/tool.py,,\n")
    third = hashes()
    assert "beside" in third
    (tmp_path / "beside.py").write_text("# changed\n")
    assert hashes() != third
