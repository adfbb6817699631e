// y = epilogue(x @ w.T) with w packed in panels, for any number of rows of x. Each thread computes a part of the
// output.
//
// A panel holds R = NV * VN accumulators as [k / PAIR][R][PAIR], padded with zeros. With PARTS = 2, its first half has
// rows of the first block of w and its second half the same rows of the second block, so that both accumulators of an
// output are in one tile. Decoding (few rows) streams every panel once, front to back. With many rows, a panel (or KC
// of its depth) stays in the L2 cache while tiles of at most MR rows of x pass over it.
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H
#include "llmc_abi.h"
#include "llmc_simd.h"

namespace llmc {

template <class X, class W> struct pair_math { static constexpr bool dp = false; };
#if defined(LLMC_DPBF16)
template <> struct pair_math<bf16, bf16> { static constexpr bool dp = true; };
#endif

// Loads one vector of the panel at one depth step as float; j selects the element of the pair.
LLMC_INLINE vf panel_load(const float* p, int) { return vload(p); }
LLMC_INLINE vf panel_load(const f16* p, int) { return vload(p); }
LLMC_INLINE vf panel_load(const bf16* p, int j) {
  vu v;
  memcpy(&v, p, sizeof v);
  return j ? as_f(v & 0xffff0000u) : as_f(v << 16);
}

// Software prefetch of two cache lines at `at`, which advances by `step` bytes per depth step of the tile. With fewer
// rows of x than PREFETCHED nothing is prefetched: the hardware prefetcher keeps up with memory, and more requests slow
// it down.
constexpr int PREFETCHED = 4;
struct ahead { const char* at; int64_t step; };

// c[MR][NV * VN] (+)= x[MR][steps * PAIR] @ panel.T; consecutive rows of x are ldx elements apart.
template <int MR, int NV, int PAIR, class X, class W> struct tile {
  static __attribute__((noinline)) void run(const W* w, const X* x, int64_t ldx, int64_t steps, float* c, bool more,
                                            ahead soon) {
    constexpr int R = NV * VN;
    vf acc[MR][NV];
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 32
      for (int v = 0; v < NV; v++) acc[i][v] = more ? vload(c + i * R + v * VN) : vf{};
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; k++) {
#if defined(LLMC_DPBF16)
      if constexpr (pair_math<X, W>::dp) {
        __m512bh b[NV];
#pragma GCC unroll 32
        for (int v = 0; v < NV; v++) memcpy(&b[v], w + v * VN * 2, 64);
#pragma GCC unroll 32
        for (int i = 0; i < MR; i++) {
          int32_t pair;
          memcpy(&pair, x + i * ldx, 4);
          __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 32
          for (int v = 0; v < NV; v++) acc[i][v] = (vf)_mm512_dpbf16_ps((__m512)acc[i][v], b[v], a);
        }
      } else
#endif
      {
#pragma GCC unroll 2
        for (int j = 0; j < PAIR; j++) {
          vf b[NV];
#pragma GCC unroll 32
          for (int v = 0; v < NV; v++) b[v] = panel_load(w + v * VN * PAIR, j);
#pragma GCC unroll 32
          for (int i = 0; i < MR; i++) {
            vf a = splat(x[i * ldx + j]);
#pragma GCC unroll 32
            for (int v = 0; v < NV; v++) acc[i][v] = fma(a, b[v], acc[i][v]);
          }
        }
      }
      if (MR >= PREFETCHED) {
        __builtin_prefetch(soon.at, 0, 3);
        __builtin_prefetch(soon.at + 64, 0, 3);
        soon.at += soon.step;
      }
      w += R * PAIR;
      x += PAIR;
    }
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 32
      for (int v = 0; v < NV; v++) vstore(c + i * R + v * VN, acc[i][v]);
  }
};

