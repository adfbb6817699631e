// Recurrent layers on device rows: convolutions along a sequence, and linear recurrences with decay. Entries of a step
// that name the same row are a run; one thread computes all runs of its channels, or of its head and columns, so that
// it owns that part of the rows' states.
#ifndef LLMC_RECURRENT_H
#define LLMC_RECURRENT_H
#include "llmc_abi.h"
#include "llmc_math.h"
namespace llmc {

// The entries of a step: rows [r], starts [r + 1], positions [t].
struct step_rows {
  const int32_t *rows, *starts, *positions;
  int64_t r, t;
};

// Calls `run(row, begin, end, first position)` of each run that has tokens, and `pad(begin, end)` of other tokens.
template <class Run, class Pad>
LLMC_INLINE void each_run(const step_rows& s, Run run, Pad pad) {
  int64_t i = 0;
  while (i < s.r) {
    int64_t last = i + 1, row = s.rows[i];
    while (last < s.r && s.rows[last] == row) last++;
    int64_t begin = s.starts[i], end = s.starts[last];
    if (row < 0) pad(begin, end);
    else if (begin < end) run(row, begin, end, (int64_t)s.positions[begin]);
    i = last;
  }
  pad((int64_t)s.starts[s.r], s.t);
}

LLMC_INLINE int lanes_of(int64_t left) { return left < 0 ? 0 : left < VN ? (int)left : VN; }

// y [t, c] = x convolved with weight [c, W] along each run. The inputs before the run are in the ring [m, n, c] of its
// device row: the input of position p is at p mod n.
template <int W, class T>
static inline void row_conv(const llmc_ctx* ctx, T* y, T* ring, const T* x, const T* weight, const T* bias,
                            const step_rows& s, int64_t c, int64_t n) {
  int64_t lo, hi;
  llmc_split(ctx, c, VN, &lo, &hi);
  for (int64_t at = lo; at < hi; at += VN) {
    int lanes = lanes_of(hi - at);
    float columns[W][VN] = {};
    for (int l = 0; l < lanes; l++)
      for (int j = 0; j < W; j++) columns[j][l] = widen(weight[(at + l) * W + j]);
    vf w[W], added = bias ? vload(bias + at, lanes) : splat(0);
    for (int j = 0; j < W; j++) w[j] = vload(columns[j]);
    auto run = [&](int64_t row, int64_t begin, int64_t end, int64_t first) {
      T* recent = ring + row * n * c + at;
      vf window[W];
      for (int j = 0; j < W - 1; j++) {
        int64_t p = first - (W - 1) + j;
        window[j] = p < 0 ? splat(0) : vload(recent + p % n * c, lanes);
      }
      for (int64_t i = begin; i < end; i++) {
        window[W - 1] = vload(x + i * c + at, lanes);
        vf sum = splat(0);
        for (int j = 0; j < W; j++) sum = fma(window[j], w[j], sum);
        vstore(y + i * c + at, sum + added, lanes);
        for (int j = 0; j < W - 1; j++) window[j] = window[j + 1];
      }
      for (int64_t i = end - begin > n ? end - n : begin; i < end; i++)
        vstore(recent + (first + i - begin) % n * c, vload(x + i * c + at, lanes), lanes);
    };
    each_run(s, run, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) vstore(y + i * c + at, splat(0), lanes);
    });
  }
}

// The operands of a recurrence, whose result is y [t, H, E]:
//   q, k    [t, G, D]
//   v       [t, H, E]
//   decay   [t, H, R]; R is 1, or D for a factor per channel of a key
//   beta    [t, H], or null without the delta rule
//   memory  [m, H, D, E], the states of the device rows
//   base    [m]; with N > 0, the state of a row covers the tokens before this position
//   log     [m, N, WIDTH]; with N > 0, the tokens from `base` on
template <class T> struct recurrence_args {
  T* y;
  float* memory;
  const T *q, *k, *v;
  const float *decay, *beta;
  const int32_t* base;
  const float* log;
  step_rows step;
};

// One head's state [D, columns] with rows of `stride` floats, of NB vectors of which the last ones may be partial.
template <int64_t D, int64_t R, int NB, bool FULL> struct head_state {
  float* s;
  int64_t stride, columns;

  LLMC_METHOD int lanes(int b) const { return FULL ? VN : lanes_of(columns - b * VN); }
  template <class T> LLMC_METHOD vf read(const T* p, int b) const {
    return FULL ? vload(p + b * VN) : vload(p + b * VN, lanes(b));
  }
  template <class T> LLMC_METHOD void write(T* p, vf x, int b) const {
    if (FULL) vstore(p + b * VN, x);
    else vstore(p + b * VN, x, lanes(b));
  }
  LLMC_METHOD void clear() {
    for (int64_t i = 0; i < D; i++)
      for (int b = 0; b < NB; b++) write(s + i * stride, splat(0), b);
  }
  LLMC_METHOD void copy(const head_state& from) {
    for (int64_t i = 0; i < D; i++)
      for (int b = 0; b < NB; b++) write(s + i * stride, read(from.s + i * from.stride, b), b);
  }
  // One token: S = exp(decay) S; u = beta (v - S^T k), or v without beta; S += k u^T; y = S^T q unless y is null.
  template <class K, class Y>
  LLMC_METHOD void token(const K* q, const K* k, const K* v, const float* decay, const float* beta, Y* y) {
    vf a = m_exp(splat(*decay)), u[NB], out[NB];
    float factors[(R + VN - 1) / VN * VN];
    if (R > 1)
      for (int64_t j = 0; j < R; j += VN) vstore(factors + j, m_exp(vload(decay + j, lanes_of(R - j))));
    for (int b = 0; b < NB; b++) u[b] = out[b] = splat(0);
    if (beta) {
      for (int64_t i = 0; i < D; i++) {
        vf ki = splat(R > 1 ? widen(k[i]) * factors[R > 1 ? i : 0] : widen(k[i]));
        for (int b = 0; b < NB; b++) u[b] = fma(read(s + i * stride, b), ki, u[b]);
      }
      for (int b = 0; b < NB; b++) u[b] = (read(v, b) - (R > 1 ? u[b] : a * u[b])) * *beta;
    } else {
      for (int b = 0; b < NB; b++) u[b] = read(v, b);
    }
    for (int64_t i = 0; i < D; i++) {
      vf ki = splat(widen(k[i])), qi = splat(y ? widen(q[i]) : 0);
      if (R > 1) a = splat(factors[R > 1 ? i : 0]);
      for (int b = 0; b < NB; b++) {
        vf x = fma(ki, u[b], a * read(s + i * stride, b));
        write(s + i * stride, x, b);
        out[b] = fma(x, qi, out[b]);
      }
    }
    if (y)
      for (int b = 0; b < NB; b++) write(y, out[b], b);
  }
};

