// The grouped products of a mixture's experts. Rows of x are sorted by expert; threads divide the rows of the weights.
// A pass over a weight row serves up to EXPERT_ROWS rows of x.
//
// With C::ACT, rows of x are rounded to int8, and codes less their zero points, which fit int8, are multiplied as
// integers: a span of 64 columns at a time, whose sums become float once for all columns that share their scales.
// Otherwise a weight row is converted to float first.
#ifndef LLMC_EXPERTS_H
#define LLMC_EXPERTS_H
#include "llmc_abi.h"
#include "llmc_round_rows.h"
#include "llmc_store.h"
namespace llmc {

constexpr int EXPERT_ROWS = 8;
constexpr int LANES = EXPERT_ROWS > VN ? EXPERT_ROWS : VN;  // results computed at once per weight row
constexpr int64_t SPAN = 64;
constexpr int VECTORS = SPAN / LLMC_VB;  // vectors of bytes per span
enum Encoding { FLOAT, INTEGER, E4M3, E5M2, E2M1 };

typedef int8_t vq __attribute__((vector_size(LLMC_VB)));
typedef uint8_t vuq __attribute__((vector_size(LLMC_VB)));
LLMC_INLINE vuq splat_b(uint8_t b) { return vuq{} + b; }

// acc + the sums of 4 products of signed codes w, with their absolute values `size`, by signed codes x in every lane.
LLMC_INLINE vq absolute(vq w) { return w < 0 ? -w : w; }
LLMC_INLINE vi dot_signed(vi acc, vq w, vq size, vq x) {
#if defined(LLMC_DOT8)
  return dot8(acc, (vi)size, (vi)(w < 0 ? -x : x));
#elif defined(LLMC_MADD)  // a sum of 2 products is at most 2 * 128 * 127 < 2^15
  return acc + madd(maddubs((vi)size, (vi)(w < 0 ? -x : x)), (vs)splat_i(0x00010001));
#else
  for (int i = 0; i < LLMC_VB; i++) acc[i / 4] += (int32_t)w[i] * x[i];
  return acc;
#endif
}

// Twice the values of codes of e2m1.
LLMC_INLINE vq twice_e2m1(vuq code) {
  static const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#if defined(LLMC_AVX512)
  return (vq)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)code);
#elif defined(LLMC_AVX2)
  return (vq)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), (__m256i)code);
#else
  vq out;
  for (int i = 0; i < LLMC_VB; i++) out[i] = table[code[i] & 15];
  return out;
#endif
}

// The codes of a span, of which `count` columns exist. Two codes of 4 bits in a byte are 32 columns apart.
template <bool PACKED> LLMC_INLINE void load_span(vuq (&code)[VECTORS], const uint8_t* from, int64_t count) {
  if constexpr (PACKED) {
#if LLMC_VB == 64
    __m256i b = _mm256_loadu_si256((const __m256i*)from);
    code[0] = (vuq)_mm512_inserti64x4(_mm512_castsi256_si512(b), _mm256_srli_epi16(b, 4), 1) & splat_b(15);
#else
    for (int v = 0; v < VECTORS / 2; v++) {
      vuq b;
      memcpy(&b, from + v * LLMC_VB, sizeof b);
      code[v] = b & splat_b(15), code[v + VECTORS / 2] = b >> 4;
    }
#endif
  } else if (count >= SPAN) {
    memcpy(code, from, SPAN);
  } else {
    memset(code, 0, SPAN);
    memcpy(code, from, count);
  }
}

// a for the first half of a vector of a span if it has two halves of 32 columns, b for the second.
LLMC_INLINE vf halves(float a, float b) { return lanes() < splat_i(VN / 2) ? splat(a) : splat(b); }
LLMC_INLINE vuq halves_b(uint8_t a, uint8_t b) {
  vuq second = {};
  for (int i = LLMC_VB / 2; i < LLMC_VB; i++) second[i] = 255;
  return (splat_b(a) & ~second) | (splat_b(b) & second);
}

