// y[M, N] = epilogue(x[M, K] @ w[0].T, .., x @ w[PARTS - 1].T, others) with f32 sums, for Hopper (sm_90a).
//
// The grid is as large as the GPU, and a block computes one tile of y after another: 128 tokens times TILE_N / PARTS
// columns. One thread of its first warpgroup (the producer) issues bulk copies of tiles of x and w into a ring of STAGES
// buffers in shared memory, also those of the next tile while the others finish one; the other two warpgroups (consumers)
// multiply them, each for 64 tokens. The rows of w of all parts lie side by side in a buffer, so that one instruction
// multiplies them all. Two barriers guard each buffer: `full` completes when its bytes have arrived, `empty` when every
// consumer warp has finished reading it.
//
// CLUSTER blocks of a cluster compute tiles of the same columns. Each copies half of the rows of w, into the buffers of
// both, so that `empty` counts the consumers of both, too.
//
// Constants: N and K (multiples of 8), PARTS (1 or 2), TILE_N (a multiple of 16, at most 256), STAGES, GROUP (tiles of
// tokens of a cluster that are processed together, so that they share tiles of w in the L2 cache), CLUSTER (1 or 2), EARLY
// (whether w may be read before the previous kernel has completed), OUT (the type of y). The generated text before this
// file defines `multiply`, OTHER_PARAMETERS, OTHER_ARGUMENTS, OTHERS and the function `epilogue`.

constexpr int TILE_M = 128, TILE_K = 64;       // TILE_K bf16 are 128 bytes, the width of the swizzle
constexpr int CONSUMERS = 2, WARPGROUP = 128;  // consumer warpgroups; threads of a warpgroup
constexpr int WIDTH = TILE_N / PARTS;          // columns of y of a tile
constexpr int X_BYTES = TILE_M * TILE_K * 2, W_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int K_TILES = (K + TILE_K - 1) / TILE_K;
constexpr int SUMS = TILE_N / 2;               // of a thread

// Starts to copy the box at (row, column) of a tensor to the same address of every block of `blocks`, a bit each.
__device__ inline void copy_box_to_cluster(unsigned to, const TensorMap& map, int row, int column, unsigned barrier,
                                           unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks) : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at this address.
__device__ inline void barrier_arrive_at(unsigned barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier), "r"(rank) : "memory");
}

// The tiles of a cluster: numbers `first`, first + `step`, .. of `count`; and the block's place in the cluster.
struct Tiles {
  int first, step, count, rank, clusters_of_rows;

  __device__ explicit Tiles(int m) {
    rank = blockIdx.x % CLUSTER;
    first = blockIdx.x / CLUSTER;
    step = gridDim.x / CLUSTER;
    clusters_of_rows = (m + CLUSTER * TILE_M - 1) / (CLUSTER * TILE_M);
    count = clusters_of_rows * ((N + WIDTH - 1) / WIDTH);
  }

  // The first token and column of a tile. Tiles cover GROUP times the tokens of a cluster, column by column.
  __device__ void find(int tile, int& token, int& column) const {
    constexpr int columns = (N + WIDTH - 1) / WIDTH;
    const int group = tile / (GROUP * columns), inside = tile % (GROUP * columns);
    const int height = min(GROUP, clusters_of_rows - group * GROUP);
    token = ((group * GROUP + inside % height) * CLUSTER + rank) * TILE_M;
    column = inside / height * WIDTH;
  }
};

// A position in the ring of buffers.
struct Ring {
  unsigned buffers, full, empty;  // addresses in shared memory
  int stage = 0, parity = 0;

  __device__ Ring(unsigned buffers, unsigned full, unsigned empty) : buffers(buffers), full(full), empty(empty) {}
  __device__ unsigned buffer() const { return buffers + stage * STAGE_BYTES; }
  __device__ unsigned arrived() const { return full + 8 * stage; }
  __device__ unsigned freed() const { return empty + 8 * stage; }
  __device__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Copies the rows of w of one step, in two boxes: halves of its columns, or its parts. A block of a cluster copies one.
__device__ inline void copy_weights(const Ring& ring, const TensorMap& w, int column, int k, int rank) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const unsigned to = ring.buffer() + X_BYTES + half * (W_BYTES / 2);
    const int row = PARTS == 2 ? half * N + column : column + half * (TILE_N / 2);
    if (CLUSTER == 1) {
      copy_box(to, w, row, k, ring.arrived());
    } else if (half == rank) {
      copy_box_to_cluster(to, w, row, k, ring.arrived(), 3);
    }
  }
}

