// cpu/rows: softmax(f32[4, sizes[1], 100]) -> f32[4, sizes[1], 100] axis=-1
#include "llmc_abi.h"
#include "llmc_math.h"
#include "llmc_store.h"
using namespace llmc;
extern "C" __attribute__((visibility("default")))
void llmc_softmax(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const float* x0 = (const float*)args[0];
  float* y0 = (float*)args[1];
  const int64_t n = 100;
  int64_t lo, hi;
  llmc_split(ctx, sizes[0], 1, &lo, &hi);
  for (int64_t row = lo; row < hi; row++) {
    const int64_t i0 = row;
    const auto q0 = x0 + i0 * 100;
    const auto r0 = y0 + i0 * 100;
    float* const c3 = (float*)ctx->scratch + 0 * (n + 16);
    vf s1 = splat(-INFINITY);
    auto pass0 = [&](int64_t j, auto m) {
      const vf t0 = get(q0 + j, m);
      s1 = m_max(s1, keep(t0, -INFINITY, m));
    };
    for (int64_t j = 0; j < n; j += VN) {
      if (j + VN <= n) pass0(j, Full{});
      else pass0(j, Part{(int)(n - j)});
    }
    const vf t1 = splat(hmax_nan(s1));
    vf s4 = splat(0.0f);
    auto pass1 = [&](int64_t j, auto m) {
      const vf t0 = get(q0 + j, m);
      const vf t2 = (t0 - t1);
      const vf t3 = m_exp(t2);
      set(c3 + j, t3, m);
      s4 = s4 + keep(t3, 0.0f, m);
    };
    for (int64_t j = 0; j < n; j += VN) {
      if (j + VN <= n) pass1(j, Full{});
      else pass1(j, Part{(int)(n - j)});
    }
    const vf t4 = splat(hsum(s4));
    auto pass2 = [&](int64_t j, auto m) {
      const vf t3 = get(c3 + j, m);
      const vf t5 = (t3 / t4);
      set(r0 + j, t5, m);
    };
    for (int64_t j = 0; j < n; j += VN) {
      if (j + VN <= n) pass2(j, Full{});
      else pass2(j, Part{(int)(n - j)});
    }
  }
}
