"""Kernels on tensors of more than 2^31 elements: no address is computed in 32 bits, none is outside of its buffer.

The interpreter runs the first and the last program along each axis of the grid, and checks every sum, difference and
product of int32. Tensors of floats are memory that is reserved, but not used until a program writes it.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from draw import SEED
from kernels.cases import COLLECTIVES, Text
from kernels.real_sizes import REAL
from kernels.triton_harness import INTERPRETED, TORCH_DTYPES, descriptor, interpret

from llmc.codegen.kernel_table import TRITON
from llmc.extension import resolve
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.example import named_operands, node_drawing
from llmc.ir.graph import Node, Value
from llmc.ir.interp import round_to_type

RANKS = tuple(f"triton/{name}" for name in (*COLLECTIVES, "all_reduce_norm"))  # which need other ranks
NORESERVE = 0x4000  # MAP_NORESERVE of Linux: reserve addresses, not memory
LARGE = 2**31  # elements
DRAWN = 2**24  # the most integers of a tensor that are drawn; larger tensors of integers are zeros


def large(text: Text) -> Text:
    """Return the node with KV pools of more than 2^31 elements, and short axes that programs loop over."""
    changes = {
        r"state i32\[256, 2560\]": "state i32[256, 4]",
        r"state (\w+)\[256": r"state \1[R",
        r"bf16\[8, T, 4096\]": "bf16[T, 16, 4096]",
    }
    if pool := re.search(r"state bf16\[4096, ([\d, ]+)\]", text.types):
        pages = LARGE // math.prod(map(int, pool[1].split(", "))) + 1
        changes[r"state bf16\[4096, "] = f"state bf16[{pages}, "
    if "attention {layer" in text.call:
        changes |= {r"\[T, \d+, 128\]": "[T, 1024, 512]", r"f32\[32\]": "f32[1024]"}
    for pattern, new in changes.items():
        text = replace(text, **{p: re.sub(pattern, new, getattr(text, p)) for p in ("types", "results")})
    return text


def number(size: Dim, sizes: Mapping[str, int]) -> int:
    return int(size.subs(sizes).const or 0)


def step_of(node: Node) -> dict[str, int]:
    """Return the tokens and rows of a step in which the largest operand or result has more than 2^31 elements.

    Small ones if no possible step has such a tensor.
    """
    sizes = [{"T": 2 ** (n + 1), "R": 2**n} for n in range(6, 20)]
    values = [*node.operands, *node.results]
    return next((s for s in sizes if any(number(v.type.numel, s) > LARGE for v in values)), sizes[0])


def zeros(v: Value, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return zeros, which take no memory until they are written."""
    nbytes = number(v.type.numel, sizes) * DTYPES[v.type.dtype].bits // 8
    memory = mmap.mmap(-1, max(16, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(TORCH_DTYPES[v.type.dtype])


def tensors(node: Node, sizes: Mapping[str, int]) -> Iterator[Any]:
    """Yield operands, then results: integers are drawn from the op's declaration, floats are zeros."""
    drawing = node_drawing(node, sizes, None, np.random.default_rng(SEED), exact=False)
    of: dict[str, torch.Tensor] = {}
    for name, v in named_operands(node):
        dtype = DTYPES[v.type.dtype]
        of[name] = zeros(v, sizes)
        if dtype.kind != "f" and number(v.type.numel, sizes) <= DRAWN:
            shape = tuple(number(d, sizes) for d in v.type.shape)
            array = round_to_type(drawing.draw(name, shape, v.type.dtype), v.type).astype(dtype.np)
            of[name] = torch.from_numpy(array.reshape(-1)).view(TORCH_DTYPES[v.type.dtype])
        yield of[name]
    written = iter(node.op.writes)
    for v in node.results:
        yield of[next(written)] if v.type.state else zeros(v, sizes)


@pytest.fixture
def corners(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], list[int]]:
    """A function that sets the grid, and returns one whose programs are its first and last along each axis.

    Kernels raise AssertionError at an overflow.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    checking = replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", checking)
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)  # would copy all tensors
    set_size, set_index = builder.set_grid_dim, builder.set_grid_idx

    def set_grid(grid: Sequence[int]) -> list[int]:
        full = [*grid, 1, 1][:3]

        def set_corner(self: Any, *corner: int) -> None:
            set_index(self, *(i * (n - 1) for i, n in zip(corner, full, strict=True)))

        monkeypatch.setattr(builder, "set_grid_dim", lambda self, *_: set_size(self, *full))
        monkeypatch.setattr(builder, "set_grid_idx", set_corner)
        return [min(n, 2) for n in full]

    return set_grid


CASES = [
    pytest.param(name, text, id=f"{name}-{i}", marks=() if name == "triton/packed_attention" else pytest.mark.drawn)
    for name, texts in REAL.items()
    for i, text in enumerate(texts)
    if name not in RANKS and "tokens=" not in text.call  # a step is not drawn for a symbolic number of tokens
]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_addresses(corners: Any, name: str, text: Text) -> None:
    kernel = resolve(TRITON[name])
    (node,) = large(text).graph().nodes
    sizes = step_of(node)
    assert kernel.reject(node, INTERPRETED) is None
    offered = kernel.schedules(node, INTERPRETED)
    best = min(offered, key=lambda s: kernel.cost_us(node, s, INTERPRETED, sizes))
    source = kernel.emit(node, best, INTERPRETED)
    buffers = list(tensors(node, sizes))
    for m in source.maps:
        buffers[m.param] = descriptor(buffers[m.param], [number(d, sizes) for d in m.shape], m.box)
    grid = corners([number(d, sizes) for d in source.grid])
    interpret(source, buffers, [number(d, sizes) for d in source.sizes], grid)
