// Penalties, masks, sampling and log-probabilities of rows of logits (the ops of llmc/ir/ops/sample.py). Sampling sorts
// only the ids in the histogram bucket of the threshold, and its result depends only on (logits, parameters, seed,
// position). In all functions: r entries of v logits; rows[i] is the device row of entry i, -1 for padding; fparams and
// iparams have 8 columns each, named by llmc_row_columns.h, which cpp_kernel.py makes from sched/row_columns.py.
#ifndef LLMC_SAMPLE_H
#define LLMC_SAMPLE_H
#include <math.h>
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_reduce.h"
#include "llmc_row_columns.h"
#include "llmc_sampling_rules.h"
#include "llmc_store.h"
namespace llmc {
// Returns the position after the last token of entry i.
static inline int64_t end_of(const int32_t* starts, const int32_t* positions, int64_t i) {
  return starts[i + 1] > 0 ? (int64_t)positions[starts[i + 1] - 1] + 1 : 0;
}

// The place of the drafted ids that precede an entry's new token. They are the last tokens of the row's entries, without
// the first entry and up to the entry itself, if these tokens come after the prompt. tokens: [rows, width], or null if
// the step verifies no drafts.
struct Drafted {
  const int32_t *starts, *positions, *tokens;
  int64_t width;
};
struct Draft { int32_t id, count; float logit; };  // a drafted id, how often it is drafted, its logit before penalties
// Finds the distinct drafted ids of entry i from lo to below hi; returns their number.
static inline int drafts_of(Drafted d, const int32_t* rows, const int32_t* iparams, int64_t i, const float* logits,
                            int64_t lo, int64_t hi, Draft* drafts) {
  int n = 0;
  if (!d.tokens) return 0;
  for (int64_t row = rows[i]; i > 0 && rows[i - 1] == row; i--) {
    int32_t at = d.positions[d.starts[i + 1] - 1], k = 0;
    if (at < iparams[row * 8 + PROMPT_LEN]) break;
    int32_t id = d.tokens[row * d.width + at];
    if (id < lo || id >= hi) continue;
    while (k < n && drafts[k].id != id) k++;
    if (k < n) {
      drafts[k].count++;
    } else if (n < DRAFTS_MAX) {
      drafts[n++] = Draft{id, 1, logits[id]};
    }
  }
  return n;
}
// Threads divide the ids. `words` is the width of a row of the bitmap `seen`, `width` that of bias_ids and biases.
template <class T>
static inline void row_penalize(const llmc_ctx* ctx, float* y, const T* x, const int32_t* rows, const float* fparams,
                                const int32_t* iparams, const int32_t* seen, const int32_t* counts,
                                const int32_t* bias_ids, const float* biases, Drafted drafted, int64_t r, int64_t v,
                                int64_t words, int64_t width) {
  int64_t lo, hi;
  llmc_split(ctx, v, 256, &lo, &hi);
  for (int64_t i = 0; i < r; i++) {
    const T* from = x + i * v;
    float* to = y + i * v;
    for (int64_t j = lo; j < hi; j++) to[j] = scalar(from[j]);
    if (rows[i] < 0) continue;
    int64_t some = iparams[rows[i] * 8 + NUM_BIASES];
    for (int64_t s = 0; s < some; s++) {
      int64_t id = bias_ids[rows[i] * width + s];
      if (id >= lo && id < hi) to[id] += biases[rows[i] * width + s];
    }
    const float* f = fparams + rows[i] * 8;
    if (!penalizes(f)) continue;
    const int32_t *bits = seen + rows[i] * words, *count = counts + rows[i] * v;
    Draft drafts[DRAFTS_MAX];
    int some_drafts = drafts_of(drafted, rows, iparams, i, to, lo, hi, drafts);
    for (int64_t j = lo; j < hi; j += VN) {  // lo is a multiple of 32: the bits of a vector are in one word
      int n = hi - j < VN ? (int)(hi - j) : VN;
      vi times = {};
      memcpy(&times, count + j, n * sizeof(int32_t));
      vi bit = (splat_i(bits[j / 32]) >> (lanes() + (int32_t)(j % 32))) & 1;
      vstore(to + j, penalized(f, vload(to + j, n), to_float(times), (bit | times) > 0), n);
    }
    for (int k = 0; k < some_drafts; k++) {
      int32_t id = drafts[k].id, times = count[id] + drafts[k].count;
      float lane[VN];
      vstore(lane, penalized(f, splat(drafts[k].logit), splat((float)times), splat_i(1) > 0));  // output has it
      to[id] = lane[0];
    }
  }
}
// Threads divide the ids. `width` is the number of stop ids per row, `words` the width of a row of `allowed`, which has
// several bitmaps.
static inline void row_mask(const llmc_ctx* ctx, float* y, const float* x, const int32_t* rows, const int32_t* starts,
                            const int32_t* positions, const int32_t* iparams, const int32_t* stops,
                            const int32_t* allowed, int64_t r, int64_t v, int64_t width, int64_t words) {
  int64_t lo, hi;
  llmc_split(ctx, v, 256, &lo, &hi);
  for (int64_t i = 0; i < r; i++) {
    if (y != x) memcpy(y + i * v + lo, x + i * v + lo, (hi - lo) * sizeof(float));
    int64_t row = rows[i];
    if (row < 0) continue;
    int64_t bitmap = (v + 31) / 32, count = iparams[row * 8 + MASKED], end = end_of(starts, positions, i);
    if (count > 0 && count <= words / bitmap) {
      const int32_t* bits = allowed + row * words + end % count * bitmap;
      for (int64_t j = lo; j < hi; j++)
        if (!((uint32_t)bits[j / 32] >> (j % 32) & 1u)) y[i * v + j] = -INFINITY;
    }
    if (end >= iparams[row * 8 + MIN_LEN]) continue;
    for (int64_t s = 0; s < width; s++) {
      int64_t id = stops[row * width + s];
      if (id >= lo && id < hi) y[i * v + id] = -INFINITY;
    }
  }
}
static inline uint64_t mix64(uint64_t z) {  // splitmix64 (Steele, Lea, Flood 2014)
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
// Exponential random variables of the ids j to j + VN - 1 for the draw `key`: see `exponentials` of ir/ops/sample.py.
// They are -log(1 - w) and at least w, in (0, 1).
struct Waits {
  float w[VN];
  uint32_t high[VN];
  Waits(uint64_t key, int64_t j) {
    for (int k = 0; k < VN; k++) {
      high[k] = mix64(key + (uint64_t)(j + k) * 0x9E3779B97F4A7C15u) >> 32;
      w[k] = ((float)high[k] + 0.5f) * 0x1p-32f;
    }
  }
  vf exponential() const {
    float rest[VN];  // 1 - w
    for (int k = 0; k < VN; k++) rest[k] = ((float)~high[k] + 0.5f) * 0x1p-32f;
    vf x = vload(w, VN);  // a series where 1 - w would lose the lower bits of w
    vf series = x * (1.0f + x * (0.5f + x * (0.33333333f + x * 0.25f)));
    return x < 0.00390625f ? series : -m_log(vload(rest, VN));
  }
};
static inline int64_t argmax_row(const float* x, int64_t n) {  // the lowest index among the largest
  vf top = splat(-INFINITY);
  for (int64_t j = 0; j + VN <= n; j += VN) top = m_max(vload(x + j), top);
  float best = hmax_nan(top);
  for (int64_t j = n / VN * VN; j < n; j++) best = x[j] > best ? x[j] : best;
  for (int64_t j = 0; j < n; j++)
    if (x[j] == best || x[j] != x[j]) return j;
  return 0;
}
struct Pick { float e; int32_t id; };                  // an id and its unnormalized probability
struct Cut { float e; int32_t id; };                   // a threshold, which keeps larger e, and equal e up to this id
struct Mass { double sum; int64_t count; };
static inline bool kept(Cut c, float e, int64_t id) { return e > c.e || (e == c.e && id <= c.id); }
static inline bool before(Pick a, Pick b) { return a.e > b.e || (a.e == b.e && a.id < b.id); }
static inline void sift(Pick* p, int64_t i, int64_t n) {
  for (int64_t c; (c = 2 * i + 1) < n; i = c) {
    if (c + 1 < n && before(p[c], p[c + 1])) c++;
    if (!before(p[i], p[c])) return;
    Pick t = p[i];
    p[i] = p[c], p[c] = t;
  }
}
static inline void sort_picks(Pick* p, int64_t n) {  // heap sort in descending order
  for (int64_t i = n / 2 - 1; i >= 0; i--) sift(p, i, n);
  for (int64_t m = n - 1; m > 0; m--) {
    Pick t = p[0];
    p[0] = p[m], p[m] = t;
    sift(p, 0, m);
  }
}
constexpr int BUCKETS = 2048;  // histogram by the leading bits of e in [0, 1], in the order of e
static inline int bucket(float e) { return (int)(f_bits(e) >> 19); }

// Samples one row. e is scratch for v floats, hist for BUCKETS masses, picks for v picks.
struct RowSampler {
  const float* e;
  int64_t v;
  Mass* hist;
  Pick* picks;
  Cut cut;  // the ids kept so far

  // Computes the mass of the kept ids per bucket.
  void measure() {
    for (int b = 0; b < BUCKETS; b++) hist[b] = Mass{0.0, 0};
    for (int64_t j = 0; j < v; j++)
      if (kept(cut, e[j], j)) {
        Mass& m = hist[bucket(e[j])];
        m.sum += e[j];
        m.count++;
      }
  }
  // Sorts the kept ids of bucket b into `picks`, in descending order; returns their number.
  int64_t sorted(int b) {
    int64_t n = 0;
    for (int64_t j = 0; j < v; j++)
      if (bucket(e[j]) == b && kept(cut, e[j], j)) picks[n++] = Pick{e[j], (int32_t)j};
    sort_picks(picks, n);
    return n;
  }
  // Moves the threshold to the k-th largest kept id.
  void top_k(int64_t k) {
    measure();
    int64_t have = 0;
    for (int b = BUCKETS - 1; b >= 0; b--) {
      if (have + hist[b].count < k) {
        have += hist[b].count;
        continue;
      }
      sorted(b);
      cut = Cut{picks[k - have - 1].e, picks[k - have - 1].id};
      return;
    }
  }
  // Moves the threshold to the id at which the cumulative mass, in descending order, reaches p of the total.
  void top_p(double p) {
    measure();
    double total = 0, have = 0;
    for (int b = 0; b < BUCKETS; b++) total += hist[b].sum;
    for (int b = BUCKETS - 1; b >= 0; b--) {
      if (!hist[b].count) continue;
      if (have + hist[b].sum < p * total) {
        have += hist[b].sum;
        continue;
      }
      int64_t n = sorted(b), i = 0;
      for (; i < n && (have < p * total || i == 0); i++) have += picks[i].e;
      cut = Cut{picks[i - 1].e, picks[i - 1].id};
      return;
    }
  }
  // Returns the kept id with the largest quotient of its mass and its exponential random variable, the lowest of equals.
  // `likeliest` is the id of the largest logit: it is always kept, and its mass is 1.
  int64_t draw(uint64_t key, int64_t likeliest) {
    int64_t best = likeliest;
    float most = 1.0f / Waits(key, best).exponential()[0];
    for (int64_t j = 0; j < v; j += VN) {
      Waits waits(key, j);
      vf mass = vload(e + j, v - j < VN ? (int)(v - j) : VN);
      vi may = vload(waits.w, VN) * most <= mass;
      if (!any(may)) continue;
      vf score = mass / waits.exponential();
      for (int k = 0; k < VN && j + k < v; k++) {
        bool more = score[k] > most || (score[k] == most && j + k < best);
        if (more && kept(cut, e[j + k], j + k)) most = score[k], best = j + k;
      }
    }
    return best;
  }
};
// scratch: BUCKETS masses, v floats rounded up to whole vectors, v picks. `position` is that of the new token.
static inline int64_t sample_row(const float* x, int64_t v, const float* f, const int32_t* ip, int64_t position,
                                 char* scratch) {
  int64_t best = argmax_row(x, v);
  if (f[TEMPERATURE] == 0.0f) return best;
  Mass* hist = (Mass*)scratch;
  float* e = (float*)(scratch + BUCKETS * sizeof(Mass));
  Pick* picks = (Pick*)(e + (v + VN) / VN * VN);
  float top = x[best], t = f[TEMPERATURE];
  for (int64_t j = 0; j < v; j += VN) {
    int n = v - j < VN ? (int)(v - j) : VN;
    vstore(e + j, m_exp((vload(x + j, n) - top) / t), n);
  }
  RowSampler sampler{e, v, hist, picks, Cut{least_probability(f), INT32_MAX}};
  if (ip[TOP_K] > 0 && ip[TOP_K] < v) sampler.top_k(ip[TOP_K]);
  if (f[TOP_P] < 1.0f) sampler.top_p(f[TOP_P]);
  uint64_t seed = (uint32_t)ip[SEED_LO] | (uint64_t)(uint32_t)ip[SEED_HI] << 32;
  return sampler.draw(mix64(mix64(seed) ^ (uint64_t)position), best);
}
// Threads divide the entries. `width` is the length of a row of `tokens`.
static inline void row_sample(const llmc_ctx* ctx, int32_t* ids, const float* x, const int32_t* rows,
                              const int32_t* starts, const int32_t* positions, const int32_t* tokens,
                              const float* fparams, const int32_t* iparams, int64_t r, int64_t v, int64_t width) {
  int64_t lo, hi;
  llmc_split(ctx, r, 1, &lo, &hi);
  for (int64_t i = lo; i < hi; i++) {
    int64_t row = rows[i], end = end_of(starts, positions, i);
    if (row < 0)
      ids[i] = 0;
    else if (end < iparams[row * 8 + PROMPT_LEN])
      ids[i] = tokens[row * width + end];
    else
      ids[i] = (int32_t)sample_row(x + i * v, v, fparams + row * 8, iparams + row * 8, end, ctx->scratch);
  }
}
// Threads divide the entries. rows and iparams may be null: then all entries are computed.
template <class T>
static inline void row_logprobs(const llmc_ctx* ctx, float* logprob, int32_t* rank, int32_t* top_ids, float* top,
                                const T* x, const int32_t* ids, const int32_t* rows, const int32_t* iparams,
                                int64_t r, int64_t v, int64_t k) {
  int64_t lo, hi;
  llmc_split(ctx, r, 1, &lo, &hi);
  for (int64_t i = lo; i < hi; i++) {
    if (rows && (rows[i] < 0 || !iparams[rows[i] * 8 + WANT_LOGPROBS])) {
      logprob[i] = 0.0f;
      rank[i] = 0;
      memset(top_ids + i * k, 0, k * sizeof(int32_t));
      memset(top + i * k, 0, k * sizeof(float));
      continue;
    }
    const T* row = x + i * v;
    top_of_row(row, v, k, top + i * k, top_ids + i * k);
    float most = top[i * k];
    double total = 0;
    for (int64_t j = 0; j < v; j += VN) {
      int n = v - j < VN ? (int)(v - j) : VN;
      vf e = m_exp(vload(row + j, n) - most);
      total += hsum(n == VN ? e : keep(e, 0.0f, Part{n}));
    }
    float lse = (float)log(total), own = scalar(row[ids[i]]);
    int32_t above = 0;
    for (int64_t j = 0; j < v; j++) above += scalar(row[j]) > own;
    logprob[i] = (own - most) - lse;
    rank[i] = above + 1;
    for (int64_t j = 0; j < k; j++) top[i * k + j] = (top[i * k + j] - most) - lse;
  }
}
}  // namespace llmc
#endif
