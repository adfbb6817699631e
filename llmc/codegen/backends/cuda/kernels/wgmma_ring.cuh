// Shared by gemm_wgmma.cu and grouped_wgmma.cu: the ring of buffers in shared memory between the producer and the
// consumer warpgroups, and the loop of a consumer. This text follows their constants.

constexpr int TILE_K = 64;                     // bf16 of 128 bytes, the width of the swizzle
constexpr int CONSUMERS = TILE_M / 64, WARPGROUP = 128;  // consumer warpgroups; threads of a warpgroup
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int WIDTH = TILE_N / PARTS;          // columns of y per tile
constexpr int COLUMN_TILES = (N + WIDTH - 1) / WIDTH;
constexpr int X_BYTES = TILE_M * TILE_K * 2, W_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int SUMS = TILE_N / 2;               // sums per thread

using Ring = BufferRing<STAGES, STAGE_BYTES>;

// Waits for the current buffer; the kernel defines it.
__device__ inline void wait_for_buffer(const Ring& ring);

// Tells the producers that write to a buffer that this warp has read it; the kernel defines it.
__device__ inline void release(unsigned empty);

// The products of one tile by a consumer warpgroup.
template <int steps> __device__ inline void consume(float (&sums)[SUMS], int consumer, Ring& ring) {
  consume_steps<steps>(
      ring,
      [&](int i) {
        const unsigned x = ring.buffer() + consumer * 64 * TILE_K * 2, w = ring.buffer() + X_BYTES;
        wait_for_buffer(ring);
        begin_products();
#pragma unroll
        for (int k = 0; k < TILE_K; k += 16) multiply(sums, matrix(x + 2 * k), matrix(w + 2 * k), i > 0 || k > 0);
      },
      release);
}
