"""Languages: a toolchain is found by a kernel's language, and one program mixes kernels of several languages."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from codegen.c_kernels import EXTENSION
from codegen.c_toolchain import CToolchain

from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.build import build
from llmc.codegen.memory import Memory
from llmc.codegen.pack import Pack
from llmc.codegen.select import Select
from llmc.codegen.toolchain import Toolset, installed
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.graph import Module
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.passes.weights.lift_weights import LiftWeights
from llmc.targets.cpu_targets import portable
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target

TEXT = """
sym T in [1, 8]
graph @main(%x: f32[T, 6], %y: f32[T, 6]) {
  %a = mul(%x, %y) : f32[T, 6]
  %b = silu(%a) : f32[T, 6]
  return %b
}
"""


TARGET = replace(portable(), name="cpu:with-c", languages=("cpp", "c"))
REGISTRY = load([EXTENSION])


def chosen(prefer: tuple[str, ...]) -> Module:
    """The module with kernels chosen and memory planned."""
    m = parse(TEXT, OPS)
    ctx = Ctx(OPS, TARGET, REGISTRY.kernels)
    for p in (Select(prefer=prefer), Pack(), LiftWeights(), Memory()):
        p.run(m, ctx)
    return m


def test_one_program_mixes_languages(tmp_path: Path) -> None:
    built = build(chosen(("c/mul",)), TARGET, tmp_path, REGISTRY.kernels, REGISTRY.toolchains)
    (program,) = built.programs
    assert [built.kernels[x.kernel].language for x in program.launches] == ["c", "cpp"]
    used = CppToolchain.find(TARGET), CToolchain.find(TARGET)
    assert program.step is not None and built.toolchains == {tool.name: tool.version for tool in used}

    libs = {}
    for key, k in built.kernels.items():
        path = tmp_path / f"{key}.test.so"
        path.write_bytes(k.binary)
        libs[key] = ctypes.CDLL(str(path))
    unit = libs[program.step[0]]
    unit.llmc_open.restype, unit.llmc_close.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    x, y, z = np.linspace(-3, 3, 30, dtype="f4").reshape(5, 6), np.full((5, 6), 0.5, "f4"), np.zeros((5, 6), "f4")
    arena = np.zeros(program.arena_bytes + 64, "u1")
    base = arena.ctypes.data + -arena.ctypes.data % 64
    outside = iter((x, y, z))
    buffers = [base + b.offset if b.kind == "arena" else next(outside).ctypes.data for b in program.buffers]
    table = [ctypes.cast(getattr(libs[k], e), ctypes.c_void_p).value for k, e in program.kernel_table]
    step = unit[program.step[1]]
    step.argtypes = [ctypes.c_void_p] * 4
    pool = unit.llmc_open(2)
    sizes = np.array([5], np.int64)
    args = (ctypes.c_void_p * len(table))(*table), (ctypes.c_void_p * len(buffers))(*buffers)
    assert step(pool, *args, sizes.ctypes.data) == 0
    unit.llmc_close(pool)
    np.testing.assert_allclose(z, x * y / (1 + np.exp(-x * y)), rtol=1e-5, atol=1e-6)


def test_an_opt_in_kernel_is_selected_only_by_name() -> None:
    def kernel(m: Module) -> str:
        return str(next(iter(m.graphs["main"].nodes)).choice["kernel"])

    assert kernel(chosen(())) != "c/mul"
    assert kernel(chosen(("c/mul",))) == "c/mul"
    with pytest.raises(Diagnostic, match=r"E421.*no kernel 'c/mull'.*\n.*did you mean 'c/mul'"):
        chosen(("c/mull",))


def test_a_language_without_a_toolchain(tmp_path: Path) -> None:
    with pytest.raises(Diagnostic, match=r"E504.*language 'c'"):
        build(chosen(("c/mul",)), TARGET, tmp_path, REGISTRY.kernels, load().toolchains)


def test_a_toolchain_is_looked_up_when_its_language_is_used() -> None:
    def missing(target: Target) -> CppToolchain:
        raise Diagnostic("E501", "not installed")

    finders = {**load().toolchains, "c": missing}
    tools = Toolset(TARGET, finders)
    assert tools.of("cpp") is tools.of("cpp") and tools.versions() == {tools.of("cpp").name: tools.of("cpp").version}
    with pytest.raises(Diagnostic, match="E501"):
        tools.of("c")
    gpu = replace(sm_90(), languages=("triton", "c"))
    assert set(installed(gpu, finders)) == {"triton"} and installed(TARGET, finders) == {}
    with pytest.raises(Diagnostic, match="E501"):
        installed(replace(gpu, languages=("c", "triton")), finders)


def test_toolchains_come_from_extensions() -> None:
    assert list(REGISTRY.toolchains) == [*load().toolchains, "c"]
    assert REGISTRY.toolchains["cpp"](portable()) == CppToolchain.find(portable())
    with pytest.raises(Diagnostic, match=r"E422: toolchain 'c' is provided by both"):
        load([EXTENSION, replace(EXTENSION, name="another", kernels={})])