LLMC_INLINE float from_e4m3(uint8_t c) {
  if ((c & 0x7f) == 0x7f) return bits_f(0x7fc00000);
  return bits_f(f_bits(bits_f((uint32_t)(c & 0x7f) << 20) * bits_f(0x7b800000)) | (uint32_t)(c & 0x80) << 24);
}
LLMC_INLINE float from_e5m2(uint8_t c) { return widen(f16{(uint16_t)(c << 8)}); }
LLMC_INLINE float from_e2m1(uint8_t c) {
  static const float table[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return c & 8 ? -table[c & 7] : table[c & 7];
}

// Members of C, which the emitter generates as `Shape`:
//   X, W, S, Z         types of x, codes, scales and zero points
//   K, N               depth, rows of the weight per part
//   PARTS, EXPERTS     parts of the weight, number of experts
//   CHOICES            row r of x is that of token order[r] / CHOICES; 0: rows of x are sorted already
//   ENCODING           encoding of the codes
//   HALF               columns between the two codes of a byte, whose scales are [groups, rows]; 0: one code per byte
//   BLOCK_ROWS, GROUP  rows and columns of the weight that share a scale
//   ZERO, ZEROS        the zero point of all codes; whether there is a zero point per scale instead
//   ACT, ACT_BLOCK     whether x is rounded to int8; columns of x that share a scale
template <class C> struct experts {
  static constexpr int64_t ROWS = C::PARTS * C::N, GROUPS = (C::K + C::GROUP - 1) / C::GROUP;
  static constexpr int64_t BLOCKS = (ROWS + C::BLOCK_ROWS - 1) / C::BLOCK_ROWS;
  static constexpr int64_t BYTES = C::HALF ? C::K / 2 : C::K;  // stored elements per row of the weight
  static constexpr int64_t SPANS = (C::K + SPAN - 1) / SPAN, KP = SPANS * SPAN;  // KP: padded depth
  static constexpr bool late = GROUPS == 1;  // one scale per row, applied to the final sum
  static constexpr bool whole = (late || C::GROUP % SPAN == 0) && (C::ACT_BLOCK % SPAN == 0 || C::ACT_BLOCK >= C::K);
  static constexpr int64_t X_BYTES = C::ACT ? KP + KP / RUN * (int64_t)sizeof(unit_row) : KP * 4;
  static constexpr int64_t SCRATCH = EXPERT_ROWS * X_BYTES + (C::ACT ? 0 : KP * 4);

  template <class T> static LLMC_METHOD T entry(const T* p, int64_t e, int64_t row, int64_t group) {
    return C::HALF ? p[(e * GROUPS + group) * ROWS + row] : p[(e * BLOCKS + row / C::BLOCK_ROWS) * GROUPS + group];
  }

  // out[j] = weight row `row` of expert e times the rounded row j of x, for j < M.
  template <int M>
  static void integer_row(float* out, const uint8_t* w, const typename C::S* scale, const typename C::Z* zero,
                          int64_t e, int64_t row, const int8_t* codes, const unit_row* units) {
    constexpr float VALUE = C::ENCODING == E2M1 ? 0.5f : 1.0f;
    vf sum[M];
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) sum[j] = vf{};
    for (int64_t s = 0; s < SPANS; s++) {
      vuq code[VECTORS];
      load_span<C::HALF != 0>(code, w + s * SPAN / (C::HALF ? 2 : 1), C::K - s * SPAN);
      float f[2] = {1.0f, 1.0f};
      uint8_t z[2] = {C::ZERO, C::ZERO};
      if constexpr (!late || C::ZEROS) {
        for (int h = 0; h < 2; h++) {
          int64_t column = s * SPAN + h * RUN, g = (column < C::K ? column : C::K - 1) / C::GROUP;
          if (!late) f[h] = scalar(entry(scale, e, row, g));
          if constexpr (C::ZEROS) z[h] = entry(zero, e, row, g);
        }
      }
      vq a[VECTORS], size[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        const int first = v * LLMC_VB / RUN, last = (v * LLMC_VB + LLMC_VB - 1) / RUN;
        if constexpr (C::ENCODING == E2M1) a[v] = twice_e2m1(code[v]);
        else a[v] = (vq)(code[v] - (first == last || !C::ZEROS ? splat_b(z[first]) : halves_b(z[0], z[1])));
        size[v] = absolute(a[v]);
      }
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) {
        const int8_t* x = codes + j * KP + s * SPAN;
        const unit_row* unit = units + j * (KP / RUN) + s * SPAN / RUN;
        const float f0 = f[0] * unit[0].scale, f1 = whole ? f0 : f[1] * unit[1].scale;
        vi acc[2] = {};
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          vq b;
          memcpy(&b, x + v * LLMC_VB, sizeof b);
          vi& to = acc[whole || VECTORS == 1 ? 0 : v * LLMC_VB / RUN];
          to = dot_signed(to, a[v], size[v], b);
        }
        if constexpr (whole) {
          sum[j] = fma(to_float(acc[0]), splat(f0), sum[j]);
        } else if constexpr (VECTORS == 1) {
          sum[j] = fma(to_float(acc[0]), halves(f0, f1), sum[j]);
        } else {
          sum[j] = fma(to_float(acc[0]), splat(f0), sum[j]);
          sum[j] = fma(to_float(acc[1]), splat(f1), sum[j]);
        }
      }
    }
    const float last = VALUE * (late ? scalar(entry(scale, e, row, 0)) : 1.0f);
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) out[j] = hsum(sum[j]) * last;
  }

  static LLMC_METHOD float value(const typename C::W* w, int64_t c) {
    if constexpr (C::ENCODING == FLOAT) {
      return scalar(w[c]);
    } else {
      typename C::W code = w[c];
      if constexpr (C::HALF != 0) {
        code = w[c / (2 * C::HALF) * C::HALF + c % C::HALF];
        code = c / C::HALF % 2 ? code >> 4 : code & 15;
      }
      if constexpr (C::ENCODING == E4M3) return from_e4m3(code);
      else if constexpr (C::ENCODING == E5M2) return from_e5m2(code);
      else if constexpr (C::ENCODING == E2M1) return from_e2m1(code);
      else return (float)code;
    }
  }

  // The numbers of weight row `row` of expert e, padded with zeros.
  static void float_row(float* to, const typename C::W* w, const typename C::S* scale, const typename C::Z* zero,
                        int64_t e, int64_t row) {
    for (int64_t g = 0; g < GROUPS; g++) {
      const int64_t end = (g + 1) * C::GROUP < C::K ? (g + 1) * C::GROUP : C::K;
      const float s = C::ENCODING == FLOAT ? 1.0f : scalar(entry(scale, e, row, g));
      float z = C::ZERO;
      if constexpr (C::ZEROS) z = scalar(entry(zero, e, row, g));
      for (int64_t c = g * C::GROUP; c < end; c++) to[c] = (value(w, c) - z) * s;
    }
    for (int64_t c = C::K; c < KP; c++) to[c] = 0.0f;
  }

  template <int M> static void float_dots(float* out, const float* w, const float* x) {
    vf sum[M];
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) sum[j] = vf{};
    for (int64_t i = 0; i < KP; i += VN) {
      vf a = vload(w + i);
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) sum[j] = fma(a, vload(x + j * KP + i), sum[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < M; j++) out[j] = hsum(sum[j]);
  }

  template <int M, class... T> static void row_of(int64_t m, float* out, T... args) {
    if constexpr (M > 1) {
      if (m < M) return row_of<M - 1>(m, out, args...);
    }
    if constexpr (C::ACT) integer_row<M>(out, args...);
    else float_dots<M>(out, args...);
  }
};

