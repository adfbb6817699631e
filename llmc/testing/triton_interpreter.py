"""Compiles Triton kernels, and compares their results in Triton's interpreter with the reference. Needs no GPU."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from llmc.codegen.backends.triton.template import PACKAGE, Template
from llmc.codegen.backends.triton.triton_kernel import ELEMENTS, FLOAT8, INTERPRET
from llmc.codegen.backends.triton.triton_toolchain import load_entry
from llmc.codegen.kernel import Source
from llmc.ir.dtype import DTYPES
from llmc.ir.ops.quantize import FLOAT_CODES
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target
from llmc.testing.case import Bound, Buffer, Case

INTERPRETED = replace(sm_90(), name="cuda:interpret", features=frozenset({INTERPRET}))
TORCH_DTYPES = MappingProxyType({
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "u16": torch.uint16,
    "u32": torch.uint32, "bool": torch.int8, "f8e4m3": torch.float8_e4m3fn,
    "f8e4m3fnuz": torch.float8_e4m3fnuz,
})  # fmt: skip
# Triton's name of each type of 8-bit floats, and the largest number.
_FLOAT8 = MappingProxyType({ELEMENTS[dtype][1]: FLOAT_CODES[dtype] for dtype in FLOAT8})


@contextmanager
def interpreting() -> Any:
    """Run kernels that are loaded inside on the CPU.

    Four faults of Triton 3.6 are corrected meanwhile: with numpy 2.4 it cannot use its scalars as Python integers, the
    result of a scalar comparison has the dtype of its operands, 8-bit floats are rounded wrongly, and those of CDNA 3
    are unknown.
    """
    from triton import knobs

    with knobs.runtime.scope(), _language_restored(), _standard_interpreted(), _patched_once(), _corrected():
        knobs.runtime.interpret = True
        yield


@contextmanager
def _replaced(replacements: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, as (owner, name, value), and restore their values at the end."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def _corrected() -> AbstractContextManager[None]:
    """Return a context in which the faults of Triton's interpreter are corrected (see `interpreting`)."""
    import triton
    from triton.runtime import interpreter

    patch_tensor, patch_core = interpreter._patch_lang_tensor, interpreter._patch_lang_core
    convert = interpreter._convert_float

    def converted(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if _FLOAT8.keys() & {source.name, target.name}:
            return _converted(x, source.name, target.name)
        return convert(x, source, target, mode)

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def patched_core(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        known = lang.dtype.to_ir
        scope.set_attr(lang.dtype, "to_ir", lambda self, b: self if self.name == "fp8e4b8" else known(self, b))

    def splat_as_is(self: Any, ret_ty: Any, arg: Any) -> Any:
        return interpreter.TensorHandle(np.full(ret_ty.shape, arg.data.reshape(-1)[0]), arg.dtype.scalar)

    replacements: list[tuple[Any, str, Any]] = [
        (interpreter.InterpreterBuilder, "create_splat", splat_as_is),
        (interpreter, "_convert_float", converted),
    ]
    if triton.__version__.startswith("3.6"):
        replacements.append((interpreter, "_patch_lang_tensor", patched_tensor))
        replacements.append((interpreter, "_patch_lang_core", patched_core))
    return _replaced(replacements)


def _converted(x: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert the bits of floats from or to 8-bit floats as a GPU does: to the nearest, infinities to the largest."""
    types = {dtype: DTYPES[name].np for name, (_, dtype) in ELEMENTS.items() if DTYPES[name].kind == "f"}
    wide = x.view(types[source]).astype(np.float32)
    if target in _FLOAT8:
        wide = np.clip(wide, -_FLOAT8[target], _FLOAT8[target])
    return wide.astype(types[target]).view(f"u{types[target].itemsize}")


@contextmanager
def _language_restored() -> Any:
    """Remove what Triton's interpreter leaves in the language after a call of a device function.

    Otherwise nothing compiles in this process any more.
    """
    import triton.language as tl

    places = (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
    originals = [(p, dict(vars(p))) for p in places]
    try:
        yield
    finally:
        for p, before in originals:
            for name in vars(p).keys() - before.keys():
                delattr(p, name)
            for name, value in before.items():
                if vars(p).get(name) is not value:
                    setattr(p, name, value)


@contextmanager
def _patched_once() -> Any:
    """Patch the language once instead of in every call of a device function, which takes most of a kernel's time.

    A launch has patched triton.language already; its core is patched in the first call.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    function = interpreter.InterpretedFunction
    done = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if not done and any(value is tl.core for value in self.fn.__globals__.values()):
            interpreter._patch_lang(self.fn)
            done = True
        return self.rewrite()(*args, **kwargs)

    with _replaced([(function, "__call__", call)]):
        yield


@contextmanager
def _standard_interpreted() -> Any:
    """Interpret Triton's own library (tl.sum, tl.max, tl.sigmoid ...), which was compiled when it was imported."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    places = (tl, tl.standard, tl.random, tl.tensor)
    functions = {f for p in places for f in vars(p).values() if isinstance(f, JITFunction)}
    interpreted = {f: InterpretedFunction(f.fn) for f in functions}
    names = [(p, name, f) for p in places for name, f in vars(p).items() if isinstance(f, JITFunction)]
    with _replaced([(p, name, interpreted[f]) for p, name, f in names]):
        yield


def template_function(template: Template) -> Any:
    """Import the module of a template, and return its function; call it inside `interpreting()`.

    Import it there for the first time: modules that were imported before compile for a GPU.
    """
    module = template.module if "." in template.module else f"{PACKAGE}.{template.module}"
    return getattr(importlib.import_module(module), template.function)


def interpret(
    source: Source, buffers: Sequence[Any], sizes: Sequence[int], grid: Sequence[int], peers: Sequence[Any] = ()
) -> None:
    """Run one kernel over all programs of its grid, in order.

    buffers: tensors, tensor descriptors or None. peers: arrays whose addresses the kernel finds in a buffer. Raises
    AssertionError if the kernel accesses memory outside of both, even if it ignores what it reads.
    """
    tensors = [getattr(b, "base", b) for b in buffers if b is not None]
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
    spans += [(m.ctypes.data, m.ctypes.data + m.nbytes) for m in peers]
    from triton.runtime.errors import InterpreterError

    with interpreting(), _within(spans):
        try:
            load_entry(source.text, source.entry)[tuple(grid)](*buffers, *sizes)
        except InterpreterError as e:
            raise (e.__cause__ or e) from None


@contextmanager
def _within(spans: Sequence[tuple[int, int]]) -> Any:
    """Check the addresses of loads and stores against the spans of memory [begin, end)."""
    from triton.runtime.interpreter import InterpreterBuilder

    ordered = sorted(spans)
    begins = np.array([begin for begin, _ in ordered], np.uint64)
    ends = np.array([end for _, end in ordered], np.uint64)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def check(access: str, pointers: Any, mask: Any) -> None:
        at = np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.uint64)
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        span = np.searchsorted(begins, at, side="right").astype(np.int64) - 1
        outside = (span < 0) | (at + size > ends[span])
        assert not outside.any(), f"{access} of {outside.sum()} of {at.size} elements outside of every buffer"

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check("load", ptrs, mask)
        return load(self, ptrs, mask, *rest, **options)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **options)

    replacements = [
        (InterpreterBuilder, "create_masked_load", checked_load),
        (InterpreterBuilder, "create_masked_store", checked_store),
    ]
    with _replaced(replacements):
        yield


def run_case(case: Case, on: Target = INTERPRETED) -> None:
    """Run the kernel in the interpreter on poisoned outputs between guard zones, and compare it with the reference.

    `on` is INTERPRETED, or a target made of it. Raises AssertionError if the kernel rejects its node, writes outside
    its buffers, or computes a wrong result.
    """
    node = case.node
    why = case.kernel.reject(node, on)
    assert why is None, why
    source = case.kernel.emit(node, case.schedule, on)
    bound = Bound(case)
    types = [v.type for v in [*node.operands, *node.results]]
    tensors = [tensor_of(b, t.dtype) for b, t in zip([*bound.operands, *bound.results], types, strict=True)]
    assert not any(m.strides or m.offset != 0 for m in source.maps), "descriptors are row-major here"
    for m in source.maps:
        tensors[m.param] = descriptor(tensors[m.param], [bound.value(d) for d in m.shape], m.box)
    interpret(source, tensors, [bound.value(d) for d in source.sizes], [bound.value(d) for d in source.grid])
    bound.check()


def descriptor(flat: torch.Tensor, shape: Sequence[int], box: Sequence[int]) -> Any:
    """Return the object that a kernel in the interpreter takes as a tensor map of a buffer's first elements."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(flat[: math.prod(shape)].view(*shape), list(box))


def tensor_of(b: Buffer, dtype: str) -> torch.Tensor:
    """Return a view of the buffer's bytes; an empty buffer has an address, too."""
    if len(b.body) == 0:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(b.body).view(TORCH_DTYPES[dtype])
