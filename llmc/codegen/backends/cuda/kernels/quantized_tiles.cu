// Product of bf16 tokens and weights in 4-bit codes, with f32 sums, for many tokens on Hopper (sm_90a):
//
//   y[M, N] = epilogue(x[M, K] @ w[0].T, .., x[M, K] @ w[PARTS - 1].T, other operands), with w = (code - zero) * scale
//
// Codes are in the order of the op pack_fragments. GROUP columns of a row of w share a scale.
//
// Tiles. The grid is as large as the GPU. A block computes one tile after another, of TOKENS tokens and ROWS columns of
// y. With WIDTH = TOKENS / 2, the last tiles are halved into tiles of WIDTH tokens if whole tiles would leave
// multiprocessors idle.
//
// Pipeline. The first warpgroup is the producer: one of its threads copies x, codes, scales and zero points by TMA to a
// ring of STAGES buffers in shared memory, and begins the next tile while this one is written. Every other warpgroup is
// a consumer: it converts BLOCKS blocks of 64 rows of w in registers, from which wgmma takes its left factor, and
// multiplies them by the tokens. The sums are therefore transposed. They are written through shared memory, STAGED
// tokens at a time. Every buffer has two barriers: `full` completes when its bytes have arrived, `empty` when the
// consumers have read it.
//
// Multicast. With ALONG_N = 2, the two blocks of a cluster compute tiles of the same tokens and of neighbouring columns
// of y. The blocks take turns in copying the tokens of a step to the buffers of both, so a block may write to a buffer
// when the consumers of both blocks have read it.
//
// Constants:
//   WARPGROUP, BLOCK  128 threads; 64 rows and columns of a block of codes
//   N, PARTS, K       K is a multiple of 128
//   GROUP             columns that share a scale
//   ZERO_POINT        the zero point of all groups, or -1 if the pointer ZEROS has one for each
//   TOKENS            a multiple of STAGED, at most 256
//   WIDTH             tokens of one copy: TOKENS or half of it
//   ROWS              PARTS * ROWS is 128, 192 or 256
//   BLOCKS            1, or 2 with 256 rows
//   CHUNKS            blocks of 64 columns of a buffer: 1 or 2
//   STAGES, STAGED    buffers of the ring; tokens that are written at once
//   ALONG_N           1 or 2
//   GROUP_SIZE_M      tiles along the tokens that are processed together, to share w in the L2 cache
//   SCALE, OUT        types of the scales (bf16 or f16) and of y
// The generated text before this file defines `multiply` for TOKENS and WIDTH columns, OTHER_PARAMETERS, ZEROS,
// OTHER_ARGUMENTS, OTHERS, Loaded, `load_others` and `epilogue`.

constexpr int TILE_BLOCKS = PARTS * ROWS / BLOCK;  // blocks of 64 rows of w per tile
constexpr int CONSUMERS = TILE_BLOCKS / BLOCKS;    // consumer warpgroups
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP, WRITERS = CONSUMERS * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 152;  // per thread
constexpr int STEP = CHUNKS * BLOCK, STEPS = K / STEP;  // columns per buffer; buffers per tile
constexpr int SCALES = STEP > GROUP ? STEP / GROUP : 1;  // per row and step
constexpr int WIDTHS = TOKENS / WIDTH;
constexpr int COLUMNS = N / ROWS / ALONG_N;  // clusters' tiles along the columns

// A buffer: x [CHUNKS][TOKENS][BLOCK] in the 128-byte swizzle, codes [TILE_BLOCKS][CHUNKS][BLOCK * BLOCK / 2], scales
// [TILE_BLOCKS][SCALES][BLOCK], zero points [TILE_BLOCKS][SCALES][BLOCK].
constexpr int X_BYTES = TOKENS * STEP * 2, CODE_BYTES = STEP * BLOCK / 2, SCALE_BYTES = BLOCK * 2;
constexpr int CODES_AT = X_BYTES, SCALES_AT = CODES_AT + TILE_BLOCKS * CODE_BYTES;
constexpr int ZEROS_AT = SCALES_AT + TILE_BLOCKS * SCALES * SCALE_BYTES;
constexpr int USED_BYTES = ZEROS_AT + (HAS_ZEROS ? TILE_BLOCKS * SCALES * BLOCK : 0);
constexpr int STAGE_BYTES = (USED_BYTES + 1023) / 1024 * 1024;

