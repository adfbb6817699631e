// Matrix product in bf16 with f32 sums, for Hopper (sm_90a), by wgmma and tensor maps:
//
//   y[M, N] = epilogue(x[M, K] @ w[0].T, .., x[M, K] @ w[PARTS - 1].T, other operands)
//
// Tiles. A block computes tiles of TILE_M tokens and TILE_N / PARTS columns of y. The rows of w of all parts are
// adjacent in a buffer, so that one instruction multiplies them all. With SPLIT = 1, the grid is as large as the GPU,
// and a block computes one tile after another. Otherwise a cluster of SPLIT blocks computes one tile: each block
// multiplies a part of the depth, and adds up the sums of all blocks for its share of the tokens.
//
// Pipeline. The first warpgroup is the producer: one of its threads copies boxes of x and w by TMA to a ring of STAGES
// buffers in shared memory, and begins the next tile while the consumers finish this one. The other warpgroups are
// consumers: each multiplies 64 tokens. Every buffer has two barriers: `full` completes when its bytes have arrived,
// `empty` when every consumer warp has read it.
//
// Multicast. With ALONG_M = 2, two blocks of a cluster compute tiles of the same columns of y. Each copies half of the
// rows of w to the buffers of both. With ALONG_N = 2, two blocks compute tiles of the same tokens, and share x in the
// same way. A block may write to a buffer when the consumers of all blocks that it writes to have read it.
//
// Constants:
//   N, K              multiples of 8
//   PARTS             1 or 2
//   TILE_M            64 or 128
//   TILE_N            a multiple of 16, at most 256
//   STAGES            buffers of the ring
//   SPLIT             1, 2, 4 or 8; divides the number of steps
//   ALONG_M, ALONG_N  1 or 2; a cluster has at most 8 blocks
//   GROUP_SIZE_M      clusters' tiles along the tokens that are processed together, to share w in the L2 cache
//   READ_BEFORE_WAIT  whether w may be read before the previous kernel has completed
//   OUT               type of y
// The generated text before this file defines `multiply`, OTHER_PARAMETERS, OTHER_ARGUMENTS, OTHERS, Loaded,
// `load_others` and `epilogue`. wgmma_ring.cuh has the ring and the loop of a consumer.

constexpr int STEPS = (K + TILE_K - 1) / TILE_K / SPLIT;  // steps per block and tile
constexpr int SUMS_STRIDE = TILE_N + 8;             // floats between the sums of two tokens in shared memory
constexpr int CLUSTER = SPLIT * ALONG_M * ALONG_N;    // blocks of a cluster
constexpr int WRITING_BLOCKS = ALONG_M + ALONG_N - 1;  // blocks that write to a block's buffers, itself included
constexpr int CLUSTER_M = TILE_M * ALONG_M, CLUSTER_N = WIDTH * ALONG_N;  // tokens and columns of a cluster's tiles

// A block's place in its cluster: its part of the depth, and its tile along tokens and columns.
__device__ inline int split_of(int rank) { return rank % SPLIT; }
__device__ inline int m_of(int rank) { return rank / SPLIT % ALONG_M; }
__device__ inline int n_of(int rank) { return rank / (SPLIT * ALONG_M); }
__device__ inline int rank_at(int split, int m, int n) { return split + SPLIT * (m + ALONG_M * n); }
__device__ inline int rank() { return blockIdx.x % CLUSTER; }

// Finds the first token and column of this block's tile among the cluster's tiles number `tile`. GROUP_SIZE_M tiles along
// the tokens are processed together, column by column.
__device__ inline void find_tile(int tile, int m, int& token, int& column) {
  constexpr int columns = (N + CLUSTER_N - 1) / CLUSTER_N;
  const int rows = (m + CLUSTER_M - 1) / CLUSTER_M;
  const int group = tile / (GROUP_SIZE_M * columns), inside = tile % (GROUP_SIZE_M * columns);
  const int height = min(GROUP_SIZE_M, rows - group * GROUP_SIZE_M);
  token = (group * GROUP_SIZE_M + inside % height) * CLUSTER_M + m_of(rank()) * TILE_M;
  column = inside / height * CLUSTER_N + n_of(rank()) * WIDTH;
}

// The number of clusters' tiles.
__device__ inline int tiles_of(int m) {
  return (m + CLUSTER_M - 1) / CLUSTER_M * ((N + CLUSTER_N - 1) / CLUSTER_N);
}

