// llmc_linear.h: y = epilogue(x @ w.T) with w packed in panels, for any number of rows of x. Not a pool: each thread
// computes its own share of the output and writes nothing else.
//
// A panel holds R = NV * VN output columns: [k / PAIR][R][PAIR], zero past the matrix. With PARTS = 2 its first half is
// rows of the first block of w and its second half the same rows of the second, so that both accumulators of an output
// lie in one tile. Decode (few rows) streams each panel once, front to back; prefill keeps a panel (or KC of its depth)
// in the L2 cache and passes MR rows of x at a time over it.
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H
#include "llmc_simd.h"

namespace llmc {

template <class X, class W> struct pair_math { static constexpr bool dp = false; };
#if defined(LLMC_DPBF16)
template <> struct pair_math<bf16, bf16> { static constexpr bool dp = true; };
#endif

// One vector of the panel at depth step k: W as float, element j of the pair.
LLMC_INLINE vf panel_load(const float* p, int) { return vload(p); }
LLMC_INLINE vf panel_load(const f16* p, int) { return vload(p); }
LLMC_INLINE vf panel_load(const bf16* p, int j) {
  vu v;
  memcpy(&v, p, sizeof v);
  return j ? as_f(v & 0xffff0000u) : as_f(v << 16);
}

// c[MR][NV * VN] (+)= x[MR][steps * PAIR] @ panel.T; x rows lie ldx elements apart.
template <int MR, int NV, int PAIR, class X, class W> struct tile {
  static __attribute__((noinline)) void run(const W* w, const X* x, int64_t ldx, int64_t steps, float* c, bool more) {
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
LLMC_INLINE void run_tile(int rows, const W* w, const X* x, int64_t ldx, int64_t steps, float* c, bool more) {
  if constexpr (MR > 1) {
    if (rows < MR) return run_tile<MR - 1, NV, PAIR>(rows, w, x, ldx, steps, c, more);
  }
  tile<MR, NV, PAIR, X, W>::run(w, x, ldx, steps, c, more);
}

}  // namespace llmc
#endif
