// What a kernel is called with, and how threads split a range. Every thread of the pool runs every kernel; between
// kernels there is a barrier, inside a kernel there is none.
#ifndef LLMC_ABI_H
#define LLMC_ABI_H
#include <stdint.h>
#include <string.h>
typedef struct {
  int tid, nthreads;
  char* scratch;  // this thread's own, 64-byte aligned
  int64_t scratch_bytes;
} llmc_ctx;
// This thread's part [*lo, *hi) of [0, n), cut at multiples of `grain`; parts differ by at most one grain.
static inline void llmc_split(const llmc_ctx* ctx, int64_t n, int64_t grain, int64_t* lo, int64_t* hi) {
  int64_t parts = (n + grain - 1) / grain, t = ctx->nthreads;
  int64_t a = parts * ctx->tid / t * grain, b = parts * (ctx->tid + 1) / t * grain;
  *lo = a < n ? a : n;
  *hi = b < n ? b : n;
}
#endif