// Copies the rows of w of one step, in two boxes: halves of its columns, or its parts. If two tiles of tokens share
// them, the block copies one box for both.
__device__ inline void copy_weights(const Ring& ring, const TensorMap& w, int column, int k) {
  const int split = split_of(rank()), n = n_of(rank());
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const unsigned to = ring.buffer() + X_BYTES + half * (W_BYTES / 2);
    const int row = column + half * (PARTS == 2 ? N : TILE_N / 2);
    if (ALONG_M == 1) {
      copy_box(to, w, row, k, ring.arrived());
    } else if (half == m_of(rank())) {
      copy_box_to_blocks(to, w, row, k, ring.arrived(), 1 << rank_at(split, 0, n) | 1 << rank_at(split, 1, n));
    }
  }
}

// Copies the rows of x of one step. If two tiles of columns share them, the block copies half of them for both.
__device__ inline void copy_tokens(const Ring& ring, const TensorMap& x, int token, int k) {
  if (ALONG_N == 1) {
    copy_box(ring.buffer(), x, token, k, ring.arrived());
  } else {
    const int split = split_of(rank()), m = m_of(rank()), half = n_of(rank());
    copy_box_to_blocks(ring.buffer() + half * (X_BYTES / 2), x, token + half * (TILE_M / 2), k, ring.arrived(),
                       1 << rank_at(split, m, 0) | 1 << rank_at(split, m, 1));
  }
}

// The producer: one thread issues the copies of all tiles, each when its buffer is free. The weights of the first steps
// are copied before the previous kernel has completed.
__device__ inline void produce(Ring ring, int m, const TensorMap& x, const TensorMap& w) {
  const int count = tiles_of(m), first = blockIdx.x / CLUSTER, begin = split_of(rank()) * STEPS;
  int early = 0;  // steps whose weights have been requested
  if (READ_BEFORE_WAIT && first < count) {
    int token, column;
    find_tile(first, m, token, column);
    Ring ahead = ring;
    for (; early < min(STAGES, STEPS); early++, ahead.advance()) {
      barrier_expect(ahead.arrived(), STAGE_BYTES);
      copy_weights(ahead, w, column, (begin + early) * TILE_K);
    }
  }
  wait_for_previous();
  launch_dependents();
  for (int tile = first; tile < count; tile += gridDim.x / CLUSTER) {
    int token, column;
    find_tile(tile, m, token, column);
    for (int i = begin; i < begin + STEPS; i++, ring.advance()) {
      if (early > 0) {
        early--;
      } else {
        barrier_wait(ring.freed(), ring.parity ^ 1);
        barrier_expect(ring.arrived(), STAGE_BYTES);
        copy_weights(ring, w, column, i * TILE_K);
      }
      copy_tokens(ring, x, token, i * TILE_K);
    }
  }
}

__device__ inline void wait_for_buffer(const Ring& ring) { barrier_wait(ring.arrived(), ring.parity); }

// Tells the producers that write to a buffer that this warp has read it: a lane for each.
__device__ inline void release(unsigned empty) {
  const int lane = threadIdx.x % 32, split = split_of(rank()), m = m_of(rank()), n = n_of(rank());
  if (WRITING_BLOCKS == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else if (lane < WRITING_BLOCKS) {
    const int along_m = ALONG_M == 2 && lane == 1, along_n = lane > 0 && !along_m;
    barrier_arrive_at(empty, rank_at(split, m ^ along_m, n ^ along_n));
  }
}

// Writes y of a tile from the accumulators of a warpgroup: a thread has two rows, 8 apart, and in each two adjacent
// columns of every 8. Other operands of BATCH such pairs are loaded before the first is used.
__device__ inline void finish(const float (&sums)[SUMS], int m, int token, int column OTHER_ARGUMENTS, OUT* y) {
  constexpr int PAIRS = WIDTH / 8, BATCH = 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = token + warp * 16 + lane / 4, first = column + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int t = row + 8 * half;
#pragma unroll
    for (int b = 0; b < PAIRS; b += BATCH) {
      Loaded loaded[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++)
        if (b + j < PAIRS && t < m && first + (b + j) * 8 < N) load_others(loaded[j], t, first + (b + j) * 8 OTHERS);
#pragma unroll
      for (int j = b; j < min(b + BATCH, PAIRS); j += 2) {
        float out[2][2] = {};
        bool inside[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          inside[i] = j + i < PAIRS && t < m && first + (j + i) * 8 < N;
          float a[PARTS][2];
#pragma unroll
          for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int n = 0; n < 2; n++) a[p][n] = j + i < PAIRS ? sums[4 * (p * PAIRS + j + i) + 2 * half + n] : 0;
          if (inside[i]) epilogue(out[i], a, loaded[j - b + i]);
        }
        store(y + (long long)t * N + first + j * 8, out, inside);
      }
    }
  }
}

