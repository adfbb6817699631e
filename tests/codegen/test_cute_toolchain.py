"""FlashAttention's binding and the CuTe toolchain without a GPU: parameters, refusals, choices, missing packages.

The kernels themselves are compiled if the packages of the extra `flash` are installed.
"""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from llmc.artifact.write import license_of
from llmc.codegen import cubin, cubin_toolchain
from llmc.codegen.backends.cuda import nvrtc_toolchain as nvrtc
from llmc.codegen.backends.cute import cute_toolchain as module
from llmc.codegen.backends.cute import flash_attention
from llmc.codegen.backends.cute.cute_toolchain import CuteToolchain, missing
from llmc.codegen.backends.cute.flash_attention import FLASH_ATTENTION
from llmc.codegen.backends.triton.prefill_attention import PREFILL_ATTENTION
from llmc.codegen.candidates import candidates, refusals
from llmc.codegen.kernel import Param, Source
from llmc.codegen.launch_check import passed
from llmc.codegen.select import Select
from llmc.codegen.tuning_records import Tuning, _indexed, record
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.dim import D
from llmc.ir.graph import Module, Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.passes.split.split_single import SplitSingle
from llmc.targets.gpu_targets import sm_80, sm_90, sm_100

ROOT = Path(__file__).resolve().parents[2]
ENV = {"T": 4096, "R": 8, "P": 256}
installed = pytest.mark.skipif(bool(missing()), reason="the extra `flash` is not installed")


def module_of(
    heads: int = 32, kv: int = 8, size: int = 128, page: int = 16, dtype: str = "bf16", pool: str = "",
    attrs: str = "scale=0.088", sinks: bool = False, tokens: str = "T",
) -> Module:  # fmt: skip
    """A module with one node of paged attention."""
    result = f"{dtype}[{tokens}, {heads}, {size}]"
    extra, last = (f", %s: {dtype}[{heads}]", ", %s") if sinks else ("", "")
    return parse(
        f"""
sym T in [1, 8192]
sym R in [1, 256]
sym P in [1, 65536]
graph @step(%q: {result}, %kv: state {pool or dtype}[P, 2, {kv}, {page}, {size}],
  %pages: state i32[256, 512], %rows: i32[R], %starts: i32[R+1], %positions: i32[{tokens}]{extra}) {{
  %y = paged_attention(%q, %kv, %pages, %rows, %starts, %positions{last}) {{{attrs}}} : {result}
  return %y
}}
""",
        OPS,
    )


def node(**changes: Any) -> Node:
    (found,) = module_of(**changes).graphs["step"].nodes
    return found


def offsets(source: Source) -> list[int]:
    """Return the offsets of a launch's parameters, each a multiple of its alignment."""
    out, at = [], 0
    for x in source.passes:
        align = {"map": 64, "tensor": 8}.get(x.kind, x.nbytes)
        at = -(-at // align) * align
        out.append(at)
        at += x.nbytes
    return out


BASE = [4, 4, 4, 16, 16, 16, 16, 8, 128, 128, 128, 4, 1, 1, 4, 4, 4, 16]


def test_parameters_of_a_launch() -> None:
    source = FLASH_ATTENTION.emit(node(), {"rows": 128, "packed": 1}, sm_90())
    assert list(passed(source)) == BASE
    # cp.async.bulk.tensor needs maps at multiples of 64 bytes
    assert offsets(source)[8:12] == [128, 256, 384, 512]
    assert (source.threads, source.shared, source.pdl) == (384, 164864, True)
    env = {"T": 300, "R": 3, "P": 70}
    assert [g.subs(env).const for g in source.grid] == [8 * (4 * 300 // 128 + 3), 1, 1]
    queries, keys, values = source.maps
    assert [str(d) for d in queries.shape] == ["T", "32", "128"] and queries.box == (32, 4, 64)
    assert [str(d) for d in keys.shape] == ["P", "8", "16", "128"] and keys.box == values.box == (1, 1, 16, 64)
    assert [str(d) for d in keys.strides] == ["32768", "2048", "128"] == [str(d) for d in values.strides]
    assert keys.offset == 0 and values.offset == D(2 * 8 * 16 * 128)


def test_unpacked_tiles_belong_to_one_head() -> None:
    source = FLASH_ATTENTION.emit(node(), {"rows": 128, "packed": 0}, sm_90())
    (queries, *_), strides = source.maps, source.maps[0].strides
    assert [str(d) for d in queries.shape] == ["32", "T", "128"] and queries.box == (1, 128, 64)
    assert [str(d) for d in strides] == ["128", "4096"]
    assert source.grid[0].subs({"T": 300, "R": 3}).const == 32 * (300 // 128 + 3)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"attrs": "scale=0.1, window=100"}, [4, 4]),
        ({"attrs": "scale=0.1, softcap=30.0"}, [4]),
        ({"sinks": True}, [8]),
        ({"attrs": "scale=0.1, softcap=30.0, window=5", "sinks": True}, [4, 4, 4, 8]),
    ],
)
def test_parameters_of_variants(changes: dict[str, Any], more: list[int]) -> None:
    source = FLASH_ATTENTION.emit(node(**changes), {"rows": 64, "packed": 1}, sm_90())
    assert list(passed(source)) == [*BASE[:12], *more, *BASE[12:]]
    assert (source.threads, source.shared) == (256, 148480)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": 96}, "heads of 96"),
        ({"page": 32}, "pages of 32 tokens"),
        ({"dtype": "f32"}, "queries of f32"),
        ({"pool": "f16"}, "a pool of f16"),
        ({"heads": 24}, "3 query heads of a key head"),
        ({"heads": 8}, "1 query heads of a key head"),
    ],
)
def test_nodes_that_are_refused(changes: dict[str, Any], why: str) -> None:
    assert why in (FLASH_ATTENTION.reject(node(**changes), sm_90()) or "")