// E::put(first, m, expert, column, out): the results of one weight row per part for rows first .. first + m - 1 of x.
template <class C, class E>
static void expert_products(const llmc_ctx* ctx, const typename C::X* x, const int32_t* order, const int32_t* starts,
                            const typename C::W* code, const typename C::S* scale, const typename C::Z* zero,
                            const E& epilogue) {
  typedef experts<C> P;
  int64_t lo, hi;
  llmc_split(ctx, C::N, 1, &lo, &hi);
  if (lo == hi) return;
  char* rows = ctx->scratch;
  float* wide = (float*)(ctx->scratch + EXPERT_ROWS * P::X_BYTES);
  int8_t* codes = (int8_t*)rows;
  unit_row* units = (unit_row*)(rows + EXPERT_ROWS * P::KP);
  for (int64_t e = 0; e < C::EXPERTS; e++)
    for (int64_t first = starts[e]; first < starts[e + 1]; first += EXPERT_ROWS) {
      const int64_t left = starts[e + 1] - first, m = left < EXPERT_ROWS ? left : EXPERT_ROWS;
      for (int64_t j = 0; j < m; j++) {
        const typename C::X* from = x + (C::CHOICES ? order[first + j] / (C::CHOICES ? C::CHOICES : 1) : first + j) * C::K;
        if constexpr (C::ACT) {
          constexpr int64_t BLOCK = C::ACT_BLOCK < P::KP ? C::ACT_BLOCK : P::KP;
          round_row<BLOCK, RUN>(codes + j * P::KP, units + j * (P::KP / RUN), from, C::K, P::KP);
        } else {
          for (int64_t i = 0; i < P::KP; i += VN) vstore((float*)rows + j * P::KP + i, load_part(from, i, C::K));
        }
      }
      for (int64_t i = lo; i < hi; i++) {
        float out[C::PARTS][LANES];
        for (int64_t p = 0; p < C::PARTS; p++) {
          const int64_t row = p * C::N + i;
          const typename C::W* w = code + (e * P::ROWS + row) * P::BYTES;
          if constexpr (C::ACT) {
            P::template row_of<EXPERT_ROWS>(m, out[p], (const uint8_t*)w, scale, zero, e, row, codes, units);
          } else {
            P::float_row(wide, w, scale, zero, e, row);
            P::template row_of<EXPERT_ROWS>(m, out[p], wide, (const float*)rows);
          }
        }
        epilogue.put(first, m, e, i, out);
      }
    }
}