template <int MR, int NV, int PAIR, class X, class W>
LLMC_INLINE void run_tile(int64_t rows, const W* w, const X* x, int64_t ldx, int64_t steps, float* c, bool more,
                          ahead soon) {
  if constexpr (MR > 1) {
    if (rows < MR) return run_tile<MR - 1, NV, PAIR>(rows, w, x, ldx, steps, c, more, soon);
  }
  tile<MR, NV, PAIR, X, W>::run(w, x, ldx, steps, c, more, soon);
}

// Copies rows of x in the form that the tile reads: bf16 (dp) or float, K padded with zeros to a multiple of PAIR.
LLMC_INLINE void copy_row(bf16* to, const bf16* from, int64_t k, int64_t padded) {
  memcpy((void*)to, (const void*)from, (size_t)k * 2);
  for (; k < padded; k++) to[k].u = 0;
}
template <class X> LLMC_INLINE void copy_row(float* to, const X* from, int64_t k, int64_t padded) {
  int64_t i = 0;
  for (; i + VN <= k; i += VN) vstore(to + i, vload(from + i));
  if (i < k) vstore(to + i, vload(from + i, (int)(k - i)), (int)(k - i));
  for (i = k; i < padded; i++) to[i] = 0.0f;
}

template <bool DP> struct tile_input { typedef float type; };
template <> struct tile_input<true> { typedef bf16 type; };

// Writes the S outputs of panel p for the rows m .. m + count - 1, whose accumulators at acc are R floats per row.
template <int64_t R, int64_t S, int64_t N, class E>
LLMC_INLINE void finish(const E& e, int64_t m, int64_t count, int64_t p, const float* acc) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t v = 0; v < S; v += VN) {
      int64_t n = p * S + v, left = N - n;
      if (left > 0) e.put(m + i, n, left < VN ? (int)left : VN, acc + i * R + v);
    }
}

// Calls q.block(b, blocks, p0, p1), which computes panels p0 .. p1 - 1 of row block b, for this thread's part.
template <class P> LLMC_INLINE void each_block(const llmc_ctx* ctx, P& q, int64_t blocks) {
  int64_t lo, hi;
  if (blocks == 1 || P::PANELS >= 16 * (int64_t)ctx->nthreads) {  // split by panels: each thread reads its own weights
    llmc_split(ctx, P::PANELS, 1, &lo, &hi);
    for (int64_t b = 0; b < blocks && lo < hi; b++) q.block(b, blocks, lo, hi);
  } else {  // few panels: split by (row block, panel)
    llmc_split(ctx, blocks * P::PANELS, 1, &lo, &hi);
    while (lo < hi) {
      int64_t b = lo / P::PANELS, end = (b + 1) * P::PANELS < hi ? (b + 1) * P::PANELS : hi;
      q.block(b, blocks, lo - b * P::PANELS, end - b * P::PANELS);
      lo = end;
    }
  }
}

