// Appends keys and values to KV pages, converting to the pool's dtype. A slot of -1 is padding.
#ifndef LLMC_KV_H
#define LLMC_KV_H
#include "llmc_abi.h"
#include "llmc_simd.h"
namespace llmc {
template <class S, class T>
LLMC_INLINE void copy_head(S* to, const T* from, int64_t d) {
  for (int64_t j = 0; j < d; j += VN) {
    int n = d - j < VN ? (int)(d - j) : VN;
    vstore(to + j, vload(from + j, n), n);
  }
}
// kv is [pages, 2, g, page, d].
template <class S, class T>
static inline void kv_append(const llmc_ctx* ctx, S* kv, const T* k, const T* v, const int32_t* slots, int64_t t,
                             int64_t g, int64_t page, int64_t d) {
  int64_t lo, hi;
  llmc_split(ctx, t * g, 1, &lo, &hi);
  for (int64_t p = lo; p < hi; p++) {
    int64_t slot = slots[p / g];
    if (slot < 0) continue;
    S* to = kv + (((slot / page * 2) * g + p % g) * page + slot % page) * d;
    copy_head(to, k + p * d, d);
    copy_head(to + g * page * d, v + p * d, d);
  }
}
}  // namespace llmc
#endif
