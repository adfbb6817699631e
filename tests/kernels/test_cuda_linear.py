"""The CUDA C++ product: binaries of all variants, rejected nodes, and a program that mixes it with Triton kernels.

tests/gpu/test_cuda_kernels.py runs it.
"""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from llmc_runtime.format.program import Program

from llmc.codegen.backends.cuda import nvrtc_toolchain
from llmc.codegen.backends.cuda.gemm_wgmma import GEMM_WGMMA
from llmc.codegen.build import build
from llmc.codegen.cubin import read_entry
from llmc.codegen.memory import Memory
from llmc.codegen.pack import Pack
from llmc.codegen.select import Select
from llmc.codegen.tuning_records import record
from llmc.extension import load
from llmc.ir.graph import Module
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.measure.tune import Tuned, tuning_work
from llmc.passes.base import Ctx
from llmc.passes.weights.lift_weights import LiftWeights
from llmc.targets.gpu_targets import sm_90, sm_100

TEXT = """
sym T in [1, 4096]
graph @main(%x: bf16[T, 520], %w: weight bf16[264, 520]) {
  %a = silu(%x) : bf16[T, 520]
  %y = linear(%a, %w) : bf16[T, 264]  // l0.q
  return %y
}
"""


def module(text: str = TEXT) -> Module:
    return parse(text, OPS)


def product(m: Module) -> object:
    return next(n for n in m.graphs["main"].nodes if n.op.name == "linear")


