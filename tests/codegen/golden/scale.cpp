// cpu/rows: mul(bf16[sizes[1], 14, 64], f32[sizes[1], 1, 64]) -> f32[sizes[1], 14, 64]
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
using namespace llmc;
extern "C" __attribute__((visibility("default")))
void llmc_mul(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const bf16* x0 = (const bf16*)args[0];
  const float* x1 = (const float*)args[1];
  float* y0 = (float*)args[2];
  const int64_t n = 64;
  int64_t lo, hi;
  llmc_split(ctx, sizes[0], 1, &lo, &hi);
  for (int64_t row = lo; row < hi; row++) {
    const int64_t i1 = row % 14, rest1 = row / 14;
    const int64_t i0 = rest1;
    const auto q0 = x0 + i0 * 896 + i1 * 64;
    const auto q1 = x1 + i0 * 64;
    const auto r0 = y0 + i0 * 896 + i1 * 64;
    auto pass0 = [&](int64_t j, auto m) {
      const vf t0 = get(q0 + j, m);
      const vf t1 = get(q1 + j, m);
      const vf t2 = (t0 * t1);
      set(r0 + j, t2, m);
    };
    for (int64_t j = 0; j < n; j += VN) {
      if (j + VN <= n) pass0(j, Full{});
      else pass0(j, Part{(int)(n - j)});
    }
  }
}
