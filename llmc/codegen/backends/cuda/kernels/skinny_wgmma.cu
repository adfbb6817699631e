// Product of few tokens on Hopper (sm_90a) by wgmma, in 8-bit codes (e4m3 with f32 sums, or i8 with i32 sums) or in
// bf16 with f32 sums:
//
//   y[M, N] = epilogue(x[M, K] @ w[0].T, .., x[M, K] @ w[PARTS - 1].T, other operands)
//
// Tiles. A block computes TOKENS tokens and ROWS columns of y. The SPLIT blocks of a cluster compute the same tile over
// different columns of w: each writes its sums to shared memory, and adds up the sums of all blocks for its share of
// the tokens.
//
// Pipeline. The last warp is the producer: it copies w and x by TMA to a ring of STAGES buffers in shared memory. The
// first buffers of w are copied before the previous kernel has completed. The next kernel may begin at once: its blocks
// copy weights as soon as blocks of this one leave room for their rings. Every warpgroup before the producer is a
// consumer: it multiplies 64 rows of w, which are the left factor, so the sums are transposed. Every buffer has two
// barriers: `full` completes when its bytes have arrived, `empty` when every consumer warp has read it.
//
// Precision. The tensor cores add products of e4m3 with 14 bits, so the sums of each step are added to the totals in
// f32.
//
// Constants:
//   N          a multiple of 8
//   ITEM       bytes of an element of x and w
//   K          K * ITEM is a multiple of 16
//   PARTS      parts of w
//   TOKENS     8, 16, 32 or 64
//   ROWS       rows of each part; PARTS * ROWS is a multiple of 64
//   CHUNKS     pieces of 128 bytes of a row in a step
//   STAGES     buffers of the ring
//   SPLIT      1, 2, 4 or 8
//   SUM, OUT   types of the sums (float or int) and of y
// The generated text before this file defines `multiply`, OTHER_PARAMETERS, OTHER_ARGUMENTS, OTHERS, Loaded,
// `load_others` and `epilogue`.

constexpr int WARPGROUP = 128, HEIGHT = 64, WIDTH = 128;  // threads; rows of w per consumer; bytes per row of a box
constexpr int CONSUMERS = PARTS * ROWS / HEIGHT, WRITERS = CONSUMERS * WARPGROUP, THREADS = WRITERS + 32;
constexpr int COLUMNS = WIDTH / ITEM;  // columns per box
constexpr int STEP = CHUNKS * COLUMNS, ALL_STEPS = (K + STEP - 1) / STEP, STEPS = (ALL_STEPS + SPLIT - 1) / SPLIT;
// A buffer: w [CHUNKS][PARTS * ROWS][WIDTH], x [CHUNKS][TOKENS][WIDTH], in the 128-byte swizzle.
constexpr int W_BYTES = PARTS * ROWS * WIDTH, X_BYTES = TOKENS * WIDTH;
constexpr int STAGE_BYTES = CHUNKS * (W_BYTES + X_BYTES);
constexpr int SUMS = TOKENS / 2, SUMS_STRIDE = PARTS * ROWS + 4;  // sums per thread; floats per token in shared memory
constexpr int SHARE = TOKENS / SPLIT;                             // tokens that this block writes
constexpr int PAIRS = (SHARE * ROWS / 2 + WRITERS - 1) / WRITERS;  // neighbouring columns of y that a thread writes
constexpr int BATCH = PAIRS < 4 ? PAIRS : 4;                      // pairs whose other operands are loaded together

// The tile of a block: its first token and column of y, the steps, and addresses in shared memory.
struct Tile {
  int m, token, column, begin, steps, rank;
  unsigned buffers, full, empty;

  __device__ unsigned buffer(int stage) const { return buffers + stage * STAGE_BYTES; }
};

__device__ inline void copy_weights(const Tile& t, const TensorMap& w, int step, int stage) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      copy_box(t.buffer(stage) + c * W_BYTES + part * ROWS * WIDTH, w, part * N + t.column,
               (t.begin + step) * STEP + c * COLUMNS, t.full + 8 * stage);
}

__device__ inline void copy_tokens(const Tile& t, const TensorMap& x, int step, int stage) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
    copy_box(t.buffer(stage) + CHUNKS * W_BYTES + c * X_BYTES, x, t.token, (t.begin + step) * STEP + c * COLUMNS,
             t.full + 8 * stage);
}

