"""A language of another package, second of two files: a kernel in C, and the extension that declares it."""

from __future__ import annotations

from llmc.extend import Extension, Kernel, Node, Schedule, Source, Target


class Mul(Kernel):
    """mul of two equal shapes, in C; the first thread computes everything."""

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        text = """// c/mul
typedef struct { int tid, nthreads; char* scratch; long long scratch_bytes; } context;
void c_mul(const context* ctx, void* const* args, const long long* sizes) {
  const float *x = args[0], *y = args[1];
  float* z = args[2];
  for (long long i = 0; ctx->tid == 0 && i < sizes[0]; i++) z[i] = x[i] * y[i];
}
"""
        return Source("c_mul", "c", text, sizes=(node.result.type.numel,))


MUL = Mul("c/mul", ("mul",), "c", opt_in=True)
EXTENSION = Extension(
    "c-kernels",
    kernels={"c/mul": "codegen.c_kernels:MUL"},
    toolchains={"c": "codegen.c_toolchain:CToolchain.find"},
)
