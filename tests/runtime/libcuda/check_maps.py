"""Tensor maps as parameters: the driver's arguments, the kernel's parameters, and rejected maps."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cuda.cuda_device import CudaDevice
from llmc_runtime.device.cuda.driver import Cuda
from llmc_runtime.format import expr
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.launch_param import TensorMap
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Buffer, Launch, Program

from llmc.artifact.write import write_artifact
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver

# Copies out each map with its sizes and strides, and the pointers and sizes that follow.
KERNEL = """
#include <stdint.h>
#include <string.h>
extern "C" {
extern const int num_params, param_bytes[];
const int num_params = 17, param_bytes[] = {128, 4, 4, 8, 8, 128, 4, 4, 4, 8, 8, 8, 8, 8, 4, 8, 8};
void maps(void** params, const unsigned* grid) {
  char* out = *(char**)params[12];
  for (int i = 0; i < num_params; i++) { memcpy(out, params[i], param_bytes[i]); out += param_bytes[i]; }
}
}
"""
ROWS = 24
WORDS = sum(w // 4 for w in (128, 4, 4, 8, 8, 128, 4, 4, 4, 8, 8, 8, 8, 8, 4, 8, 8))


def program(**changes: Any) -> Program:
    """A program with x[T, 40] and w[2, 6, 32] as maps; T is at most 24."""
    sizes = (
        ("x", "input", "bf16", ("T", "40")),
        ("w", "weight", "f16", ("12", "32")),
        ("y", "output", "i32", (WORDS,)),
    )
    buffers = tuple(
        Buffer(name, kind, dtype, tuple(expr.of(d) for d in shape), expr.of(nbytes))
        for (name, kind, dtype, shape), nbytes in zip(sizes, ("80*T", 768, 4 * WORDS), strict=True)
    )
    x = TensorMap(0, (expr.of("T"), expr.of(40)), (16, 64), 3)
    w = TensorMap(1, (expr.of(2), expr.of(6), expr.of(32)), (2, 8, 32), 2)
    launch = Launch(
        toy.kernel(KERNEL, "maps").hash, "maps", (0, 1, 2, 2), (expr.of("T"),), (expr.of(1),), 32, maps=(x, w)
    )
    symbols = {"T": (1, ROWS), "R": (1, 4)}
    made = Program("maps", symbols, symbols, buffers, (replace(launch, **changes),), 0)
    return Program.load(made.dump(), "maps")  # as it is read from an artifact


def test_tensor_maps_that_a_kernel_receives(driver: Driver, tmp_path: Path) -> None:
    parts = replace(toy.parts(tmp_path), kernels=(toy.kernel(KERNEL, "maps"),), programs=())
    write_artifact(tmp_path / "toy.llmc", parts)
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        x, w, y = (device.alloc(n) for n in (80 * ROWS, 768, 4 * WORDS))
        symbols = np.array([5, 1], np.int64)
        addresses = [m.address for m in (x, w, y)]
        with ThreadPoolExecutor(1) as pool:  # a thread that has not used the GPU yet
            run = pool.submit(device.bind, program(), addresses, symbols).result()
        run()
        got = device.read(y).view(np.uint32)
    finally:
        device.close()
    at = 0

    def take(words: int) -> list[int]:
        nonlocal at
        at += words
        return [int(n) for n in got[at - words : at]]

    def longs(count: int) -> list[int]:
        found = take(2 * count)
        return [low | high << 32 for low, high in zip(found[::2], found[1::2], strict=True)]

    bf16, f16 = 9, 6  # of CUtensorMapDataType
    assert take(2) == [bf16, 2] and longs(1) == [x.address]
    assert longs(5) == [40, ROWS, 0, 0, 0] and longs(4) == [80, 0, 0, 0]  # the upper bound of T, whatever this step has
    assert take(6) == [64, 16, 0, 0, 0, 3] and take(4) == [0] * 4
    assert take(2) == [ROWS, 40] and longs(2) == [40, 1]
    assert take(2) == [f16, 3] and longs(1) == [w.address]
    assert longs(5) == [32, 6, 2, 0, 0] and longs(4) == [64, 384, 0, 0]
    assert take(6) == [32, 8, 2, 0, 0, 2] and take(4) == [0] * 4
    assert take(3) == [2, 6, 32] and longs(3) == [192, 32, 1]
    assert longs(2) == [y.address, y.address] and take(1) == [5] and longs(2) == [0, 0]


def test_similar_launches_share_maps_and_a_configuration(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the launches of a model's layers. Each runs, with its own arguments."""
    calls: Counter[str] = Counter()
    tensor_map, launch_config = Cuda.tensor_map, Cuda.launch_config

    def counted_map(*args: Any) -> bytes:
        calls["tensor_map"] += 1
        return tensor_map(*args)

    def counted_config(*args: Any) -> Any:
        calls["launch_config"] += 1
        return launch_config(*args)

    monkeypatch.setattr(Cuda, "tensor_map", counted_map)
    monkeypatch.setattr(Cuda, "launch_config", counted_config)
    write_artifact(
        tmp_path / "toy.llmc", replace(toy.parts(tmp_path), kernels=(toy.kernel(KERNEL, "maps"),), programs=())
    )
    one = program()
    first, other = one.launches[0], replace(one.buffers[2], name="z")
    made = replace(one, buffers=(*one.buffers, other), launches=(first, first, replace(first, args=(0, 1, 3, 3))))
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        x, w, y, z = (device.alloc(n) for n in (80 * ROWS, 768, 4 * WORDS, 4 * WORDS))
        symbols = np.array([5, 1], np.int64)
        device.bind(made, [m.address for m in (x, w, y, z)], symbols)()
        of_y, of_z = (device.read(m).view(np.uint32).tolist() for m in (y, z))
    finally:
        device.close()
    assert calls == {"tensor_map": 2, "launch_config": 1}
    pointers = WORDS - 9, WORDS - 5  # the last arguments, T and two null pointers are the last 9 words
    assert of_y[: pointers[0]] == of_z[: pointers[0]] and of_y[pointers[1]] == of_z[pointers[1]] == 5
    assert of_z[pointers[0] : pointers[1]] == [z.address & 0xFFFFFFFF, z.address >> 32] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": (expr.of("T+1"), expr.of(40))}, "inside its buffer"),
        ({"shape": (expr.of(0), expr.of(40))}, "is empty or larger"),
        ({"shape": (expr.of("Q"), expr.of(40))}, "symbol"),
        ({"shape": (expr.of("T"),)}, "one size per axis"),
        ({"shape": (expr.of("0-T"), expr.of(-40))}, "is empty or larger"),
        ({"shape": (expr.of(1 << 31), expr.of(8))}, "is empty or larger"),
        ({"shape": (expr.of("T"), expr.of(36))}, "not multiples of 16 bytes"),
        ({"box": (16, 36)}, "rows of 72 bytes"),
        ({"swizzle": 2}, "too wide for its swizzle"),
        ({"box": (16, 512)}, "1 to 256"),
        ({"box": (0, 64)}, "1 to 256"),
        ({"arg": 3}, "a tensor map of i32"),
        ({"arg": 4}, "out of range"),
        ({"arg": 1}, "used twice"),
        ({"swizzle": 4}, "swizzle"),
    ],
)
def test_refused_tensor_maps(change: dict[str, Any], words: str) -> None:
    good = program().launches[0].maps
    with pytest.raises(LlmcError, match=words):
        program(maps=(replace(good[0], **change), good[1]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "state"}, ""),
        ({"kind": "state", "shape": (expr.of("T+1"), expr.of(40))}, ""),
        ({"kind": "state", "bytes": expr.of("160*T-1920")}, "inside its buffer"),  # if it has its smallest size
        ({"kind": "arena", "offset": 8}, "not multiples of 16 bytes"),
        ({"kind": "arena", "alias": "tiny"}, "inside its buffer"),
        ({"kind": "arena", "alias": "x"}, ""),  # an alias of itself: its own size is the limit
        ({"dtype": "f32"}, "a tensor map of f32"),
        ({"dtype": "f8e4m3"}, "not multiples of 16 bytes"),
    ],
)
def test_memory_that_no_map_is_of(change: dict[str, Any], words: str) -> None:
    good = program()
    tiny = Buffer("tiny", "arena", "bf16", (expr.of(8),), expr.of(16))
    buffers = (replace(good.buffers[0], **change), *good.buffers[1:], tiny)
    data = replace(good, buffers=buffers, arena_bytes=80 * ROWS + 256).dump()
    if not words:
        assert Program.load(data, "maps").launches == good.launches
        return
    with pytest.raises(LlmcError, match=words):
        Program.load(data, "maps")


