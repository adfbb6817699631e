// Pooling of prompts (the ops of llmc/ir/ops/pooling.py). `t` is the number of tokens, `r` the number of entries, `d` the
// number of columns. Thread 0 does the work of the integer ops, which is tiny; threads divide the columns of a mean.
#ifndef LLMC_POOLING_H
#define LLMC_POOLING_H
#include "llmc_abi.h"
#include "llmc_math.h"
namespace llmc {
static inline void row_first(const llmc_ctx* ctx, int32_t* first, const int32_t* starts, int64_t r) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++) first[i] = starts[i + 1] > starts[i] ? starts[i] : -1;
}
static inline void row_reach(const llmc_ctx* ctx, int32_t* reach, const int32_t* starts, const int32_t* positions,
                             int64_t r, int64_t t) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < t; i++) reach[i] = -1;
  for (int64_t i = 0; i < r; i++)
    for (int64_t j = starts[i]; j < starts[i + 1]; j++)
      if (positions[j] >= 0) reach[j] = positions[starts[i + 1] - 1];
}
template <class T>
static inline void row_mean(const llmc_ctx* ctx, float* mean, const T* x, const int32_t* starts, int64_t r, int64_t d) {
  int64_t lo, hi;
  llmc_split(ctx, d, 64, &lo, &hi);
  for (int64_t i = 0; i < r; i++) {
    float* to = mean + i * d;
    int64_t n = starts[i + 1] - starts[i];
    for (int64_t c = lo; c < hi; c++) to[c] = 0.0f;
    for (int64_t j = starts[i]; j < starts[i + 1]; j++)
      for (int64_t c = lo; c < hi; c++) to[c] += widen(x[j * d + c]);
    if (n > 1)
      for (int64_t c = lo; c < hi; c++) to[c] /= (float)n;
  }
}
static inline void row_advance(const llmc_ctx* ctx, int32_t* length, const int32_t* rows, const int32_t* starts,
                               const int32_t* positions, int64_t r) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++)
    if (rows[i] >= 0 && starts[i] < starts[i + 1] && (i + 1 == r || rows[i + 1] != rows[i]))
      length[rows[i]] = positions[starts[i + 1] - 1] + 1;
}
}  // namespace llmc
#endif
