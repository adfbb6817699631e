// Mixture of experts over unpacked weights. Each thread takes part of the tokens, groups them by expert, and reads only
// the experts it needs, applying each weight row to several tokens at once.
#ifndef LLMC_MOE_H
#define LLMC_MOE_H
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
namespace llmc {
constexpr int64_t GROUP = 8;  // tokens that share one pass over an expert's weights
// out[j] = dot(w, x[j]) for m <= GROUP f32 vectors, `stride` elements apart.
template <class W>
LLMC_INLINE void dots(float* out, const W* w, const float* x, int64_t stride, int64_t m, int64_t n) {
  vf acc[GROUP];
  for (int64_t j = 0; j < m; j++) acc[j] = splat(0.0f);
  for (int64_t i = 0; i < n; i += VN) {
    int part = n - i < VN ? (int)(n - i) : VN;
    vf a = part == VN ? vload(w + i) : vload(w + i, part);
    for (int64_t j = 0; j < m; j++) acc[j] = fma(a, vload(x + j * stride + i), acc[j]);
  }
  for (int64_t j = 0; j < m; j++) out[j] = hsum(acc[j]);
}
static inline int64_t padded(int64_t n) { return (n + VN - 1) / VN * VN; }
// PARTS: 2, or 1 for experts without a gate, whose `body` does not read its second argument. bg [experts, PARTS * inner]
// and bd [experts, d] are the biases of gate_up and down, or null.
template <int PARTS, class T, class I, class F, class W, class B, class Body>
static inline void moe(const llmc_ctx* ctx, T* y, const T* x, const I* idx, const F* weights, const W* gate_up,
                       const W* down, const B* bg, const B* bd, int64_t t, int64_t k, int64_t d, int64_t inner,
                       int64_t experts, Body body) {
  int64_t lo, hi;
  llmc_split(ctx, t, 1, &lo, &hi);
  const int64_t pd = padded(d), pi = padded(inner);
  float *xs = (float*)ctx->scratch, *hs = xs + GROUP * pd, *sum = hs + GROUP * pi;
  for (int64_t first = lo; first < hi; first += GROUP) {
    int64_t count = hi - first < GROUP ? hi - first : GROUP;
    memset(sum, 0, count * pd * sizeof(float));
    for (int64_t e = 0; e < experts; e++) {
      int64_t who[GROUP], m = 0;  // the m tokens of the group that chose expert e, and their weights
      float scale[GROUP];
      for (int64_t j = 0; j < count; j++)
        for (int64_t c = 0; c < k; c++)
          if (idx[(first + j) * k + c] == (I)e) {
            if (m && who[m - 1] == j) scale[m - 1] += scalar(weights[(first + j) * k + c]);
            else who[m] = j, scale[m++] = scalar(weights[(first + j) * k + c]);
          }
      if (!m) continue;
      memset(xs, 0, m * pd * sizeof(float));
      memset(hs, 0, m * pi * sizeof(float));
      for (int64_t j = 0; j < m; j++)
        for (int64_t i = 0; i < d; i++) xs[j * pd + i] = scalar(x[(first + who[j]) * d + i]);
      const W *gu = gate_up + e * PARTS * inner * d, *dn = down + e * d * inner;
      for (int64_t i = 0; i < inner; i++) {
        float sums[PARTS][GROUP];
        for (int64_t p = 0; p < PARTS; p++) {
          dots(sums[p], gu + (p * inner + i) * d, xs, pd, m, d);
          const float c = bg ? scalar(bg[(e * PARTS + p) * inner + i]) : 0.0f;
          for (int64_t j = 0; j < m; j++) sums[p][j] += c;
        }
        for (int64_t j = 0; j < m; j++) hs[j * pi + i] = body(splat(sums[0][j]), splat(sums[PARTS - 1][j]))[0];
      }
      for (int64_t i = 0; i < d; i++) {
        float o[GROUP];
        dots(o, dn + i * inner, hs, pi, m, inner);
        const float c = bd ? scalar(bd[e * d + i]) : 0.0f;
        for (int64_t j = 0; j < m; j++) sum[who[j] * pd + i] += (o[j] + c) * scale[j];
      }
    }
    for (int64_t j = 0; j < count; j++)
      for (int64_t i = 0; i < d; i++) put(y + (first + j) * d + i, sum[j * pd + i]);
  }
}
}  // namespace llmc
#endif
