// Moves elements: copies of row segments, strided copies, rows by index. T is any type of the element's size.
#ifndef LLMC_SHAPE_H
#define LLMC_SHAPE_H
#include "llmc_abi.h"
namespace llmc {
// Copies `rows` segments of `bytes` bytes; threads split the total at multiples of 4 KiB, across segments.
static inline void copy_rows(const llmc_ctx* ctx, char* dst, int64_t dst_step, const char* src, int64_t src_step,
                             int64_t rows, int64_t bytes) {
  int64_t lo, hi;
  llmc_split(ctx, rows * bytes, 4096, &lo, &hi);
  while (lo < hi) {
    int64_t r = lo / bytes, at = lo % bytes, n = bytes - at < hi - lo ? bytes - at : hi - lo;
    memcpy(dst + r * dst_step + at, src + r * src_step + at, n);
    lo += n;
  }
}
// Writes y densely over `size`; element (i0, i1, ...) is x[sum of i * step].
template <class T, int RANK>
static inline void copy_strided(const llmc_ctx* ctx, T* y, const T* x, const int64_t* size, const int64_t* step) {
  int64_t rows = 1, lo, hi, n = size[RANK - 1], s = step[RANK - 1];
  for (int a = 0; a < RANK - 1; a++) rows *= size[a];
  llmc_split(ctx, rows, 1, &lo, &hi);
  for (int64_t r = lo; r < hi; r++) {
    int64_t rest = r, off = 0;
    for (int a = RANK - 2; a >= 0; a--) {
      off += rest % size[a] * step[a];
      rest /= size[a];
    }
    T* to = y + r * n;
    const T* from = x + off;
    if (s == 1) memcpy((void*)to, (const void*)from, n * sizeof(T));
    else for (int64_t j = 0; j < n; j++) to[j] = from[j * s];
  }
}
// y[i] = x[idx[i] - start] for rows of `bytes` bytes; zeros if x, which has `rows` rows, has no such row.
template <class I>
static inline void take_rows(const llmc_ctx* ctx, char* y, const char* x, const I* idx, int64_t count, int64_t bytes,
                             int64_t start = 0, int64_t rows = INT64_MAX) {
  int64_t lo, hi;
  llmc_split(ctx, count * bytes, 1024, &lo, &hi);
  while (lo < hi) {
    int64_t r = lo / bytes, at = lo % bytes, n = bytes - at < hi - lo ? bytes - at : hi - lo;
    int64_t row = (int64_t)idx[r] - start;
    if (row < 0 || row >= rows) memset(y + r * bytes + at, 0, n);
    else memcpy(y + r * bytes + at, x + row * bytes + at, n);
    lo += n;
  }
}
// y[slots[i]] = x[i] for rows of `bytes` bytes; rows with a negative slot are skipped.
static inline void put_rows(const llmc_ctx* ctx, char* y, const char* x, const int32_t* slots, int64_t count,
                            int64_t bytes) {
  int64_t lo, hi;
  llmc_split(ctx, count * bytes, 1024, &lo, &hi);
  while (lo < hi) {
    int64_t r = lo / bytes, at = lo % bytes, n = bytes - at < hi - lo ? bytes - at : hi - lo;
    if (slots[r] >= 0) memcpy(y + slots[r] * bytes + at, x + r * bytes + at, n);
    lo += n;
  }
}
// y[i] = row idx[i] - start of a weight in panels [.., DEPTH, ROWS, PAIR] with K elements; zeros outside 0 .. rows-1.
template <class T, class I, int64_t K, int64_t DEPTH, int ROWS, int PAIR>
static inline void take_packed(const llmc_ctx* ctx, T* y, const T* x, const I* idx, int64_t count, int64_t start = 0,
                               int64_t rows = INT64_MAX) {
  int64_t lo, hi;
  llmc_split(ctx, count * DEPTH, 64, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    int64_t r = p / DEPTH, j = p % DEPTH, n = K - j * PAIR < PAIR ? K - j * PAIR : PAIR;
    T* to = y + r * K + j * PAIR;
    int64_t row = (int64_t)idx[r] - start;
    if (row < 0 || row >= rows) memset((void*)to, 0, n * sizeof(T));
    else memcpy((void*)to, x + ((row / ROWS * DEPTH + j) * ROWS + row % ROWS) * PAIR, n * sizeof(T));
  }
}
// y[r, j] = x[r, idx[j]] for rows of n elements of x and k of y
template <class T, class I>
static inline void take_columns(const llmc_ctx* ctx, T* y, const T* x, const I* idx, int64_t rows, int64_t n,
                                int64_t k) {
  int64_t lo, hi;
  llmc_split(ctx, rows * k, 64, &lo, &hi);
  for (int64_t p = lo, r = lo / k, j = lo % k; p < hi; p++) {
    y[p] = x[r * n + (int64_t)idx[j]];
    if (++j == k) j = 0, r++;
  }
}
// y[o, j, i] = x[o, idx[o, j, i], i]
template <class T, class I>
static inline void gather(const llmc_ctx* ctx, T* y, const T* x, const I* idx, int64_t outer, int64_t n, int64_t k,
                          int64_t inner) {
  int64_t lo, hi;
  llmc_split(ctx, outer * k * inner, 64, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    int64_t o = p / (k * inner), i = p % inner;
    y[p] = x[(o * n + (int64_t)idx[p]) * inner + i];
  }
}
}  // namespace llmc
#endif