// out[r] = body(gate, up) in the order of the experts; without a gate (PARTS 1), up is not read. B: the type of the bias
// [experts, PARTS, n], or null.
template <class C, class T, class B, class Body> struct up_epilogue {
  T* y;
  const B* bias;
  Body body;
  LLMC_METHOD void put(int64_t first, int64_t m, int64_t e, int64_t i, const float (&out)[C::PARTS][LANES]) const {
    constexpr int64_t UP = C::PARTS - 1;
    const B* row = bias ? bias + e * C::PARTS * C::N + i : nullptr;
    const float gate = row ? scalar(row[0]) : 0.0f, up = row ? scalar(row[UP * C::N]) : 0.0f;
    for (int64_t j = 0; j < m; j += VN) {
      vf v = body(vload(out[0] + j) + splat(gate), vload(out[UP] + j) + splat(up));
      for (int64_t l = 0; l < VN && j + l < m; l++) llmc::put(y + (first + j + l) * C::N + i, v[l]);
    }
  }
};

// out[order[r]] = weight * product. B: the type of the bias [experts, n], or null.
template <class C, class F, class B> struct down_epilogue {
  float* y;
  const int32_t* order;
  const F* weights;
  const B* bias;
  LLMC_METHOD void put(int64_t first, int64_t m, int64_t e, int64_t i, const float (&out)[1][LANES]) const {
    const float c = bias ? scalar(bias[e * C::N + i]) : 0.0f;
    for (int64_t j = 0; j < m; j++) {
      const int64_t pair = order[first + j];
      y[pair * C::N + i] = (out[0][j] + c) * scalar(weights[pair]);
    }
  }
};

// Sorts the pairs by expert, stably, on one thread.
template <class I>
static void route(const llmc_ctx* ctx, int32_t* order, int32_t* starts, const I* idx, int64_t pairs, int64_t experts) {
  if (ctx->tid) return;
  memset(starts, 0, (experts + 1) * sizeof(int32_t));
  for (int64_t p = 0; p < pairs; p++) starts[idx[p] + 1]++;
  for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
  for (int64_t p = 0; p < pairs; p++) order[starts[idx[p]]++] = (int32_t)p;
  for (int64_t e = experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

}  // namespace llmc
#endif
