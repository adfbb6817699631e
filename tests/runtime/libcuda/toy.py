"""The toy artifact of `artifact.tiny` for the driver without a GPU: the same model, with CUDA's calling convention."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from artifact import tiny
from kernel_cache import library
from llmc_runtime.format import expr
from llmc_runtime.format import group_memory as memory
from llmc_runtime.format.manifest import TargetInfo
from llmc_runtime.format.program import Buffer, Launch, Program

from llmc.artifact.write import Parts
from llmc.codegen.build import Binary

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


RANKS = 2
# Exchanges the sampled ids with the other ranks: an id that another rank does not have becomes -1.
AGREE = f"""
#include <stdint.h>
#include <time.h>
static int64_t now() {{ timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ll + t.tv_nsec; }}
extern "C" {{ extern const int num_params; const int num_params = 2 + 1 + 2; }}
extern "C" void agree(void** params, const unsigned* grid) {{
  int32_t* ids = *(int32_t**)params[0];
  int64_t* group = *(int64_t**)params[1];
  int n = *(int32_t*)params[2];
  int64_t rank = group[{memory.RANK_WORD}], limit = group[{memory.LIMIT_WORD}];
  int32_t* status = (int32_t*)group[{memory.STATUS_WORD}];
  uint32_t* counter = (uint32_t*)((char*)group + {memory.COUNTERS});
  if (grid[0] != {memory.PROGRAMS}) __builtin_trap();  // of more, which the runtime does not launch
  if (group[{memory.ENDED_WORD}]) return;
  uint64_t slot = *counter % {memory.SLOTS};
  auto at = [&](int owner, int source) {{
    char* first = (char*)group[{memory.PEERS_WORD} + owner] + {memory.DATA};
    return (int64_t*)(first + (slot * {RANKS} + source) * {memory.CHUNK});
  }};
  for (int r = 0; r < {RANKS}; r++)
    for (int i = 0; i < n && r != rank; i++) __atomic_store_n(at(r, rank) + i, (int64_t)ids[i], __ATOMIC_RELEASE);
  int64_t begin = now();
  for (int r = 0; r < {RANKS}; r++)
    for (int i = 0; i < n && r != rank; i++) {{
      int64_t* word = at(rank, r) + i;
      while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == -1) {{
        if (now() - begin > limit) *status = 110;
        if (__atomic_load_n(status, __ATOMIC_ACQUIRE)) {{ group[{memory.ENDED_WORD}] = 1; return; }}
      }}
      if (*word != ids[i]) ids[i] = -1;
      *word = -1;
    }}
  ++*counter;
}}
"""


def kernel(text: str, entry: str, shared: int = 0) -> Binary:
    """Return a source text as a kernel for the driver without a GPU."""
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Binary(key, text, library(text, "-O1"), entry, 128, shared, suffix="cubin", abi="cuda-1")


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


def of_ranks(p: Program) -> Program:
    """Return the program for RANKS ranks, which ends by comparing their ids."""
    nbytes = expr.of(memory.group_bytes(RANKS))
    group = Buffer("group", "group", "u8", (nbytes,), nbytes)
    ids = next(i for i, b in enumerate(p.buffers) if b.name == "ids")
    agree = Launch(
        kernel(AGREE, "agree").hash, "agree", (ids, len(p.buffers)), (expr.of("R"),), (expr.of("300*R"),), 128
    )
    return replace(p, buffers=(*p.buffers, group), launches=(*p.launches, agree), ranks=RANKS)


def parts(folder: Path, weights: object = ..., programs: tuple[Program, ...] = ()) -> Parts:
    """Return the artifact's parts, by default with decode programs for two ranges of rows, and the ragged step."""
    default = (program("decode1", True, (1, 1)), program("decode", True, (2, tiny.ROWS)), program("step", False))
    return replace(
        tiny.parts(folder, weights=weights),
        target=TargetInfo("cuda:sm_90", "sm_90", ()),
        kernels=(kernel(KERNEL, "toy"), kernel(STAMP, "stamp", 64 << 10), kernel(AGREE, "agree")),
        programs=programs or default,
    )


# Compares the ids of a rank with those of RANKS ranks and with their sum: an id that another rank does not have becomes
# -1.
COMPARE = f"""
#include <stdint.h>
extern "C" {{ extern const int num_params; const int num_params = 3 + 1 + 2; }}
extern "C" void compare(void** params, const unsigned* grid) {{
  int32_t *ids = *(int32_t**)params[0], *all = *(int32_t**)params[1], *sum = *(int32_t**)params[2];
  int n = *(int32_t*)params[3];
  for (int i = 0; i < n; i++)
    for (int r = 0; r < {RANKS}; r++) if (all[r * n + i] != ids[i] || sum[i] != {RANKS} * ids[i]) ids[i] = -1;
}}
"""
ROW_BYTES = 4 * tiny.ROWS  # of ids


def nccl_call(function: str) -> Binary:
    """Return the description of a call of NCCL on i32."""
    text = json.dumps({"function": function, "dtype": "i32"})
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Binary(key, text, text.encode(), function, suffix="json", language="txt", abi="nccl-1")


def with_nccl(p: Program) -> Program:
    """Return the program for RANKS ranks, which ends by comparing their ids, gathered and summed by NCCL."""
    ids, count = next(i for i, b in enumerate(p.buffers) if b.name == "ids"), len(p.buffers)
    rows, nbytes = expr.of("R"), expr.of("4*R")
    gathered = Buffer("all", "arena", "i32", (expr.of(RANKS), rows), expr.of(f"{4 * RANKS}*R"), 64)
    total = Buffer("sum", "arena", "i32", (rows,), nbytes, 64 + RANKS * ROW_BYTES)
    launches = [
        Launch(nccl_call(name).hash, name, (ids, count + i), (rows,))
        for i, name in enumerate(("ncclAllGather", "ncclAllReduce"))
    ]
    compare = kernel(COMPARE, "compare").hash
    launches.append(
        Launch(compare, "compare", (ids, count, count + 1), (rows,), (expr.of(1),), 128, op="compare", pdl=True)
    )
    return replace(p, buffers=(*p.buffers, gathered, total), launches=(*p.launches, *launches), ranks=RANKS)


def nccl_parts(folder: Path) -> Parts:
    """Return the parts of an artifact of RANKS ranks that use NCCL."""
    programs = (program("decode1", True, (1, 1)), program("decode", True, (2, tiny.ROWS)), program("step", False))
    made = parts(folder, programs=tuple(map(with_nccl, programs)))
    calls = (nccl_call("ncclAllGather"), nccl_call("ncclAllReduce"))
    return replace(made, kernels=(*made.kernels, kernel(COMPARE, "compare"), *calls))
