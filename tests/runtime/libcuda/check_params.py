"""Launches that list their parameters: the values that a kernel gets, and invalid lists."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cuda.cuda_device import CudaDevice
from llmc_runtime.format import expr
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.launch_param import Param, TensorMap
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Buffer, Launch, Program

from llmc.artifact.write import write_artifact
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver

BYTES = (4, 128, 8, 4, 8, 8, 4, 8)
BF16 = 9  # of CUtensorMapDataType
# Copies out everything that it is given; its result's pointer is the third parameter.
KERNEL = f"""
#include <string.h>
extern "C" {{
extern const int num_params, param_bytes[];
const int num_params = {len(BYTES)}, param_bytes[] = {{{", ".join(map(str, BYTES))}}};
void params(void** params, const unsigned* grid) {{
  char* out = *(char**)params[2];
  for (int i = 0; i < num_params; i++) {{ memcpy(out, params[i], param_bytes[i]); out += param_bytes[i]; }}
}}
}}
"""
PARAMS = (
    Param("value", value=0.25, type="f32"),
    Param("map", 0),
    Param("arg", 1),
    Param("size", size=expr.of("T"), type="i32"),
    Param("size", size=expr.of("2*T+1"), type="i64"),
    Param("arg", 0),
    Param("value", value=-7, type="i32"),
    Param("value", value=-(1 << 40), type="i64"),
)

WHOLE = TensorMap(0, (expr.of(24), expr.of(64)), (8, 64), 3)
# Every other row of the columns from 16 on, as 4 groups of 3 rows.
PART = TensorMap(0, (expr.of(4), expr.of(3), expr.of(40)), (1, 3, 64), 3, (expr.of("48*R"), expr.of(128)), expr.of(32))


def program(*params: Param, maps: tuple[TensorMap, ...] = (WHOLE,), **changes: Any) -> Program:
    """x[24, 64] as a pointer and as maps; the kernel writes its parameters to y."""
    x = Buffer("x", "weight", "bf16", (expr.of(24), expr.of(64)), expr.of(24 * 64 * 2))
    y = Buffer("y", "output", "u8", (expr.of(sum(BYTES)),), expr.of(sum(BYTES)))
    launch = Launch(
        toy.kernel(KERNEL, "params").hash, "params", (0, 1), (), (expr.of(1),), 32,
        maps=maps, params=params,
    )  # fmt: skip
    launch = replace(launch, **changes)
    symbols = {"T": (1, 9), "R": (1, 4)}
    return Program.load(Program("params", symbols, symbols, (x, y), (launch,), 0).dump(), "params")


def test_parameters_that_a_kernel_receives(driver: Driver, tmp_path: Path) -> None:
    """In two runs, between which a size changes."""
    kernels = (toy.kernel(KERNEL, "params"),)
    write_artifact(tmp_path / "toy.llmc", replace(toy.parts(tmp_path), kernels=kernels, programs=()))
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        x, y = device.alloc(24 * 64 * 2), device.alloc(sum(BYTES))
        symbols = np.array([5, 1], np.int64)
        run = device.bind(program(*PARAMS), [x.address, y.address], symbols)
        for tokens in (5, 9):
            symbols[0] = tokens
            run()
            got = struct.unpack("<f128sQiqQiq", device.read(y).tobytes())
            assert struct.unpack_from("<iiQ5Q", got[1]) == (BF16, 2, x.address, 64, 24, 0, 0, 0)
            assert (*got[:1], *got[2:]) == (0.25, y.address, tokens, 2 * tokens + 1, x.address, -7, -(1 << 40))
    finally:
        device.close()


# Copies out its parameters; the address of the result is the first word of the second one.
TENSORS = """
#include <string.h>
extern "C" {
extern const int num_params, param_bytes[];
const int num_params = 4, param_bytes[] = {1, 16, 16, 8};
void tensors(void** params, const unsigned* grid) {
  char* out = *(char**)params[1];
  for (int i = 0; i < num_params; i++) { memcpy(out, params[i], param_bytes[i]); out += param_bytes[i]; }
}
}
"""


def test_tensors_and_bytes(driver: Driver, tmp_path: Path) -> None:
    """A tensor is an address and a size; the sizes follow the step."""
    params = (
        Param("value", value=200, type="u8"), Param("tensor", 1, expr.of("T")),
        Param("tensor", 0, expr.of("R+1"), offset=expr.of(64)), Param("arg", 0),
    )  # fmt: skip
    kernels = (toy.kernel(TENSORS, "tensors"),)
    write_artifact(tmp_path / "toy.llmc", replace(toy.parts(tmp_path), kernels=kernels, programs=()))
    made = program(*params, kernel=kernels[0].hash, entry="tensors")
    assert made.launches[0].params == params
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        x, y = device.alloc(24 * 64 * 2), device.alloc(sum(BYTES))
        symbols = np.array([5, 1], np.int64)
        run = device.bind(made, [x.address, y.address], symbols)
        for tokens, rows in ((5, 1), (9, 4)):
            symbols[:] = tokens, rows
            run()
            got = struct.unpack_from("<BQi4xQi4xQ", device.read(y).tobytes())
            assert got == (200, y.address, tokens, x.address + 64, rows + 1, x.address)
    finally:
        device.close()


def test_offsets_strides_and_clusters(driver: Driver, tmp_path: Path) -> None:
    """The second map of the buffer begins inside it and has strides; sizes are those of the symbols' upper bounds."""
    kernels = (toy.kernel(KERNEL, "params"),)
    write_artifact(tmp_path / "toy.llmc", replace(toy.parts(tmp_path), kernels=kernels, programs=()))
    params = (PARAMS[0], Param("map", 1), *PARAMS[2:5], Param("arg", 0, offset=expr.of("8*T+4")), *PARAMS[6:])
    grid = (expr.of("2*T"), expr.of(3), expr.of(1))
    made = program(*params, maps=(WHOLE, PART), cluster=(2, 3, 1), grid=grid)
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        x, y = device.alloc(24 * 64 * 2), device.alloc(sum(BYTES))
        run = device.bind(made, [x.address, y.address], np.array([5, 1], np.int64))
        driver.log()
        run()
        got = struct.unpack("<f128sQiqQiq", device.read(y).tobytes())
        assert "launch-cluster2x3x1" in driver.log()
    finally:
        device.close()
    encoded = struct.unpack_from("<iiQ5Q4Q5I", got[1])
    assert encoded[:3] == (BF16, 3, x.address + 32)
    assert encoded[3:] == (40, 3, 4, 0, 0, 256, 384, 0, 0, 64, 3, 1, 0, 0)
    assert got[5] == x.address + 8 * 9 + 4