def test_prompts_get_high_tiles() -> None:
    prompts, single = node(), node(tokens="R")
    assert [s["rows"] for s in FLASH_ATTENTION.schedules(prompts, sm_90())] == [128, 128]
    assert FLASH_ATTENTION.schedules(single, sm_90())[0] == {"rows": 64, "packed": 1}
    for env in (ENV, {**ENV, "R": 96}, {**ENV, "T": 512, "R": 1}):
        costs = [FLASH_ATTENTION.cost_us(prompts, s, sm_90(), env) for s in FLASH_ATTENTION.schedules(prompts, sm_90())]
        assert costs[0] <= costs[1], "packed tiles are faster in mixtures, and nearly as fast otherwise"


def test_other_architectures_are_refused() -> None:
    assert FLASH_ATTENTION.reject(node(), sm_90()) is None
    for target in (sm_80(), sm_100()):
        assert "is not the architecture" in (FLASH_ATTENTION.reject(node(), target) or "")


@lru_cache(maxsize=1)
def shipped() -> Tuning:
    return Tuning.shipped(sm_90())


def lacking(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(flash_attention, "missing", lambda: why)


def test_a_preferred_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "")
    kernels = load().kernels
    found = candidates(node(), kernels, sm_90(), ENV, shipped(), ("cute/flash_attention",))
    assert found[0].kernel is FLASH_ATTENTION
    again = candidates(node(), kernels, replace(sm_90(), deterministic=True), ENV, shipped())
    assert not any(o.kernel is FLASH_ATTENTION for o in again)


