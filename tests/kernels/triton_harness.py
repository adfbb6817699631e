"""Runs Triton kernels in Triton's CPU interpreter, beside the reference; what their tests share. It needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from draw import SEED
from kernels.harness import Buffer, Case

from llmc.codegen.backends.triton.triton_kernel import ELEMENTS
from llmc.codegen.backends.triton.triton_toolchain import Compiled, TritonToolchain, load_entry
from llmc.codegen.kernel import Source
from llmc.ir.dtype import DTYPES
from llmc.ir.interp import bind_symbols, round_to_type, run
from llmc.targets.gpu_targets import gfx942, sm_80, sm_90, sm_100
from llmc.targets.target import Target

INTERPRETED = replace(sm_90(), name="cuda:interpret", features=frozenset({"interpret"}))
TARGETS = (sm_80(), sm_90(), sm_100(), gfx942())
ONE_TARGET = Random(SEED).sample(TARGETS, 1)  # another one in every run; test_triton_binaries.py has all of them
T = TypeVar("T")
_TORCH = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "u16": torch.uint16,
    "u32": torch.uint32, "bool": torch.int8, "f8e4m3": torch.float8_e4m3fn,
}  # fmt: skip


def some(items: Sequence[T], share: float = 0.5) -> Sequence[T]:
    """A part of the items in the interpreter, which the run's seed draws; on a GPU they are all run."""
    return Random(SEED).sample(items, max(1, round(share * len(items))))


@contextmanager
def interpreting() -> Any:
    """Kernels loaded inside run on the CPU. Mended meanwhile: Triton 3.6 cannot use its scalars as Python integers with
    numpy >= 2.4, a scalar comparison becomes a tensor of the numbers compared, and 8-bit floats are rounded wrongly."""
    import triton
    from triton import knobs
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    builder = interpreter.InterpreterBuilder
    splat = builder.create_splat
    convert = interpreter._convert_float

    def converted(x: Any, source: Any, wanted: Any, mode: Any) -> Any:
        if "fp8e4nv" in (source.name, wanted.name):
            return _converted(x, source.name, wanted.name)
        return convert(x, source, wanted, mode)

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def splat_as_is(self: Any, ret_ty: Any, arg: Any) -> Any:
        return interpreter.TensorHandle(np.full(ret_ty.shape, arg.data.reshape(-1)[0]), arg.dtype.scalar)

    with knobs.runtime.scope(), _language_restored(), _standard_interpreted(), _patched_once():
        knobs.runtime.interpret = True
        builder.create_splat = splat_as_is
        interpreter._convert_float = converted
        if triton.__version__.startswith("3.6"):
            interpreter._patch_lang_tensor = patched
        try:
            yield
        finally:
            interpreter._patch_lang_tensor = original
            builder.create_splat = splat
            interpreter._convert_float = convert


def _converted(x: np.ndarray, source: str, wanted: str) -> np.ndarray:
    """Convert the bits of floats from or to fp8e4nv as a GPU does: to the nearest, infinities to the largest."""
    types = {dtype: DTYPES[name].np for name, (_, dtype) in ELEMENTS.items() if DTYPES[name].kind == "f"}
    wide = x.view(types[source]).astype(np.float32)
    if wanted == "fp8e4nv":
        wide = np.clip(wide, -448, 448)
    return wide.astype(types[wanted]).view(f"u{types[wanted].itemsize}")


