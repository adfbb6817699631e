"""The Triton toolchain without a GPU: binaries for every target, the cache, and the messages for compile errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc.codegen import build as codegen
from llmc.codegen.backends.triton import triton_toolchain as module
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain, reason_of
from llmc.codegen.kernel import Source
from llmc.codegen.toolchain import write_entry
from llmc.compilation import Compilation
from llmc.console import Quiet
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Module
from llmc.options import Options
from llmc.targets.gpu_targets import gfx90a, gfx942, gfx950, sm_80, sm_90, sm_100

TEXT = """# toy: doubles
import triton
import triton.language as tl


@triton.jit
def double(x0, y0, s0):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    m = i < s0
    tl.store(y0 + i, tl.load(x0 + i, mask=m) * 2, mask=m)
"""
GOOD = Source("double", "triton", TEXT, params=("*fp32", "*fp32", "i32"), options=(("num_warps", 2),))
BAD = replace(GOOD, text=TEXT.replace("s0\n", "undeclared\n"))


@pytest.mark.parametrize("make", [sm_80, sm_90, sm_100, gfx90a, gfx942, gfx950])
def test_every_target_gets_a_binary(make, tmp_path: Path) -> None:
    tool = TritonToolchain.find(make())
    binary = tool.compile([(GOOD, "")], tmp_path)[tool.key(GOOD)]
    assert binary.binary[:4] == b"\x7fELF" and b"double" in binary.binary
    assert binary.threads == 2 * make().limits.warp and binary.shared == 0


def test_equal_sources_are_compiled_once_and_give_equal_bytes(tmp_path: Path, monkeypatch) -> None:
    tool = TritonToolchain.find(sm_90())
    first = tool.compile([(GOOD, "a"), (GOOD, "b")], tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / f"{tool.key(GOOD)}.gpu"]
    assert tool.compile([(GOOD, "")], tmp_path / "b") == first
    monkeypatch.setattr(module, "compile_one", lambda work: pytest.fail("it was compiled already"))
    assert tool.compile([(GOOD, "")], tmp_path / "a") == first


def test_a_binary_does_not_depend_on_targets_compiled_before_it(tmp_path: Path) -> None:
    """Triton keeps the conversions of 8-bit floats of the first target of a process."""
    for target, float8 in ((gfx950(), "fp8e4nv"), (gfx942(), "fp8e4b8")):
        tool, source = TritonToolchain.find(target), replace(GOOD, params=("*fp32", f"*{float8}", "i32"))
        assert tool.compile([(source, "")], tmp_path, jobs=1)[tool.key(source)].binary


def test_several_are_compiled_by_several_processes(tmp_path: Path) -> None:
    tool, seen = TritonToolchain.find(sm_90()), []
    sources = [(replace(GOOD, options=(("num_warps", w),)), "") for w in (1, 4)]
    found = tool.compile(sources, tmp_path, jobs=2, progress=lambda *a: seen.append(a))
    assert sorted(c.threads for c in found.values()) == [32, 128]
    assert seen == [(1, 2, "double"), (2, 2, "double")]


def test_processes_end_with_the_one_that_started_them() -> None:
    """However it ended: nothing waits for work from a compile that was killed."""
    text = """
import multiprocessing, os, signal, time
from concurrent.futures import ProcessPoolExecutor
from llmc.codegen.backends.triton.triton_toolchain import end_with_parent
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert int(started.stdout.readline()) > 0
        assert started.wait() == -signal.SIGKILL
        assert started.stdout.read() == ""  # at its end: nobody holds it open


