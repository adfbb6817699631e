// y = epilogue(x @ w.T) with w as codes of 8 or 4 bits and a scale per row or per block of columns. With C::ACT, rows of
// x are rounded to int8 and multiplied as integers; otherwise codes are converted to float.
//
// Columns are processed in runs of 32. A run of a panel is [quads][R][4] bytes: codes of 4 neighbouring columns per
// row (8 bits), or of 4 columns in the low halves and the next 4 in the high halves (4 bits). So a vector has 4 codes of
// VN rows, and meets 4 codes of a row of x, broadcast as one int32. A unit is a number of runs whose columns share
// their scales in w and in x: its sum is exact, and becomes float once.
#ifndef LLMC_QUANTIZED_H
#define LLMC_QUANTIZED_H
#include "llmc_linear.h"
#include "llmc_round_rows.h"

namespace llmc {

// Code s of every lane of a vector of a panel: signed for 8 bits, otherwise unsigned.
template <int BITS> LLMC_INLINE vi code_of(vi t, int s) {
  return BITS == 8 ? (t << (24 - 8 * s)) >> 24 : (t >> (4 * s)) & splat_i(15);
}

// ---- one run of 32 columns: acc[MR][NV] += codes of x * codes of w ----
// Codes of w are read as unsigned numbers. Sums therefore start from START times the sum of x's codes. FACTOR is the
// factor of the sums that `unit_row` stores.
template <class C> struct integer_run {
  typedef typename row_code<true, C::BITS>::A A;
  typedef vi V;
  static constexpr int64_t STEP = RUN * C::NV * VN * C::BITS / 8;  // bytes of a run of a panel
#if defined(LLMC_DOT8)
  static constexpr int START = C::BITS == 8 ? -128 : -C::ZERO;
#else
  static constexpr int START = C::BITS == 8 ? 0 : -C::ZERO;
#endif
  static constexpr int FACTOR = START ? START : 1;
  static_assert(!(C::ZEROS && START), "zero points per scale need the plain sum");

  template <int MR> static LLMC_METHOD void add(vi (&acc)[MR][C::NV], const uint8_t* w, const A* x, int64_t ldx) {
    constexpr int NV = C::NV;
#if defined(LLMC_DOT8)
    constexpr int HALVES = C::BITS == 4 ? 2 : 1;
#pragma GCC unroll 8
    for (int q = 0; q < C::BITS; q++) {
      vi b[HALVES][NV];
#pragma GCC unroll 32
      for (int v = 0; v < NV; v++) {
        vi t = load_i(w + (q * NV + v) * LLMC_VB);
        if constexpr (HALVES == 1) b[0][v] = t ^ splat_i((int32_t)0x80808080u);
        else b[0][v] = t & splat_i(0x0f0f0f0f), b[HALVES - 1][v] = (t >> 4) & splat_i(0x0f0f0f0f);
      }
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; h++)
#pragma GCC unroll 32
        for (int i = 0; i < MR; i++) {
          vi a = broadcast4(x + i * ldx + (q * HALVES + h) * 4);
#pragma GCC unroll 32
          for (int v = 0; v < NV; v++) acc[i][v] = dot8(acc[i][v], b[h][v], a);
        }
    }
#elif defined(LLMC_MADD)
    // Loops are not unrolled: the compiler would reorder long chains of additions, which takes registers.
    if constexpr (C::BITS == 8) {
#pragma GCC unroll 1
      for (int q = 0; q < 8; q++) {
        vs even[NV], odd[NV];
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) {
          vs t = (vs)load_i(w + (q * NV + v) * LLMC_VB);
          even[v] = (t << 8) >> 8, odd[v] = t >> 8;
        }
#pragma GCC unroll 32
        for (int i = 0; i < MR; i++) {
          vs a = (vs)broadcast4(x + i * ldx + 4 * q), b = (vs)broadcast4(x + i * ldx + 4 * q + 2);
#pragma GCC unroll 32
          for (int v = 0; v < NV; v++) acc[i][v] += madd(even[v], a) + madd(odd[v], b);
        }
      }
    } else {  // a sum of 8 maddubs is at most 8 * 2 * 15 * 127 < 2^15
      vs part[MR][NV] = {};
#pragma GCC unroll 1
      for (int q = 0; q < 4; q++) {
        vi low[NV], high[NV];
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) {
          vi t = load_i(w + (q * NV + v) * LLMC_VB);
          low[v] = t & splat_i(0x0f0f0f0f), high[v] = (vi)((vs)t >> 4) & splat_i(0x0f0f0f0f);
        }
#pragma GCC unroll 32
        for (int i = 0; i < MR; i++) {
          vi a = broadcast4(x + i * ldx + 8 * q), b = broadcast4(x + i * ldx + 8 * q + 4);
#pragma GCC unroll 32
          for (int v = 0; v < NV; v++) part[i][v] += maddubs(low[v], a) + maddubs(high[v], b);
        }
      }
#pragma GCC unroll 32
      for (int i = 0; i < MR; i++)
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) acc[i][v] += madd(part[i][v], (vs)splat_i(0x00010001));
    }