// The producer: one thread issues the copies of all steps, each when its buffer is free.
__device__ inline void produce(const Tile& t, const TensorMap& x, const TensorMap& w) {
  const int first = min(STAGES, t.steps);
  for (int i = 0; i < first; i++) {
    barrier_expect(t.full + 8 * i, STAGE_BYTES);
    copy_weights(t, w, i, i);
  }
  wait_for_previous();
  for (int i = 0; i < first; i++) copy_tokens(t, x, i, i);
  for (int i = first, stage = 0, parity = 0; i < t.steps; i++) {
    barrier_wait(t.empty + 8 * stage, parity);
    barrier_expect(t.full + 8 * stage, STAGE_BYTES);
    copy_weights(t, w, i, stage);
    copy_tokens(t, x, i, stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// Orders reads of a number after the wait for the products that write it.
__device__ inline void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ inline void pin(int& x) { asm volatile("" : "+r"(x)::"memory"); }

// A consumer warpgroup adds up its rows of all steps.
__device__ inline void consume(const Tile& t, int consumer, SUM (&total)[SUMS]) {
  SUM fresh[SUMS] = {};
  for (int i = 0, stage = 0, parity = 0; i < t.steps; i++) {
    const unsigned w = t.buffer(stage) + consumer * HEIGHT * WIDTH, x = t.buffer(stage) + CHUNKS * W_BYTES;
    barrier_wait(t.full + 8 * stage, parity);
    begin_products();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int k = 0; k < WIDTH; k += 32)
        multiply(fresh, matrix(w + c * W_BYTES + k), matrix(x + c * X_BYTES + k), c > 0 || k > 0);
    end_products();
    wait_products<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(t.empty + 8 * stage);
#pragma unroll
    for (int j = 0; j < SUMS; j++) {
      pin(fresh[j]);
      total[j] += fresh[j];
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// Writes a consumer's sums to shared memory as [TOKENS][SUMS_STRIDE].
__device__ inline void share(float* shared, const SUM (&sums)[SUMS], int consumer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float* to = shared + lane % 4 * 2 * SUMS_STRIDE + consumer * HEIGHT + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < SUMS; i++) to[(i / 4 * 8 + i % 2) * SUMS_STRIDE + i / 2 % 2 * 8] = (float)sums[i];
}

// The i-th pair of columns of a thread: its token and first column within the tile.
struct Pair {
  int token, column;
  bool exists;

  __device__ Pair(const Tile& t, int i) {
    const int at = i * WRITERS + threadIdx.x;
    token = t.rank * SHARE + at / (ROWS / 2), column = at % (ROWS / 2) * 2;
    exists = at < SHARE * ROWS / 2 && t.token + token < t.m && t.column + column < N;
  }
};

__device__ inline void load_batch(Loaded (&loaded)[BATCH], const Tile& t, int first OTHER_ARGUMENTS) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const Pair pair(t, first + i);
    if (pair.exists) load_others(loaded[i], t.token + pair.token, t.column + pair.column OTHERS);
  }
}

// Two neighbouring sums of a token, added over the blocks of the cluster.
__device__ inline void add_blocks(float (&out)[2], const float* shared) {
  const unsigned address = shared_address(shared);
#pragma unroll
  for (int rank = 0; rank < SPLIT; rank++) {
    float v[2];
    const unsigned peer = SPLIT > 1 ? address_at(address, rank) : address;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(peer) : "memory");
#pragma unroll
    for (int i = 0; i < 2; i++) out[i] = rank == 0 ? v[i] : out[i] + v[i];
  }
}

// Writes y for this block's share of the tokens. `loaded` has the other operands of the first batch.
__device__ inline void finish(const Tile& t, const float* shared, Loaded (&loaded)[BATCH] OTHER_ARGUMENTS, OUT* y) {
#pragma unroll
  for (int first = 0; first < PAIRS; first += BATCH) {
    if (first > 0) load_batch(loaded, t, first OTHERS);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const Pair pair(t, first + i);
      if (!pair.exists) continue;
      float a[PARTS][2], out[2];
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        add_blocks(a[part], shared + pair.token * SUMS_STRIDE + part * ROWS + pair.column);
      epilogue(out, a, loaded[i]);
      store_pair(y + (long long)(t.token + pair.token) * N + t.column + pair.column, out);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    llmc_skinny_wgmma(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, OTHER_PARAMETERS OUT* y,
                      int m) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  const unsigned buffers = (shared_address(memory) + 1023) & ~1023u;  // a swizzled box begins at a multiple of 1024
  float* shared = (float*)(memory + (buffers - shared_address(memory)));
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  init_ring(full, empty, STAGES, CONSUMERS * WARPGROUP / 32);

  const int rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT, tiles = (m + TOKENS - 1) / TOKENS;
  const int begin = rank * STEPS, consumer = threadIdx.x / WARPGROUP;
  const Tile t = {m, tile % tiles * TOKENS, tile / tiles * ROWS, begin, min(STEPS, ALL_STEPS - begin), rank,
                  buffers, full, empty};
  launch_dependents();
  Loaded loaded[BATCH];
  if (consumer == CONSUMERS) {
    if (threadIdx.x == WRITERS) {
      produce(t, x, w);
    } else {
      wait_for_previous();
    }
    __syncwarp();
  } else {
    wait_for_previous();
    load_batch(loaded, t, 0 OTHERS);
    SUM total[SUMS] = {};
    consume(t, consumer, total);
    asm volatile("bar.sync 1, %0;" ::"n"(WRITERS) : "memory");  // no consumer reads the buffers any more
    share(shared, total, consumer);
  }
  wait_for_cluster<SPLIT>();
  if (consumer < CONSUMERS) finish(t, shared, loaded OTHERS, y);
  if (SPLIT > 1) {  // no block exits while others read its sums
    __syncwarp();
    cluster_wait();
  }
}