// The columns [at, at + columns) of one head of all runs; `spare` has room for a state.
template <int64_t G, int64_t H, int64_t D, int64_t E, int64_t N, int64_t R, int NB, bool FULL, class T>
static inline void recur_columns(const recurrence_args<T>& a, int64_t h, int64_t at, int64_t columns, float* spare) {
  constexpr int64_t WIDTH = G * D + H * E + R * H + H;
  const int64_t g = h / (H / G);
  typedef head_state<D, R, NB, FULL> state;
  auto tokens = [&](state s, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T *q = a.q + (i * G + g) * D, *k = a.k + (i * G + g) * D;
      int64_t column = (i * H + h) * E + at;
      s.token(q, k, a.v + column, a.decay + (i * H + h) * R, a.beta ? a.beta + i * H + h : nullptr, a.y + column);
    }
  };
  auto run = [&](int64_t row, int64_t begin, int64_t end, int64_t first) {
    state s = {a.memory + (row * H + h) * D * E + at, E, columns};
    if (!first) s.clear();
    if (!N) return tokens(s, begin, end);
    for (int64_t p = first ? a.base[row] : 0; p < first; p++) {
      const float* x = a.log + (row * N + p % (N ? N : 1)) * WIDTH;
      const float *v = x + G * D + h * E + at, *factors = x + G * D + H * E;
      s.token(x, x + g * D, v, factors + h * R, a.beta ? factors + H * R + h : nullptr, (float*)nullptr);
    }
    int64_t accepted = end - begin - N > 1 ? end - N : begin + 1;  // tokens before this one cannot be rejected
    tokens(s, begin, accepted);
    if (accepted == end) return;
    state drafted = {spare, NB * VN, columns};
    drafted.copy(s);
    tokens(drafted, accepted, end);
  };
  each_run(a.step, run, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int b = 0; b < NB; b++) {
        int lanes = lanes_of(columns - b * VN);
        vstore(a.y + (i * H + h) * E + at + b * VN, splat(0), lanes);
      }
  });
}

// Threads divide the heads and, in blocks of NB vectors, their columns.
template <int64_t G, int64_t H, int64_t D, int64_t E, int64_t N, int64_t R, int NB, class T>
static inline void recurrence(const llmc_ctx* ctx, const recurrence_args<T>& a) {
  constexpr int64_t COLUMNS = NB * VN, BLOCKS = (E + COLUMNS - 1) / COLUMNS;
  int64_t lo, hi;
  llmc_split(ctx, H * BLOCKS, 1, &lo, &hi);
  for (int64_t part = lo; part < hi; part++) {
    int64_t h = part / BLOCKS, at = part % BLOCKS * COLUMNS;
    if (E - at >= COLUMNS) recur_columns<G, H, D, E, N, R, NB, true>(a, h, at, COLUMNS, (float*)ctx->scratch);
    else recur_columns<G, H, D, E, N, R, NB, false>(a, h, at, E - at, (float*)ctx->scratch);
  }
}

// Writes the tokens of each run that may be rejected to the log [m, n, g * d + h * e + c + h], and sets its base.
template <class T>
static inline void row_log(const llmc_ctx* ctx, int32_t* base, float* log, const T* k, const T* v, const float* decay,
                           const float* beta, const step_rows& s, int64_t keys, int64_t values, int64_t c, int64_t h,
                           int64_t n) {
  int64_t width = keys + values + c + h, lo, hi;
  llmc_split(ctx, width, 16, &lo, &hi);
  auto run = [&](int64_t row, int64_t begin, int64_t end, int64_t first) {
    int64_t accepted = end - begin - n > 1 ? end - n : begin + 1;  // tokens before this one cannot be rejected
    if (ctx->tid == 0) base[row] = (int32_t)(first + accepted - begin);
    for (int64_t i = accepted; i < end; i++) {
      float* to = log + (row * n + (first + i - begin) % n) * width;
      for (int64_t j = lo; j < hi; j++) {
        if (j < keys) to[j] = widen(k[i * keys + j]);
        else if (j < keys + values) to[j] = widen(v[i * values + j - keys]);
        else if (j < keys + values + c) to[j] = decay[i * c + j - keys - values];
        else to[j] = beta ? beta[i * h + j - keys - values - c] : 0.0f;
      }
    }
  };
  each_run(s, run, [](int64_t, int64_t) {});
}
}  // namespace llmc
#endif