// Staged sums: [2][STAGED][SUMS_STRIDE], after the buffers. A thread writes QUADS groups of four columns of each.
constexpr int SUMS_STRIDE = PARTS * ROWS + 4;  // padded, to avoid bank conflicts
constexpr int QUADS = STAGED * ROWS / 4 / WRITERS;
static_assert(QUADS * WRITERS * 4 == STAGED * ROWS, "the threads have equal numbers of quads");

using Ring = BufferRing<STAGES, STAGE_BYTES>;

struct Tile {
  int token, column;  // the first ones
  int widths;         // number of tokens, in units of WIDTH
};

// The tiles of clusters: first the whole ones, of which those of GROUP_SIZE_M * TOKENS tokens follow each other column by
// column, then halved ones, then those of the last tokens if at most WIDTH are left.
struct Tiles {
  int heights, whole, halved, last;  // whole tiles along the tokens; tiles of the three kinds

  __device__ explicit Tiles(int m) {
    const int clusters = gridDim.x / ALONG_N, rest = m % TOKENS;
    const bool narrow = WIDTHS == 2 && 0 < rest && rest <= WIDTH;
    heights = (m + TOKENS - 1) / TOKENS - narrow;
    last = narrow ? COLUMNS : 0;
    const int left = heights * COLUMNS % clusters;
    const bool halves = WIDTHS == 2 && (narrow || 2 * left <= clusters);
    whole = heights * COLUMNS - (halves ? left : 0);
    halved = halves ? 2 * left : 0;
  }

  __device__ int count() const { return whole + halved + last; }

  __device__ Tile find(int i) const {
    if (i < whole) return place(i, 0, WIDTHS);
    const int half = i - whole;
    if (half < halved) return place(whole + half / 2, half % 2 * WIDTH, 1);
    return {heights * TOKENS, column(half - halved), 1};
  }

 private:
  __device__ static int column(int i) { return (i * ALONG_N + (ALONG_N > 1 ? blockIdx.x % ALONG_N : 0)) * ROWS; }

  __device__ Tile place(int i, int token, int widths) const {
    const int group = i / (GROUP_SIZE_M * COLUMNS), inside = i % (GROUP_SIZE_M * COLUMNS);
    const int height = min(GROUP_SIZE_M, heights - group * GROUP_SIZE_M);
    return {(group * GROUP_SIZE_M + inside % height) * TOKENS + token, column(inside / height), widths};
  }
};

// The weights.
struct Codes {
  const unsigned char* codes;   // [PARTS * N / 64][K / 64][2048]
  const SCALE* scales;          // [K / GROUP][PARTS * N]
  const unsigned char* zeros;   // [K / GROUP][PARTS * N], or null
};

// Copies codes, scales and zero points of one step.
__device__ inline void copy_weights(const Ring& ring, const Codes& w, const Tile& tile, int step) {
  barrier_expect(ring.arrived(), USED_BYTES - (WIDTHS - tile.widths) * WIDTH * STEP * 2);
#pragma unroll
  for (int b = 0; b < TILE_BLOCKS; b++) {
    const int row = b / (ROWS / BLOCK) * N + tile.column + b % (ROWS / BLOCK) * BLOCK;
    const long long block = (long long)(row / BLOCK) * STEPS + step;  // a block of rows and CHUNKS blocks of columns
    copy_bytes(ring.buffer() + CODES_AT + b * CODE_BYTES, w.codes + block * CODE_BYTES, CODE_BYTES, ring.arrived());
#pragma unroll
    for (int s = 0; s < SCALES; s++) {
      const long long entry = (long long)((step * STEP + s * GROUP) / GROUP) * (PARTS * N) + row;
      const int to = b * SCALES + s;
      copy_bytes(ring.buffer() + SCALES_AT + to * SCALE_BYTES, w.scales + entry, SCALE_BYTES, ring.arrived());
      if (HAS_ZEROS) copy_bytes(ring.buffer() + ZEROS_AT + to * BLOCK, w.zeros + entry, BLOCK, ring.arrived());
    }
  }
}