@pytest.mark.parametrize(
    ("changes", "tokens", "leads"),
    [
        ({}, 4096, True), ({"attrs": "scale=0.1, least=2"}, 512, True), ({"attrs": "scale=0.1, least=2"}, 256, False),
        ({"attrs": "scale=0.1, window=64"}, 4096, False), ({"attrs": "scale=0.1, softcap=9.0"}, 4096, False),
        ({"sinks": True}, 4096, False), ({"dtype": "f16"}, 4096, False),
    ],
)  # fmt: skip
def test_the_rule_for_prompts(
    changes: dict[str, Any], tokens: int, leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention precedes llmc's measured kernels, unless it was measured for the node, too."""
    lacking(monkeypatch, "")
    env, kernels = {**ENV, "T": tokens}, load().kernels
    best, *_ = candidates(node(**changes), kernels, sm_90(), env, shipped())
    assert (best.kernel is FLASH_ATTENTION) == leads
    made = node(**changes)
    slow = record(made, "cute/flash_attention", FLASH_ATTENTION.schedules(made, sm_90())[0], sm_90(), 1e6, env)
    best, *_ = candidates(made, kernels, sm_90(), env, Tuning(_indexed([slow])))
    assert best.kernel is FLASH_ATTENTION and best.measured  # nothing else was measured
    other = record(made, "triton/prefill_attention", PREFILL_ATTENTION.schedules(made, sm_90())[0], sm_90(), 1.0, env)
    best, *_ = candidates(made, kernels, sm_90(), env, Tuning(_indexed([slow, other])))
    assert best.kernel is PREFILL_ATTENTION


@pytest.mark.parametrize("why", ["", "absent"])
def test_single_tokens_beside_prompts_have_a_kernel_of_their_own(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether FlashAttention computes the prompts or not."""
    lacking(monkeypatch, why)
    registry = load()
    module = module_of(attrs="scale=0.1")
    assert SplitSingle().run(module, Ctx(registry.opset(), sm_90(), registry.kernels)) == 1
    many, single = next(iter(module.graphs.values())).nodes
    assert (many.op.name, many.attrs["least"], single.op.name) == ("paged_attention", 2, "paged_attention_single")
    best, *_ = candidates(many, registry.kernels, sm_90(), {**ENV, "T": 4096}, shipped())
    assert (best.kernel is FLASH_ATTENTION) == (not why)


@pytest.mark.parametrize(
    ("size", "tokens", "why", "one"),
    [
        (128, 511, "", True), (128, 512, "", False), (128, 768, "absent", True), (128, 769, "absent", False),
        (256, 640, "absent", False),
    ],
)  # fmt: skip
def test_small_steps_have_one_kernel(
    size: int, tokens: int, why: str, one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For prompts and for the rows that decode next to them, unless heads are large or FlashAttention leads."""
    lacking(monkeypatch, why)
    registry = load()
    module = module_of(size=size, attrs="scale=0.1")
    (graph,) = module.graphs.values()
    graph.ranges["T"] = (1, tokens)
    assert SplitSingle().run(module, Ctx(registry.opset(), sm_90(), registry.kernels)) == (not one)
    best, *_ = candidates(next(iter(graph.nodes)), registry.kernels, sm_90(), {**ENV, "T": tokens}, shipped())
    assert (best.kernel.name == "triton/mixed_attention") == one
    other = candidates(node(), registry.kernels, replace(sm_90(), deterministic=True), {**ENV, "T": tokens}, shipped())
    assert "triton/mixed_attention" not in [o.kernel.name for o in other]


def test_single_tokens_are_not_taken_by_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "")
    decode = node(tokens="R")
    best, *_ = candidates(decode, load().kernels, sm_90(), {"R": 256, "P": 256}, shipped())
    assert best.kernel.language != FLASH_ATTENTION.language


def test_a_compile_without_the_packages_says_what_it_did_without(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "flash-attn-4 is not installed")
    registry = load()
    made = module_of()
    ctx = Ctx(registry.opset(), sm_90(), registry.kernels)
    Select(prefer=("cute/flash_attention",)).run(made, ctx)
    (chosen,) = made.graphs["step"].nodes
    assert chosen.choice["kernel"] == "triton/mixed_attention"
    (note,) = [n for n in ctx.notes if "without the kernel" in n]
    assert "cute/flash_attention: flash-attn-4 is not installed; " in note and "[flash]" in note
    (row,) = ctx.choices
    assert "flash-attn-4 is not installed" in row["refused"]["cute/flash_attention"]


def test_refusals_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "")
    why = refusals(node(size=96), load().kernels, sm_90())
    assert why["cute/flash_attention"] == "pages of 16 tokens, heads of 96; 16 and 64, 128, 256 are supported"


def test_missing_packages_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cubin_toolchain, "version", absent)
    with pytest.raises(Diagnostic, match=r"E501.*nvidia-cutlass-dsl is not installed[^$]*\[flash\]"):
        CuteToolchain.find(sm_90())
    monkeypatch.setattr(cubin_toolchain, "version", lambda name: "1.0")
    with pytest.raises(Diagnostic, match=r"nvidia-cutlass-dsl 1\.0 is installed, and only 4\.8\.1 is supported"):
        CuteToolchain.find(sm_90())


