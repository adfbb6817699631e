"""The toy artifact of `artifact.tiny` for the installed GPU: kernels compiled by NVRTC, calling convention cuda-1."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from artifact import tiny
from llmc_runtime.format import expr
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Buffer, Launch, Program

from llmc.artifact.write import Parts
from llmc.codegen.build import Binary

SHARED = 100 << 10
_BODY = tiny.KERNEL[tiny.KERNEL.index("  const int32_t *rows") : tiny.KERNEL.rindex("}")]
_ROW = "int32_t r = rows[i], len = length[r];"
_WAIT = 'asm volatile("griddepcontrol.wait;"); asm volatile("griddepcontrol.launch_dependents;");'
TYPES = "typedef int int32_t; typedef long long int64_t;\n"
# A single thread computes everything. `stamp`, launched before it, sleeps and uses more than 48 KiB of shared memory.
TOY = f"""{TYPES}
extern "C" __global__ void toy({", ".join(f"void* a{i}" for i in range(14))}, int n0, int n1, int n2, int n3, int n4,
                               int n5, void* none, void* none2) {{
  WAIT
  if (blockIdx.x || threadIdx.x) return;
  void* a[14] = {{{", ".join(f"a{i}" for i in range(14))}}};
  int64_t n[6] = {{n0, n1, n2, n3, n4, n5}};
{_BODY.replace(_ROW, "if (rows[i] < 0) continue; " + _ROW)}
}}
"""
STAMP = f"""{TYPES}
extern "C" __global__ void stamp(int32_t* out, int32_t* tokens, int t, void* none, void* none2) {{
  extern __shared__ int shared[];
  WAIT
  shared[threadIdx.x] = threadIdx.x;
  shared[{SHARED // 4 - 1}] = t;
  __syncthreads();
  for (int i = 0; i < 200; i++) __nanosleep(100);
  if (!threadIdx.x && !blockIdx.x && shared[{SHARED // 4 - 1}] == t) atomicAdd(out, gridDim.y);
}}
"""


def nvrtc(text: str, arch: str) -> bytes:
    """Compile a text to a cubin."""
    from cuda.bindings import nvrtc as n

    status, program = n.nvrtcCreateProgram(text.encode(), b"k.cu", 0, [], [])
    assert not status
    (status,) = n.nvrtcCompileProgram(program, 2, [f"-arch={arch}".encode(), b"--std=c++17"])
    if status:
        _, size = n.nvrtcGetProgramLogSize(program)
        log = b" " * size
        n.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = n.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    n.nvrtcGetCUBIN(program, cubin)
    return cubin


def kernel(text: str, entry: str, arch: str, shared: int = 0) -> Binary:
    """Return a kernel of an artifact; WAIT in the text becomes griddepcontrol.wait on sm_90 and later."""
    text = text.replace("WAIT", _WAIT if int(arch[3:]) >= 90 else "")
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Binary(key, text, nvrtc(text, arch), entry, 128, shared, suffix="cubin", language="cu", abi="cuda-1")


def parts(folder: Path, arch: str, weights: object = ...) -> Parts:
    """Return the parts of an artifact: decode graphs for one row and for more, and a step; two launches each."""
    toy, stamp = kernel(TOY, "toy", arch), kernel(STAMP, "stamp", arch, SHARED)
    programs = [_program(n, u, r, toy, stamp, arch) for n, u, r in (
        ("decode1", True, (1, 1)), ("decode", True, (2, tiny.ROWS)), ("step", False, (1, tiny.ROWS)))]  # fmt: skip
    return replace(
        tiny.parts(folder, weights=weights),
        target=TargetInfo(f"cuda:{arch}", arch, ()),
        kernels=(toy, stamp),
        programs=tuple(programs),
    )


def _program(name: str, uniform: bool, rows: tuple[int, int], toy: Binary, stamp: Binary, arch: str) -> Program:
    old = tiny.program(name, "ab" * 16, "cd" * 16, uniform)
    arena = Buffer("scratch", "arena", "i32", (expr.of(2),), expr.of(8))
    pdl, args, end = int(arch[3:]) >= 90, old.launches[0].args, len(old.buffers)
    launches = (
        Launch(stamp.hash, "stamp", (end, 3), (expr.of("T"),), (expr.of(1), expr.of("T")), 128, SHARED, pdl=pdl),
        Launch(toy.hash, "toy", args, old.launches[0].sizes, (expr.parse("ceil(R,2)"),), 128, pdl=pdl, op="toy"),
    )
    serves = {"R": rows} if uniform else old.serves
    return replace(
        old, buffers=(*old.buffers, arena), launches=launches, step=None, arena_bytes=256, serves=serves
    )  # fmt: skip
