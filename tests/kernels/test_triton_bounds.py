"""A kernel in the interpreter may access its buffers only, even if it ignores what it reads."""

from __future__ import annotations

import pytest
import torch
from kernels.triton_harness import interpret

from llmc.codegen.kernel import Source

TEXT = """
import triton
import triton.language as tl

@triton.jit
def copy(x_ptr, y_ptr, read, written):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at, mask=at < read, other=0.0)
    tl.store(y_ptr + at, x, mask=at < written)
"""


@pytest.mark.parametrize(
    ("read", "written", "message"),
    [
        (13, 13, ""),
        (14, 13, "load of 1 of 14 elements outside of every buffer"),
        (13, 15, "store of 2 of 15 elements outside of every buffer"),
    ],
)
def test_an_access_outside_of_the_buffers(read: int, written: int, message: str) -> None:
    memory = torch.arange(64, dtype=torch.float32)
    x, y = memory[3:16], memory[32:45]  # neither begins nor ends where the memory does
    source = Source("copy", "triton", TEXT)
    if message:
        with pytest.raises(AssertionError, match=message):
            interpret(source, [x, y], [read, written], [1])
    else:
        interpret(source, [x, y], [read, written], [1])
        assert torch.equal(x, y)
