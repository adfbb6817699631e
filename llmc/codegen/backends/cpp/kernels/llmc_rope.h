// Rotary embedding: cos and sin tables, and the rotation of the first 2h elements of every head.
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
namespace llmc {
template <class O, class F, class I>
static inline void rope_tables(const llmc_ctx* ctx, O* co, O* si, const F* freq, const I* pos, int64_t t, int64_t h,
                               float scaling) {
  int64_t lo, hi;
  llmc_split(ctx, t, 1, &lo, &hi);
  for (int64_t r = lo; r < hi; r++)
    for (int64_t j = 0; j < h; j += VN) {
      int n = h - j < VN ? (int)(h - j) : VN;
      vf a = splat((float)pos[r]) * vload(freq + j, n);
      vstore(co + r * h + j, m_cos(a) * scaling, n);
      vstore(si + r * h + j, m_sin(a) * scaling, n);
    }
}
// x and y are [t, heads, d]; y may be x.
template <class T, class C>
static inline void rope(const llmc_ctx* ctx, T* y, const T* x, const C* co, const C* si, int64_t t, int64_t heads,
                        int64_t d, int64_t h, bool interleaved) {
  int64_t lo, hi;
  llmc_split(ctx, t * heads, 1, &lo, &hi);
  for (int64_t r = lo; r < hi; r++) {
    const T* from = x + r * d;
    T* to = y + r * d;
    const C *c = co + r / heads * h, *s = si + r / heads * h;
    if (interleaved) {
      for (int64_t j = 0; j < h; j++) {
        float a = widen(from[2 * j]), b = widen(from[2 * j + 1]), cj = widen(c[j]), sj = widen(s[j]);
        narrow(to + 2 * j, a * cj - b * sj);
        narrow(to + 2 * j + 1, b * cj + a * sj);
      }
    } else {
      for (int64_t j = 0; j < h; j += VN) {
        int n = h - j < VN ? (int)(h - j) : VN;
        vf a = vload(from + j, n), b = vload(from + h + j, n), cj = vload(c + j, n), sj = vload(s + j, n);
        vstore(to + j, a * cj - b * sj, n);
        vstore(to + h + j, b * cj + a * sj, n);
      }
    }
    if (to != from && 2 * h < d) memcpy((void*)(to + 2 * h), (const void*)(from + 2 * h), (d - 2 * h) * sizeof(T));
  }
}
}  // namespace llmc
#endif
