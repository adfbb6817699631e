"""The C++ toolchain: its cache, a missing compiler, and the messages for compile errors."""

from __future__ import annotations

import ctypes
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.codegen.backends.cpp.cpp_toolchain import MIN_KERNELS, CppToolchain, precompiled
from llmc.codegen.kernel import Source
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.dim import D

GOOD = Source("answer", "cpp", 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
BAD = Source("f", "cpp", "// cpu/bad\nint f() { return undeclared; }\nint g() { return also; }\n")


@pytest.fixture
def toolchain() -> CppToolchain:
    return CppToolchain.find(load().target("cpu:portable"))


def counting(toolchain: CppToolchain, folder: Path) -> tuple[CppToolchain, Path]:
    """A script that runs the same compiler and appends a line to a file per call."""
    script, log = folder / Path(toolchain.compiler).name, folder / "calls"
    script.write_text(f'#!/bin/sh\necho call >> "{log}"\nexec "{toolchain.compiler}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    log.write_text("")
    return replace(toolchain, compiler=str(script)), log


def test_equal_units_are_compiled_once(toolchain: CppToolchain, tmp_path: Path) -> None:
    tool, log = counting(toolchain, tmp_path)
    cache, seen = tmp_path / "cache", list[tuple[int, int, str]]()
    first = tool.compile([(GOOD, ""), (GOOD, "")], cache, progress=lambda *a: seen.append(a))
    assert log.read_text().count("call") == 1 and seen == [(1, 1, "answer")]
    assert tool.compile([(GOOD, "")], cache) == first
    assert log.read_text().count("call") == 1
    assert list(cache.iterdir()) == [cache / f"{tool.key(GOOD)}.so"], "nothing but the entry is left"
    path = tmp_path / "x.so"
    path.write_bytes(first[tool.key(GOOD)].binary)
    assert ctypes.CDLL(str(path)).answer() == 42


def test_work_folders_of_killed_compiles_are_removed(toolchain: CppToolchain, tmp_path: Path) -> None:
    for name, age in (("build-old", 7200), ("build-new", 5)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    toolchain.compile([(GOOD, "")], tmp_path)
    assert not (tmp_path / "build-old").exists() and (tmp_path / "build-new").exists()


@pytest.mark.slow
def test_system_headers_are_precompiled_for_several_kernels(toolchain: CppToolchain, tmp_path: Path) -> None:
    """The binaries are the same; a damaged form is not used."""
    if toolchain.name != "g++":
        pytest.skip("only for g++")
    tool, log = counting(toolchain, tmp_path)
    text = "#include <immintrin.h>\n#include <math.h>\n" + GOOD.text.replace("42", "(int)lrintf(sqrtf(NUMBER))")
    sources = [Source("answer", "cpp", text.replace("NUMBER", str(n))) for n in range(MIN_KERNELS + 2)]
    cache = tmp_path / "cache"
    few = tool.compile([(sources[0], "")], tmp_path / "few")
    assert log.read_text().count("call") == 1
    many = tool.compile([(s, "") for s in sources[:MIN_KERNELS]], cache)
    assert log.read_text().count("call") == 2 + MIN_KERNELS and len(many) == MIN_KERNELS
    assert many[tool.key(sources[0])] == few[tool.key(sources[0])]
    (header,) = cache.glob("headers-*/headers.h")
    plain = header.read_text()
    header.write_text("#error the precompiled form was not used\n")
    assert tool.compile([(sources[-1], "")], cache) == toolchain.compile([(sources[-1], "")], tmp_path / "few")
    assert log.read_text().count("call") == 3 + MIN_KERNELS
    header.write_text(plain)
    header.with_suffix(".h.gch").write_bytes(b"damaged")
    assert tool.compile([(sources[-2], "")], cache) == toolchain.compile([(sources[-2], "")], tmp_path / "few")


def test_headers_that_cannot_be_precompiled_are_parsed(toolchain: CppToolchain, tmp_path: Path) -> None:
    assert precompiled(["false"], "1", tmp_path, MIN_KERNELS) is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_entry_is_compiled_again(toolchain: CppToolchain, tmp_path: Path, damage: str) -> None:
    tool, log = counting(toolchain, tmp_path)
    cache = tmp_path / "cache"
    good = tool.compile([(GOOD, "")], cache)
    entry = cache / f"{tool.key(GOOD)}.so"
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes({"cut": bytes(data[: len(data) // 2]), "flip": bytes(data), "empty": b""}[damage])
    assert tool.compile([(GOOD, "")], cache) == good
    assert log.read_text().count("call") == 2


def test_the_key_is_text_flags_and_compiler(toolchain: CppToolchain) -> None:
    others = [
        toolchain.key(replace(GOOD, text=GOOD.text + " ")),
        toolchain.key(replace(GOOD, options=(("O", 1),))),
        replace(toolchain, flags=(*toolchain.flags, "-mavx2")).key(GOOD),
        replace(toolchain, version="99 none").key(GOOD),
    ]
    assert len({toolchain.key(GOOD), *others}) == 5
    assert toolchain.key(replace(GOOD, sizes=(D("T"),))) == toolchain.key(GOOD)


def test_the_first_error_is_shown_with_the_place(toolchain: CppToolchain, tmp_path: Path) -> None:
    with pytest.raises(Diagnostic) as e:
        toolchain.compile([(GOOD, ""), (BAD, "model.layers.0.mlp")], tmp_path)
    text = str(e.value)
    assert e.value.code == "E502" and "model.layers.0.mlp" in text and "cpu/bad" in text
    assert "undeclared" in text and "also" not in text
    assert len(text.splitlines()) <= 5
    assert (tmp_path / f"{toolchain.key(BAD)}.failed.cpp").read_text() == BAD.text


def test_a_missing_compiler_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(Diagnostic) as e:
        CppToolchain.find(load().target("cpu:portable"), path=str(tmp_path))
    assert e.value.code == "E501" and "apt-get install g++" in str(e.value)


def test_binaries_do_not_depend_on_where_they_were_made(toolchain: CppToolchain, tmp_path: Path) -> None:
    a, b = (toolchain.compile([(GOOD, "")], tmp_path / name)[toolchain.key(GOOD)].binary for name in ("a", "elsewhere"))
    assert a == b and str(tmp_path).encode() not in a


def test_binaries_need_only_the_c_library(toolchain: CppToolchain, tmp_path: Path) -> None:
    """An artifact runs on machines without the C++ standard library."""
    binary = toolchain.compile([(GOOD, "")], tmp_path)[toolchain.key(GOOD)].binary
    assert b"libstdc++" not in binary and b"libgcc_s" not in binary
