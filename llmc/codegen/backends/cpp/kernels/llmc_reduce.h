// Reductions, cumulative sums and top-k along one axis of x [outer, n, inner], as plain loops; `row_kernels.py` vectorizes
// float reductions of the last axis. Accumulators are double for floats and int64 for integers.
#ifndef LLMC_REDUCE_H
#define LLMC_REDUCE_H
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
namespace llmc {
template <class T> struct wide { typedef int64_t type; };
template <> struct wide<float> { typedef double type; };
template <> struct wide<bf16> { typedef double type; };
template <> struct wide<f16> { typedef double type; };
struct Sum {
  template <class A> static A first(A) { return 0; }
  template <class A> static A next(A a, A x) { return a + x; }
};
struct Max {
  template <class A> static A first(A x) { return x; }
  template <class A> static A next(A a, A x) { return x > a || x != x ? x : a; }
};
struct Min {
  template <class A> static A first(A x) { return x; }
  template <class A> static A next(A a, A x) { return x < a || x != x ? x : a; }
};
template <class F, class T, class O>
static inline void reduce(const llmc_ctx* ctx, O* y, const T* x, int64_t outer, int64_t n, int64_t inner, bool mean) {
  typedef typename wide<T>::type A;
  int64_t lo, hi;
  llmc_split(ctx, outer * inner, 16, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    const T* c = x + p / inner * n * inner + p % inner;
    A a = F::first((A)scalar(c[0]));
    for (int64_t j = 0; j < n; j++) a = F::next(a, (A)scalar(c[j * inner]));
    put(y + p, mean ? a / (A)n : a);
  }
}
template <class T>
static inline void argmax(const llmc_ctx* ctx, int64_t* y, const T* x, int64_t outer, int64_t n, int64_t inner) {
  int64_t lo, hi;
  llmc_split(ctx, outer * inner, 1, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    const T* c = x + p / inner * n * inner + p % inner;
    int64_t best = 0;
    auto top = scalar(c[0]);
    for (int64_t j = 1; j < n; j++) {
      auto v = scalar(c[j * inner]);
      if (v > top || (v != v && top == top)) top = v, best = j;
    }
    y[p] = best;
  }
}
template <class T>
static inline void cumsum(const llmc_ctx* ctx, T* y, const T* x, int64_t outer, int64_t n, int64_t inner) {
  int64_t lo, hi;
  llmc_split(ctx, outer * inner, 1, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    int64_t at = p / inner * n * inner + p % inner;
    typename wide<T>::type a = 0;
    for (int64_t j = 0; j < n; j++, at += inner) put(y + at, a += scalar(x[at]));
  }
}
template <class T>
static inline void softmax(const llmc_ctx* ctx, T* y, const T* x, int64_t outer, int64_t n, int64_t inner) {
  int64_t lo, hi;
  llmc_split(ctx, outer * inner, 1, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    int64_t at = p / inner * n * inner + p % inner;
    float top = -INFINITY;
    double total = 0;
    for (int64_t j = 0; j < n; j++) top = m_max(scalar(x[at + j * inner]), top);
    for (int64_t j = 0; j < n; j++) total += m_exp(scalar(x[at + j * inner]) - top);
    for (int64_t j = 0; j < n; j++) put(y + at + j * inner, (float)(m_exp(scalar(x[at + j * inner]) - top) / total));
  }
}
// The k largest elements of a row in descending order, lower index first among equals, by insertion into a sorted list.
// Most of a long row is skipped four vectors at a time.
template <class T, class I>
static inline void top_of_row(const T* x, int64_t n, int64_t k, float* value, I* index) {
  int64_t have = 0, look = 0;  // from `look` on, a block is first compared as vectors
  for (int64_t j = 0; j < n; j++) {
    if (have == k && j >= look && j + 4 * VN <= n) {
      vf least = splat(value[k - 1]);
      if (!any((vload(x + j) > least) | (vload(x + j + VN) > least) | (vload(x + j + 2 * VN) > least) |
               (vload(x + j + 3 * VN) > least))) {
        j += 4 * VN - 1;
        continue;
      }
      look = j + 4 * VN;
    }
    float v = scalar(x[j]);
    if (have == k && !(v > value[k - 1])) continue;
    int64_t at = have < k ? have++ : k - 1;
    for (; at > 0 && v > value[at - 1]; at--) value[at] = value[at - 1], index[at] = index[at - 1];
    value[at] = v;
    index[at] = (I)j;
  }
}
template <class T>
static inline void topk(const llmc_ctx* ctx, T* values, int64_t* idx, const T* x, int64_t rows, int64_t n, int64_t k) {
  int64_t lo, hi;
  llmc_split(ctx, rows, 1, &lo, &hi);
  float* top = (float*)ctx->scratch;
  for (int64_t r = lo; r < hi; r++) {
    top_of_row(x + r * n, n, k, top, idx + r * k);
    for (int64_t j = 0; j < k; j++) put(values + r * k + j, top[j]);
  }
}
}  // namespace llmc
#endif
