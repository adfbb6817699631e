"""XQA's binding and FlashInfer's toolchain without a GPU: parameters, refusals, choices, missing packages.

The kernels themselves are compiled if the packages of the extra `flashinfer` are installed.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from llmc.artifact.write import license_of
from llmc.codegen import cubin, cubin_toolchain
from llmc.codegen.backends.flashinfer import flashinfer_toolchain as module
from llmc.codegen.backends.flashinfer import xqa, xqa_source
from llmc.codegen.backends.flashinfer.flashinfer_toolchain import FlashinferToolchain, missing
from llmc.codegen.backends.flashinfer.xqa import XQA, Problem
from llmc.codegen.candidates import candidates, refusals
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.codegen.launch_check import passed
from llmc.codegen.select import Select
from llmc.codegen.tuning_records import Tuning, _indexed, record
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.graph import Module, Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.targets.gpu_targets import gfx942, sm_80, sm_90, sm_100
from llmc.targets.target import Target

ROOT = Path(__file__).resolve().parents[2]
NAME = "flashinfer/xqa"
ENV = {"R": 32, "P": 256}
TOOL = FlashinferToolchain(sm_90(), "of a test")
installed = pytest.mark.skipif(bool(missing()), reason="the extra `flashinfer` is not installed")


def module_of(
    heads: int = 32, kv: int = 8, size: int = 128, page: int = 16, dtype: str = "bf16", pool: str = "",
    attrs: str = "scale=0.088", sinks: str = "", parts: int = 0, tokens: str = "R",
) -> Module:  # fmt: skip
    """A module with one node of paged attention, or of one in parts."""
    q, pool = f"{dtype}[{tokens}, {heads}, {size}]", pool or dtype
    operands = {
        "q": q, "kv": f"state {pool}[P, 2, {kv}, {page}, {size}]", "pages": "state i32[256, 512]", "rows": "i32[R]",
        **({} if parts else {"starts": "i32[R+1]"}), "positions": f"i32[{tokens}]",
        **({"scales": f"f32[{2 * kv}]"} if pool == "f8e4m3" else {}),
        **({"sinks": f"{sinks}[{heads}]"} if sinks else {}),
    }  # fmt: skip
    names = ", ".join(f"%{x}" for x in operands)
    result = f"%y = paged_attention({names}) {{{attrs}}} : {q}\n  return %y"
    if parts:
        types = f"f32[R, {heads}, {parts}, {size}], f32[R, {heads}, {parts}]"
        result = f"%y, %s = paged_attention_split({names}) {{{attrs}, splits={parts}}} : {types}\n  return %y, %s"
    return parse(
        f"""