def test_the_extra_has_the_supported_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [x.partition(";")[0] for x in project["optional-dependencies"]["flash"]]
    assert sorted(declared) == sorted(f"{name}=={found}" for name, found in module.PACKAGES.items())


@pytest.mark.parametrize(
    ("status", "messages", "code", "words"),
    [
        (1, "Traceback\n  File kernel.py\nTypeError: bad tile\n", "E502", "TypeError: bad tile"),
        (-11, "", "E502", "ended with status -11"),
        (-9, "", "E503", "was killed"),
    ],
)
def test_a_process_that_fails(
    status: int, messages: str, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, status, "", messages)

    monkeypatch.setattr(module.subprocess, "run", run)
    source = FLASH_ATTENTION.emit(node(), {"rows": 64, "packed": 1}, sm_90())
    with pytest.raises(Diagnostic, match=words) as error:
        CuteToolchain(sm_90()).compile([(source, "model.layers.0")], tmp_path)
    assert error.value.code == code and "CUTE_DSL_ARCH=sm_90a" in ran[0]
    if code == "E502":
        assert any(p.read_text() == source.text for p in tmp_path.glob("*.failed.py"))


def test_a_binary_with_other_parameters_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real cubin, whose kernel has this name and one parameter."""
    try:
        nvrtc.NvrtcToolchain.find(sm_90())
    except Diagnostic:
        pytest.skip("NVRTC is not installed")
    text = 'extern "C" __global__ void llmc_paged_attention_0(int n) {}'
    binary, why = nvrtc.compile_text(text, ("-arch=sm_90a",))
    assert not why
    monkeypatch.setattr(module, "compile_text", lambda source, arch: (binary, ""))
    source = FLASH_ATTENTION.emit(node(), {"rows": 64, "packed": 1}, sm_90())
    with pytest.raises(Diagnostic, match=r"E505.*the binary takes \[4\]"):
        CuteToolchain(sm_90()).compile([(source, "")], tmp_path)
    one = replace(source, passes=(Param("value", value=1, type="i32"),), threads=128)
    text = text.replace("void llmc", "void __launch_bounds__(64) llmc")
    monkeypatch.setattr(
        module, "compile_text", lambda source, arch: (nvrtc.compile_text(text, ("-arch=sm_90a",))[0], "")
    )
    with pytest.raises(Diagnostic, match=r"E505.*blocks of 128 threads, the binary allows 64"):
        CuteToolchain(sm_90()).compile([(one, "")], tmp_path)


@installed
def test_a_block_of_other_threads_is_refused(tmp_path: Path) -> None:
    source = replace(FLASH_ATTENTION.emit(node(), {"rows": 64, "packed": 1}, sm_90()), threads=128)
    with pytest.raises(Diagnostic, match=r"E505.*blocks of 128 threads, the binary needs 256"):
        CuteToolchain.find(sm_90()).compile([(source, "")], tmp_path)


def test_the_key_depends_on_what_the_binary_depends_on() -> None:
    tool = CuteToolchain(sm_90())
    source = FLASH_ATTENTION.emit(node(), {"rows": 64, "packed": 1}, sm_90())
    others = [
        replace(source, text=source.text + "#"), replace(source, shared=1), replace(source, entry="other"),
        replace(source, passes=source.passes[1:]),
    ]  # fmt: skip
    keys = {tool.key(s) for s in (source, *others)} | {replace(tool, version="2").key(source)}
    assert len(keys) == 6


@installed
def test_a_kernel_compiles_to_equal_bytes(tmp_path: Path) -> None:
    source = FLASH_ATTENTION.emit(node(), {"rows": 64, "packed": 1}, sm_90())
    tool = CuteToolchain.find(sm_90())
    made = tool.compile([(source, "")], tmp_path / "a")[tool.key(source)]
    assert cubin.read_entry(made.binary, source.entry).sizes == tuple(BASE)
    assert tool.compile([(source, "")], tmp_path / "b")[tool.key(source)] == made


@installed
def test_the_licence_is_that_of_the_package() -> None:
    title, text = license_of("flash-attn-4")
    assert title == "flash-attn-4-4.0.0b36" and "BSD 3-Clause License" in text and "Tri Dao" in text


def test_a_package_without_a_licence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Diagnostic, match=r"E506.*it is not installed"):
        license_of("no-such-distribution-1234")
