"""The interpreter as a device: a hand-made Triton program, its padding and its states."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format import expr
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Launch
from llmc_runtime.sched.step import RowInit, RowParams, Step, Work

from llmc.artifact.write import write_artifact
from llmc.codegen.build import Binary

pytest.importorskip("triton")

# The toy of `artifact.tiny`, without counts and log-probabilities; one program a row.
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def toy(rows, qlens, emit, tokens, length, pages, kv, table, ids, s0):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row >= 0:
        n = tl.load(length + row)
        end = n + tl.load(qlens + i)
        while n < end:
            page = tl.load(pages + row * 8 + n // 4)
            tl.store(kv + page * 4 + n % 4, tl.load(tokens + row * 32 + n).to(tl.float32))
            n += 1
        total = end * 0
        p = end * 0
        while p < end:
            page = tl.load(pages + row * 8 + p // 4)
            total += (p + 1) * tl.load(kv + page * 4 + p % 4).to(tl.int32)
            p += 1
        token = tl.load(table + total % 64)
        tl.store(ids + i, token)
        tl.store(length + row, end)
        if tl.load(emit + i) != 0:
            tl.store(tokens + row * 32 + end, token)
"""


def test_steps_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.runtime.interpret_device import InterpretDevice

    key = hashlib.sha256(KERNEL.encode()).hexdigest()[:32]
    kernel = Binary(key, KERNEL, b"not for this device", "toy", 32, suffix="cubin", language="py", abi="cuda-1")
    programs = []
    for name, uniform in (("decode", True), ("step", False)):
        p = tiny.program(name, key, key, uniform)
        args = tuple(i for i, b in enumerate(p.buffers) if b.name in
                     ("rows", "qlens", "emit", "tokens", "length", "pages", "kv.0", "table", "ids"))  # fmt: skip
        grid = (expr.of("R"), expr.of(1), expr.of(1))
        launch = Launch(key, "toy", args, (expr.of("R"),), grid, 32, op="toy", loc="model.toy")
        programs.append(replace(p, launches=(launch,), step=None))
    parts = tiny.parts(tmp_path)
    target = TargetInfo("cuda:interpret", "sm_90", ())
    write_artifact(tmp_path / "toy.llmc", replace(parts, target=target, kernels=(kernel,), programs=tuple(programs)))
    device = InterpretDevice()
    executor = Executor(open_artifact(tmp_path / "toy.llmc"), device, 1024)
    rows = {r: [5 + r, 6, 7 * r + 1] for r in range(3)}
    inits = [RowInit(r, t, 0, 3, RowParams(), [r, 9 + r]) for r, t in rows.items()]
    work = [Work(r, 3, True) for r in rows]
    for step in (Step(inits, [], work), *[Step([], [], [Work(r, 1, True) for r in rows])] * 2):
        for row, token in zip(rows, executor.run(step).tokens):
            assert token == tiny.expected(rows[row])
            rows[row].append(token)
    assert device.launches == [("toy", "model.toy")] * 3
    executor.close()
