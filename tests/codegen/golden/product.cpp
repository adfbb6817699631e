// cpu/linear: packed_linear(bf16[sizes[0], 66], bf16[5, 33, 32, 2], f32[70], bf16[sizes[0], 70]) -> bf16[sizes[0], 70] n=70 parts=2 body=add(mul(mul(a0, sigmoid(a0)), add(a1, a2)), a3) dtype= rows=32 mr=12 mb=8 kc=4096
#include "llmc_linear.h"
#include "llmc_math.h"
#include "llmc_store.h"
using namespace llmc;
struct Shape {
  typedef bf16 X;
  typedef bf16 W;
  static constexpr int64_t K = 66, N = 70, MB = 8, KC = 4096;
  static constexpr int NV = 32 / VN, PAIR = 2, PARTS = 2, MR = 12;
  static_assert(32 % (VN * PARTS) == 0, "panels fit the vectors");
};
struct Epilogue {
  bf16* y;
  const float* e0;
  const bf16* e1;
  template <class M> LLMC_METHOD void at(int64_t m, int64_t n, M mask, const float* c) const {
    const vf t0 = vload(c);
    const vf t3 = vload(c + 16);
    const vf t4 = get(e0 + n, mask);
    const vf t7 = get(e1 + m * 70 + n, mask);
    const vf t1 = m_sigmoid(t0);
    const vf t2 = (t0 * t1);
    const vf t5 = (t3 + t4);
    const vf t6 = (t2 * t5);
    const vf t8 = (t6 + t7);
    set(y + m * 70 + n, t8, mask);
  }
  LLMC_METHOD void put(int64_t m, int64_t n, int count, const float* c) const {
    if (count == VN) at(m, n, Full{}, c);
    else at(m, n, Part{count}, c);
  }
};
static_assert(product<Shape, Epilogue>::SCRATCH <= 26880, "scratch");
extern "C" __attribute__((visibility("default")))
void llmc_packed_linear(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const bf16* x0 = (const bf16*)args[0];
  const bf16* x1 = (const bf16*)args[1];
  const float* x2 = (const float*)args[2];
  const bf16* x3 = (const bf16*)args[3];
  bf16* y0 = (bf16*)args[4];
  const Epilogue e = {y0, x2, x3};
  linear<Shape>(ctx, x0, (int64_t)sizes[0], x1, e);
}
