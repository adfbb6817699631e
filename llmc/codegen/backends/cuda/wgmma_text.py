"""Generated CUDA C++ of a product of warpgroups for any number of columns."""

from __future__ import annotations

MOST = 256  # columns of an instruction


def multiply(columns: int) -> str:
    """Return the function `multiply(d, a, b, add)`: d[64, columns] = a[64, 16] @ b[columns, 16].T, plus d if `add`.

    One warpgroup executes it asynchronously. a, b: descriptors of matrices in shared memory. columns: a multiple of 8.
    """
    if columns % 8 or not 8 <= columns <= MOST:
        raise ValueError(f"{columns} columns; an instruction has a multiple of 8, at most {MOST}")
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
