// Integer dot products of the instruction set that the compile flags allow, and rows of activations rounded to the codes
// that they read.
#ifndef LLMC_ROUND_ROWS_H
#define LLMC_ROUND_ROWS_H
#include "llmc_simd.h"

namespace llmc {

typedef int16_t vs __attribute__((vector_size(LLMC_VB)));
constexpr int RUN = 32;

LLMC_INLINE vi load_i(const void* p) { vi v; memcpy(&v, p, sizeof v); return v; }
LLMC_INLINE vi broadcast4(const void* p) { int32_t q; memcpy(&q, p, 4); return splat_i(q); }

// acc + the sums of 4 products of unsigned codes u by signed codes s in every lane.
#if defined(LLMC_AVX512) && defined(__AVX512VNNI__)
#define LLMC_DOT8 1
LLMC_INLINE vi dot8(vi acc, vi u, vi s) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s); }
#elif defined(LLMC_AVX2) && defined(__AVXVNNI__)
#define LLMC_DOT8 1
LLMC_INLINE vi dot8(vi acc, vi u, vi s) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)s); }
#elif defined(LLMC_AVX512) || defined(LLMC_AVX2)
#define LLMC_MADD 1
// madd: sums of 2 products of int16. maddubs: of unsigned by signed bytes, as int16 with saturation.
#if defined(LLMC_AVX512)
LLMC_INLINE vi madd(vs a, vs b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
LLMC_INLINE vs maddubs(vi u, vi s) { return (vs)_mm512_maddubs_epi16((__m512i)u, (__m512i)s); }
#else
LLMC_INLINE vi madd(vs a, vs b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
LLMC_INLINE vs maddubs(vi u, vi s) { return (vs)_mm256_maddubs_epi16((__m256i)u, (__m256i)s); }
#endif
#endif

// Rounds to the nearest integer, ties to even. The product before it must not be fused with an addition.
LLMC_INLINE vi nearest(vf v) {
#if defined(LLMC_AVX512)
  return (vi)_mm512_cvtps_epi32((__m512)v);
#elif defined(LLMC_AVX2)
  return (vi)_mm256_cvtps_epi32((__m256)v);
#else
  vi r = {};
  for (int i = 0; i < VN; i++) r[i] = (int32_t)__builtin_rintf(v[i]);
  return r;
#endif
}

// The largest lane, and the sum of the lanes.
#if defined(LLMC_AVX512)
LLMC_INLINE int32_t max_i(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
LLMC_INLINE int32_t sum_i(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
LLMC_INLINE int32_t max_i(vi v) {
  int32_t most = v[0];
  for (int i = 1; i < VN; i++) most = v[i] > most ? v[i] : most;
  return most;
}
LLMC_INLINE int32_t sum_i(vi v) {
  int32_t total = 0;
  for (int i = 0; i < VN; i++) total += v[i];
  return total;
}
#endif

// ---- codes of x ----
// A is the element type of the rows that a tile reads. int16_t (AVX without VNNI, codes of 8 bits): the 4 codes of a
// quad in the order 0, 2, 1, 3, because shifts by 8 separate the even and the odd bytes of w.
template <bool ACT, int BITS> struct row_code { typedef float A; };
template <> struct row_code<true, 4> { typedef int8_t A; };
#if defined(LLMC_MADD)
template <> struct row_code<true, 8> { typedef int16_t A; };
#else
template <> struct row_code<true, 8> { typedef int8_t A; };
#endif

LLMC_INLINE void store_codes(int8_t* p, vi v) {
  typedef int8_t vb __attribute__((vector_size(VN)));
  vb b = __builtin_convertvector(v, vb);
  memcpy(p, &b, sizeof b);
}
#if defined(LLMC_MADD)
LLMC_INLINE void store_codes(int16_t* p, vi v) {
  vh h = __builtin_convertvector(v, vh);
#if defined(LLMC_AVX512)
  h = (vh)_mm256_shufflehi_epi16(_mm256_shufflelo_epi16((__m256i)h, 0xd8), 0xd8);
#else
  h = (vh)_mm_shufflehi_epi16(_mm_shufflelo_epi16((__m128i)h, 0xd8), 0xd8);
#endif
  memcpy(p, &h, sizeof h);
}
#endif

struct unit_row { float scale; int32_t sum; };  // one unit of a row of x: its scale, and a multiple of the sum of its codes

template <class X> LLMC_INLINE vf load_part(const X* x, int64_t i, int64_t end) {
  return i + VN <= end ? vload(x + i) : i < end ? vload(x + i, (int)(end - i)) : vf{};
}

// Rounds a row of k elements, padded with zeros to `padded`, in blocks of BLOCK columns of UNIT columns each. Sums of
// codes are stored times FACTOR. A block with a value that is not finite has the scale NaN.
template <int64_t BLOCK, int64_t UNIT, int FACTOR = 1, class X, class A>
static void round_row(A* to, unit_row* units, const X* x, int64_t k, int64_t padded) {
  for (int64_t b = 0; b < padded; b += BLOCK) {
    int64_t end = b + BLOCK < padded ? b + BLOCK : padded;
    vi bits = {};
    for (int64_t i = b; i < end; i += VN) {
      vi v = as_i(load_part(x, i, k)) & splat_i(0x7fffffff);
      bits = v > bits ? v : bits;
    }
    const int32_t most = max_i(bits);
    float largest = bits_f((uint32_t)most);
    vf inverse = splat(most ? 127.0f / largest : 0.0f);
    float scale = most < 0x7f800000 ? largest / 127.0f : bits_f(0x7fc00000);
    for (int64_t u = b; u < end; u += UNIT) {
      int64_t stop = u + UNIT < end ? u + UNIT : end;
      vi sum = {};
      for (int64_t i = u; i < stop; i += VN) {
        vi c = nearest(load_part(x, i, k) * inverse);
        store_codes(to + i, c);
        sum += c;
      }
      *units++ = unit_row{scale, FACTOR * sum_i(sum)};
    }
  }
}

}  // namespace llmc
#endif