@contextmanager
def _language_restored() -> Any:
    """Triton's interpreter leaves its own functions in the language after a call of a device function: take them out,
    or nothing compiles in this process any more."""
    import triton.language as tl

    places = (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
    kept = [(p, dict(vars(p))) for p in places]
    try:
        yield
    finally:
        for p, before in kept:
            for name in vars(p).keys() - before.keys():
                delattr(p, name)
            for name, value in before.items():
                if vars(p).get(name) is not value:
                    setattr(p, name, value)


@contextmanager
def _patched_once() -> Any:
    """Triton's interpreter patches the language in every call of a device function, which takes most of the time of
    kernels made of small functions. A launch has patched triton.language already; patch its core once for all."""
    import triton.language as tl
    from triton.runtime import interpreter

    function = interpreter.InterpretedFunction
    original, done = function.__call__, False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if not done and any(value is tl.core for value in self.fn.__globals__.values()):
            interpreter._patch_lang(self.fn)
            done = True
        return self.rewrite()(*args, **kwargs)

    function.__call__ = call
    try:
        yield
    finally:
        function.__call__ = original


@contextmanager
def _standard_interpreted() -> Any:
    """Triton's own library in Triton (tl.sum, tl.max, tl.sigmoid ...) was jitted when it was imported: interpret it."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    places = (tl, tl.standard, tl.random, tl.tensor)
    found = {f for p in places for f in vars(p).values() if isinstance(f, JITFunction)}
    swap = {f: InterpretedFunction(f.fn) for f in found}
    kept = [(p, k, f) for p in places for k, f in list(vars(p).items()) if isinstance(f, JITFunction)]
    try:
        for p, k, f in kept:
            setattr(p, k, swap[f])
        yield
    finally:
        for p, k, f in kept:
            setattr(p, k, f)


def interpret(source: Source, buffers: Sequence[Any], sizes: Sequence[int], grid: Sequence[int]) -> None:
    """Run one kernel over all its programs, in order."""
    with interpreting():
        load_entry(source.text, source.entry)[tuple(grid)](*buffers, *sizes)


def run_case(case: Case) -> None:
    """Run the kernel in the interpreter on poisoned outputs between guard zones; hold it against the reference."""
    node, g = case.node, case.graph
    why = case.kernel.reject(node, INTERPRETED)
    assert why is None, why
    source = case.kernel.emit(node, case.schedule, INTERPRETED)
    held = [round_to_type(x, v.type) for x, v in zip(case.inputs, g.inputs, strict=True)]
    sizes = bind_symbols(g, held, case.sizes)
    want = run(g, held, sizes)
    at = {v: Buffer.holding(x, v.type) for v, x in zip(g.inputs, held, strict=True)}
    operands = [at[v] for v in node.operands]
    written = iter(node.op.writes)
    results = []
    for r, w in zip(node.results, want, strict=True):
        if r.type.state:
            results.append(at[node.operands[[s.name for s in node.op.operands].index(next(written))]])
        else:
            results.append(Buffer(w.size * DTYPES[r.type.dtype].bits // 8))
    types = [v.type for v in [*node.operands, *node.results]]
    tensors = [_tensor(b, t.dtype) for b, t in zip([*operands, *results], types, strict=True)]
    given = [int(d.subs(sizes).const) for d in source.sizes]  # type: ignore[arg-type]
    assert not any(m.strides or m.offset != 0 for m in source.maps), "descriptors are row-major here"
    for m in source.maps:
        shape = [int(d.subs(sizes).const) for d in m.shape]  # type: ignore[arg-type]
        tensors[m.param] = descriptor(tensors[m.param], shape, m.box)
    interpret(source, tensors, given, [int(d.subs(sizes).const) for d in source.grid])  # type: ignore[arg-type]
    for i, b in enumerate([*operands, *results]):
        b.check(f"{case.name}: buffer {i}")
    for x, v in zip(held, g.inputs, strict=True):
        if at[v] not in results:
            np.testing.assert_array_equal(at[v].body, Buffer.holding(x, v.type).body, "an operand changed")
    for r, w, b in zip(node.results, want, results, strict=True):
        compare(case, r.type.dtype, round_to_type(b.get(r.type, w.shape), r.type), w)


def compare(case: Case, dtype: str, got: np.ndarray, want: np.ndarray) -> None:
    """Floats within the case's tolerance, if any, and a unit in the last place of the dtype; the rest exactly."""
    if DTYPES[dtype].kind == "f":
        unit = {"bf16": 2.0**-7, "f16": 2.0**-10, "f8e4m3": 2.0**-3}.get(dtype, 0.0) if case.rtol else 0.0
        np.testing.assert_allclose(got, want, rtol=case.rtol + unit, atol=case.atol, err_msg=case.name)
    else:
        np.testing.assert_array_equal(got, want, err_msg=case.name)


def descriptor(flat: torch.Tensor, shape: Sequence[int], box: Sequence[int]) -> Any:
    """What a kernel in the interpreter takes as a tensor map of a buffer's first elements."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(flat[: math.prod(shape)].view(*shape), list(box))


def _tensor(b: Buffer, dtype: str) -> torch.Tensor:
    """A view of the buffer's bytes; an empty buffer has an address, too."""
    return torch.from_numpy(b.body).view(_TORCH[dtype]) if len(b.body) else torch.empty(0, dtype=_TORCH[dtype])


def compile_for(case: Case, target: Target, cache: Path) -> Compiled:
    """The case's kernel as a binary for a target; AssertionError where the kernel rejects its node."""
    why = case.kernel.reject(case.node, target)
    assert why is None, why
    source = case.kernel.emit(case.node, case.schedule, target)
    toolchain = TritonToolchain.find(target)
    return toolchain.compile([(source, "")], cache, jobs=1)[toolchain.key(source)]


def ttir(source: Source) -> str:
    """The text of a kernel in Triton's first representation, for sm_90, in which all calls are inlined."""
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
