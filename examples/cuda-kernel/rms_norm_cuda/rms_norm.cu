// y = x / sqrt(mean(x * x) + eps) * w, one block a row.
//
// Constants: X and W (element types), WIDTH (elements of a row), THREADS (of a block, a multiple of 32).

// The sum of a value over all threads of the block, in every thread.
__device__ inline float block_sum(float value) {
  __shared__ float sums[THREADS / 32];
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffff, value, lanes);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < THREADS / 32; i++) total += sums[i];
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const X* x, const W* w, X* y, float eps) {
  begin_launch();
  const X* from = x + (long long)blockIdx.x * WIDTH;
  X* to = y + (long long)blockIdx.x * WIDTH;
  float squares = 0;
  for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
    const float v = to_float(from[i]);
    squares += v * v;
  }
  const float scale = rsqrtf(block_sum(squares) / WIDTH + eps);
  for (int i = threadIdx.x; i < WIDTH; i += THREADS) to[i] = from_float<X>(to_float(from[i]) * scale * to_float(w[i]));
}
