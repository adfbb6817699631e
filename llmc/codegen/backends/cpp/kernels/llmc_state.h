// Device rows: laying out a step, reading histories, committing tokens (the ops of llmc/ir/ops/state.py). A row of -1 is
// padding and is neither read nor written. Thread 0 does all of the work, which is tiny. `t` is the number of tokens, `r`
// the number of entries, `width` the number of columns of the row state that is read or written.
#ifndef LLMC_STATE_H
#define LLMC_STATE_H
#include "llmc_abi.h"
namespace llmc {
static inline void row_spans(const llmc_ctx* ctx, int32_t* starts, int32_t* token_row, int32_t* positions,
                             const int32_t* rows, const int32_t* qlens, const int32_t* length, int64_t r, int64_t t) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < t; i++) token_row[i] = positions[i] = -1;
  int32_t at = 0, first = 0;  // first: offset of the first token of the entry's row
  for (int64_t i = 0; i < r; i++) {
    starts[i] = at;
    if (!i || rows[i] != rows[i - 1]) first = at;
    if (rows[i] >= 0)
      for (int32_t j = at; j < at + qlens[i] && j < t; j++) {
        token_row[j] = rows[i];
        positions[j] = length[rows[i]] + j - first;
      }
    at += qlens[i];
  }
  starts[r] = at;
}
static inline void row_ids(const llmc_ctx* ctx, int32_t* ids, const int32_t* tokens, const int32_t* token_row,
                           const int32_t* positions, int64_t t, int64_t width) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < t; i++)
    ids[i] = token_row[i] < 0 ? 0 : tokens[token_row[i] * width + (positions[i] < 0 ? 0 : positions[i])];
}
static inline void row_slots(const llmc_ctx* ctx, int32_t* slots, const int32_t* pages, const int32_t* token_row,
                             const int32_t* positions, int64_t t, int64_t width, int32_t page) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < t; i++) {
    int32_t at = positions[i];
    bool stored = token_row[i] >= 0 && at >= 0;
    slots[i] = stored ? pages[token_row[i] * width + at / page] * page + at % page : -1;
  }
}
static inline void row_last(const llmc_ctx* ctx, int32_t* last, const int32_t* starts, int64_t r) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++) last[i] = starts[i + 1] > starts[i] ? starts[i + 1] - 1 : -1;
}
static inline void row_commit(const llmc_ctx* ctx, int32_t* tokens, int32_t* length, int32_t* counts,
                              const int32_t* rows, const int32_t* starts, const int32_t* positions,
                              const int32_t* emit, const int32_t* ids, int64_t r, int64_t width, int64_t vocab) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++) {
    int64_t row = rows[i];
    if (row < 0 || starts[i] == starts[i + 1] || (i + 1 < r && rows[i + 1] == row)) continue;
    length[row] = positions[starts[i + 1] - 1] + 1;
    if (!emit[i]) continue;
    if (length[row] < width) tokens[row * width + length[row]] = ids[i];
    if (ids[i] >= 0 && ids[i] < vocab) counts[row * vocab + ids[i]]++;
  }
}
}  // namespace llmc
#endif