// The producer: one thread issues the copies of all tiles, each when its buffer is free. The weights of the first steps
// are copied before the previous kernel has completed.
__device__ inline void produce(Ring ring, const Tiles& tiles, const TensorMap& x, const TensorMap& w) {
  int early = 0;  // steps whose weights have been requested
  if (EARLY && tiles.first < tiles.count) {
    int token, column;
    tiles.find(tiles.first, token, column);
    Ring ahead = ring;
    for (; early < min(STAGES, K_TILES); early++, ahead.advance()) {
      barrier_expect(ahead.arrived(), STAGE_BYTES);
      copy_weights(ahead, w, column, early * TILE_K, tiles.rank);
    }
  }
  wait_for_previous();
  launch_dependents();
  for (int tile = tiles.first; tile < tiles.count; tile += tiles.step) {
    int token, column;
    tiles.find(tile, token, column);
    for (int i = 0; i < K_TILES; i++, ring.advance()) {
      if (early > 0) {
        early--;
      } else {
        barrier_wait(ring.freed(), ring.parity ^ 1);
        barrier_expect(ring.arrived(), STAGE_BYTES);
        copy_weights(ring, w, column, i * TILE_K, tiles.rank);
      }
      copy_box(ring.buffer(), x, token, i * TILE_K, ring.arrived());
    }
  }
}

// Tells the producers that write to a buffer that this warp has read it.
__device__ inline void release(unsigned empty) {
  if (threadIdx.x % 32 != 0) return;
  if (CLUSTER == 1) {
    barrier_arrive(empty);
  } else {
    for (int rank = 0; rank < CLUSTER; rank++) barrier_arrive_at(empty, rank);
  }
}

// The products of one tile by a consumer warpgroup. A buffer is released one step late, when the products that read it
// have completed; the products of the next step already run.
__device__ inline void consume(float (&sums)[SUMS], int consumer, Ring& ring) {
  unsigned previous = 0;
#pragma unroll 1
  for (int i = 0; i < K_TILES; i++) {
    const unsigned x = ring.buffer() + consumer * 64 * TILE_K * 2, w = ring.buffer() + X_BYTES;
    barrier_wait(ring.arrived(), ring.parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < TILE_K; k += 16) multiply(sums, matrix(x + 2 * k), matrix(w + 2 * k), i > 0 || k > 0);
    end_products();
    if (i > 0) {
      wait_products<1>();
      release(previous);
    }
    previous = ring.freed();
    ring.advance();
  }
  wait_products<0>();
  release(previous);
}

// The accumulator layout of wgmma: a thread has two rows, 8 apart, and in each two adjacent columns of every 8.
__device__ inline void finish(const float (&sums)[SUMS], int m, int token, int column OTHER_ARGUMENTS, OUT* y) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = token + warp * 16 + lane / 4, first = column + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int t = row + 8 * half;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j += 2) {
      float out[2][2] = {};
      bool inside[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int c = first + (j + i) * 8;
        inside[i] = t < m && c < N && j + i < WIDTH / 8;
        if (inside[i]) {
          float a[PARTS][2];
#pragma unroll
          for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int n = 0; n < 2; n++) a[p][n] = sums[4 * (p * (WIDTH / 8) + j + i) + 2 * half + n];
          epilogue(out[i], a, t, c OTHERS);
        }
      }
      store(y + (long long)t * N + first + j * 8, out, inside);
    }
  }
}

__device__ inline void wait_for_cluster() {
  if (CLUSTER > 1) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  } else {
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    llmc_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  const unsigned buffers = (shared_address(memory) + 1023) & ~1023u;  // a swizzled box begins at a multiple of 1024
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  init_ring(full, empty, STAGES, CLUSTER * CONSUMERS * WARPGROUP / 32);
  wait_for_cluster();

  const Tiles tiles(m);
  Ring ring(buffers, full, empty);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      produce(ring, tiles, x, w);
    } else {
      begin_launch();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    begin_launch();
    float sums[SUMS];
    for (int tile = tiles.first; tile < tiles.count; tile += tiles.step) {
      int token, column;
      tiles.find(tile, token, column);
      consume(sums, warpgroup - 1, ring);
      finish(sums, m, token + (warpgroup - 1) * 64, column OTHERS, y);
    }
  }
  __syncwarp();
  wait_for_cluster();  // no block of the cluster writes to this one any more
}