// Writes a warpgroup's sums to shared memory as [TILE_M][SUMS_STRIDE].
__device__ inline void share(float* shared, const float (&sums)[SUMS], int consumer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float* to = shared + (consumer * 64 + warp * 16 + lane / 4) * SUMS_STRIDE + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < SUMS; i += 2)  // 4 j + 2 half
    *(float2*)(to + i / 2 % 2 * 8 * SUMS_STRIDE + i / 4 * 8) = make_float2(sums[i], sums[i + 1]);
}

// Two neighbouring sums, added over the blocks of the cluster.
__device__ inline void add_up(float (&out)[2], const float* shared) {
  const unsigned address = shared_address(shared);
#pragma unroll
  for (int split = 0; split < SPLIT; split++) {
    float v[2];
    const unsigned peer = address_at(address, rank_at(split, m_of(rank()), n_of(rank())));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(peer) : "memory");
#pragma unroll
    for (int i = 0; i < 2; i++) out[i] = split == 0 ? v[i] : out[i] + v[i];
  }
}

// Writes y for this block's share of the tokens of a tile, from the sums of all blocks of the cluster.
__device__ inline void finish_share(const float* shared, int m, int token, int column OTHER_ARGUMENTS, OUT* y) {
  constexpr int SHARE = TILE_M / SPLIT, PAIRS = WIDTH / 2, WRITERS = CONSUMERS * WARPGROUP;
  const int split = split_of(rank());
  for (int i = threadIdx.x - WARPGROUP; i < SHARE * PAIRS; i += WRITERS) {
    const int row = split * SHARE + i / PAIRS, c = i % PAIRS * 2;
    if (token + row >= m || column + c >= N) continue;
    Loaded loaded;
    load_others(loaded, token + row, column + c OTHERS);
    float a[PARTS][2], out[2];
#pragma unroll
    for (int p = 0; p < PARTS; p++) add_up(a[p], shared + row * SUMS_STRIDE + p * WIDTH + c);
    epilogue(out, a, loaded);
    store_pair(y + (long long)(token + row) * N + column + c, out);
  }
}

// A consumer warpgroup for all tiles of the block, and for the only one of a cluster.
__device__ inline void compute(Ring ring, int consumer, int m OTHER_ARGUMENTS, OUT* y, float* shared) {
  float sums[SUMS];
  int token, column;
  if (SPLIT > 1) {
    find_tile(blockIdx.x / CLUSTER, m, token, column);
    consume<STEPS>(sums, consumer, ring);
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * WARPGROUP) : "memory");  // no consumer reads the buffers any more
    share(shared, sums, consumer);
    cluster_publish();
    finish_share(shared, m, token, column OTHERS, y);
  } else {
    for (int tile = blockIdx.x / CLUSTER; tile < tiles_of(m); tile += gridDim.x / CLUSTER) {
      find_tile(tile, m, token, column);
      consume<STEPS>(sums, consumer, ring);
      finish(sums, m, token + consumer * 64, column OTHERS, y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    llmc_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  const unsigned buffers = (shared_address(memory) + 1023) & ~1023u;  // a swizzled box begins at a multiple of 1024
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  init_ring(full, empty, STAGES, WRITING_BLOCKS * CONSUMERS * WARPGROUP / 32);
  if (WRITING_BLOCKS > 1) cluster_wait();  // the other blocks' barriers are initialized

  const Ring ring(buffers, full, empty);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    if (CONSUMERS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      produce(ring, m, x, w);
    } else {
      begin_launch();
    }
    __syncwarp();
    if (SPLIT > 1) cluster_publish();
  } else {
    if (CONSUMERS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    begin_launch();
    compute(ring, warpgroup - 1, m OTHERS, y, (float*)(memory + (buffers - shared_address(memory))));
  }
  if (CLUSTER > 1) {  // no block of the cluster accesses this one's memory any more
    __syncwarp();
    cluster_wait();
  }
}
