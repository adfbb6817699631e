"""Packages from outside: the one in examples, and the one that DEVELOPING.md tells its reader to write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "extension"


def install(folder: Path, project: Path) -> None:
    """What an installer leaves of a package whose modules lie in `folder`: its name and its entry points."""
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


def test_the_pass_of_developing_md_works_as_it_is_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "DEVELOPING.md").read_text(), re.S | re.M)
    code = next(text for kind, text in blocks if kind == "python")
    project = next(text for kind, text in blocks if kind == "toml")
    test = next(text for kind, text in blocks if "use-div" in text and text.startswith("// RUN"))
    for name, text in (("mine.py", code), ("pyproject.toml", project), ("use_div.llir", test)):
        (tmp_path / name).write_text(text)
    without = llmc(tmp_path, "opt", "use_div.llir", "-p", "use-div")
    assert without.returncode == 1
    assert "there is no pass 'use-div'" in without.stderr
    install(tmp_path, tmp_path / "pyproject.toml")
    pipeline = "serve, without page-attention, after fuse-norm: use-div"
    done = llmc(tmp_path, "opt", "use_div.llir", "-p", pipeline, "--check")
    assert done.returncode == 0, done.stderr
    done = llmc(tmp_path, "opt", "use_div.llir", "-p", "use-div", "--check")
    assert "div(%x, %y) : f32[T, 8]  // model.layers.0" in done.stdout
    assert "check: @main: 1 outputs agree" in done.stdout
    assert "use-div" in llmc(tmp_path, "passes").stdout


def test_the_example_package(tmp_path: Path) -> None:
    (tmp_path / "llmc_softcap.py").write_bytes((EXAMPLE / "llmc_softcap.py").read_bytes())
    install(tmp_path, EXAMPLE / "pyproject.toml")
    file = str(EXAMPLE / "softcap.llir")
    done = llmc(tmp_path, "opt", file, "-p", "canonicalize, fuse-softcap", "--explain", "--check")
    assert done.returncode == 0, done.stderr
    assert "softcap(%x) {cap=30.0} : f32[T, 64]" in done.stdout
    assert "miss: softcap: mul at lm_head: it divides by 30 and multiplies by 50" in done.stdout
    priced = llmc(tmp_path, "opt", file, "-p", "fuse-softcap, select", "--target", "cpu:one-thread")
    assert re.search(r'softcap\(%x\) \{cap=30.0, kernel="(softcap/plain|cpu/\w+)"', priced.stdout), priced.stderr
    assert "(-cap, cap)" in llmc(tmp_path, "ops", "softcap").stdout


def test_the_example_kernel_computes_what_the_op_says(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import llmc_softcap as example
    finally:
        sys.path.remove(str(EXAMPLE))
    from kernels.harness import Case, compile_cases, run_case

    from llmc.ir.example import example_graph

    rng = np.random.default_rng(3)
    arrays, attrs = example.softcap.example(rng)
    case = Case("softcap", example_graph(example.softcap, arrays, attrs).graphs["main"], example.KERNEL, {}, arrays)
    target = example.one_thread()
    assert example.KERNEL.reject(case.node, target) is None
    source, function = compile_cases([case], target, tmp_path)["softcap"]
    run_case(case, source, function)


def test_the_cache_sees_what_an_extension_changes(tmp_path: Path) -> None:
    """A whole artifact is reused while the packages that extend the compiler stay as they are, and no longer."""
    (tmp_path / "llmc_softcap.py").write_bytes((EXAMPLE / "llmc_softcap.py").read_bytes())
    script = tmp_path / "key.py"
    script.write_text("from llmc_runtime.format.cache_key import extension_hashes\nprint(extension_hashes())\n")

    def hashes() -> str:
        path = os.pathsep.join(map(str, (tmp_path, ROOT / "runtime")))
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True).stdout

    assert "llmc_softcap" not in hashes()
    install(tmp_path, EXAMPLE / "pyproject.toml")
    first = hashes()
    assert "llmc_softcap" in first and hashes() == first
    with open(tmp_path / "llmc_softcap.py", "a") as file:
        file.write("# changed\n")
    assert hashes() != first
