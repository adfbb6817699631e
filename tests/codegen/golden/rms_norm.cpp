// cpu/rows: rms_norm(bf16[sizes[0], 896], bf16[896]) -> bf16[sizes[0], 896] eps=1e-06
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
using namespace llmc;
extern "C" __attribute__((visibility("default")))
void llmc_rms_norm(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const bf16* x0 = (const bf16*)args[0];
  const bf16* x1 = (const bf16*)args[1];
  bf16* y0 = (bf16*)args[2];
  const int64_t n = 896;
  int64_t lo, hi;
  llmc_split(ctx, sizes[0], 1, &lo, &hi);
  for (int64_t row = lo; row < hi; row++) {
    const int64_t i0 = row;
    const auto q0 = x0 + i0 * 896;
    const auto q1 = x1;
    const auto r0 = y0 + i0 * 896;
    vf s2 = splat(0.0f);
    auto pass0 = [&](int64_t j, auto m) {
      const vf t0 = get(q0 + j, m);
      const vf t1 = (t0 * t0);
      s2 = s2 + keep(t1, 0.0f, m);
    };
    for (int64_t j = 0; j < n; j += VN) {
      if (j + VN <= n) pass0(j, Full{});
      else pass0(j, Part{(int)(n - j)});
    }
    const vf t2 = splat(hsum(s2) / (float)n);
    const vf t4 = (t2 + splat(1e-06f));
    const vf t5 = m_rsqrt(t4);
    auto pass1 = [&](int64_t j, auto m) {
      const vf t0 = get(q0 + j, m);
      const vf t6 = (t0 * t5);
      const vf t7 = get(q1 + j, m);
      const vf t8 = (t6 * t7);
      set(r0 + j, t8, m);
    };
    for (int64_t j = 0; j < n; j += VN) {
      if (j + VN <= n) pass1(j, Full{});
      else pass1(j, Part{(int)(n - j)});
    }
  }
}
