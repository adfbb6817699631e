// Loads and stores in addition to llmc_simd.h: integers and bools as float lanes, run-time lane counts, and scalars of
// any storage dtype.
#ifndef LLMC_STORE_H
#define LLMC_STORE_H
#include "llmc_simd.h"
namespace llmc {
struct b8 { uint8_t u; };  // bool: 0 or 1
struct Full {};            // all lanes
struct Part { int n; };    // the first n lanes, 0 < n < VN

LLMC_INLINE float scalar(float x) { return x; }
LLMC_INLINE float scalar(bf16 x) { return widen(x); }
LLMC_INLINE float scalar(f16 x) { return widen(x); }
LLMC_INLINE bool scalar(b8 x) { return x.u != 0; }
template <class T> LLMC_INLINE int64_t scalar(T x) { return (int64_t)x; }
template <class X> LLMC_INLINE void put(bf16* p, X x) { narrow(p, (float)x); }
template <class X> LLMC_INLINE void put(f16* p, X x) { narrow(p, (float)x); }
template <class X> LLMC_INLINE void put(b8* p, X x) { p->u = x != 0; }
template <class T, class X> LLMC_INLINE void put(T* p, X x) { *p = (T)x; }

template <class T> LLMC_INLINE vf get(const T* p, Full) { return vload(p); }
template <class T> LLMC_INLINE vf get(const T* p, Part m) { return vload(p, m.n); }
LLMC_INLINE vf get(const b8* p, Part m) {
  vf v = {};
  for (int i = 0; i < m.n; i++) v[i] = p[i].u ? 1.0f : 0.0f;
  return v;
}
LLMC_INLINE vf get(const b8* p, Full) { return get(p, Part{VN}); }
template <class T> LLMC_INLINE void set(T* p, vf v, Full) { vstore(p, v); }
template <class T> LLMC_INLINE void set(T* p, vf v, Part m) { vstore(p, v, m.n); }
LLMC_INLINE void set(b8* p, vf v, Part m) {
  for (int i = 0; i < m.n; i++) p[i].u = v[i] != 0.0f;
}
LLMC_INLINE void set(b8* p, vf v, Full) { set(p, v, Part{VN}); }
// Returns v with the lanes from m.n on replaced by `other`.
LLMC_INLINE vf keep(vf v, float other, Full) { return v; }
LLMC_INLINE vf keep(vf v, float other, Part m) { return lanes() < splat_i(m.n) ? v : splat(other); }
LLMC_INLINE vf as_float(vi mask) { return mask ? splat(1.0f) : splat(0.0f); }
LLMC_INLINE vi as_mask(vf v) { return v != 0.0f; }
LLMC_INLINE bool any(vi mask) {  // whether a lane of the mask is set
#if defined(LLMC_AVX512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(LLMC_AVX2)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t t = 0;
  for (int i = 0; i < VN; i++) t |= mask[i];
  return t != 0;
#endif
}
LLMC_INLINE float hmax_nan(vf v) {  // propagates NaN
  float t = v[0];
  for (int i = 1; i < VN; i++) t = v[i] > t || v[i] != v[i] ? v[i] : t;
  return t;
}
}  // namespace llmc
#endif
