// cpu/sample: row_sample(f32[sizes[0], 320], i32[sizes[0]], i32[sizes[1]], i32[sizes[2]], state i32[8, 64], state f32[8, 8], state i32[8, 8]) -> i32[sizes[0]]
#include "llmc_abi.h"
#include "llmc_sample.h"
using namespace llmc;
extern "C" __attribute__((visibility("default")))
void llmc_row_sample(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const float* x0 = (const float*)args[0];
  const int32_t* x1 = (const int32_t*)args[1];
  const int32_t* x2 = (const int32_t*)args[2];
  const int32_t* x3 = (const int32_t*)args[3];
  const int32_t* x4 = (const int32_t*)args[4];
  const float* x5 = (const float*)args[5];
  const int32_t* x6 = (const int32_t*)args[6];
  int32_t* y0 = (int32_t*)args[7];
  row_sample(ctx, y0, x0, x1, x2, x3, x4, x5, x6, sizes[0], 320, 64);
}
