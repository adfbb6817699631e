// Products of the experts of a mixture in bf16 with f32 sums, for Hopper (sm_90a), by wgmma:
//
//   y[r, N] = epilogue(x[source(r), K] @ w[e, p, N, K].T) for the rows r of every expert e, sorted by expert
//
// Tiles. The grid is as large as the GPU. A block computes tiles of TILE_M rows of one expert and TILE_N / PARTS
// columns of y, which it finds from the starts of the experts' rows; an expert without rows has no tiles. The tiles of
// an expert follow each other column by column, so that its weights are read from memory once.
//
// Pipeline. The first warpgroup is the producer. It copies tiles of w by TMA to a ring of STAGES buffers in shared
// memory, and the rows of x, which need not be adjacent, by copies of 16 bytes. The other warpgroups are consumers:
// each multiplies 64 rows. Every buffer has two barriers: `full` completes when its bytes have arrived, `empty` when
// every consumer warp has read it.
//
// Constants:
//   EXPERTS           number of experts
//   N, K              multiples of 8
//   PARTS             1 or 2
//   TILE_M            64 or 128
//   TILE_N            a multiple of 16, at most 256
//   STAGES            buffers of the ring, at least 3
//   GROUP_SIZE_M      tiles along the rows that are processed together, to share w in the L2 cache
//   CHOICES           if not 0, source(r) = order[r] / CHOICES, the token of a (token, choice) pair; otherwise r
//   SCATTER           whether row r is written to row order[r] of y
//   READ_BEFORE_WAIT  whether the previous kernel wrote neither `starts` nor w
//   OUT               type of y
// The generated text before this file defines `multiply`, OTHER_PARAMETERS, OTHER_ARGUMENTS, OTHERS and the functions
// `row_factor`, `add_bias` and `epilogue`. wgmma_ring.cuh has the loop of a consumer, expert_rows.cuh the experts'
// rows.

constexpr int STEPS = (K + TILE_K - 1) / TILE_K;
// Rows of x that a warpgroup copies at once, 16 bytes per thread, and how often it does so for a tile.
constexpr int ROWS_PER_PASS = WARPGROUP / 8, PASSES = TILE_M / ROWS_PER_PASS;

struct Tile {
  int expert;
  int row, stop;  // the tile's first row, and the end of the expert's rows
  int column;     // the first column
};

__device__ inline int tiles_of(const Blocks& blocks) { return blocks.ends[EXPERTS - 1] * COLUMN_TILES; }

// Finds a tile. GROUP_SIZE_M tiles of an expert along its rows are processed together, column by column.
__device__ inline Tile find_tile(const Blocks& blocks, int tile) {
  const int low = expert_of(blocks, tile / COLUMN_TILES);
  const int first = low > 0 ? blocks.ends[low - 1] : 0, rows = blocks.ends[low] - first;
  const int inside = tile - first * COLUMN_TILES;
  const int group = inside / (GROUP_SIZE_M * COLUMN_TILES), place = inside % (GROUP_SIZE_M * COLUMN_TILES);
  const int height = min(GROUP_SIZE_M, rows - group * GROUP_SIZE_M);
  return {low, blocks.starts[low] + (group * GROUP_SIZE_M + place % height) * TILE_M, blocks.starts[low + 1],
          place / height * WIDTH};
}

// The first row of a tile in w.
__device__ inline int weight_row(const Tile& tile) { return tile.expert * (PARTS * N) + tile.column; }

// Copies the rows of w of one step from `row` on, in two boxes: halves of its columns, or its parts.
__device__ inline void copy_weights(const Ring& ring, const TensorMap& w, int row, int k) {
#pragma unroll
  for (int half = 0; half < 2; half++)
    copy_box(ring.buffer() + X_BYTES + half * (W_BYTES / 2), w, row + half * (PARTS == 2 ? N : TILE_N / 2), k,
             ring.arrived());
}

// Copies the weights of the first steps, as many as there are buffers; returns their number.
__device__ inline int copy_first_weights(Ring ring, const Blocks& blocks, const TensorMap& w) {
  if (blockIdx.x >= tiles_of(blocks)) return 0;
  constexpr int COUNT = STEPS < STAGES ? STEPS : STAGES;
  const Tile tile = find_tile(blocks, blockIdx.x);
  if (threadIdx.x == 0)
    for (int i = 0; i < COUNT; i++, ring.advance()) {
      barrier_expect(ring.arrived(), W_BYTES);
      copy_weights(ring, w, weight_row(tile), i * TILE_K);
    }
  return COUNT;
}

