// The step functions of one artifact: launches in order on a pool of threads.
#define LLMC_MAX_ARGS 7
#define LLMC_MAX_SIZES 2
#define LLMC_MAX_LAUNCHES 3
#define LLMC_SCRATCH INT64_C(1024)
#include "llmc_layout.h"
#include "llmc_abi.h"
#include "llmc_pool.h"
static inline int64_t llmc_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
static void step_sizes(const int64_t* s, int64_t* z) {
  (void)s, (void)z;
  z[0] = s[0];
  z[1] = 4*llmc_ceil(2*s[0], 16)+1;
}
static const llmc_launch step_launches[] = {{0, 0, 1}, {2, 2, 0}, {4, 0, 1}};
static const int32_t step_args[] = {0, 2, 1, 3, 2, 3, 4};
static const llmc_step step_step = {
  step_launches, 3, step_args, 7, step_sizes};
LLMC_EXPORT int llmc_run_step(void* pool, void* const* kernels, void* const* buffers, const int64_t* symbols) {
  return llmc_go((llmc_pool*)pool, &step_step, kernels, buffers, symbols, nullptr);
}
LLMC_EXPORT int llmc_profile_step(void* pool, void* const* kernels, void* const* buffers, const int64_t* symbols, int64_t* ns) {
  return llmc_go((llmc_pool*)pool, &step_step, kernels, buffers, symbols, ns);
}
