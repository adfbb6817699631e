"""What the kernels that use wgmma share: sizes, the check of the target, and the generated instruction.

wgmma are the matrix instructions of warpgroups on Hopper, which read their factors from shared memory.
"""

from __future__ import annotations

from llmc.targets.target import Target

WARPGROUP = 128  # threads
SWIZZLE = 3  # of tensor maps: 128 bytes
ALIGN = 1024  # alignment of the buffers in shared memory, in bytes
RESERVED = 1024  # bytes of shared memory for barriers and counts
MAX_COLUMNS = 256  # of an instruction


def lacks_wgmma(target: Target) -> str | None:
    """Return why kernels that use wgmma cannot run on the target, or None."""
    if target.family == "cuda" and target.arch == "sm_90" and not target.has("interpret"):
        return None
    return f"{target.name} does not have wgmma, the matrix instructions of sm_90"


def multiply(columns: int) -> str:
    """Return the function `multiply(d, a, b, add)`: d[64, columns] = a[64, 16] @ b[columns, 16].T, plus d if `add`.

    One warpgroup executes it asynchronously. a, b: descriptors of matrices in shared memory. columns: a multiple of 8.
    """
    if columns % 8 or not 8 <= columns <= MAX_COLUMNS:
        raise ValueError(f"{columns} columns; an instruction has a multiple of 8, at most {MAX_COLUMNS}")
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    taken = f"float (&d)[{count}], unsigned long long a, unsigned long long b, int add"
    return (
        f"// d[64, {columns}] = a[64, 16] @ b[{columns}, 16].T by one warpgroup, asynchronously, plus d if `add`.\n"
        f"__device__ inline void multiply({taken}) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, "\n'
        f'               "%{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"\n'
        f'               : {outputs} : "l"(a), "l"(b), "r"(add));\n'
        f"}}"
    )
