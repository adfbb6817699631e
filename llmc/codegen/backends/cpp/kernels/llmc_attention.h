// Causal flash attention of ragged query spans over the pages of a KV pool.
//
// A token's value is a row of its own, or the first part of its key (latent attention). The query heads that share a key
// head form a group. A unit of work is a block of query rows, which are pairs (token, head of one group), with all keys
// that are visible to them. Keys and values are copied tile by tile (KT tokens) into panels, as weights are in
// llmc_linear.h, so that both products use the same tile kernel. The softmax is online, in base 2. Units are assigned to
// threads in order, balanced by rows x keys.
//
// Invariants: pages after a row's last position are never read; every element of the result is written exactly once.
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H
#include "llmc_abi.h"
#include "llmc_linear.h"
#include "llmc_math.h"

namespace llmc {

struct attention_args {
  const void* q;
  const void* rotary;  // latent attention: the part of each query after its first E elements
  const void* kv;
  const int32_t *pages, *rows, *starts, *positions;
  const void* sinks;
  const float* slopes;  // slopes of the bias by distance, if C::ALIBI
  void* out;
  int64_t tokens, count, row_pages;  // tokens T, rows R, length of a row's page table
};

#if defined(LLMC_AVX512)
// Transposes 16 x 16 words: to[j * stride + i] = from[i][j]. Columns from `n` on are read as 0.
LLMC_INLINE void transpose16(const void* const* from, int64_t offset, int n, uint32_t* to, int64_t stride) {
  __m512i a[16], b[16];
  __mmask16 keep = (__mmask16)((1u << n) - 1u);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi32(keep, (const char*)from[i] + offset);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int j = 0; j < 16; j++)
    if (j < n) _mm512_storeu_si512(to + j * stride, a[j]);
}
#endif

