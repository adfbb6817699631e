"""Compiles CUDA C++ kernels for a target, without a GPU; what their tests share."""

from __future__ import annotations

from pathlib import Path

from kernels.harness import Case

from llmc.codegen.backends.cuda.nvrtc_toolchain import NvrtcToolchain
from llmc.codegen.toolchain import Compiled
from llmc.targets.target import Target


def compile_for(case: Case, target: Target, cache: Path) -> Compiled:
    """The case's kernel as a cubin. Raises AssertionError if the kernel rejects its node."""
    why = case.kernel.reject(case.node, target)
    assert why is None, why
    source = case.kernel.emit(case.node, case.schedule, target)
    toolchain = NvrtcToolchain.find(target)
    return toolchain.compile([(source, "")], cache, jobs=1)[toolchain.key(source)]
