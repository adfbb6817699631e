// The calling convention of kernels. A launch calls the kernel once for every tid below nthreads, on any thread and in
// any order, possibly concurrently: parts must not wait for each other or read what another part writes. Only collectives
// wait, for the same part of other ranks.
#ifndef LLMC_ABI_H
#define LLMC_ABI_H
#include <stdint.h>
#include <string.h>
typedef struct {
  int tid, nthreads;
  char* scratch;  // private to the calling thread, 64-byte aligned, undefined at the start of a call
  int64_t scratch_bytes;
  void* group;  // the group of ranks (see llmc_group.h), or null
} llmc_ctx;
// Sets [*lo, *hi) to this part of [0, n), cut at multiples of `grain`; parts differ by at most one grain.
static inline void llmc_split(const llmc_ctx* ctx, int64_t n, int64_t grain, int64_t* lo, int64_t* hi) {
  int64_t parts = (n + grain - 1) / grain, t = ctx->nthreads;
  int64_t a = parts * ctx->tid / t * grain, b = parts * (ctx->tid + 1) / t * grain;
  *lo = a < n ? a : n;
  *hi = b < n ? b : n;
}
#endif
