// all_reduce and all_gather over the ranks of ctx->group. See llmc_group.h.
#ifndef LLMC_COLLECTIVE_H
#define LLMC_COLLECTIVE_H
#include "llmc_group.h"
#include "llmc_store.h"
namespace llmc {
// y = the sum over the ranks of `n` elements, in the order of the ranks and in float32; y may be x.
template <class T>
static inline void all_reduce(const llmc_ctx* ctx, T* y, const T* x, int64_t n) {
  Group* g = (Group*)ctx->group;
  constexpr int64_t most = CHUNK / (int64_t)sizeof(T);
  int64_t lo, hi;
  llmc_split(ctx, n, 64, &lo, &hi);
  for (int64_t at = lo; at < hi; at += most) {
    int64_t count = hi - at < most ? hi - at : most;
    uint32_t number;
    if (!exchange(g, ctx->tid, x + at, count * (int64_t)sizeof(T), &number)) return;
    auto add = [&](int64_t i, auto lanes) {
      vf total = get((const T*)chunk(g, 0, ctx->tid, number) + i, lanes);
      for (int r = 1; r < g->ranks; r++) total += get((const T*)chunk(g, r, ctx->tid, number) + i, lanes);
      set(y + at + i, total, lanes);
    };
    int64_t i = 0;
    for (; i + VN <= count; i += VN) add(i, Full{});
    if (i < count) add(i, Part{(int)(count - i)});
  }
}
// Copies the bytes [at, at + count) of an operand [rows, width] to its place in the result [rows, stride].
static inline void place(char* y, const char* x, int64_t at, int64_t count, int64_t width, int64_t stride) {
  while (count > 0) {
    int64_t row = at / width, column = at % width, n = width - column < count ? width - column : count;
    memcpy(y + row * stride + column, x, n);
    x += n, at += n, count -= n;
  }
}
// y[row] = the rows of the ranks' operands one after the other; an operand has `rows` rows of `width` bytes.
static inline void all_gather(const llmc_ctx* ctx, char* y, const char* x, int64_t rows, int64_t width) {
  Group* g = (Group*)ctx->group;
  int64_t lo, hi;
  llmc_split(ctx, rows * width, 64, &lo, &hi);
  for (int64_t at = lo; at < hi; at += CHUNK) {
    int64_t count = hi - at < CHUNK ? hi - at : CHUNK;
    uint32_t number;
    if (!exchange(g, ctx->tid, x + at, count, &number)) return;
    for (int r = 0; r < g->ranks; r++)
      place(y + r * width, chunk(g, r, ctx->tid, number), at, count, width, g->ranks * width);
  }
}
}  // namespace llmc
#endif
