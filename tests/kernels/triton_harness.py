"""Shared by the tests of Triton kernels, besides `llmc.testing`: targets, samples, and Triton's IR."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from draw import SEED

from llmc.codegen.backends.triton.triton_toolchain import load_entry
from llmc.codegen.kernel import Source
from llmc.targets.gpu_targets import gfx90a, gfx942, gfx950, sm_80, sm_90, sm_100
from llmc.testing.case import compare
from llmc.testing.check import compile_for
from llmc.testing.triton_interpreter import INTERPRETED, TORCH_DTYPES, descriptor, interpret, interpreting, run_case

__all__ = [
    "INTERPRETED", "ONE_TARGET", "TARGETS", "TORCH_DTYPES", "compare", "compile_for", "descriptor", "interpret",
    "interpreting", "ptx", "run_case", "some", "ttir",
]  # fmt: skip

TARGETS = (sm_80(), sm_90(), sm_100(), gfx90a(), gfx942(), gfx950())
ONE_TARGET = Random(SEED).sample(TARGETS, 1)  # another one in every run; test_triton_binaries.py has all of them
T = TypeVar("T")


def some(items: Sequence[T], share: float = 0.5) -> Sequence[T]:
    """Return a random share of the items, drawn from the run's seed; the GPU tests replace this function to run all."""
    return Random(SEED).sample(items, max(1, round(share * len(items))))


def ttir(source: Source) -> str:
    """Return a kernel in Triton IR (TTIR) for sm_90, in which all calls are inlined."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    fn = load_entry(source.text, source.entry)
    src = ASTSource(fn, dict(zip(fn.arg_names, source.params, strict=True)), {}, {})
    gpu = GPUTarget("cuda", 90, 32)
    backend = make_backend(gpu)
    options = backend.parse_options(dict(source.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, src.language)
    given = backend.get_codegen_implementation(options), backend.get_module_map(), context
    return str(stages["ttir"](src.make_ir(gpu, options, *given), {}))


def ptx(source: Source) -> str:
    """Return the machine code of a kernel for sm_90 as text; all pointers are multiples of 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = load_entry(source.text, source.entry)
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(source.params) if p.startswith("*")}
    src = ASTSource(fn, dict(zip(fn.arg_names, source.params, strict=True)), {}, aligned)
    return str(triton.compile(src, target=GPUTarget("cuda", 90, 32), options=dict(source.options)).asm["ptx"])
