// y[M, N] = x[M, K] @ w[N, K].T in bf16 with f32 sums, for Hopper (sm_90a).
//
// A block computes a tile of TILE_M x TILE_N elements of y. One thread of its first warpgroup (the producer) issues bulk
// copies of tiles of x and w into a ring of STAGES buffers in shared memory; the other two warpgroups (consumers)
// multiply them, each for 64 rows of the tile. Two barriers guard each buffer: `full` completes when its bytes have
// arrived, `empty` when every consumer warp has finished reading it.
//
// Constants: N and K (multiples of 8), TILE_N (128 or 256), STAGES, GROUP (row tiles that are processed together, so that
// they share tiles of w in the L2 cache).

constexpr int TILE_M = 128, TILE_K = 64;        // TILE_K bf16 are 128 bytes, the width of the swizzle
constexpr int CONSUMERS = 2, WARPGROUP = 128;   // consumer warpgroups; threads of a warpgroup
constexpr int HALVES = TILE_N / 128;            // one instruction multiplies 64 x 128 x 16
constexpr int X_BYTES = TILE_M * TILE_K * 2, W_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int K_TILES = (K + TILE_K - 1) / TILE_K;

// d[64, 128] += a[64, 16] @ b[128, 16].T by one warpgroup, asynchronously: `d` is valid after `wait_products`.
__device__ inline void multiply(float (&d)[64], unsigned long long a, unsigned long long b) {
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, 1, 1, 1, 0, 0;"
      : R16(0), R16(16), R16(32), R16(48)
      : "l"(a), "l"(b));
#undef R16
#undef R4
}

// The first row and column of this block's tile. Blocks cover GROUP row tiles at a time, column by column.
__device__ inline void find_tile(int m, int& row, int& column) {
  const int rows = (m + TILE_M - 1) / TILE_M, columns = (N + TILE_N - 1) / TILE_N;
  const int group = blockIdx.x / (GROUP * columns), inside = blockIdx.x % (GROUP * columns);
  const int height = min(GROUP, rows - group * GROUP);
  row = (group * GROUP + inside % height) * TILE_M;
  column = inside / height * TILE_N;
}

// The producer: one thread issues the copies of all tiles, each when its buffer is free.
__device__ inline void produce(const TensorMap& x, const TensorMap& w, int row, int column, unsigned buffers,
                               unsigned full, unsigned empty) {
  for (int i = 0; i < K_TILES; i++) {
    const int stage = i % STAGES, round = i / STAGES;
    const unsigned buffer = buffers + stage * STAGE_BYTES;
    barrier_wait(empty + 8 * stage, (round & 1) ^ 1);
    barrier_expect(full + 8 * stage, STAGE_BYTES);
    copy_box(buffer, x, row, i * TILE_K, full + 8 * stage);
    copy_box(buffer + X_BYTES, w, column, i * TILE_K, full + 8 * stage);
  }
}

// A consumer warpgroup: `sums[h]` is 64 rows times columns 128 h to 128 h + 127 of the tile. A buffer is released one
// step late, when the products that read it have completed; the products of the next step already run.
__device__ inline void consume(float (&sums)[HALVES][64], int consumer, unsigned buffers, unsigned full,
                               unsigned empty) {
  const bool arrives = threadIdx.x % 32 == 0;
  for (int i = 0; i < K_TILES; i++) {
    const int stage = i % STAGES, round = i / STAGES;
    const unsigned x = buffers + stage * STAGE_BYTES + consumer * 64 * TILE_K * 2;
    const unsigned w = buffers + stage * STAGE_BYTES + X_BYTES;
    barrier_wait(full + 8 * stage, round & 1);
    begin_products();
#pragma unroll
    for (int k = 0; k < TILE_K; k += 16)
#pragma unroll
      for (int h = 0; h < HALVES; h++) multiply(sums[h], matrix(x + 2 * k), matrix(w + h * 128 * TILE_K * 2 + 2 * k));
    end_products();
    wait_products<1>();
    if (arrives && i > 0) barrier_arrive(empty + 8 * ((i - 1) % STAGES));
  }
  wait_products<0>();
}

// The accumulator layout of wgmma: a thread has two rows, 8 apart, and in each two adjacent columns of every 8.
__device__ inline void store(bf16* y, const float (&sums)[HALVES][64], int m, int row, int column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first = row + warp * 16 + lane / 4;
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = first + 8 * half, c = column + h * 128 + j * 8 + lane % 4 * 2;
        if (r < m && c < N) {  // N is even, so that both columns are inside
          const unsigned low = from_float<bf16>(sums[h][4 * j + 2 * half]).bits;
          const unsigned high = from_float<bf16>(sums[h][4 * j + 2 * half + 1]).bits;
          *(unsigned*)(y + (long long)r * N + c) = low | high << 16;
        }
      }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    llmc_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* y, int m) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  const unsigned buffers = (shared_address(memory) + 1023) & ~1023u;  // a swizzled box begins at a multiple of 1024
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  init_ring(full, empty, STAGES, CONSUMERS * WARPGROUP / 32);
  begin_launch();

  int row, column;
  find_tile(m, row, column);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    if (threadIdx.x == 0) produce(x, w, row, column, buffers, full, empty);
    return;
  }
  float sums[HALVES][64] = {};
  consume(sums, warpgroup - 1, buffers, full, empty);
  store(y, sums, m, row + (warpgroup - 1) * 64, column);
}
