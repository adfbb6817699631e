"""Checks of a kernel of any language: compiled for its target and, where this machine can run it, run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from llmc.codegen.kernel import Compiled, Kernel
from llmc.codegen.launch_plan import package_of
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.dtype import FLOATS
from llmc.ir.opdef import OpDef
from llmc.targets.cpu_targets import native
from llmc.targets.target import Target
from llmc.testing.case import Case, case_of
from llmc.testing.cpu import compile_cases, run_case


def compile_for(case: Case, target: Target, cache: Path) -> Compiled:
    """Return the case's kernel as a binary for a target, compiled through the cache folder; needs no GPU.

    Raises AssertionError if the kernel rejects its node, and Diagnostic E501, E502 and E505 like a compile.
    """
    why = case.kernel.reject(case.node, target)
    assert why is None, why
    source = replace(case.kernel.emit(case.node, case.schedule, target), package=package_of(case.kernel))
    toolchain = load().toolchains[source.language](target)
    return toolchain.compile([(source, "")], cache, jobs=1)[toolchain.key(source)]


def run_on_cpu(case: Case) -> None:
    """Compile a C++ kernel for this CPU, run it, and compare it with the reference; see `run_case`."""
    why = case.kernel.reject(case.node, native())
    assert why is None, why
    with tempfile.TemporaryDirectory(prefix="llmc-testing-") as folder:
        source, function = compile_cases([case], native(), Path(folder))[case.name]
        run_case(case, source, function, threads=3)


def check_case(case: Case) -> None:
    """Run the case's kernel on this machine, and compare it with the reference of its op.

    C++ kernels run on this CPU, Triton kernels in Triton's interpreter. Raises AssertionError if a result is wrong, and
    Diagnostic E504 for kernels of other languages, which `compile_for` compiles.
    """
    if case.kernel.language == "cpp":
        run_on_cpu(case)
    elif case.kernel.language == "triton":
        from llmc.testing.triton_interpreter import run_case as interpret_case

        interpret_case(case)
    else:
        cause = f"kernels in {case.kernel.language} run on their own devices only"
        raise Diagnostic("E504", cause, "compile it: llmc.testing.compile_for(case, target, folder)")


def check_kernel(kernel: Kernel, op: OpDef, dtypes: Iterable[str] = FLOATS, seed: int = 0) -> int:
    """Check a kernel with all of its schedules on operands that the op's declaration draws; return the number of cases.

    Dtypes and schedules whose node the kernel rejects are skipped. Raises AssertionError if all are rejected or a
    result is wrong, and the errors of `check_case`.
    """
    target, done, reasons = _target_of(kernel), 0, []
    for dtype in dtypes:
        node = case_of(kernel, op, dtype=dtype, seed=seed).node
        if why := kernel.reject(node, target):
            reasons.append(f"{dtype}: {why}")
            continue
        for schedule in kernel.schedules(node, target):
            check_case(case_of(kernel, op, dtype=dtype, schedule=schedule, seed=seed))
            done += 1
    assert done, f"{kernel.name} rejects every node: {'; '.join(reasons)}"
    return done


def _target_of(kernel: Kernel) -> Target:
    """Return the target for which this machine runs kernels of a language."""
    if kernel.language != "triton":
        return native()
    from llmc.testing.triton_interpreter import INTERPRETED

    return INTERPRETED
