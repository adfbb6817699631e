"""The toy artifact of `artifact.tiny` for the driver without a GPU: the same model, with CUDA's calling convention."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from artifact import tiny
from llmc_runtime.format import expr
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Buffer, Launch, Program

from llmc.artifact.write import Parts
from llmc.codegen.binary import Binary

_BODY = tiny.KERNEL[tiny.KERNEL.index("  const int32_t *rows") : tiny.KERNEL.rindex("}")]
_ROW = "int32_t r = rows[i], len = length[r];"
KERNEL = f"""
#include <stdint.h>
extern "C" {{ extern const int num_params; const int num_params = 14 + 6 + 2; }}
extern "C" void toy(void** params, const unsigned* grid) {{
  void* a[14];
  int64_t n[6];
  for (int i = 0; i < 14; i++) a[i] = *(void**)params[i];
  for (int i = 0; i < 6; i++) n[i] = *(int32_t*)params[14 + i];
  if (*(void**)params[20] || *(void**)params[21] || grid[1] != 1 || grid[2] != 1) __builtin_trap();
  if (grid[0] != (unsigned)((n[0] + 1) / 2)) __builtin_trap();
{_BODY.replace(_ROW, "if (rows[i] < 0) continue; " + _ROW)}
}}
"""
# Counts its runs and sums up its rows in the arena; runs T blocks along y.
STAMP = """
#include <stdint.h>
extern "C" { extern const int num_params; const int num_params = 1 + 1 + 2; }
extern "C" void stamp(void** params, const unsigned* grid) {
  int32_t* out = *(int32_t**)params[0];
  if (grid[1] != *(uint32_t*)params[1]) __builtin_trap();
  out[0]++; out[1] += *(int32_t*)params[1];
}
"""


def kernel(text: str, entry: str, shared: int = 0) -> Binary:
    """Return a source text as a kernel for the driver without a GPU."""
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Binary(key, text, tiny.binary(text), entry, 128, shared, suffix="cubin", abi="cuda-1")


def program(name: str, uniform: bool, rows: tuple[int, int] = (1, tiny.ROWS)) -> Program:
    """Return a program with two launches: the stamp, and the toy, which may start early."""
    old = tiny.program(name, "ab" * 16, "cd" * 16, uniform)
    arena = Buffer("scratch", "arena", "i32", (expr.of(2),), expr.of(8))
    toy, stamp = kernel(KERNEL, "toy"), kernel(STAMP, "stamp", 64 << 10)
    launches = (
        Launch(stamp.hash, "stamp", (len(old.buffers),), (expr.of("T"),), (expr.of(1), expr.of("T")), 128, 64 << 10),
        Launch(
            toy.hash, "toy", old.launches[0].args, old.launches[0].sizes, (expr.parse("ceil(R,2)"),), 128,
            loc="model.toy", op="toy", pdl=True,
        ),
    )  # fmt: skip
    serves = {"R": rows} if uniform else old.serves
    return replace(
        old, buffers=(*old.buffers, arena), launches=launches, step=None, arena_bytes=256, serves=serves,
    )  # fmt: skip


def parts(folder: Path, weights: object = ..., programs: tuple[Program, ...] = ()) -> Parts:
    """Return the artifact's parts, by default with decode programs for two ranges of rows, and the ragged step."""
    default = (program("decode1", True, (1, 1)), program("decode", True, (2, tiny.ROWS)), program("step", False))
    return replace(
        tiny.parts(folder, weights=weights),
        target=TargetInfo("cuda:sm_90", "sm_90", ()),
        kernels=(kernel(KERNEL, "toy"), kernel(STAMP, "stamp", 64 << 10)),
        programs=programs or default,
    )