// The producer: the warpgroup copies the steps of all tiles, each when its buffer is free.
__device__ inline void produce(Ring ring, const Blocks& blocks, const bf16* x, const int* order, const TensorMap& w) {
  int early = copy_first_weights(ring, blocks, w);  // steps whose weights have been requested
  if (READ_BEFORE_WAIT) begin_launch();
  const int chunk = threadIdx.x % 8, line = threadIdx.x / 8, count = tiles_of(blocks);
  const int place = line * TILE_K * 2 + (chunk ^ line % 8) * 16;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Tile tile = find_tile(blocks, i);
    const bf16* from[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
      const int row = tile.row + p * ROWS_PER_PASS + line;
      from[p] = nullptr;
      if (row < tile.stop) from[p] = x + (long long)(CHOICES ? order[row] / max(CHOICES, 1) : row) * K + chunk * 8;
    }
    for (int k = 0; k < STEPS * TILE_K; k += TILE_K) {
      if (early > 0) {
        early--;
      } else {
        barrier_wait(ring.freed(), ring.parity ^ 1);
        if (threadIdx.x == 0) {
          barrier_expect(ring.arrived(), W_BYTES);
          copy_weights(ring, w, weight_row(tile), k);
        }
      }
      const bool inside = k + chunk * 8 < K;
#pragma unroll
      for (int p = 0; p < PASSES; p++)
        if (from[p])
          copy_or_clear(ring.buffer() + place + p * ROWS_PER_PASS * TILE_K * 2, from[p] + (inside ? k : 0), inside);
      arrive_with_copies(ring.arrived());
      ring.advance();
    }
  }
}

// Releases the buffers of a tile whose rows are all those of other consumers.
__device__ inline void skip(Ring& ring) {
  for (int i = 0; i < STEPS; i++, ring.advance()) {
    barrier_wait(ring.arrived(), ring.parity);
    release(ring.freed());
  }
}

// Writes y of a tile from the accumulators of a warpgroup: a thread has two rows, 8 apart, and in each two adjacent
// columns of every 8.
__device__ inline void finish(const float (&sums)[SUMS], const Tile& tile, int consumer, const int* order
                              OTHER_ARGUMENTS, OUT* y) {
  constexpr int PAIRS = WIDTH / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first = tile.column + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = tile.row + consumer * 64 + warp * 16 + lane / 4 + 8 * half;
    const bool valid = row < tile.stop;
    const int to = valid && SCATTER ? order[row] : row;
    const float factor = valid ? row_factor(to OTHERS) : 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j += 2) {
      float out[2][2] = {};
      bool inside[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = first + (j + i) * 8;
        inside[i] = j + i < PAIRS && valid && column < N;
        float a[PARTS][2];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
          for (int n = 0; n < 2; n++) a[p][n] = j + i < PAIRS ? sums[4 * (p * PAIRS + j + i) + 2 * half + n] : 0;
        if (inside[i]) {
          add_bias(a, tile.expert, column OTHERS);
          epilogue(out[i], a, factor);
        }
      }
      store(y + (long long)to * N + first + j * 8, out, inside);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    llmc_experts(const bf16* x, const int* order, const int* starts, const __grid_constant__ TensorMap w,
                 OTHER_PARAMETERS OUT* y) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  __shared__ Blocks blocks;
  const unsigned buffers = (shared_address(memory) + 1023) & ~1023u;  // a swizzled box begins at a multiple of 1024
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1 + WARPGROUP);  // bulk copies, and the threads that copy rows
      barrier_init(empty + 8 * i, CONSUMERS * WARPGROUP / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (!READ_BEFORE_WAIT) begin_launch();
  count_blocks(blocks, starts);

  Ring ring(buffers, full, empty);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    if (CONSUMERS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    produce(ring, blocks, x, order, w);
  } else {
    if (CONSUMERS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    if (READ_BEFORE_WAIT) begin_launch();
    const int consumer = warpgroup - 1, count = tiles_of(blocks);
    float sums[SUMS];
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
      const Tile tile = find_tile(blocks, i);
      if (tile.row + consumer * 64 < tile.stop) {
        consume<STEPS>(sums, consumer, ring);
        finish(sums, tile, consumer, order OTHERS, y);
      } else {
        skip(ring);
      }
    }
  }
}
