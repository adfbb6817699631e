// What a kernel is called with, and how a range is split. A kernel is called once for every tid below nthreads, by any
// thread, at any time of its launch: parts must neither wait for each other nor read what another one writes.
#ifndef LLMC_ABI_H
#define LLMC_ABI_H
#include <stdint.h>
#include <string.h>
typedef struct {
  int tid, nthreads;
  char* scratch;  // the calling thread's own, 64-byte aligned; it holds nothing between calls
  int64_t scratch_bytes;
} llmc_ctx;
// The part [*lo, *hi) of [0, n), cut at multiples of `grain`; parts differ by at most one grain.
static inline void llmc_split(const llmc_ctx* ctx, int64_t n, int64_t grain, int64_t* lo, int64_t* hi) {
  int64_t parts = (n + grain - 1) / grain, t = ctx->nthreads;
  int64_t a = parts * ctx->tid / t * grain, b = parts * (ctx->tid + 1) / t * grain;
  *lo = a < n ? a : n;
  *hi = b < n ? b : n;
}
#endif