def test_ways_become_binaries_of_sm_90(tmp_path: Path) -> None:
    """A third of them, drawn."""
    node, target = product(module()), sm_90()
    tool = load().toolchains["cuda"](target)
    offered = GEMM_WGMMA.schedules(node, target)
    assert len(offered) == 23
    ways = random.sample(list(offered), 8)
    sources = [GEMM_WGMMA.emit(node, s, target) for s in ways]
    made = tool.compile([(s, "") for s in sources], tmp_path, jobs=2)
    assert len(made) == len(ways)
    for way, source in zip(ways, sources, strict=True):
        c = made[tool.key(source)]
        assert c.threads == 128 + 2 * way["bm"] and c.shared <= target.limits.shared
        along_m, along_n = way.get("along_m", 1), way.get("along_n", 1)
        assert c.boxes == (((way["bm"] // along_n, 64), 3), ((way["bn"] // 2, 64), 3))
        assert read_entry(c.binary, source.entry).sizes == (128, 128, 8, 4)
        assert source.grid[0] == 132 and source.cluster == ((2, 1, 1) if along_m * along_n == 2 else ())


def test_deep_products_are_split_over_clusters(tmp_path: Path) -> None:
    node, target = product(module(TEXT.replace("520", "1024").replace("264", "4096"))), sm_90()
    ways = [s for s in GEMM_WGMMA.schedules(node, target) if s["split"] > 1]
    assert {(s["bn"], s["split"]) for s in ways if len(s) == 3} == {
        (256, 2), (256, 4), (256, 8), (192, 2), (192, 4), (128, 2), (128, 4), (96, 2), (64, 2)
    }  # fmt: skip
    assert {(s["bn"], s["split"]) for s in ways if "along_n" in s} == {(128, 2), (96, 2), (64, 2)}
    pair = GEMM_WGMMA.emit(node, {"bm": 128, "bn": 128, "split": 2, "along_m": 2}, target)
    assert pair.cluster == (4, 1, 1) and str(pair.grid[0]) == "128*ceil(T, 256)"
    tool = load().toolchains["cuda"](target)
    source = GEMM_WGMMA.emit(node, {"bm": 64, "bn": 128, "split": 4}, target)
    assert source.cluster == (4, 1, 1) and str(source.grid[0]) == "128*ceil(T, 64)"
    made = tool.compile([(source, "")], tmp_path)[tool.key(source)]
    assert made.threads == 256 and made.shared <= target.limits.shared
    few, many = ({"T": n} for n in (64, 4096))
    split, whole = {"bm": 64, "bn": 128, "split": 4}, {"bm": 128, "bn": 256, "split": 1}
    assert GEMM_WGMMA.cost_us(node, split, target, few) < GEMM_WGMMA.cost_us(node, whole, target, few)
    assert GEMM_WGMMA.cost_us(node, split, target, many) > GEMM_WGMMA.cost_us(node, whole, target, many)


def test_pairs_of_tiles_share_an_operand_without_a_fence_in_every_step(tmp_path: Path) -> None:
    """A fence of the whole GPU in the loop made shared tiles twice as slow as separate ones."""
    node, target = product(module(TEXT.replace("520", "1024").replace("264", "4096"))), sm_90()
    tool = load().toolchains["cuda"](target)
    sources = [
        GEMM_WGMMA.emit(node, {"bm": 128, "bn": 128, "split": split, along: 2}, target)
        for along in ("along_m", "along_n")
        for split in (1, 2)
    ]
    made = tool.compile([(s, "") for s in sources], tmp_path)
    for source in sources:
        assembly = disassembled(made[tool.key(source)].binary, tmp_path)
        fences = 2 if "SPLIT = 2" in source.text else 0  # the sums of a split tile are published once by each role
        assert assembly.count("UTMALDG.2D.MULTICAST") > 0 and assembly.count("MEMBAR.ALL.GPU") == fences


def disassembled(binary: bytes, folder: Path) -> str:
    """Return the machine code of a cubin as text, by the disassembler that comes with Triton."""
    import triton

    tool, path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm", folder / "kernel.cubin"
    path.write_bytes(binary)
    return subprocess.run([str(tool), "-c", str(path)], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("bf16", "f16"), "operand type f16"),
        (("520", "516"), "264 x 516 are not constant multiples of 8 and 8"),
        (("264", "260"), "260 x 520 are not"),
    ],
)
def test_rejected_nodes(change: tuple[str, str], why: str) -> None:
    assert why in str(GEMM_WGMMA.reject(product(module(TEXT.replace(*change))), sm_90()))


def test_other_targets_than_hopper_are_rejected() -> None:
    node = product(module())
    assert GEMM_WGMMA.reject(node, sm_90()) is None
    assert "does not have wgmma" in str(GEMM_WGMMA.reject(node, sm_100()))
    assert "does not have wgmma" in str(GEMM_WGMMA.reject(node, replace(sm_90(), features=frozenset({"interpret"}))))


def chosen(**options: object) -> Module:
    m = module()
    ctx = Ctx(OPS, sm_90(), load().kernels)
    for p in (Select(**options), Pack(), LiftWeights(), Memory()):
        p.run(m, ctx)
    return m


def test_it_is_chosen_by_name_or_measurement(tmp_path: Path) -> None:
    assert product(chosen()).choice["kernel"].startswith("triton/")
    assert product(chosen(prefer=("cuda/gemm_wgmma",))).choice["kernel"] == "cuda/gemm_wgmma"
    node, path = product(module()), tmp_path / "tuning.jsonl"
    way = GEMM_WGMMA.schedules(node, sm_90())[2]
    path.write_text(record(node, "cuda/gemm_wgmma", way, sm_90(), 1.0, {"T": 256}).line() + "\n")
    assert product(chosen(tuning=str(path))).choice == {"kernel": "cuda/gemm_wgmma", **way}


def test_without_nvrtc_another_kernel_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, path = product(module()), tmp_path / "tuning.jsonl"
    way = GEMM_WGMMA.schedules(node, sm_90())[0]
    path.write_text(record(node, "cuda/gemm_wgmma", way, sm_90(), 1.0, {"T": 256}).line() + "\n")

    def absent() -> str:
        raise ModuleNotFoundError("NVRTC is not installed")

    monkeypatch.setattr(nvrtc_toolchain, "nvrtc_version", absent)
    m, ctx = module(), Ctx(OPS, sm_90(), load().kernels)
    Select(tuning=str(path)).run(m, ctx)
    assert product(m).choice["kernel"].startswith("triton/")
    (note,) = [n for n in ctx.notes if "without the kernel" in n]
    assert "cuda/gemm_wgmma: NVRTC is not installed; " in note and "[nvrtc]" in note


def test_one_program_mixes_triton_and_cuda(tmp_path: Path) -> None:
    registry = load()
    built = build(chosen(prefer=("cuda/gemm_wgmma",)), sm_90(), tmp_path, registry.kernels, registry.toolchains)
    (program,) = built.programs
    kernels = [built.kernels[x.kernel] for x in program.launches]
    assert [(k.language, k.suffix, k.abi) for k in kernels] == [("py", "cubin", "cuda-1"), ("cu", "cubin", "cuda-1")]
    launch = program.launches[1]
    way = product(chosen(prefer=("cuda/gemm_wgmma",))).choice
    assert (launch.threads, launch.pdl, len(launch.args)) == (128 + 2 * way["bm"], True, 3)
    assert [x.json() for x in launch.params] == [{"map": 0}, {"map": 1}, {"arg": 2}, {"size": "T", "type": "i32"}]
    assert Program.load(program.dump(), "a program") == program
    assert [(m.arg, m.box, m.swizzle) for m in launch.maps] == [(0, (way["bm"], 64), 3), (1, (way["bn"] // 2, 64), 3)]
    assert set(built.toolchains) == {"triton", "nvrtc"}
    head = kernels[1].source.partition("\n")[0]
    assert head.startswith("// cuda/gemm_wgmma: linear(bf16[s0, 520], bf16[264, 520]) -> bf16[s0, 264] bm=")


def test_tuning_measures_it_where_it_is_named() -> None:
    def measured(*kernels: str) -> set[str]:
        (work,) = [
            w for w in tuning_work(module(), load(), sm_90(), Tuned(""), kernels=kernels) if w.node.op.name == "linear"
        ]
        return {o.kernel.name for o in work.candidates}

    assert "cuda/gemm_wgmma" not in measured() and len(measured()) > 1
    assert (
        "cuda/gemm_wgmma" in measured("cuda/gemm_wgmma") and len(measured("cuda/gemm_wgmma")) > 1
    )  # next to its rivals