// Members of C, which the emitter generates as `Shape`:
//   X, W   storage types of x and w
//   K, N   depth, outputs per row
//   NV     vectors per panel
//   PAIR   adjacent columns that are stored side by side in a panel
//   PARTS  blocks of w, of which an output reads one accumulator each
//   MR     maximum rows of x per tile
//   MB     tiles of rows per block
//   KC     depth for which a panel stays in the L2 cache
// E, the epilogue, has put(m, n, count, c): it writes the outputs (m, n .. n + count - 1) from the accumulators at c,
// c + R / PARTS, ...
template <class C, class E> struct product {
  typedef typename C::X X;
  typedef typename C::W W;
  static constexpr bool dp = pair_math<X, W>::dp && C::PAIR == 2;
  typedef typename tile_input<dp>::type A;
  static constexpr int64_t R = C::NV * VN, S = R / C::PARTS;               // accumulators and outputs per panel
  static constexpr int64_t KP = (C::K + C::PAIR - 1) / C::PAIR * C::PAIR;  // padded depth
  static constexpr int64_t PANELS = (C::N + S - 1) / S;
  static constexpr int64_t DEPTHS = (C::K + C::KC - 1) / C::KC;            // passes over the depth
  static constexpr int64_t CROWS = DEPTHS > 1 ? C::MB * C::MR : C::MR;     // rows of partial sums
  static constexpr bool direct = sizeof(X) == sizeof(A) && C::K == KP;     // whether tiles read x without a copy
  static constexpr int64_t SCRATCH = CROWS * R * 4 + (direct ? 0 : C::MB * C::MR * KP * (int64_t)sizeof(A));

  const X* x;
  const W* w;
  const E* e;
  float* c;             // scratch: accumulators [CROWS][R]
  A* copy;              // scratch: converted rows of x, unless `direct`
  int64_t rows, tiles;  // rows of x, and the tiles into which they are divided

  LLMC_METHOD int64_t row(int64_t t) const { return rows * t / tiles; }  // first row of tile t: tiles differ by one row

  // The prefetch of tile t of n: a single tile prefetches LEAD bytes ahead of its own reads; several tiles divide the
  // next stretch of the panel among themselves.
  static LLMC_METHOD ahead next(const W* from, int64_t steps, int64_t t, int64_t n) {
    constexpr int64_t STEP = R * C::PAIR * sizeof(W), LEAD = 8192;
    if (n == 1) return ahead{(const char*)from + LEAD, STEP};
    int64_t step = STEP / n;
    return ahead{(const char*)from + steps * STEP + t * steps * step, step};
  }

  // Multiplies panel p by the tiles t0 .. t1 - 1, whose rows start at `a`.
  LLMC_METHOD void panel(int64_t p, int64_t t0, int64_t t1, const A* a) const {
    for (int64_t d = 0; d < DEPTHS; d++) {
      int64_t s0 = KP / C::PAIR * d / DEPTHS, s1 = KP / C::PAIR * (d + 1) / DEPTHS;
      for (int64_t t = t0; t < t1; t++) {
        int64_t m = row(t), count = row(t + 1) - m, off = m - row(t0);
        float* acc = DEPTHS > 1 ? c + off * R : c;
        const W* from = w + (p * KP + s0 * C::PAIR) * R;
        run_tile<C::MR, C::NV, C::PAIR>(count, from, a + off * KP + s0 * C::PAIR, KP, s1 - s0, acc, d > 0,
                                        next(from, s1 - s0, t - t0, t1 - t0));
        if (d + 1 == DEPTHS) finish<R, S, C::N>(*e, m, count, p, acc);
      }
    }
  }

  // Multiplies the panels p0 .. p1 - 1 by the rows of block b.
  LLMC_METHOD void block(int64_t b, int64_t blocks, int64_t p0, int64_t p1) const {
    int64_t t0 = tiles * b / blocks, t1 = tiles * (b + 1) / blocks, m0 = row(t0);
    const A* a;
    if constexpr (direct) {
      a = (const A*)x + m0 * KP;
    } else {
      for (int64_t m = m0; m < row(t1); m++) copy_row(copy + (m - m0) * KP, x + m * C::K, C::K, KP);
      a = copy;
    }
    for (int64_t p = p0; p < p1; p++) panel(p, t0, t1, a);
  }
};

template <class C, class E>
static void linear(const llmc_ctx* ctx, const typename C::X* x, int64_t rows, const typename C::W* w, const E& e) {
  typedef product<C, E> P;
  P q;
  q.x = x, q.w = w, q.e = &e, q.rows = rows;
  q.c = (float*)ctx->scratch;
  q.copy = (typename P::A*)(ctx->scratch + P::CROWS * P::R * 4);
  q.tiles = (rows + C::MR - 1) / C::MR;
  if (rows == 0) return;
  each_block(ctx, q, (q.tiles + C::MB - 1) / C::MB);
}

}  // namespace llmc
#endif