def die(work: object) -> None:
    """As a process that the system kills for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "compile_one", die)
    sources = [(replace(GOOD, options=(("num_warps", w),)), "") for w in (1, 4)]
    with pytest.raises(Diagnostic, match=r"E503.*ended too soon"):
        TritonToolchain.find(sm_90()).compile(sources, tmp_path, jobs=2)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_entry_is_compiled_again(tmp_path: Path, damage: str) -> None:
    tool = TritonToolchain.find(sm_90())
    want = tool.compile([(GOOD, "")], tmp_path)
    entry = tmp_path / f"{tool.key(GOOD)}.gpu"
    data = bytearray(entry.read_bytes())
    data[-9] ^= 1
    entry.write_bytes({"cut": data[:200], "flip": bytes(data), "empty": b""}[damage])
    assert tool.compile([(GOOD, "")], tmp_path) == want


def test_an_entry_of_other_maps_is_compiled_again(tmp_path: Path) -> None:
    toolchain = TritonToolchain.find(sm_90())
    (made,) = toolchain.compile([(GOOD, "")], tmp_path).values()
    (entry,) = tmp_path.glob("*.gpu")
    write_entry(entry, replace(made, boxes=(((128, 64), 3),)))
    assert toolchain.compile([(GOOD, "")], tmp_path) == {toolchain.key(GOOD): made}


def test_errors_of_triton_name_the_kernel_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(Diagnostic, match=r"could not compile toy: doubles: .*undeclared") as e:
        TritonToolchain.find(sm_90()).compile([(BAD, "model.layers.0.mlp")], tmp_path)
    assert e.value.code == "E502" and "model.layers.0.mlp" in str(e.value)
    assert next(tmp_path.glob("*.failed.py")).read_text() == BAD.text


def test_the_end_of_tritons_message_is_shown_and_all_of_it_kept(tmp_path: Path) -> None:
    """A long kernel is quoted up to the error, followed by the reason. The kernel's package is named."""
    line = next(line for line in BAD.text.splitlines() if "undeclared" in line)
    long = BAD.text.replace(line, "\n".join([*["    one = 1"] * 200, line]))
    bad = replace(BAD, text=long, package="take_norm")
    with pytest.raises(Diagnostic, match="E502") as e:
        TritonToolchain.find(sm_90()).compile([(bad, "model.norm")], tmp_path)
    assert "undeclared is not defined" in e.value.cause
    assert "of the package take_norm" in e.value.cause
    assert "report" not in e.value.remedy and ".failed.log" in e.value.remedy
    (log,) = tmp_path.glob("*.failed.log")
    assert "one = 1" in log.read_text() and "is not defined" in log.read_text()
    assert "".join(traceback.format_exception(e.value)).count(log.read_text()) == 1  # what -v prints


def test_an_error_in_a_called_function_has_the_reason(tmp_path: Path) -> None:
    """Triton's message about the kernel ends at the call; the one about the function has the reason."""
    head, _, body = BAD.text.partition("@triton.jit")
    called = "@triton.jit\ndef inner(x):\n    tl.store(x, tl.arange(0, 48))\n\n\n"
    line = next(line for line in body.splitlines() if "undeclared" in line)
    indent = line[: len(line) - len(line.lstrip())]
    text = f"{head}{called}@triton.jit{body.replace(line, f'{indent}inner(x0)')}"
    with pytest.raises(Diagnostic, match="E502") as e:
        TritonToolchain.find(sm_90()).compile([(replace(BAD, text=text), "")], tmp_path)
    assert "'tl.store(x, tl.arange(0, 48))': arange's range must be a power of 2" in e.value.cause
    (log,) = tmp_path.glob("*.failed.log")
    assert "inner(x0)" in log.read_text() and "power of 2" in log.read_text()


def test_the_reason_of_a_message() -> None:
    quoted = "CompilationError: at 3:4:\ndef f(x):\n    y = g(x)\n        ^\nNameError('g is not defined')"
    assert reason_of(quoted) == "CompilationError: 'y = g(x)': NameError('g is not defined')"
    assert reason_of("RuntimeError: " + "x" * 900 + " the end") == "RuntimeError: " + ("x" * 900 + " the end")[-400:]


def test_the_text_that_does_not_compile_is_kept_without_a_cache_too(tmp_path: Path, monkeypatch) -> None:
    """An error that names a file has left it there; anything else leaves nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trip = SimpleNamespace(
        options=Options(), target=sm_90(), registry=SimpleNamespace(kernels={}, toolchains={}), console=Quiet()
    )
    for code, left in (("E501", 0), ("E502", 1)):

        def build(m, target, cache, kernels, toolchains, progress, code=code):
            raise Diagnostic(code, "no")

        monkeypatch.setattr(codegen, "build", build)
        with pytest.raises(Diagnostic, match=code):
            Compilation.build(trip, Module())
        assert len(list(tmp_path.iterdir())) == left


def test_options_that_triton_would_ignore_are_refused(tmp_path: Path) -> None:
    source = replace(GOOD, options=(("num_wraps", 4),))
    with pytest.raises(Diagnostic, match=r"unknown option 'num_wraps'"):
        TritonToolchain.find(sm_90()).compile([(source, "")], tmp_path)


def test_without_triton_it_says_what_to_install(monkeypatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(Diagnostic, match=r"pip install .*\[nvidia\]") as e:
        TritonToolchain.find(sm_90())
    assert e.value.code == "E501"