def test_a_grid_that_the_cluster_does_not_divide_names_the_launch(driver: Driver, tmp_path: Path) -> None:
    """The largest step's grid is a multiple of the cluster, this step's is not."""
    kernels = (toy.kernel(KERNEL, "params"),)
    write_artifact(tmp_path / "toy.llmc", replace(toy.parts(tmp_path), kernels=kernels, programs=()))
    made = program(*PARAMS, cluster=(3, 1, 1), grid=(expr.of("T"), expr.of(1), expr.of(1)), op="toy", loc="here")
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()), 1)
    try:
        device.load(open_artifact(tmp_path / "toy.llmc"))
        x, y = device.alloc(24 * 64 * 2), device.alloc(sum(BYTES))
        run = device.bind(made, [x.address, y.address], np.array([5, 1], np.int64))
        with pytest.raises(LlmcError, match=r"E114.*INVALID_CLUSTER_SIZE.* at toy \(here\)"):
            run()
    finally:
        device.close()


def test_the_new_fields_are_written_only_if_they_are_used() -> None:
    plain = program(*PARAMS).launches[0].json()
    assert "cluster" not in plain and not {"strides", "offset"} & plain["maps"][0].keys()
    assert plain["params"][5] == {"arg": 0}
    offset = Param("arg", 0, offset=expr.of("T"))
    used = program(offset, maps=(PART,), cluster=(1, 1, 1), grid=(expr.of(1),) * 3).launches[0]
    assert (used.params, used.maps, used.cluster) == ((offset,), (PART,), (1, 1, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strides": (expr.of(128),)}, "one stride per axis except the last"),
        ({"strides": (expr.of(0), expr.of(128))}, "out of range"),
        ({"strides": (expr.of("0-192"), expr.of(128))}, "out of range"),
        ({"strides": (expr.of(1 << 40), expr.of(128))}, "out of range"),
        ({"strides": (expr.of(192), expr.of(60))}, "not multiples of 16 bytes"),
        ({"strides": (expr.of(512), expr.of(128))}, "inside its buffer"),
        ({"strides": (expr.of("Q"), expr.of(128))}, "symbol"),
        ({"offset": expr.of(40)}, "not multiples of 16 bytes"),
        ({"offset": expr.of(-16)}, "out of range"),
        ({"offset": expr.of(24 * 128)}, "inside its buffer"),
        ({"offset": expr.of("Q")}, "symbol"),
        ({"shape": (expr.of(2),) * 6, "box": (1, 1, 1, 1, 1, 64)}, "at most 5"),
    ],
)
def test_maps_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LlmcError, match=words) as e:
        program(*PARAMS, maps=(replace(PART, **change),))
    assert e.value.code == "E103"


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ((2,), "three sizes"), ((0, 1, 1), "at least 1"), ((-2, -2, 1), "at least 1"), ((16, 1, 1), "at most 8 blocks"),
        ((2, 1, 1), "not a multiple of the cluster"), ((1, 2, 1), "not a multiple"), ((1, 1, 1, 1), "at most 3"),
    ],
)  # fmt: skip
def test_clusters_that_are_refused(cluster: tuple[int, ...], words: str) -> None:
    with pytest.raises(LlmcError, match=words) as e:
        program(*PARAMS, cluster=cluster, grid=(expr.of("T"), expr.of(1), expr.of(1)))
    assert e.value.code == "E103"


