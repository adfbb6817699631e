// Simple products and prompt attention; llmc_linear.h and llmc_attention.h have the fast versions for packed weights and
// paged KV.
#ifndef LLMC_REFERENCE_H
#define LLMC_REFERENCE_H
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
namespace llmc {
// y[b] = a[b] @ c[b], in tiles of 4 rows and 2 vectors of columns. HEADS: the rows of the batches alternate in y and a,
// whose axes are [m, batch, columns], as heads do in the rows of tokens.
template <bool HEADS, class T, class C>
static inline void matmul(const llmc_ctx* ctx, T* y, const T* a, const C* c, int64_t batch, int64_t m, int64_t k,
                          int64_t n) {
  const int64_t step = HEADS ? batch : 1;  // rows from one of a batch to the next
  const int64_t cols = 2 * VN, tm = (m + 3) / 4, tn = (n + cols - 1) / cols;
  int64_t lo, hi;
  llmc_split(ctx, batch * tm * tn, 1, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    int64_t b = p / (tm * tn), i = p / tn % tm * 4, j = p % tn * cols;
    int64_t rows = m - i < 4 ? m - i : 4, left = n - j < cols ? n - j : cols;
    int n0 = left < VN ? (int)left : VN, n1 = (int)left - n0;
    vf acc[4][2];
    for (auto& r : acc) r[0] = r[1] = splat(0.0f);
    const int64_t first = HEADS ? i * batch + b : b * m + i;
    const T* ai = a + first * k;
    const C* cj = c + b * k * n + j;
    for (int64_t q = 0; q < k; q++, cj += n) {
      vf u = vload(cj, n0), v = n1 ? vload(cj + VN, n1) : splat(0.0f);
      for (int64_t r = 0; r < rows; r++) {
        vf s = splat(scalar(ai[r * step * k + q]));
        acc[r][0] = fma(s, u, acc[r][0]);
        acc[r][1] = fma(s, v, acc[r][1]);
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      T* to = y + (first + r * step) * n + j;
      vstore(to, acc[r][0], n0);
      if (n1) vstore(to + VN, acc[r][1], n1);
    }
  }
}
template <class A, class B>
LLMC_INLINE float dot(const A* a, const B* b, int64_t n) {
  vf s = splat(0.0f);
  for (int64_t i = 0; i < n; i += VN) {
    int part = n - i < VN ? (int)(n - i) : VN;
    s = fma(vload(a + i, part), vload(b + i, part), s);
  }
  return hsum(s);
}
struct Attention {
  int64_t t, h, g, d, e;
  float scale, softcap;
  int64_t window;
  bool causal;
};
// A sequence starts wherever a position is not its predecessor plus one. `sinks` and `slopes` may be null.
template <class T, class I, class S>
static inline void attention(const llmc_ctx* ctx, T* y, const T* q, const T* k, const T* v, const I* pos, const S* sinks,
                             const float* slopes, const Attention& at) {
  int64_t lo, hi, start = 0, end = 0;
  llmc_split(ctx, at.t, 1, &lo, &hi);
  float* s = (float*)ctx->scratch;
  for (int64_t i = lo; i < hi; i++) {
    if (i >= end) {
      for (start = i; start > 0 && pos[start] == pos[start - 1] + 1;) start--;
      for (end = i + 1; end < at.t && pos[end] == pos[end - 1] + 1;) end++;
    }
    int64_t from = at.window && i - at.window + 1 > start ? i - at.window + 1 : start, to = at.causal ? i + 1 : end;
    for (int64_t head = 0; head < at.h; head++) {
      int64_t group = head / (at.h / at.g);
      float top = sinks ? scalar(sinks[head]) : -1e30f, total = 0;
      for (int64_t j = from; j < to; j++) {
        float x = dot(q + (i * at.h + head) * at.d, k + (j * at.g + group) * at.d, at.d) * at.scale;
        if (at.softcap != 0.0f) x = m_tanh(x / at.softcap) * at.softcap;
        if (slopes) x += slopes[head] * (float)(j - i);
        s[j - from] = x;
        top = x > top ? x : top;
      }
      if (sinks) total = m_exp(scalar(sinks[head]) - top);
      for (int64_t j = from; j < to; j++) total += s[j - from] = m_exp(s[j - from] - top);
      T* out = y + (i * at.h + head) * at.e;
      for (int64_t c = 0; c < at.e; c += VN) {
        int part = at.e - c < VN ? (int)(at.e - c) : VN;
        vf acc = splat(0.0f);
        for (int64_t j = from; j < to; j++)
          acc = fma(splat(s[j - from]), vload(v + (j * at.g + group) * at.e + c, part), acc);
        vstore(out + c, acc / total, part);
      }
    }
  }
}
}  // namespace llmc
#endif
