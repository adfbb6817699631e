"""The NVRTC toolchain without a GPU: cubins, the cache, compile errors, and parameters checked against binaries."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.codegen import cubin
from llmc.codegen.backends.cuda import nvrtc_toolchain as module
from llmc.codegen.backends.cuda.nvrtc_toolchain import NvrtcToolchain
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.codegen.kernel import Map, Param, Source
from llmc.codegen.launch_check import passed
from llmc.codegen.toolchain import entry_path
from llmc.diagnostics import Diagnostic
from llmc.ir.dim import D
from llmc.targets.gpu_targets import sm_80, sm_90, sm_100

TEXT = """// toy: doubles
extern "C" __global__ void __launch_bounds__(256) twice(const float* x, float* y, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
"""
ARGS = (Param("arg", 0), Param("arg", 1))
GOOD = Source("twice", "cuda", TEXT, threads=256, passes=(*ARGS, Param("size", size=D("T"), type="i32")))
MAPPED = """// toy: a map
struct alignas(64) TensorMap { unsigned char bytes[128]; };
extern "C" __global__ void mapped(const __grid_constant__ TensorMap x, float* y, float f, long long n) {
  y[threadIdx.x] = x.bytes[threadIdx.x];
}
"""
WITH_MAP = Source(
    "mapped", "cuda", MAPPED, threads=32, shared=2048, maps=(Map(0, (D("T"), D(64)), (8, 64), 3),),
    passes=(Param("map"), Param("arg", 1), Param("value", value=0.5, type="f32"), Param("value", value=7, type="i64")),
)  # fmt: skip


@pytest.fixture
def tool() -> NvrtcToolchain:
    return NvrtcToolchain.find(sm_90())


@pytest.mark.parametrize("make", [sm_80, sm_90, sm_100])
def test_every_nvidia_target_gets_a_cubin(make, tmp_path: Path) -> None:
    tool = NvrtcToolchain.find(make())
    made = tool.compile([(GOOD, "")], tmp_path)[tool.key(GOOD)]
    assert made.binary[:4] == b"\x7fELF" and (made.threads, made.shared, made.boxes) == (256, 0, ())
    entry = cubin.read_entry(made.binary, "twice")
    assert entry.sizes == (8, 8, 4) and entry.max_threads == 256
    assert (
        module.options(make())[0]
        == {"sm_80": "-arch=sm_80", "sm_90": "-arch=sm_90a", "sm_100": "-arch=sm_100a"}[make().arch]
    )


def test_equal_sources_are_compiled_once_and_give_equal_bytes(
    tool: NvrtcToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, str]] = []
    first = tool.compile([(GOOD, "a"), (GOOD, "b")], tmp_path / "a", progress=lambda *a: seen.append(a))
    assert seen == [(1, 1, "toy: doubles")] and tool.cached(tool.key(GOOD), tmp_path / "a")
    assert not tool.cached(tool.key(GOOD), tmp_path / "b")
    assert tool.compile([(GOOD, "")], tmp_path / "b") == first
    monkeypatch.setattr(module, "compile_text", lambda *a: pytest.fail("it was compiled already"))
    assert tool.compile([(GOOD, "")], tmp_path / "a") == first


def test_a_damaged_entry_is_compiled_again(tool: NvrtcToolchain, tmp_path: Path) -> None:
    want = tool.compile([(GOOD, "")], tmp_path)
    path = entry_path(tmp_path, tool.key(GOOD))
    path.write_bytes(path.read_bytes()[:300])
    assert tool.compile([(GOOD, "")], tmp_path) == want


def test_the_key_is_text_launch_options_and_version(tool: NvrtcToolchain) -> None:
    others = [
        tool.key(replace(GOOD, text=TEXT + " ")),
        tool.key(replace(GOOD, threads=128)),
        tool.key(replace(GOOD, shared=64)),
        tool.key(replace(GOOD, cluster=(2, 1, 1))),
        tool.key(replace(WITH_MAP, maps=(replace(WITH_MAP.maps[0], swizzle=0),))),
        tool.key(WITH_MAP),
        replace(tool, version="99").key(GOOD),
        replace(tool, target=sm_80()).key(GOOD),
    ]
    assert len({tool.key(GOOD), *others}) == len(others) + 1


def test_a_text_that_does_not_compile_is_shown_and_kept(tool: NvrtcToolchain, tmp_path: Path) -> None:
    bad = replace(GOOD, text=TEXT.replace("2 * x[i]", "2 * undeclared"))
    with pytest.raises(Diagnostic, match=r"E502.*NVRTC .* could not compile toy: doubles: .*undeclared") as e:
        tool.compile([(bad, "model.layers.0.mlp")], tmp_path)
    assert "model.layers.0.mlp" in str(e.value) and "kernel.cu(4)" in str(e.value)
    assert (tmp_path / f"{tool.key(bad)}.failed.cu").read_text() == bad.text
    include = replace(GOOD, text='#include "beside.h"\n' + TEXT)
    with pytest.raises(Diagnostic, match=r"E502.*beside\.h"):
        tool.compile([(include, "")], tmp_path)


def test_launches_are_checked_against_the_binary(tool: NvrtcToolchain, tmp_path: Path) -> None:
    (made,) = tool.compile([(WITH_MAP, "")], tmp_path).values()
    assert cubin.read_entry(made.binary, "mapped").sizes == (128, 8, 4, 8) == passed(WITH_MAP)
    assert made.boxes == (((8, 64), 3),)
    wrong = {
        r"\[8, 8\] bytes, the binary takes \[8, 8, 4\]": replace(GOOD, passes=ARGS),
        r"\[8, 8, 8, 4\] bytes": replace(GOOD, passes=(ARGS[0], *GOOD.passes)),
        "blocks of 512 threads, the binary allows 256": replace(GOOD, threads=512),
        "it has no kernel 'thrice'": replace(GOOD, entry="thrice"),
    }
    for why, source in wrong.items():
        with pytest.raises(Diagnostic, match=why) as e:
            tool.compile([(source, "model.norm")], tmp_path)
        assert e.value.code == "E505" and "model.norm" in str(e.value)
        assert not tool.cached(tool.key(source), tmp_path)


def test_clusters_are_checked_against_the_binary_and_the_grid(tool: NvrtcToolchain, tmp_path: Path) -> None:
    fixed = replace(GOOD, text=TEXT.replace("__launch_bounds__", "__cluster_dims__(2, 1, 1) __launch_bounds__"))
    grid = (D("2*T"), D(1), D(1))
    for source in (replace(fixed, cluster=(2, 1, 1), grid=grid), replace(GOOD, cluster=(2, 1, 1), grid=grid)):
        tool.compile([(source, "")], tmp_path)
        assert tool.cached(tool.key(source), tmp_path)
    wrong = {
        r"cluster \[\], the binary was compiled for \[2, 1, 1\]": fixed,
        r"cluster \[4, 1, 1\], the binary was compiled for": replace(fixed, cluster=(4, 1, 1), grid=grid),
        r"grid \(T, 1, 1\) is not a multiple of the cluster": replace(
            GOOD, cluster=(2, 1, 1), grid=(D("T"), *grid[1:])
        ),
        r"\[16, 1, 1\] must have three sizes": replace(GOOD, cluster=(16, 1, 1), grid=grid),
    }
    for why, source in wrong.items():
        with pytest.raises(Diagnostic, match=why) as e:
            tool.compile([(source, "")], tmp_path)
        assert e.value.code == "E505" and not tool.cached(tool.key(source), tmp_path)


def test_triton_binaries_are_checked_alike(tmp_path: Path) -> None:
    head = "# toy\nimport triton\nimport triton.language as tl\n\n\n"
    text = head + "@triton.jit\ndef put(y0, s0):\n    tl.store(y0 + s0, 1.0)\n"
    source = Source("put", "triton", text, sizes=(D("T"),), params=("*fp32", "i32"), options=(("num_warps", 1),))
    tool = TritonToolchain.find(sm_90())
    (made,) = tool.compile([(source, "")], tmp_path).values()
    assert cubin.read_entry(made.binary, "put").sizes == (8, 4, 8, 8)  # with Triton's two scratch pointers
    cubin.check_launch(source, made.binary, scratch=2)
    with pytest.raises(Diagnostic, match=r"E505.*\[8\] bytes, the binary takes \[8, 4, 8, 8\]"):
        cubin.check_launch(replace(source, sizes=(), params=source.params[:1]), made.binary, scratch=2)


@pytest.mark.parametrize("damage", [b"", b"\x7fELF\x02\x01", b"not an ELF file"])
def test_damaged_binaries(damage: bytes) -> None:
    with pytest.raises(ValueError, match="ELF"):
        cubin.read_entry(damage, "twice")


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(Diagnostic, match=r"E501.*NVRTC is not installed\n.*pip install .*\[nvrtc\]"):
        NvrtcToolchain.find(sm_90())
