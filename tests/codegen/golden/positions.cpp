// cpu/elements: le(i64[sizes[0]], i64[]) -> bool[sizes[0]]
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
#include "llmc_element.h"
using namespace llmc;
extern "C" __attribute__((visibility("default")))
void llmc_le(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const int64_t* x0 = (const int64_t*)args[0];
  const int64_t* x1 = (const int64_t*)args[1];
  b8* y0 = (b8*)args[2];
  const int64_t n = sizes[0];
  int64_t lo, hi;
  llmc_split(ctx, n, 256, &lo, &hi);
  const auto q0 = x0;
  const auto q1 = x1;
  const auto r0 = y0;
  for (int64_t j = lo; j < hi; j++) {
    const auto t0 = scalar(q0[j]);
    const auto t1 = scalar(q1[0]);
    const auto t2 = (t0 <= t1);
    put(r0 + j, t2);
  }
}
