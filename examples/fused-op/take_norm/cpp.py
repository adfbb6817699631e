"""The CPU kernel in C++; the threads share the rows."""

from __future__ import annotations

from llmc.extend import Node, Schedule, Target
from llmc.extend.cpp import FLOATS, CppKernel, Sizes, pointers


class TakeNorm(CppKernel):
    """take_norm for f32, bf16 and f16."""

    headers = ("llmc_abi.h", "llmc_math.h", "llmc_store.h")  # scalar() reads a float of any dtype, put() rounds one

    def reject(self, node: Node, target: Target) -> str | None:
        dtype = node.operands[0].type.dtype
        return None if dtype in FLOATS else f"the dtype {dtype} is not one of {', '.join(FLOATS)}"

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        x, rows, _ = (v.type for v in node.operands)
        d = sizes(x.shape[1])
        return f"""{pointers(node)}
int64_t lo, hi;
llmc_split(ctx, {sizes(rows.numel)}, 1, &lo, &hi);
for (int64_t r = lo; r < hi; r++) {{
  int64_t source = x1[r];
  float sum = 0;
  for (int64_t i = 0; source >= 0 && i < {d}; i++) {{
    float v = scalar(x0[source * {d} + i]);
    sum += v * v;
  }}
  float scale = 1.0f / sqrtf(sum / {d} + {node.attrs["eps"]!r}f);
  for (int64_t i = 0; i < {d}; i++)
    put(y0 + r * {d} + i, source < 0 ? 0.0f : scalar(x0[source * {d} + i]) * scale * scalar(x2[i]));
}}"""


KERNEL = TakeNorm("take-norm/cpp", ("take_norm",))
