// Elementary functions on vectors of float, and on single floats by the same code (lane 0), so that tails and whole
// vectors agree bit for bit. Errors are within about 3 ulp (erf: 8). Infinities, NaN and the subnormal results of exp
// are handled; the sign of zero, errno and floating-point flags are not.
#ifndef LLMC_MATH_H
#define LLMC_MATH_H
#include <math.h>
#include "llmc_simd.h"

namespace llmc {

LLMC_INLINE vf m_abs(vf x) { return as_f(as_i(x) & 0x7fffffff); }
LLMC_INLINE vf m_copysign(vf m, vf s) { return as_f((as_i(m) & 0x7fffffff) | (as_i(s) & (int32_t)0x80000000)); }
LLMC_INLINE vf m_max(vf a, vf b) { return ((a > b) | (a != a)) ? a : b; }  // propagates NaN, as numpy does
LLMC_INLINE vf m_min(vf a, vf b) { return ((a < b) | (a != a)) ? a : b; }

LLMC_INLINE vf m_rint(vf x) {  // round to nearest, ties to even
#if defined(LLMC_AVX512)
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(LLMC_AVX2)
  return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vf r = x;
  for (int i = 0; i < VN; i++) r[i] = __builtin_rintf(x[i]);
  return r;
#endif
}
LLMC_INLINE vf m_floor(vf x) {
  vf r = m_rint(x);
  return r > x ? r - 1.0f : r;
}
LLMC_INLINE vf m_sqrt(vf x) {
#if defined(LLMC_AVX512)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(LLMC_AVX2)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  vf r = x;
  for (int i = 0; i < VN; i++) r[i] = __builtin_sqrtf(x[i]);
  return r;
#endif
}
LLMC_INLINE vf m_rsqrt(vf x) { return 1.0f / m_sqrt(x); }
LLMC_INLINE vf m_reciprocal(vf x) { return 1.0f / x; }

// p * 2^n for integral n in [-300, 300]; rounds once into the subnormals.
LLMC_INLINE vf m_scale(vf p, vf n) {
#if defined(LLMC_AVX512)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vi k = to_int(n), a = k >> 1, b = k - a;
  return p * as_f((a + 127) << 23) * as_f((b + 127) << 23);
#endif
}
LLMC_INLINE vf exp_poly(vf r) {  // exp on |r| <= ln2/2
  vf p = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return fma(p, r * r, r) + 1.0f;
}
LLMC_INLINE vf m_exp(vf x) {
  x = x > 89.0f ? splat(89.0f) : x;
  x = x < -104.0f ? splat(-104.0f) : x;
  vf n = m_rint(x * 1.44269504088896341f);
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  return m_scale(exp_poly(r), n);
}
LLMC_INLINE vf m_exp2(vf x) {
  x = x > 129.0f ? splat(129.0f) : x;
  x = x < -151.0f ? splat(-151.0f) : x;
  vf n = m_rint(x);
  return m_scale(exp_poly((x - n) * 0.693147180559945f), n);
}
LLMC_INLINE vf m_sigmoid(vf x) { return 1.0f / (1.0f + m_exp(-x)); }
LLMC_INLINE vf m_tanh(vf x) {
  vf a = m_abs(x), z = x * x;
  vf p = fma(z, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  vf small = fma(p * z, x, x);
  vf big = m_copysign(1.0f - 2.0f / (m_exp(a + a) + 1.0f), x);
  return a < 0.625f ? small : (x != x ? x : big);
}
LLMC_INLINE vf m_log(vf x) {
  vi tiny = x < 1.17549435e-38f;
  vf s = tiny ? x * 8388608.0f : x;
  vi e = ((as_i(s) >> 23) & 0xff) - 126;
  vf m = as_f((as_i(s) & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  vi low = m < 0.707106781186547524f;
  e = e + low - (tiny & 23);
  m = (low ? m + m : m) - 1.0f;
  vf z = m * m, n = to_float(e);
  vf p = fma(m, splat(7.0376836292e-2f), splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  vf y = fma(n, splat(-2.12194440e-4f), p * m * z);
  y = fma(z, splat(-0.5f), y);
  y = fma(n, splat(0.693359375f), m + y);
  y = x == INFINITY ? x : y;
  y = x == 0.0f ? splat(-INFINITY) : y;
  return (x < 0.0f) | (x != x) ? splat(NAN) : y;
}
// erf(x) is x * P(x^2) / Q(x^2) on [-4, 4], and rounds to 1 beyond.
LLMC_INLINE vf m_erf(vf x) {
  vf c = x > 4.0f ? splat(4.0f) : x;
  c = c < -4.0f ? splat(-4.0f) : c;
  vf z = c * c;
  vf p = fma(z, splat(-2.72614225801306e-10f), splat(2.77068142495902e-08f));
  p = fma(p, z, splat(-2.10102402082508e-06f));
  p = fma(p, z, splat(-5.69250639462346e-05f));
  p = fma(p, z, splat(-7.34990630326855e-04f));
  p = fma(p, z, splat(-2.95459980854025e-03f));
  p = fma(p, z, splat(-1.60960333262415e-02f));
  vf q = fma(z, splat(-1.45660718464996e-05f), splat(-2.13374055278905e-04f));
  q = fma(q, z, splat(-1.68282697438203e-03f));
  q = fma(q, z, splat(-7.37332916720468e-03f));
  q = fma(q, z, splat(-1.42647390514189e-02f));
  return c * p / q;
}
// sin and cos share a reduction to |r| <= pi/4 in double precision, accurate to a float up to |x| = 1e6.
struct sincos_parts { vf r; vi q; };
LLMC_INLINE sincos_parts sincos_reduce(vf x) {
  float f[VN], r[VN];
  int32_t q[VN];
  memcpy(f, &x, sizeof x);
  for (int i = 0; i < VN; i++) {
    double d = f[i], n = d * 0.63661977236758134308;
    n = (n + 6755399441055744.0) - 6755399441055744.0;  // to nearest integer
    r[i] = (float)((d - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11);  // 33 + 53 bits of pi/2
    q[i] = (int32_t)(int64_t)(__builtin_fabs(n) < 2147483648.0 ? n : 0.0);
  }
  sincos_parts s;
  memcpy(&s.r, r, sizeof r);
  memcpy(&s.q, q, sizeof q);
  return s;
}
LLMC_INLINE vf sincos_pick(vf r, vi q) {  // sin(r + q pi/2)
  vf z = r * r;
  vf s = fma(z, splat(-1.9515295891e-4f), splat(8.3321608736e-3f));
  s = fma(s, z, splat(-1.6666654611e-1f));
  s = fma(s * z, r, r);
  vf c = fma(z, splat(2.443315711809948e-5f), splat(-1.388731625493765e-3f));
  c = fma(c, z, splat(4.166664568298827e-2f));
  c = fma(c * z, z, fma(z, splat(-0.5f), splat(1.0f)));
  vf y = (q & 1) != 0 ? c : s;
  return as_f(as_i(y) ^ ((q & 2) << 30));
}
LLMC_INLINE vf m_sin(vf x) { sincos_parts s = sincos_reduce(x); return sincos_pick(s.r, s.q); }
LLMC_INLINE vf m_cos(vf x) { sincos_parts s = sincos_reduce(x); return sincos_pick(s.r, s.q + 1); }
LLMC_INLINE vf m_pow(vf a, vf b) {  // libm, lane by lane
  vf r = a;
  for (int i = 0; i < VN; i++) r[i] = powf(a[i], b[i]);
  return r;
}

#define LLMC_SCALAR1(name) LLMC_INLINE float name(float x) { return name(splat(x))[0]; }
LLMC_SCALAR1(m_abs) LLMC_SCALAR1(m_rint) LLMC_SCALAR1(m_floor) LLMC_SCALAR1(m_sqrt) LLMC_SCALAR1(m_rsqrt)
LLMC_SCALAR1(m_reciprocal) LLMC_SCALAR1(m_exp) LLMC_SCALAR1(m_exp2) LLMC_SCALAR1(m_sigmoid) LLMC_SCALAR1(m_tanh)
LLMC_SCALAR1(m_log) LLMC_SCALAR1(m_erf) LLMC_SCALAR1(m_sin) LLMC_SCALAR1(m_cos)
#undef LLMC_SCALAR1
LLMC_INLINE float m_max(float a, float b) { return m_max(splat(a), splat(b))[0]; }
LLMC_INLINE float m_min(float a, float b) { return m_min(splat(a), splat(b))[0]; }
LLMC_INLINE float m_pow(float a, float b) { return powf(a, b); }

}  // namespace llmc
#endif