// Members of C, which the emitter generates as `Shape`:
//   Q, KV, S         storage types of queries and results, of the pool, and of the sinks
//   H, G             query heads, key heads
//   D, E             elements of a key, of a value
//   PAGE             tokens per page
//   NV, MR           vectors and rows per tile of a product (llmc_linear.h)
//   BR, KT           query rows per block, tokens per tile of keys
//   ALIGN            tiles begin at multiples of it; if it is KT, the tiles are the same for all rows
//   WINDOW, SOFTCAP  0 for none
//   SCALE            factor of the logits
//   SINKS            whether there are sinks
//   LATENT           whether a value is the first E elements of its key
//   ALIBI            whether logits have a bias: the head's slope times (position of the key - that of the query)
template <class C> struct attend {
  typedef typename C::Q Q;
  typedef typename C::KV KV;
  static constexpr bool dp = pair_math<Q, KV>::dp && pair_math<KV, KV>::dp;
  typedef typename tile_input<dp>::type A;
  static constexpr int64_t PAIR = dp ? 2 : 1;     // factors that an instruction reads together
  static constexpr int64_t R = C::NV * VN;        // columns per panel
  static constexpr int64_t D = C::D, E = C::E, BR = C::BR, KT = C::KT;
  static constexpr int64_t GROUP = C::H / C::G;   // query heads per key head
  static constexpr int64_t DK = (D + PAIR - 1) / PAIR * PAIR;  // elements of a key, padded
  static constexpr int64_t DP = (E + R - 1) / R;               // panels of a value
  static constexpr int64_t VALUES = C::LATENT ? 0 : C::G * C::PAGE * D;  // elements from a key to its value
  static constexpr int64_t PAGE_SIZE = (C::LATENT ? 1 : 2) * C::G * C::PAGE * D;
  static constexpr float LOG2E = 1.44269504088896341f;
  static_assert(KT % R == 0 && KT % 16 == 0, "a tile is whole panels");

  // Scratch memory, in this order; every part is a multiple of 64 bytes.
  static constexpr int64_t aligned(int64_t n) { return (n + 63) / 64 * 64; }
  static constexpr int64_t QUERY_BYTES = aligned(BR * DK * sizeof(A));
  static constexpr int64_t SUM_BYTES = aligned(DP * BR * R * 4);
  static constexpr int64_t LOGIT_BYTES = aligned(KT * C::MR * 4);
  static constexpr int64_t WEIGHT_BYTES = aligned(KT * C::MR * sizeof(A));
  static constexpr int64_t KEY_BYTES = aligned(KT * DK * sizeof(A));
  static constexpr int64_t VALUE_BYTES = aligned(KT * DP * R * sizeof(A));
  static constexpr int64_t POINTER_BYTES = aligned(KT * 8);
  static constexpr int64_t ROW_BYTES = aligned(BR * 4);  // of each array with one number per query row
  static constexpr int64_t ZERO_BYTES = aligned(D * sizeof(KV));
  static constexpr int64_t SCRATCH = QUERY_BYTES + SUM_BYTES + LOGIT_BYTES + WEIGHT_BYTES + KEY_BYTES + VALUE_BYTES +
                                     POINTER_BYTES + (C::ALIBI ? 4 : 3) * ROW_BYTES + ZERO_BYTES;

  const attention_args* a;
  A* q;             // queries of the block [BR][DK]
  float* o;         // weighted sums of values [DP][BR][R]
  float* s;         // logits of MR rows of a tile [KT / R][MR][R]
  A* p;             // their weights exp2(logit - top) [MR][KT]
  A *kp, *vp;       // panels of keys and of values
  const KV** row;   // the keys of a tile; the values are VALUES elements further
  float *top, *sum;  // of each row: the largest logit so far, and the sum of the weights
  int32_t* pos;     // position of each row's token
  float* slope;     // slope of each row's head, if C::ALIBI
  KV* zero;         // a key or value of zeros

  explicit attend(const attention_args* args, char* memory) : a(args) {
    q = (A*)memory, memory += QUERY_BYTES;
    o = (float*)memory, memory += SUM_BYTES;
    s = (float*)memory, memory += LOGIT_BYTES;
    p = (A*)memory, memory += WEIGHT_BYTES;
    kp = (A*)memory, memory += KEY_BYTES;
    vp = (A*)memory, memory += VALUE_BYTES;
    row = (const KV**)memory, memory += POINTER_BYTES;
    top = (float*)memory, memory += ROW_BYTES;
    sum = (float*)memory, memory += ROW_BYTES;
    pos = (int32_t*)memory, memory += ROW_BYTES;
    slope = (float*)memory, memory += C::ALIBI ? ROW_BYTES : 0;
    zero = (KV*)memory;
    memset((void*)zero, 0, D * sizeof(KV));
  }

  // ---- copy a tile of keys and values into panels ----
  // Sets row[0 .. n - 1] to the keys of tokens k0 .. k0 + n - 1, and the entries up to `padded` to a row of zeros.
  LLMC_METHOD void find_rows(const int32_t* table, int64_t g, int64_t k0, int64_t n, int64_t padded) const {
    const KV* base = (const KV*)a->kv + g * C::PAGE * D;
    for (int64_t i = 0; i < n;) {
      int64_t at = (k0 + i) % C::PAGE, page = table[(k0 + i) / C::PAGE];
      const KV* from = base + page * PAGE_SIZE;
      for (; at < C::PAGE && i < n; at++, i++) row[i] = from + at * D;
    }
    for (int64_t i = n; i < padded; i++) row[i] = zero;
  }
  LLMC_METHOD const KV* value_row(int64_t i, int64_t n) const { return i < n ? row[i] + VALUES : zero; }

  static __attribute__((noinline)) void pack_keys(const KV* const* row, int64_t padded, A* kp) {
    for (int64_t t = 0; t < padded; t += 16) {
      A* to = kp + t / R * DK * R + t % R * PAIR;
#if defined(LLMC_AVX512)
      if constexpr (dp && D % 2 == 0) {
        for (int64_t d = 0; d < D / 2; d += 16)
          transpose16((const void* const*)(row + t), d * 4, D / 2 - d < 16 ? (int)(D / 2 - d) : 16,
                      (uint32_t*)to + d * R, R);
        continue;
      } else if constexpr (!dp) {
        float wide[16][16];
        const void* at[16];
        for (int i = 0; i < 16; i++) at[i] = wide[i];
        for (int64_t d = 0; d < D; d += 16) {
          int n = D - d < 16 ? (int)(D - d) : 16;
          for (int i = 0; i < 16; i++) vstore(wide[i], vload(row[t + i] + d, n));
          transpose16(at, 0, n, (uint32_t*)to + d * R, R);
        }
        continue;
      }
#endif
      for (int64_t i = 0; i < 16; i++)
        for (int64_t d = 0; d < DK; d++) {
          A* e = kp + (t + i) / R * DK * R + (d / PAIR * R + (t + i) % R) * PAIR + d % PAIR;
          if constexpr (dp) *e = d < D ? *(const A*)(row[t + i] + d) : A{};
          else *e = widen(row[t + i][d]);
        }
    }
  }

  LLMC_METHOD void pack_values(int64_t n, int64_t padded) const {
    for (int64_t t = 0; t < padded; t += PAIR)
      for (int64_t d = 0; d < DP * R; d += R) {
        A* to = vp + (d / R * KT + t) * R;  // [DP][KT / PAIR][R][PAIR]
        int64_t left = E - d < R ? E - d : R;
        if constexpr (dp) {
#if defined(LLMC_AVX512)
          interleave(value_row(t, n) + d, value_row(t + 1, n) + d, left, to);
#endif
        } else {
          const KV* from = value_row(t, n) + d;
          for (int64_t v = 0; v < R; v += VN) {
            int64_t m = left - v;
            vstore(to + v, m >= VN ? vload(from + v) : m > 0 ? vload(from + v, (int)m) : vf{});
          }
        }
      }
  }
#if defined(LLMC_AVX512)
  static LLMC_METHOD void interleave(const KV* x, const KV* y, int64_t left, A* to) {
    static_assert(R % 32 == 0 || !dp, "whole vectors of 16-bit lanes");
    __m512i lo, hi;
    uint16_t index[64];
    for (int i = 0; i < 64; i++) index[i] = (uint16_t)(i / 2 + (i % 2) * 32);
    memcpy(&lo, index, 64);
    memcpy(&hi, index + 32, 64);
    for (int64_t v = 0; v < R; v += 32) {
      int64_t n = left - v;
      __mmask32 keep = n >= 32 ? 0xffffffffu : n > 0 ? (1u << n) - 1u : 0u;
      hi = _mm512_add_epi16(lo, _mm512_set1_epi16(16));
      __m512i f = _mm512_maskz_loadu_epi16(keep, x + v), g = _mm512_maskz_loadu_epi16(keep, y + v);
      _mm512_storeu_si512(to + 2 * v, _mm512_permutex2var_epi16(f, lo, g));
      _mm512_storeu_si512(to + 2 * v + 32, _mm512_permutex2var_epi16(f, hi, g));
    }
  }
#endif

  // ---- one block of rows ----
  // Row f of the span that begins with entry i, for group g, is token starts[i] + f / GROUP and head g * GROUP + f % GROUP.
  // Copies the queries of the rows f0 .. f0 + rows - 1, and initializes the softmax of each.
  LLMC_METHOD void load_queries(int64_t i, int64_t g, int64_t f0, int64_t rows) const {
    for (int64_t r = 0; r < rows; r++) {
      int64_t t = a->starts[i] + (f0 + r) / GROUP, h = g * GROUP + (f0 + r) % GROUP;
      copy_row(q + r * DK, (const Q*)a->q + (t * C::H + h) * E, E, C::LATENT ? E : DK);
      if constexpr (C::LATENT) copy_row(q + r * DK + E, (const Q*)a->rotary + (t * C::H + h) * (D - E), D - E, DK - E);
      pos[r] = a->positions[t];
      if constexpr (C::ALIBI) slope[r] = a->slopes[h] * LOG2E;
      top[r] = C::SINKS ? widen(((const typename C::S*)a->sinks)[h]) * LOG2E : -1e30f;
      sum[r] = C::SINKS ? 1.0f : 0.0f;
    }
    for (int64_t d = 0; d < DP; d++) memset(o + d * BR * R, 0, (size_t)(rows * R * 4));
  }

  LLMC_METHOD vf logits(vf x) const {
    if (C::SOFTCAP != 0.0f) return m_tanh(x * (C::SCALE / (C::SOFTCAP != 0.0f ? C::SOFTCAP : 1.0f))) * (C::SOFTCAP * LOG2E);
    return x * (C::SCALE * LOG2E);
  }

  // The online softmax step of row r of the block, which is row i of the tile: converts logits in s to weights in p, and
  // rescales the earlier sums. Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135.
  template <bool MASK> LLMC_METHOD void soften(int64_t r, int64_t i, int64_t k0, int64_t cols) const {
    vf best = splat(-1e30f), total = {};
    int32_t last = pos[r] - (int32_t)k0, first = C::WINDOW ? last - (int32_t)C::WINDOW + 1 : -2147483647;
    for (int64_t j = 0; j < cols; j += VN) {
      float* at = s + j / R * C::MR * R + i * R + j % R;
      vf x = logits(vload(at));
      vi col = lanes() + (int32_t)j;
      if constexpr (C::ALIBI) x += to_float(col - last) * slope[r];
      if (MASK) {
        x = select((col <= last) & (col >= first), x, splat(-INFINITY));
      }
      vstore(at, x);
      best = fast_max(x, best);
    }
    float m = hmax(best), old = top[r];
    m = m > old ? m : old;
    for (int64_t j = 0; j < cols; j += VN) {
      vf e = m_exp2(vload(s + j / R * C::MR * R + i * R + j % R) - m);
      total += e;
      vstore(p + i * KT + j, e);
    }
    float alpha = m > old ? m_exp2(old - m) : 1.0f;
    top[r] = m;
    sum[r] = sum[r] * alpha + hsum(total);
    if (alpha != 1.0f)
      for (int64_t d = 0; d < DP; d++)
        for (int64_t v = 0; v < R; v += VN) {
          float* at = o + (d * BR + r) * R + v;
          vstore(at, vload(at) * alpha);
        }
  }

  // Processes rows r0 .. r0 + n - 1 of the block with the packed tile of `keys` tokens that starts at token k0.
  LLMC_METHOD void tile_rows(int64_t r0, int64_t n, int64_t k0, int64_t keys) const {
    int32_t min_pos = pos[r0], max_pos = pos[r0];
    for (int64_t r = r0 + 1; r < r0 + n; r++) {
      min_pos = pos[r] < min_pos ? pos[r] : min_pos;
      max_pos = pos[r] > max_pos ? pos[r] : max_pos;
    }
    if (max_pos < k0 || (C::WINDOW && min_pos - C::WINDOW >= k0 + keys - 1)) return;
    int64_t used = max_pos - k0 + 1 < keys ? max_pos - k0 + 1 : keys, cols = (used + R - 1) / R * R;
    for (int64_t c = 0; c < cols; c += R)
      run_tile<C::MR, C::NV, PAIR>(n, kp + c * DK, q + r0 * DK, DK, DK / PAIR, s + c * C::MR, false,
                                    ahead{(const char*)s, 0});
    bool mask = min_pos < k0 + cols - 1 || (C::WINDOW && max_pos - C::WINDOW >= k0);
    for (int64_t i = 0; i < n; i++) {
      if (mask) soften<true>(r0 + i, i, k0, cols);
      else soften<false>(r0 + i, i, k0, cols);
    }
    for (int64_t d = 0; d < DP; d++)
      run_tile<C::MR, C::NV, PAIR>(n, vp + d * KT * R, p, KT, (used + PAIR - 1) / PAIR, o + (d * BR + r0) * R, true,
                                    ahead{(const char*)p, 0});
  }

  // Writes the rows of the block: the accumulated values divided by the sum of weights.
  LLMC_METHOD void store(int64_t i, int64_t g, int64_t f0, int64_t rows) const {
    for (int64_t r = 0; r < rows; r++) {
      int64_t t = a->starts[i] + (f0 + r) / GROUP, h = g * GROUP + (f0 + r) % GROUP;
      Q* to = (Q*)a->out + (t * C::H + h) * E;
      float inv = 1.0f / (sum[r] > 1e-30f ? sum[r] : 1e-30f);
      for (int64_t d = 0; d < E; d += VN) {
        vf x = vload(o + (d / R * BR + r) * R + d % R) * inv;
        if (E - d >= VN) vstore(to + d, x);
        else vstore(to + d, x, (int)(E - d));
      }
    }
  }

  // Computes the rows f0 .. f0 + rows - 1 of span i and group g, tile by tile over all visible keys.
  __attribute__((noinline)) void block(int64_t i, int64_t g, int64_t f0, int64_t rows) const {
    load_queries(i, g, f0, rows);
    int32_t min_pos = 2147483647, max_pos = -1;
    for (int64_t r = 0; r < rows; r++) {
      if (pos[r] >= 0 && pos[r] < min_pos) min_pos = pos[r];
      if (pos[r] > max_pos) max_pos = pos[r];
    }
    const int32_t* table = a->pages + (int64_t)a->rows[i] * a->row_pages;
    int64_t k0 = C::WINDOW && min_pos >= C::WINDOW ? (min_pos - C::WINDOW + 1) / C::ALIGN * C::ALIGN : 0;
    for (; k0 <= max_pos; k0 += KT) {
      int64_t keys = max_pos + 1 - k0 < KT ? max_pos + 1 - k0 : KT, padded = (keys + R - 1) / R * R;
      padded = (padded + 15) / 16 * 16;
      find_rows(table, g, k0, keys, padded);
      pack_keys(row, padded, kp);
      pack_values(keys, (keys + PAIR - 1) / PAIR * PAIR);
      for (int64_t r = 0; r < rows; r += C::MR) tile_rows(r, rows - r < C::MR ? rows - r : C::MR, k0, keys);
    }
    store(i, g, f0, rows);
  }

  // ---- the step ----
  // Calls fn(span, group, first row, rows, cost) for every unit of at most `size` rows, in the same order on every thread.
  // Adjacent spans of one device row, such as the entries that verify drafts, form a single one: their keys are packed
  // once.
  template <class F> LLMC_METHOD void units(int64_t size, F fn) const {
    for (int64_t i = 0, end; i < a->count; i = end) {
      for (end = i + 1; end < a->count && a->rows[end] == a->rows[i]; end++) {}
      int64_t rows = (int64_t)(a->starts[end] - a->starts[i]) * GROUP;
      if (a->rows[i] < 0 || rows <= 0) continue;
      int64_t parts = (rows + size - 1) / size;
      for (int64_t g = 0; g < C::G; g++)
        for (int64_t b = 0; b < parts; b++) {
          int64_t f0 = rows * b / parts, f1 = rows * (b + 1) / parts;
          int64_t keys = a->positions[a->starts[i] + (f1 - 1) / GROUP] + 1;
          if (C::WINDOW && keys > C::WINDOW + f1 - f0) keys = C::WINDOW + f1 - f0;
          fn(i, g, f0, f1 - f0, (keys + 16) * (f1 - f0 + 24));
        }
    }
  }
  // Sets the results of the tokens from .. to - 1 to zero: they are padding.
  LLMC_METHOD void clear(int64_t from, int64_t to) const {
    if (from < to) memset((char*)a->out + from * C::H * E * sizeof(Q), 0, (size_t)((to - from) * C::H * E * sizeof(Q)));
  }
  // Runs this thread's units: those whose midpoint in the total cost falls into its share of it. If there are fewer
  // units than threads, blocks are made smaller. Thread 0 also zeroes the padding tokens.
  LLMC_METHOD void run(int64_t tid, int64_t threads) const {
    int64_t count = 0, total = 0, done = 0, size = BR, widest = 1;
    units(size, [&](int64_t, int64_t, int64_t, int64_t rows, int64_t) { count++, widest = rows > widest ? rows : widest; });
    if (count > 0 && count < threads) size = (widest * count + threads - 1) / threads;
    if (size > BR) size = BR;
    units(size, [&](int64_t, int64_t, int64_t, int64_t, int64_t cost) { total += cost; });
    units(size, [&](int64_t i, int64_t g, int64_t f0, int64_t rows, int64_t cost) {
      if ((2 * done + cost) * threads / (2 * total) == tid) block(i, g, f0, rows);
      done += cost;
    });
    if (tid) return;
    for (int64_t i = 0; i < a->count; i++)
      if (a->rows[i] < 0) clear(a->starts[i], a->starts[i + 1]);
    clear(a->starts[a->count], a->tokens);
  }
};

template <class C> static void attention(const llmc_ctx* ctx, const attention_args& a) {
  attend<C>(&a, ctx->scratch).run(ctx->tid, ctx->nthreads);
}

}  // namespace llmc
#endif
