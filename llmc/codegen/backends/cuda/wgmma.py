"""Shared by the bindings of kernels that use wgmma: sizes, the check of the target, and the generated instruction.

The wgmma instructions of Hopper multiply matrices by a warpgroup, and read their factors from shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from llmc.ir.dtype import DTYPES
from llmc.targets.target import Target

WARPGROUP = 128  # threads
SWIZZLE = 3  # CUtensorMapSwizzle of the tensor maps: 128 bytes
ALIGN = 1024  # alignment of the buffers in shared memory, in bytes
RESERVED = 1024  # bytes of shared memory for barriers and counts
MAX_COLUMNS = 256  # maximum columns of an instruction
Limit = TypeVar("Limit")


def lacks_wgmma(target: Target) -> str | None:
    """Return why kernels that use wgmma cannot run on the target, or None."""
    if target.family == "cuda" and target.arch == "sm_90" and not target.has("interpret"):
        return None
    return f"{target.name} does not have wgmma, the matrix instructions of sm_90"


def deepest_rings(depths: Sequence[int], limits: Sequence[Limit], fits: Callable[[int, Limit], bool]) -> list[int]:
    """Return the number of buffers of the deepest ring that fits each limit, without repetition.

    depths: numbers of buffers, in descending order. limits: of shared memory, such as the blocks that share it.
    """
    deepest = [next((depth for depth in depths if fits(depth, limit)), None) for limit in limits]
    return list(dict.fromkeys(depth for depth in deepest if depth is not None))


class Instruction(NamedTuple):
    """A product of two matrices in shared memory: its depth and types in PTX, the type of a sum, its constraint in
    inline assembly, and the last operands."""

    shape: str
    sum: str
    constraint: str
    last: str


# By the dtype of both factors. An instruction multiplies 32 bytes of the depth.
INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType(
    {
        "bf16": Instruction("k16.f32.bf16.bf16", "float", "f", ", 1, 1, 0, 0"),
        "f8e4m3": Instruction("k32.f32.e4m3.e4m3", "float", "f", ", 1, 1"),
        "i8": Instruction("k32.s32.s8.s8", "int", "r", ""),
    }
)


def multiply(columns: int, dtype: str = "bf16") -> str:
    """Return the function `multiply(d, a, b, add)`: d[64, columns] = a[64, k] @ b[columns, k].T, plus d if `add`.

    One warpgroup executes it asynchronously. a, b: descriptors of matrices of `dtype` in shared memory, of 32 bytes a
    row. columns: a multiple of 8; for i8, 8, 24 or a multiple of 16.
    """
    if columns % 8 or not 8 <= columns <= MAX_COLUMNS or (dtype == "i8" and columns % 16 and columns not in (8, 24)):
        raise ValueError(f"{columns} columns of {dtype}; an instruction has a multiple of 8, at most {MAX_COLUMNS}")
    count, i = columns // 2, INSTRUCTIONS[dtype]
    depth = 32 // (DTYPES[dtype].bits // 8)
    sums = ", ".join(f"%{j}" for j in range(count))
    outputs = ", ".join(f'"+{i.constraint}"(d[{j}])' for j in range(count))
    parameters = f"{i.sum} (&d)[{count}], unsigned long long a, unsigned long long b, int add"
    return (
        f"// d[64, {columns}] = a[64, {depth}] @ b[{columns}, {depth}].T by one warpgroup, asynchronously, "
        "plus d if `add`.\n"
        f"__device__ inline void multiply({parameters}) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{columns}{i.shape} {{{sums}}}, "\n'
        f'               "%{count}, %{count + 1}, p{i.last};\\n}}"\n'
        f'               : {outputs} : "l"(a), "l"(b), "r"(add));\n'
        f"}}"
    )


def multiply_registers(columns: int) -> str:
    """Return `multiply(d, a, b, add)`: d[64, columns] = a[64, 16] @ b[columns, 16].T in bf16, plus d if `add`.

    One warpgroup executes it asynchronously. a: four registers of a thread, which must not change until the product has
    completed. b: the low word of the descriptor of a matrix in shared memory, of 32 bytes a row. columns: a multiple of
    8, at most 256.
    """
    if columns % 8 or not 8 <= columns <= MAX_COLUMNS:
        raise ValueError(f"{columns} columns; an instruction has a multiple of 8, at most {MAX_COLUMNS}")
    count, i = columns // 2, INSTRUCTIONS["bf16"]
    sums = ", ".join(f"%{j}" for j in range(count))
    outputs = ", ".join(f'"+f"(d[{j}])' for j in range(count))
    factors = ", ".join(f"%{count + j}" for j in range(4))
    return (
        f"// d[64, {columns}] = a[64, 16] @ b[{columns}, 16].T by one warpgroup, asynchronously, plus d if `add`.\n"
        f"__device__ inline void multiply(float (&d)[{count}], const unsigned (&a)[4], unsigned b, int add) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\n.reg .b32 high;\\n.reg .b64 x;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"\n'
        f'               "mov.b32 high, " MATRIX_HIGH ";\\nmov.b64 x, {{%{count + 4}, high}};\\n"\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{columns}{i.shape} {{{sums}}}, "\n'
        f'               "{{{factors}}}, x, p, 1, 1, 0;\\n}}"\n'
        f'               : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));\n'
        f"}}"
    )