#else
    for (int q = 0; q < C::BITS; q++)
#pragma GCC unroll 8
      for (int s = 0; s < 32 / C::BITS; s++) {
        int at = C::BITS == 8 ? q * 4 + s : q * 8 + s / 2 + s % 2 * 4;
        vi b[NV];
        for (int v = 0; v < NV; v++) b[v] = code_of<C::BITS>(load_i(w + (q * NV + v) * LLMC_VB), s);
        for (int i = 0; i < MR; i++)
          for (int v = 0; v < NV; v++) acc[i][v] += b[v] * splat_i(x[i * ldx + at]);
      }
#endif
  }
};

// The same for x in float: codes of w are converted to float, and their zero points subtracted.
template <class C> struct float_run {
  typedef float A;
  typedef vf V;
  static constexpr int64_t STEP = RUN * C::NV * VN * C::BITS / 8;

  template <int MR>
  static LLMC_METHOD void add(vf (&acc)[MR][C::NV], const uint8_t* w, const float* x, int64_t ldx, const vf* zero) {
    constexpr int NV = C::NV;
    for (int q = 0; q < C::BITS; q++)
#pragma GCC unroll 8
      for (int s = 0; s < 32 / C::BITS; s++) {
        int at = C::BITS == 8 ? q * 4 + s : q * 8 + s / 2 + s % 2 * 4;  // the column of code s
        vf b[NV];
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++)
          b[v] = to_float(code_of<C::BITS>(load_i(w + (q * NV + v) * LLMC_VB), s)) - zero[v];
#pragma GCC unroll 32
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 32
          for (int v = 0; v < NV; v++) acc[i][v] = fma(b[v], splat(x[i * ldx + at]), acc[i][v]);
      }
  }
};

template <class T> LLMC_INLINE vf load_entry(const T* p) { return vload(p); }  // VN scales or zero points
LLMC_INLINE vf load_entry(const uint8_t* p) {
  typedef uint8_t vb __attribute__((vector_size(VN)));
  vb b;
  memcpy(&b, p, sizeof b);
  return to_float(__builtin_convertvector(b, vi));
}

template <bool ACT, class C> struct run_of { typedef integer_run<C> type; };
template <class C> struct run_of<false, C> { typedef float_run<C> type; };

constexpr int64_t common(int64_t a, int64_t b) { return b ? common(b, a % b) : a; }  // the greatest common divisor

