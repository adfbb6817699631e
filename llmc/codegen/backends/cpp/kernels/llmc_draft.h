// Speculative decoding: accepting and drafting tokens (the ops of llmc/ir/ops/draft.py). Thread 0 does all of the work.
// `r` is the number of entries, of which adjacent ones of a row verify its drafts; `width` the length of a row's history.
#ifndef LLMC_DRAFT_H
#define LLMC_DRAFT_H
#include "llmc_abi.h"
#include "llmc_row_columns.h"
namespace llmc {
// Takes the ids of a row's entries up to the first one that differs from the next draft, at most `limit` + 1 of them:
// `taken` is -1 for the others. Counts the taken ids, stores the last one after them, and sets the row's length.
static inline void row_accept(const llmc_ctx* ctx, int32_t* taken, int32_t* tokens, int32_t* length, int32_t* counts,
                              const int32_t* rows, const int32_t* starts, const int32_t* positions,
                              const int32_t* emit, const int32_t* ids, int64_t r, int64_t width, int64_t vocab,
                              int64_t limit) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++) taken[i] = -1;
  for (int64_t i = 0; i < r; i++) {
    int64_t row = rows[i];
    if (row < 0 || starts[i] == starts[i + 1]) continue;
    bool more = i + 1 < r && rows[i + 1] == row;
    if (!emit[i]) {
      if (!more) length[row] = positions[starts[i + 1] - 1] + 1;
      continue;
    }
    int32_t* history = tokens + row * width;
    int64_t at = i, end;  // at: the entry that takes its id; end: the position of that id
    for (;; at++) {
      end = positions[starts[at + 1] - 1] + 1;
      taken[at] = ids[at];
      if (ids[at] >= 0 && ids[at] < vocab) counts[row * vocab + ids[at]]++;
      bool verified = at + 1 < r && at < i + limit && rows[at + 1] == row && starts[at + 1] < starts[at + 2] && emit[at + 1];
      if (!verified || history[end] != ids[at]) break;
    }
    length[row] = (int32_t)end;
    if (end < width) history[end] = ids[at];
    while (i + 1 < r && rows[i + 1] == row) i++;
  }
}
// Returns the index after the latest earlier occurrence of the longest suffix of low to high tokens; 0 for none.
static inline int64_t lookup(const int32_t* tokens, int64_t known, int64_t low, int64_t high) {
  int64_t found = 0, longest = low > 1 ? low - 1 : 0;  // longest: the number of tokens to exceed
  const int32_t last = tokens[known - 1];
  for (int64_t end = known - 1; end > longest && longest < high; end--) {
    if (tokens[end - 1] != last) continue;
    int64_t n = 1;
    while (n < high && n < end && tokens[end - 1 - n] == tokens[known - 1 - n]) n++;
    if (n > longest) {
      longest = n;
      found = end;
    }
  }
  return found;
}
// Drafts tokens after each row's last one by prompt lookup: writes them to the history, and their number to `proposed`
// and to the row's `drafts`. If nothing is found, the number is 0 and the last token is repeated.
static inline void row_propose(const llmc_ctx* ctx, int32_t* proposed, int32_t* tokens, int32_t* drafts,
                               const int32_t* length, const int32_t* rows, const int32_t* starts, const int32_t* emit,
                               int64_t r, int64_t width) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++) {
    int64_t row = rows[i];
    proposed[i] = 0;
    if (row < 0 || !emit[i] || starts[i] == starts[i + 1] || (i + 1 < r && rows[i + 1] == row)) continue;
    int32_t *d = drafts + row * 4, *history = tokens + row * width;
    int64_t known = length[row] + 1, room = width - known;
    if (d[MAX_DRAFTS] < room) room = d[MAX_DRAFTS];
    d[NUM_DRAFTS] = 0;
    if (room <= 0) continue;
    int64_t start = lookup(history, known, d[MIN_NGRAM], d[MAX_NGRAM]), source = start ? start : known - 1;
    for (int64_t j = 0; j < room; j++) history[known + j] = history[source + j];
    if (start) d[NUM_DRAFTS] = proposed[i] = (int32_t)room;
  }
}
// Sets `reach`, where a draft model begins, to one token before the last computed one of each row.
static inline void row_rewind(const llmc_ctx* ctx, int32_t* reach, const int32_t* length, const int32_t* rows,
                              int64_t r) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++)
    if (rows[i] >= 0) reach[rows[i]] = length[rows[i]] > 0 ? length[rows[i]] - 1 : 0;
}
// Stores the token that a draft model has sampled for each row, and sets `reach` to the end of what it has computed.
static inline void row_extend(const llmc_ctx* ctx, int32_t* tokens, int32_t* reach, const int32_t* rows,
                              const int32_t* starts, const int32_t* positions, const int32_t* emit, const int32_t* ids,
                              int64_t r, int64_t width) {
  if (ctx->tid) return;
  for (int64_t i = 0; i < r; i++) {
    int64_t row = rows[i];
    if (row < 0 || starts[i] == starts[i + 1] || (i + 1 < r && rows[i + 1] == row)) continue;
    reach[row] = positions[starts[i + 1] - 1] + 1;
    if (emit[i] && reach[row] < width) tokens[row * width + reach[row]] = ids[i];
  }
}
}  // namespace llmc
#endif