// Copies the tokens of one step, if this block copies those of the step.
__device__ inline void copy_tokens(const Ring& ring, const TensorMap& x, const Tile& tile, int step) {
  if (ALONG_N > 1 && step % ALONG_N != blockIdx.x % ALONG_N) return;
  for (int i = 0; i < CHUNKS * tile.widths; i++) {
    const int chunk = i % CHUNKS, width = i / CHUNKS;
    const unsigned to = ring.buffer() + (chunk * TOKENS + width * WIDTH) * BLOCK * 2;
    const int token = tile.token + width * WIDTH, column = step * STEP + chunk * BLOCK;
    if (ALONG_N == 1) {
      copy_box(to, x, token, column, ring.arrived());
    } else {
      copy_box_to_blocks(to, x, token, column, ring.arrived(), (1 << ALONG_N) - 1);
    }
  }
}

// Arrivals that complete an `empty` barrier. With __syncwarp and an arrival of one thread for the warp, NVCC would wait
// for all products, so every thread arrives. In a cluster these would be arrivals at two blocks: there, one thread
// arrives for its warp without a join. All of the warp's reads have ended by then, since they are factors of products
// that have completed, but racecheck does not know that.
constexpr bool ALL_ARRIVE = ALONG_N == 1 || EVERY_THREAD_ARRIVES;
constexpr int ARRIVALS = ALONG_N * (ALL_ARRIVE ? WRITERS : WRITERS / 32);

// Signals the producers of a buffer that this thread, or its warp, has finished reading it.
__device__ inline void release(unsigned empty) {
  const int lane = threadIdx.x % 32;
  if (ALONG_N == 1) {
    barrier_arrive(empty);
  } else if (ALL_ARRIVE) {
#pragma unroll
    for (int rank = 0; rank < ALONG_N; rank++) barrier_arrive_at(empty, rank);
  } else if (lane < ALONG_N) {
    barrier_arrive_at(empty, lane);
  }
}

// The products of a tile of W * WIDTH tokens by a consumer warpgroup; sums[b] is a block of 64 rows times the tokens.
// Those of a block and chunk run while the codes of the next are converted; a buffer is released two chunks later.
template <int W>
__device__ inline void add_steps(float (&sums)[BLOCKS][W * WIDTH / 2], Ring& ring, const unsigned char* memory,
                                 int consumer, const Constants& constants) {
  unsigned a[2][4][4], previous[2] = {};
  clear(sums);
#pragma unroll 1
  for (int i = 0; i < STEPS * CHUNKS; i += 2) {
    Ring at[2] = {ring, ring};  // the positions of both chunks
    if (CHUNKS == 1) at[1].advance();
    // Before both: NVCC would wait for all products if a branch were between them.
    barrier_wait(at[0].arrived(), at[0].parity);
    if (CHUNKS == 1) barrier_wait(at[1].arrived(), at[1].parity);
#pragma unroll
    for (int u = 0; u < 2 * BLOCKS; u++) {
      const int c = u / BLOCKS, b = u % BLOCKS, chunk = c % CHUNKS, block = consumer * BLOCKS + b;
      const unsigned char* const buffer = memory + at[c].offset();
      wait_products<1>();
      if (b == 0 && (CHUNKS == 1 || c == 1) && i > 0) release(previous[c]);
      const Weights from = {buffer + CODES_AT + block * CODE_BYTES, buffer + SCALES_AT + block * SCALES * SCALE_BYTES,
                            buffer + ZEROS_AT + block * SCALES * BLOCK};
      convert<true>(a[u % 2], from, chunk, constants);
      pin(sums);
      begin_products();
#pragma unroll
      for (int s = 0; s < 4; s++)
        multiply(sums[b], a[u % 2][s], (unsigned)matrix(at[c].buffer() + chunk * TOKENS * BLOCK * 2 + 32 * s), true);
      end_products();
      previous[c] = at[c].freed();
    }
    ring = at[1];
    ring.advance();
  }
  wait_products<0>();
  pin(sums);
  if (CHUNKS == 1) release(previous[0]);
  release(previous[1]);
}

