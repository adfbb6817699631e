// cpu/attention: paged_attention(bf16[sizes[0], 14, 64], state bf16[sizes[2], 2, 2, 16, 64], state i32[8, 64], i32[sizes[1]], i32[sizes[3]], i32[sizes[0]], f32[14]) -> bf16[sizes[0], 14, 64] scale=0.125 window=128 softcap=0.0 least=1 nv=2 mr=12 br=192 kt=256
#include "llmc_attention.h"
using namespace llmc;
struct Shape {
  typedef bf16 Q;
  typedef bf16 KV;
  typedef float S;
  static constexpr int64_t H = 14, G = 2, D = 64, E = 64, PAGE = 16;
  static constexpr int64_t WINDOW = 128;
  static constexpr int NV = 2, MR = 12;
  static constexpr int64_t BR = 192, KT = 256, ALIGN = 1;
  static constexpr float SCALE = 0.125f, SOFTCAP = 0.0f;
  static constexpr bool SINKS = true;
  static constexpr bool LATENT = false;
  static constexpr bool ALIBI = false;
};
static_assert(attend<Shape>::SCRATCH <= 258432, "scratch");
extern "C" __attribute__((visibility("default")))
void llmc_paged_attention(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const bf16* x0 = (const bf16*)args[0];
  const bf16* x1 = (const bf16*)args[1];
  const int32_t* x2 = (const int32_t*)args[2];
  const int32_t* x3 = (const int32_t*)args[3];
  const int32_t* x4 = (const int32_t*)args[4];
  const int32_t* x5 = (const int32_t*)args[5];
  const float* x6 = (const float*)args[6];
  bf16* y0 = (bf16*)args[7];
  const attention_args a = {x0, nullptr, x1, x2, x3, x4, x5, x6, nullptr, y0, sizes[0], sizes[1], 64};
  attention<Shape>(ctx, a);
}