def test_a_map_of_a_state_has_the_size_of_its_memory(driver: Driver, tmp_path: Path) -> None:
    """Not the upper bound: states may be allocated for fewer pages."""
    write_artifact(
        tmp_path / "toy.llmc", replace(toy.parts(tmp_path), kernels=(toy.kernel(KERNEL, "maps"),), programs=())
    )
    good = program()
    made = replace(good, buffers=(replace(good.buffers[0], kind="state"), *good.buffers[1:]))
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        x, w, y = (device.alloc(n) for n in (80 * ROWS, 768, 4 * WORDS))
        device.bind(made, [m.address for m in (x, w, y)], np.array([5, 1], np.int64))()
        got = device.read(y).view(np.uint32)
    finally:
        device.close()
    assert [int(n) for n in got[4:8]] == [40, 0, 5, 0] and [int(n) for n in got[32:34]] == [5, 40]


def test_a_driver_without_maps() -> None:
    """The driver reports success without an address."""
    found = SimpleNamespace(
        cuInit=lambda flags: (0,),
        cuGetProcAddress=lambda *args: (0, 0, 1),
        CUtensorMapDataType=SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16=9),
    )
    with pytest.raises(LlmcError, match=r"E116.*cuTensorMapEncodeTiled"):
        Cuda(found).tensor_map(256, "bf16", (8, 8), (8, 1), (8, 8), 0)


def test_a_map_that_the_driver_refuses(driver: Driver, tmp_path: Path) -> None:
    write_artifact(
        tmp_path / "toy.llmc", replace(toy.parts(tmp_path), kernels=(toy.kernel(KERNEL, "maps"),), programs=())
    )
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        driver.fail("cuTensorMapEncodeTiled", 1)
        with pytest.raises(LlmcError, match="E114"):
            device.bind(program(), [device.alloc(n).address for n in (80 * ROWS, 768, 4 * WORDS)], np.ones(2, np.int64))
    finally:
        device.close()


def test_a_map_is_checked_for_each_memory() -> None:
    """Launches with the same map are checked once, unless the memory is another."""
    good = program()
    small = Buffer("small", "arena", "bf16", (expr.of(8),), expr.of(16))
    first = good.launches[0]
    made = replace(good, buffers=(*good.buffers, small), arena_bytes=256, launches=(first, first))
    assert Program.load(made.dump(), "maps") == made
    other = replace(first, args=(3, 1, 2, 2))
    with pytest.raises(LlmcError, match="inside its buffer"):
        Program.load(replace(made, launches=(first, other)).dump(), "maps")
