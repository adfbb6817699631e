// Vectors of float in the widest size that the compile flags allow, with loads and stores of every storage type. One
// source for AVX-512, AVX2+FMA and plain C++ (GCC vector extensions); intrinsics are used only where the extensions
// have no equivalent. Invariant: vload(p, n) and vstore(p, v, n) touch exactly n elements, 0 <= n <= VN.
#ifndef LLMC_SIMD_H
#define LLMC_SIMD_H
#include <stdint.h>
#include <string.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wuninitialized"        // false positives inside immintrin.h of gcc 12
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#define LLMC_METHOD inline __attribute__((always_inline))
#define LLMC_INLINE static LLMC_METHOD

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LLMC_AVX512 1
#define LLMC_VB 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LLMC_AVX2 1
#define LLMC_VB 32
#else
#define LLMC_VB 16
#endif
#if defined(LLMC_AVX512) && defined(__AVX512BF16__)
#define LLMC_DPBF16 1
#endif

namespace llmc {

constexpr int VN = LLMC_VB / 4;  // float lanes of a vector
typedef float vf __attribute__((vector_size(LLMC_VB)));
typedef int32_t vi __attribute__((vector_size(LLMC_VB)));
typedef uint32_t vu __attribute__((vector_size(LLMC_VB)));
typedef uint16_t vh __attribute__((vector_size(LLMC_VB / 2)));

struct bf16 { uint16_t u; };
struct f16 { uint16_t u; };

LLMC_INLINE vi as_i(vf v) { return (vi)v; }
LLMC_INLINE vu as_u(vf v) { return (vu)v; }
LLMC_INLINE vf as_f(vi v) { return (vf)v; }
LLMC_INLINE vf as_f(vu v) { return (vf)v; }

#if LLMC_VB == 64
#define LLMC_SPLAT(s) {s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}
#elif LLMC_VB == 32
#define LLMC_SPLAT(s) {s, s, s, s, s, s, s, s}
#else
#define LLMC_SPLAT(s) {s, s, s, s}
#endif
LLMC_INLINE vf splat(float s) { return vf LLMC_SPLAT(s); }
LLMC_INLINE vi splat_i(int32_t s) { return vi LLMC_SPLAT(s); }
LLMC_INLINE vi lanes() {  // 0, 1, 2, ...
#if LLMC_VB == 64
  return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LLMC_VB == 32
  return vi{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return vi{0, 1, 2, 3};
#endif
}
LLMC_INLINE vi to_int(vf v) { return __builtin_convertvector(v, vi); }  // truncates
LLMC_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// a * b + c, fused if the machine supports it.
LLMC_INLINE vf fma(vf a, vf b, vf c) {
#if defined(LLMC_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(LLMC_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
LLMC_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }  // mask lanes are 0 or -1
LLMC_INLINE vf fast_max(vf a, vf b) { return a > b ? a : b; }         // b if either is NaN
LLMC_INLINE vf fast_min(vf a, vf b) { return a < b ? a : b; }

// ---- scalar storage conversions (round to nearest, ties to even; NaN stays NaN) ----
LLMC_INLINE float bits_f(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
LLMC_INLINE uint32_t f_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
LLMC_INLINE float widen(float x) { return x; }
LLMC_INLINE float widen(bf16 x) { return bits_f((uint32_t)x.u << 16); }
LLMC_INLINE float widen(f16 x) {
  uint32_t s = (uint32_t)(x.u & 0x8000u) << 16, m = x.u & 0x7fffu;
  if (m >= 0x7c00u) return bits_f(s | 0x7f800000u | ((m & 0x3ffu) << 13));
  float f = bits_f(m << 13) * bits_f(0x77800000u);  // times 2^112, which also handles subnormals
  return bits_f(f_bits(f) | s);
}
LLMC_INLINE void narrow(float* p, float x) { *p = x; }
LLMC_INLINE void narrow(bf16* p, float x) {
  uint32_t u = f_bits(x);
  p->u = x != x ? (uint16_t)((u >> 16) | 0x40u) : (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
LLMC_INLINE void narrow(f16* p, float x) {
  uint32_t u = f_bits(x), s = (u >> 16) & 0x8000u, m = u & 0x7fffffffu;
  uint16_t r;
  if (m > 0x7f800000u) r = 0x7e00u;
  else if (m >= 0x477ff000u) r = 0x7c00u;                                        // 65520 and above
  else if (m < 0x38800000u) r = (uint16_t)(f_bits(bits_f(m) + 0.5f) - 0x3f000000u);  // subnormal: the adder rounds
  else r = (uint16_t)((m - 0x38000000u + 0xfffu + ((m >> 13) & 1u)) >> 13);
  p->u = (uint16_t)(r | s);
}

// ---- whole-vector loads and stores ----
LLMC_INLINE vf vload(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
LLMC_INLINE void vstore(float* p, vf v) { memcpy(p, &v, sizeof v); }
LLMC_INLINE vf widen(vh h, bf16) { return as_f(__builtin_convertvector(h, vu) << 16); }
LLMC_INLINE vh narrow(vf v, bf16) {
#if defined(LLMC_DPBF16)
  __m256bh b = _mm512_cvtneps_pbh((__m512)v);
  vh h; memcpy(&h, &b, sizeof h);
  return h;
#else
  vu u = as_u(v);
  vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  r = (v != v) ? ((u >> 16) | 0x40u) : r;
  return __builtin_convertvector(r, vh);
#endif
}
LLMC_INLINE vf widen(vh h, f16) {
#if defined(LLMC_AVX512)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(LLMC_AVX2)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  vf v = {};
  for (int i = 0; i < VN; i++) v[i] = widen(f16{h[i]});
  return v;
#endif
}
LLMC_INLINE vh narrow(vf v, f16) {
#if defined(LLMC_AVX512)
  return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(LLMC_AVX2)
  return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vh h = {};
  for (int i = 0; i < VN; i++) { f16 t; narrow(&t, v[i]); h[i] = t.u; }
  return h;
#endif
}
LLMC_INLINE vf vload(const bf16* p) { vh h; memcpy(&h, p, sizeof h); return widen(h, bf16{}); }
LLMC_INLINE vf vload(const f16* p) { vh h; memcpy(&h, p, sizeof h); return widen(h, f16{}); }
LLMC_INLINE void vstore(bf16* p, vf v) { vh h = narrow(v, bf16{}); memcpy(p, &h, sizeof h); }
LLMC_INLINE void vstore(f16* p, vf v) { vh h = narrow(v, f16{}); memcpy(p, &h, sizeof h); }

// ---- the first n lanes only; missing lanes read as 0 ----
LLMC_INLINE vf vload(const float* p, int n) {
#if defined(LLMC_AVX512)
  return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
#else
  vf v = {};
  memcpy(&v, p, (size_t)n * 4);
  return v;
#endif
}
LLMC_INLINE void vstore(float* p, vf v, int n) {
#if defined(LLMC_AVX512)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
#else
  memcpy(p, &v, (size_t)n * 4);
#endif
}
template <class T> LLMC_INLINE vf vload16(const T* p, int n) {
  vh h = {};
#if defined(LLMC_AVX512)
  h = (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1u), p);
#else
  memcpy(&h, p, (size_t)n * 2);
#endif
  return widen(h, T{});
}
template <class T> LLMC_INLINE void vstore16(T* p, vf v, int n) {
  vh h = narrow(v, T{});
#if defined(LLMC_AVX512)
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1u), (__m256i)h);
#else
  memcpy(p, &h, (size_t)n * 2);
#endif
}
LLMC_INLINE vf vload(const bf16* p, int n) { return vload16(p, n); }
LLMC_INLINE vf vload(const f16* p, int n) { return vload16(p, n); }
LLMC_INLINE void vstore(bf16* p, vf v, int n) { vstore16(p, v, n); }
LLMC_INLINE void vstore(f16* p, vf v, int n) { vstore16(p, v, n); }

// ---- across lanes (in a fixed tree, so that results do not depend on the thread) ----
LLMC_INLINE float hsum(vf v) {
  float t[VN];
  memcpy(t, &v, sizeof v);
  for (int w = VN / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
LLMC_INLINE float hmax(vf v) {
  float t[VN];
  memcpy(t, &v, sizeof v);
  for (int w = VN / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
}

}  // namespace llmc
#endif
