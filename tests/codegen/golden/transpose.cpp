// cpu/transpose: transpose(bf16[sizes[0], 14, 64]) -> bf16[14, sizes[0], 64] perm=[1, 0, 2]
#include "llmc_abi.h"
#include "llmc_shape.h"
using namespace llmc;
extern "C" __attribute__((visibility("default")))
void llmc_transpose(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {
  const int64_t size[] = {14, sizes[0], 64};
  const int64_t step[] = {64, 896, 1};
  const uint16_t* x = (const uint16_t*)args[0] + 0;
  copy_strided<uint16_t, 3>(ctx, (uint16_t*)args[1], x, size, step);
}