// Writes y of STAGED tokens of a tile, from STAGED * PLACE on. Two places in turn have shared memory of their own, so
// that one is written while the other is read.
template <int PLACE, int count>
__device__ inline void finish(const float (&sums)[BLOCKS][count], float* staged, const Tile& tile, int consumer,
                              int m OTHER_ARGUMENTS, OUT* y) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, token = tile.token + PLACE * STAGED;
  staged += PLACE % 2 * (STAGED * SUMS_STRIDE);
  Loaded loaded[QUADS][2];
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const int at = i * WRITERS + threadIdx.x - WARPGROUP, t = token + at / (ROWS / 4);
    const int c = tile.column + at % (ROWS / 4) * 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (t < m) load_others(loaded[i][half], t, c + 2 * half OTHERS);
  }
  float* const to = staged + lane % 4 * 2 * SUMS_STRIDE + consumer * BLOCKS * BLOCK + warp * 16 + lane / 4;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++)
#pragma unroll
    for (int i = 0; i < STAGED / 2; i++)  // 4 j + 2 half + pair
      to[(i / 4 * 8 + i % 2) * SUMS_STRIDE + b * BLOCK + i / 2 % 2 * 8] = sums[b][PLACE * STAGED / 2 + i];
  asm volatile("bar.sync 1, %0;" ::"n"(WRITERS) : "memory");
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const int at = i * WRITERS + threadIdx.x - WARPGROUP, t = at / (ROWS / 4), c = at % (ROWS / 4) * 4;
    float four[PARTS][4];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float4 v = *(const float4*)(staged + t * SUMS_STRIDE + p * ROWS + c);
      four[p][0] = v.x, four[p][1] = v.y, four[p][2] = v.z, four[p][3] = v.w;
    }
    if (token + t < m) *(Four*)(y + (long long)(token + t) * N + tile.column + c) = four_columns(four, loaded[i]);
  }
}

// The same from PLACE to the last one.
template <int PLACE, int count>
__device__ inline void finish_from(const float (&sums)[BLOCKS][count], float* staged, const Tile& tile, int consumer,
                                   int m OTHER_ARGUMENTS, OUT* y) {
  finish<PLACE>(sums, staged, tile, consumer, m OTHERS, y);
  if constexpr ((PLACE + 1) * STAGED / 2 < count) finish_from<PLACE + 1>(sums, staged, tile, consumer, m OTHERS, y);
}

// A tile of W * WIDTH tokens by a consumer warpgroup.
template <int W>
__device__ inline void compute(Ring& ring, const unsigned char* memory, const Tile& tile, int consumer,
                               const Constants& constants, int m OTHER_ARGUMENTS, OUT* y) {
  float sums[BLOCKS][W * WIDTH / 2];
  add_steps<W>(sums, ring, memory, consumer, constants);
  float* const staged = (float*)(memory + STAGES * STAGE_BYTES);
  finish_from<0>(sums, staged, tile, consumer, m OTHERS, y);
  // If the number of places is odd, the first one of the next tile has the memory of this tile's last one.
  if (W * WIDTH / STAGED % 2) asm volatile("bar.sync 1, %0;" ::"n"(WRITERS) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    llmc_quantized_tiles(const __grid_constant__ TensorMap x, const unsigned char* codes, const SCALE* scales,
                         OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  const unsigned buffers = (shared_address(dynamic_memory) + 1023) & ~1023u;  // swizzled boxes begin at multiples
  const unsigned char* const memory = dynamic_memory + (buffers - shared_address(dynamic_memory));
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  init_ring(full, empty, STAGES, ARRIVALS);
  if (ALONG_N > 1) cluster_wait();  // the other block's barriers are initialized

  Ring ring(buffers, full, empty);
  const Tiles tiles(m);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) {
      const Codes w = {codes, scales, ZEROS};
      produce_tiles<STEPS, ALONG_N, true>(
          ring, tiles, [&](const Ring& at, const Tile& tile, int step) { copy_weights(at, w, tile, step); },
          [&](const Ring& at, const Tile& tile, int step) { copy_tokens(at, x, tile, step); });
    } else {
      begin_launch();
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    begin_launch();
    const Constants constants;
    const int count = tiles.count();
    for (int i = blockIdx.x / ALONG_N; i < count; i += gridDim.x / ALONG_N) {
      const Tile tile = tiles.find(i);
      if (WIDTHS == 1 || tile.widths == WIDTHS) {
        compute<WIDTHS>(ring, memory, tile, warpgroup - 1, constants, m OTHERS, y);
      } else {
        compute<1>(ring, memory, tile, warpgroup - 1, constants, m OTHERS, y);
      }
    }
  }
  if (ALONG_N > 1) cluster_wait();  // no block of the cluster accesses this one's memory any more
}
