"""Parameters as data: what a kernel gets of a launch that lists them, and what is refused when a program is read."""

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
from llmc_runtime.format.launch_param import Param
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Buffer, Launch, Program, TensorMap

from llmc.artifact.write import write_artifact
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver

BYTES = (4, 128, 8, 4, 8, 8, 4, 8)
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


def program(*params: Param) -> Program:
    """x[24, 64] as a pointer and as a map, y for what the kernel gets."""
    x = Buffer("x", "weight", "bf16", (expr.of(24), expr.of(64)), expr.of(24 * 64 * 2))
    y = Buffer("y", "output", "u8", (expr.of(sum(BYTES)),), expr.of(sum(BYTES)))
    launch = Launch(
        toy.kernel(KERNEL, "params").hash, "params", (0, 1), (), (expr.of(1),), 32,
        maps=(TensorMap(0, (expr.of(24), expr.of(64)), (8, 64), 3),), params=params,
    )  # fmt: skip
    symbols = {"T": (1, 9), "R": (1, 4)}
    return Program.load(Program("params", symbols, symbols, (x, y), (launch,), 0).dump(), "params")


def test_what_a_kernel_gets(driver: Driver, tmp_path: Path) -> None:
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
            bf16 = 9  # of CUtensorMapDataType
            assert struct.unpack_from("<iiQ5Q", got[1]) == (bf16, 2, x.address, 64, 24, 0, 0, 0)
            assert (*got[:1], *got[2:]) == (0.25, y.address, tokens, 2 * tokens + 1, x.address, -7, -(1 << 40))
    finally:
        device.close()


def test_params_are_read_as_they_were_written() -> None:
    good = program(*PARAMS)
    assert good.launches[0].params == PARAMS
    assert good.launches[0].json()["params"][:4] == [
        {"value": 0.25, "type": "f32"}, {"map": 0}, {"arg": 1}, {"size": "T", "type": "i32"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (Param("arg", 2), "no arg of number 2"),
        (Param("map", 1), "no map of number 1"),
        (Param("size", size=expr.of("Q"), type="i32"), "a symbol that the program lacks"),
        (Param("size", size=expr.of("T"), type="f32"), "a size has no type 'f32'"),
        (Param("value", value=1, type="i8"), "a value has no type 'i8'"),
        (Param("value", value=1 << 31, type="i32"), "does not fit i32"),
        (Param("value", value=0.5, type="i64"), "does not fit i64"),
        (Param("value", value=1e39, type="f32"), "does not fit f32"),
        (Param("value", value=True, type="i32"), "no number"),
    ],
)
def test_what_is_refused(param: Param, words: str) -> None:
    with pytest.raises(LlmcError, match=words) as e:
        program(param)
    assert e.value.code == "E103"


@pytest.mark.parametrize(
    "value", [{}, {"arg": -1}, {"arg": 0, "more": 1}, {"pointer": 0}, [], {"size": [], "type": "i32"}]
)
def test_what_is_no_parameter(value: Any) -> None:
    with pytest.raises(LlmcError, match="E103"):
        Param.read(value, "a parameter")