// Members of C, which the emitter generates as `Shape`; K, N, NV, PARTS, MR, MB and KC are those of llmc_linear.h:
//   X, S, Z    types of x, scales and zero points
//   BITS       bits per code, 8 or 4
//   GROUP      columns of w that share a scale; 0: all
//   ZERO       the zero point of all codes
//   ZEROS      whether there is a zero point per scale instead
//   ACT        whether x is rounded to int8
//   ACT_BLOCK  columns of x that share a scale; 0: all
template <class C> struct quantized {
  typedef typename run_of<C::ACT, C>::type Run;
  typedef typename Run::A A;
  static constexpr int64_t R = C::NV * VN;
  static constexpr int64_t KP = (C::K + RUN - 1) / RUN * RUN, RUNS = KP / RUN;  // padded depth, and its runs
  static constexpr int64_t GROUP = C::GROUP && C::GROUP < KP ? C::GROUP : KP;
  static constexpr int64_t BLOCK = C::ACT && C::ACT_BLOCK && C::ACT_BLOCK < KP ? C::ACT_BLOCK : KP;
  static constexpr int64_t UNIT = GROUP == KP ? BLOCK : BLOCK == KP ? GROUP : common(GROUP, BLOCK);
  static constexpr int64_t UNITS = (KP + UNIT - 1) / UNIT;
  static constexpr int64_t GROUPS = (KP + GROUP - 1) / GROUP;
  static constexpr bool late = GROUPS == 1;  // one scale per row, applied to the final sum

  // c[MR][R] (+)= units u0 .. u1 - 1 of the panel at w, with entries `scale` and `zero`, times MR rows of x.
  template <int MR>
  static __attribute__((noinline)) void tile(const uint8_t* w, const typename C::S* scale, const typename C::Z* zero,
                                             const A* x, const unit_row* units, int64_t u0, int64_t u1, float* c,
                                             ahead soon) {
    constexpr int NV = C::NV;
    vf sum[MR][NV];
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 32
      for (int v = 0; v < NV; v++) sum[i][v] = u0 ? vload(c + i * R + v * VN) : vf{};
    x += u0 * UNIT;
    for (int64_t u = u0; u < u1; u++) {
      int64_t runs = UNITS == 1 ? RUNS : u + 1 < UNITS || KP % UNIT == 0 ? UNIT / RUN : KP % UNIT / RUN;
      const int64_t entry = late ? 0 : u * UNIT / GROUP * R;
      vf z[NV];
      if constexpr (C::ZEROS || !C::ACT) {
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) {
          if constexpr (C::ZEROS) z[v] = load_entry(zero + entry + v * VN);
          else z[v] = splat(C::ZERO);
        }
      }
      typename Run::V acc[MR][NV];
#pragma GCC unroll 32
      for (int i = 0; i < MR; i++)
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) {
          if constexpr (C::ACT) acc[i][v] = Run::START ? splat_i(units[i * UNITS + u].sum) : vi{};
          else acc[i][v] = vf{};
        }
      for (int64_t r = 0; r < runs; r++) {
        if constexpr (C::ACT) Run::add(acc, w, x, KP);
        else Run::add(acc, w, x, KP, z);
        for (int64_t o = 0; o < soon.step; o += 64) __builtin_prefetch(soon.at + o, 0, 3);
        soon.at += soon.step;
        w += Run::STEP;
        x += RUN;
      }
      if constexpr (C::ACT) {
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) {
          vf s = late ? splat(1.0f) : load_entry(scale + entry + v * VN);
#pragma GCC unroll 32
          for (int i = 0; i < MR; i++) {
            const unit_row& a = units[i * UNITS + u];
            vf t = to_float(acc[i][v]);
            if constexpr (C::ZEROS) t = t - z[v] * splat((float)a.sum);
            sum[i][v] = fma(t, late ? splat(a.scale) : s * splat(a.scale), sum[i][v]);
          }
        }
      } else {
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) {
          vf s = late ? splat(1.0f) : load_entry(scale + entry + v * VN);
#pragma GCC unroll 32
          for (int i = 0; i < MR; i++) sum[i][v] = fma(acc[i][v], s, sum[i][v]);
        }
      }
    }
    const bool last = late && u1 == UNITS;
#pragma GCC unroll 32
    for (int v = 0; v < NV; v++) {
      vf s = last ? load_entry(scale + v * VN) : splat(1.0f);
#pragma GCC unroll 32
      for (int i = 0; i < MR; i++) vstore(c + i * R + v * VN, sum[i][v] * s);
    }
  }

  template <int MR, class... T> static LLMC_METHOD void run_tile(int64_t rows, T... args) {
    if constexpr (MR > 1) {
      if (rows < MR) return run_tile<MR - 1>(rows, args...);
    }
    tile<MR>(args...);
  }
};