sym T in [1, 8192]
sym R in [1, 256]
sym P in [1, 65536]
graph @decode({", ".join(f"%{x}: {t}" for x, t in operands.items())}) {{
  {result}
}}
""",
        OPS,
    )


def node(**changes: Any) -> Node:
    (found,) = module_of(**changes).graphs["decode"].nodes
    return found


def macro(text: str, name: str) -> str:
    (line,) = [x for x in text.splitlines() if x.startswith(f"#define {name} ")]
    return line.rpartition(" ")[2]


def test_parameters_of_a_launch() -> None:
    whole, parts = (XQA.emit(node(parts=n), {}, sm_90()) for n in (0, 4))
    assert list(passed(whole)) == [8] * 7 + [4] and list(passed(parts)) == [8] * 7
    assert [str(d) for d in whole.grid] == ["1", "8", "R"] and [str(d) for d in parts.grid] == ["4", "8", "R"]
    assert (whole.threads, whole.shared, whole.pdl, whole.license) == (256, 145024, True, "flashinfer-python")
    assert (macro(whole.text, "PARTS"), macro(parts.text, "PARTS")) == ("0", "4")
    assert list(passed(XQA.emit(node(sinks="bf16"), {}, sm_90()))) == [8] * 8 + [4]
    assert list(passed(XQA.emit(node(pool="f8e4m3", sinks="f32"), {}, sm_90()))) == [8] * 9 + [4]


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({}, "HEAD_GRP_SIZE", "4"), ({}, "SLIDING_WINDOW", "0"), ({"attrs": "scale=0.1, window=9"}, "WINDOW", "9"),
        ({"dtype": "f16"}, "INPUT_FP16", "1"), ({"pool": "f8e4m3"}, "CACHE_ELEM_ENUM", "2"), ({}, "RESIDENT", "1"),
        ({"pool": "f8e4m3"}, "RESIDENT", "2"), ({"sinks": "f32"}, "SINK", "float"),
        ({"page": 64}, "TOKENS_PER_PAGE", "64"),
        ({"attrs": "scale=0.25", "size": 64}, "SCALE", "2.0f"),
    ],
)  # fmt: skip
def test_constants(changes: dict[str, Any], name: str, value: str) -> None:
    assert macro(XQA.emit(node(**changes), {}, sm_90()).text, name) == value


def test_tables_that_no_launch_writes_are_read_before_the_wait() -> None:
    assert macro(XQA.emit(node(), {READ_BEFORE_WAIT: 1}, sm_90()).text, "READ_BEFORE_WAIT") == "1"
    assert XQA.reads_before_wait(node()) == (2, 3, 4, 5) and XQA.reads_before_wait(node(parts=2)) == (2, 3, 4)
    for found in (node(), node(parts=2)):
        names = [s.name for s in found.op.operands]
        assert {names[i] for i in XQA.reads_before_wait(found)} <= {"pages", "rows", "starts", "positions"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attrs": "scale=0.1, softcap=9.0"}, "soft caps"),
        ({"tokens": "T"}, "rows of several tokens"),
        ({"attrs": "scale=0.1, least=2"}, "rows of several tokens"),
        ({"size": 100}, "heads of 100"),
        ({"size": 512, "kv": 4}, "heads of 512"),
        ({"page": 8}, "pages of 8 tokens"),
        ({"dtype": "f32"}, "queries of f32"),
        ({"pool": "f16"}, "a pool of f16"),
        ({"heads": 128, "kv": 1}, "128 query heads of 128 for 1 key heads"),
    ],
)
def test_nodes_that_are_refused(changes: dict[str, Any], why: str) -> None:
    assert why in (XQA.reject(node(**changes), sm_90()) or "")
    assert why in refusals(node(**changes), load().kernels, sm_90())[NAME]


def test_architectures() -> None:
    for target in (sm_80(), sm_90(), sm_100()):
        assert XQA.reject(node(), target) is None
    assert "is not one of the architectures" in (XQA.reject(node(), gfx942()) or "")
    small = replace(sm_80(), limits=replace(sm_80().limits, shared=100 << 10))
    assert "it needs 145024 bytes of shared memory" in (XQA.reject(node(), small) or "")


def lacking(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(xqa, "missing", lambda: why)


@pytest.mark.parametrize("parts", [0, 4])
def test_it_is_chosen_by_name_or_measurement(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "")
    made, kernels = node(parts=parts), load().kernels
    assert not any(o.kernel is XQA for o in candidates(made, kernels, sm_90(), ENV, Tuning.shipped(sm_90())))
    best, *_ = candidates(made, kernels, sm_90(), ENV, Tuning.shipped(sm_90()), (NAME,))
    assert best.kernel is XQA and not best.measured
    leading = kernels["cuda/decode_attention"]  # which precedes others unless it was measured, too
    slower = record(made, leading.name, leading.schedules(made, sm_90())[0], sm_90(), 0.6, ENV)
    fast = Tuning(_indexed([record(made, NAME, {}, sm_90(), 0.5, ENV), slower]))
    best, *_ = candidates(made, kernels, sm_90(), ENV, fast)
    assert best.kernel is XQA and best.measured


def test_it_does_not_claim_an_order_of_sums() -> None:
    assert XQA.reduction_order(node(), {}, sm_90()) is None


def test_a_compile_without_the_packages_says_what_it_did_without(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "flashinfer-python is not installed")
    registry = load()
    made = module_of()
    ctx = Ctx(registry.opset(), sm_90(), registry.kernels)
    Select(prefer=(NAME,)).run(made, ctx)
    (chosen,) = made.graphs["decode"].nodes
    assert chosen.choice["kernel"] == "cuda/decode_attention"
    (note,) = [n for n in ctx.notes if "without the kernel" in n]
    assert f"{NAME}: flashinfer-python is not installed; " in note and "[flashinfer]" in note
    (row,) = ctx.choices
    assert "flashinfer-python is not installed" in row["refused"][NAME]


def test_the_cost_grows_with_rows_and_with_parts_that_do_not_help() -> None:
    costs = [XQA.cost_us(node(), {}, sm_90(), {**ENV, "R": rows}) for rows in (1, 4, 64, 256)]
    assert costs[0] < costs[2] < costs[3] and costs[0] == costs[1]
    few = [XQA.cost_us(node(parts=n), {}, sm_90(), {**ENV, "R": 1}) for n in (2, 4)]
    assert few[1] < few[0] < costs[0]


def test_missing_packages_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cubin_toolchain, "version", absent)
    with pytest.raises(Diagnostic, match=r"E501.*flashinfer-python is not installed[^$]*\[flashinfer\]"):
        FlashinferToolchain.find(sm_90())
    monkeypatch.setattr(cubin_toolchain, "version", lambda name: "0.7.3" if "flash" in name else "13.0.1")
    with pytest.raises(
        Diagnostic, match=r"flashinfer-python 0\.7\.3 is installed, and only 0\.7\.2\.post1 is supported"
    ):
        FlashinferToolchain.find(sm_90())
    monkeypatch.setattr(cubin_toolchain, "version", lambda name: "0.7.2.post1" if "flash" in name else "12.9.79")
    assert missing() == "nvidia-cuda-runtime 12.9.79 is installed, and only 13 is supported"
    monkeypatch.setattr(cubin_toolchain, "version", lambda name: "0.7.2.post1" if "flash" in name else "13.0.96")

    def no_nvrtc() -> str:
        raise ModuleNotFoundError("NVRTC is not installed")

    monkeypatch.setattr(module, "nvrtc_version", no_nvrtc)
    assert missing() == "NVRTC is not installed"


def test_the_extra_has_the_supported_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = [x.partition(";")[0] for x in project["flashinfer"]]
    assert f"flashinfer-python=={module.SUPPORTED}" in declared
    assert f"{module.CUDA_HEADERS}>={module.MAJOR}0,<14" in declared
    assert {x.partition(";")[0] for x in project["nvrtc"]} <= set(declared)


def test_the_key_depends_on_what_the_binary_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    source = XQA.emit(node(), {}, sm_90())
    others = [
        replace(source, text=source.text + "//"), replace(source, shared=1), replace(source, entry="other"),
        replace(source, passes=source.passes[1:]),
    ]  # fmt: skip
    keys = {TOOL.key(s) for s in (source, *others)}
    keys |= {replace(TOOL, version="2").key(source), replace(TOOL, target=sm_80()).key(source)}
    monkeypatch.setattr(module, "CHANGES", {"mha.cu": (xqa_source.Change("a", "b"),)})
    assert len(keys | {TOOL.key(source)}) == 8


def folder_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """A package whose files have only what llmc changes, or the texts."""
    wanted = {name: "\n".join(c.old for c in some for _ in range(c.count)) for name, some in xqa_source.CHANGES.items()}
    wanted["mha.cu"] += f"\n{xqa_source.END}\nfunctions for hosts\n"
    folder = tmp_path / xqa_source.FOLDER
    folder.mkdir(parents=True)
    for name in xqa_source.FILES:
        (folder / name).write_text(texts.get(name.partition(".")[0], wanted.get(name, name)))

    class Package:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(xqa_source, "distribution", lambda name: Package())


def test_the_package_s_text_is_changed_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, monkeypatch)
    found = xqa_source.headers()
    assert set(found) == set(xqa_source.FILES) and found["mma.cuh"] == "mma.cuh"
    assert "functions for hosts" not in found["mha.cu"] and found["mha.cu"].endswith("#endif\n")
    for name, changes in xqa_source.CHANGES.items():
        assert all(c.new in found[name] for c in changes) and "threadIdx" not in found[name]


@pytest.mark.parametrize("text", ["", f"{xqa_source.END}\n", "threadIdx.x"])
def test_another_text_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, monkeypatch, mha=text)
    with pytest.raises(ValueError, match=r"mha\.cu does not"):
        xqa_source.headers()
    with pytest.raises(Diagnostic, match=r"E501.*the files of flashinfer-python 0\.7\.2\.post1 are damaged: mha\.cu"):
        TOOL.compile([(XQA.emit(node(), {}, sm_90()), "")], tmp_path / "cache")


@installed
@pytest.mark.parametrize("make", [sm_80, sm_90, sm_100])
@pytest.mark.parametrize(
    "changes", [{}, {"parts": 3, "attrs": "scale=0.1, window=77"}, {"pool": "f8e4m3", "sinks": "bf16"}], ids=str
)
def test_it_compiles_with_the_bytes_of_shared_memory_that_are_computed(
    changes: dict[str, Any], make: Any, tmp_path: Path
) -> None:
    target: Target = make()
    made = node(**changes)
    source, tool = XQA.emit(made, {}, target), FlashinferToolchain.find(target)
    compiled = tool.compile([(source, "")], tmp_path / "a")[tool.key(source)]
    assert cubin.read_entry(compiled.binary, source.entry).sizes == passed(source)
    assert compiled.shared == Problem.of(made).shared <= target.limits.shared


@installed
def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    source, tool = XQA.emit(node(size=64), {}, sm_90()), FlashinferToolchain.find(sm_90())
    first, second = (tool.compile([(source, "")], tmp_path / x) for x in "ab")
    assert first == second


@installed
def test_the_licence_is_that_of_the_package() -> None:
    title, text = license_of("flashinfer-python")
    assert title == "flashinfer-python-0.7.2.post1" and "Apache License" in text