def test_an_offset_into_a_state_holds_for_its_least_size() -> None:
    """States are allocated for fewer rows than the upper bounds."""
    good = program(Param("arg", 0, offset=expr.of(1024)))
    state = replace(good.buffers[0], kind="state", shape=(expr.of("R"), expr.of(512)), bytes=expr.of("1024*R"))
    with pytest.raises(LlmcError, match="the offset 1024 is outside of the buffer 'x'"):
        Program.load(replace(good, buffers=(state, good.buffers[1]), launches=_without_maps(good)).dump(), "params")


def _without_maps(made: Program) -> tuple[Launch, ...]:
    return tuple(replace(x, maps=()) for x in made.launches)


def test_params_are_read_as_they_were_written() -> None:
    good = program(*PARAMS)
    assert good.launches[0].params == PARAMS
    assert good.launches[0].json()["params"][:4] == [
        {"value": 0.25, "type": "f32"}, {"map": 0}, {"arg": 1}, {"size": "T", "type": "i32"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (Param("arg", 2), "no arg 2"),
        (Param("map", 1), "no map 1"),
        (Param("arg", 0, offset=expr.of("Q")), "an undeclared symbol"),
        (Param("arg", 0, offset=expr.of(24 * 128)), "is outside of the buffer"),
        (Param("arg", 0, offset=expr.of("4-T")), "is outside of the buffer"),
        (Param("size", size=expr.of("Q"), type="i32"), "an undeclared symbol"),
        (Param("size", size=expr.of("T"), type="f32"), "a size cannot have type 'f32'"),
        (Param("value", value=1, type="i8"), "a value cannot have type 'i8'"),
        (Param("value", value=1 << 31, type="i32"), "does not fit i32"),
        (Param("value", value=0.5, type="i64"), "does not fit i64"),
        (Param("value", value=1e39, type="f32"), "does not fit f32"),
        (Param("value", value=True, type="i32"), "not a number"),
        (Param("value", value=256, type="u8"), "does not fit u8"),
        (Param("size", size=expr.of("T"), type="u8"), "a size cannot have type 'u8'"),
        (Param("tensor", 2, expr.of("T")), "no tensor 2"),
        (Param("tensor", 0, expr.of("Q")), "an undeclared symbol"),
        (Param("tensor", 0, expr.of("T"), offset=expr.of(24 * 128)), "is outside of the buffer"),
    ],
)
def test_refused_parameters(param: Param, words: str) -> None:
    with pytest.raises(LlmcError, match=words) as e:
        program(param)
    assert e.value.code == "E103"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"arg": -1},
        {"arg": 0, "more": 1},
        {"pointer": 0},
        [],
        {"size": [], "type": "i32"},
        {"map": 0, "offset": 0},
        {"arg": 0, "offset": []},
        {"tensor": 0},
        {"tensor": -1, "size": "T"},
        {"tensor": 0, "size": "T", "type": "i32"},
    ],
)
def test_unknown_kinds_of_parameters_are_refused(value: Any) -> None:
    with pytest.raises(LlmcError, match="E103"):
        Param.read(value, "a parameter")