// E has put(m, n, count, c), as in llmc_linear.h.
template <class C, class E> struct quantized_product : quantized<C> {
  typedef quantized<C> Q;
  typedef typename Q::A A;
  static constexpr int64_t R = Q::R, S = R / C::PARTS, PANELS = (C::N + S - 1) / S;
  static constexpr int64_t WANTED = (C::K + C::KC - 1) / C::KC, DEPTHS = WANTED < Q::UNITS ? WANTED : Q::UNITS;
  static constexpr int64_t CROWS = DEPTHS > 1 ? C::MB * C::MR : C::MR;  // rows of partial sums
  static constexpr int64_t ROWS = C::MB * C::MR;                        // rows of x that are rounded at a time
  static constexpr int64_t UNIT_BYTES = C::ACT ? Q::UNITS * (int64_t)sizeof(unit_row) : 0;
  static constexpr int64_t SCRATCH = CROWS * R * 4 + ROWS * (Q::KP * (int64_t)sizeof(A) + UNIT_BYTES);

  const typename C::X* x;
  const uint8_t* w;
  const typename C::S* scale;
  const typename C::Z* zero;
  const E* e;
  float* c;             // scratch: accumulators [CROWS][R]
  unit_row* units;      // scratch: scales and sums of the rounded rows [ROWS][UNITS]
  A* codes;             // scratch: rounded or converted rows of x [ROWS][KP]
  int64_t rows, tiles;  // rows of x, and the tiles into which they are divided

  LLMC_METHOD int64_t row(int64_t t) const { return rows * t / tiles; }  // first row of tile t: tiles differ by one row

  // The prefetch of tile t of n: a single tile prefetches LEAD bytes ahead of its own reads (a fifth faster for one row
  // than the hardware's prefetcher alone); several tiles divide the next stretch of the panel among themselves.
  static LLMC_METHOD ahead next(const uint8_t* from, int64_t runs, int64_t t, int64_t n) {
    constexpr int64_t STEP = Q::Run::STEP, LEAD = 2048;
    if (n == 1) return ahead{(const char*)from + LEAD, STEP};
    int64_t step = (STEP + n - 1) / n;
    return ahead{(const char*)from + runs * STEP + t * runs * step, step};
  }

  // Multiplies panel p by the tiles t0 .. t1 - 1, whose rounded rows start at `codes`.
  LLMC_METHOD void panel(int64_t p, int64_t t0, int64_t t1) const {
    for (int64_t d = 0; d < DEPTHS; d++) {
      int64_t u0 = Q::UNITS * d / DEPTHS, u1 = Q::UNITS * (d + 1) / DEPTHS;
      int64_t r0 = u0 * (Q::UNIT / RUN), r1 = d + 1 < DEPTHS ? u1 * (Q::UNIT / RUN) : Q::RUNS;
      const uint8_t* from = w + (p * Q::RUNS + r0) * Q::Run::STEP;
      const int64_t entry = p * Q::GROUPS * R;
      for (int64_t t = t0; t < t1; t++) {
        int64_t m = row(t), count = row(t + 1) - m, off = m - row(t0);
        float* acc = DEPTHS > 1 ? c + off * R : c;
        Q::template run_tile<C::MR>(count, from, scale + entry, zero + (C::ZEROS ? entry : 0), codes + off * Q::KP,
                                    units + off * Q::UNITS, u0, u1, acc, next(from, r1 - r0, t - t0, t1 - t0));
        if (d + 1 == DEPTHS) finish<R, S, C::N>(*e, m, count, p, acc);
      }
    }
  }

  // Multiplies the panels p0 .. p1 - 1 by the rows of block b, which are rounded or converted first.
  LLMC_METHOD void block(int64_t b, int64_t blocks, int64_t p0, int64_t p1) const {
    int64_t t0 = tiles * b / blocks, t1 = tiles * (b + 1) / blocks, m0 = row(t0);
    for (int64_t m = m0; m < row(t1); m++) {
      const typename C::X* from = x + m * C::K;
      A* to = codes + (m - m0) * Q::KP;
      unit_row* u = units + (m - m0) * Q::UNITS;
      if constexpr (C::ACT) round_row<Q::BLOCK, Q::UNIT, Q::Run::FACTOR>(to, u, from, C::K, Q::KP);
      else copy_row(to, from, C::K, Q::KP);
    }
    for (int64_t p = p0; p < p1; p++) panel(p, t0, t1);
  }
};

template <class C, class E>
static void quantized_linear(const llmc_ctx* ctx, const typename C::X* x, int64_t rows, const void* w,
                             const typename C::S* scale, const typename C::Z* zero, const E& e) {
  typedef quantized_product<C, E> P;
  P q;
  q.x = x, q.w = (const uint8_t*)w, q.scale = scale, q.zero = zero, q.e = &e, q.rows = rows;
  q.c = (float*)ctx->scratch;
  q.codes = (typename P::A*)(ctx->scratch + P::CROWS * P::R * 4);
  q.units = (unit_row*)(q.codes + P::ROWS * P::Q::KP);
  q.tiles = (rows + C::MR - 1) / C::MR;
  if (rows > 0) each_block(ctx, q, (q.tiles + C::MB - 1) / C::MB);
}

}  // namespace llmc
#endif
