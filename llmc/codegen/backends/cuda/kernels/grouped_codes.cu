// Products of the experts of a mixture with weights in 4-bit codes, in bf16 with f32 sums, for Hopper (sm_90a):
//
//   y[r, N] = epilogue(x[source(r), K] @ w[e, p, N, K].T) for the rows r of every expert e, sorted by expert,
//   with w = (code - zero) * scale
//
// Codes are in the order of the op pack_fragments. GROUP columns of a row of w share a scale. If there are two parts,
// eight rows of the first alternate with the same eight rows of the second.
//
// Tiles. The grid has as many blocks as the GPU holds at once. A block computes tiles of TILE_BLOCKS blocks of 64 rows
// of w and at most TILE_M rows of x, which it finds from the starts of the experts' rows; an expert without rows has no
// tiles. The tiles of an expert follow each other, so that its weights are read from memory once.
//
// Pipeline. The first warpgroup is the producer. It copies codes, scales and zero points by bulk copies to a ring of
// STAGES buffers in shared memory, and the rows of x, which need not be adjacent, by copies of 16 bytes. Every other
// warpgroup is a consumer: it converts BLOCKS blocks of 64 rows of w in registers, from which wgmma takes its left
// factor, and multiplies them by the rows of x. The sums are therefore transposed, and rows of x are the columns of the
// instruction, whose number is the smallest sufficient multiple of NARROWEST. Scales multiply the sums of a group if
// there are few rows of x, and otherwise the codes, in bf16. Every buffer has two barriers: `full` completes when its
// bytes have arrived, `empty` when every consumer warp has read it.
//
// Constants:
//   WARPGROUP, BLOCK     128 threads; 64 rows and columns of a block of codes
//   THREADS, RESIDENT    threads of a block; blocks of a multiprocessor
//   EXPERTS              number of experts
//   N, K                 multiples of 64; with two parts, N is a multiple of 32
//   PARTS                1 or 2
//   GROUP                columns that share a scale
//   ZERO_POINT           the zero point of all groups, or -1 if `zeros` has one for each
//   E2M1                 whether codes are floats (e2m1)
//   TILE_M, NARROWEST    TILE_M is 8, or a multiple of NARROWEST, at most 256
//   CONSUMERS, BLOCKS    consumer warpgroups; blocks of 64 rows of w of each
//   CHUNKS, STEP         blocks of 64 columns of a buffer; its columns
//   STAGES, STAGE_BYTES  number and size of the buffers
//   OVERLAP              whether a warpgroup converts while it multiplies, in tiles of TILE_M rows. NVCC 13.0 has enough
//                        registers for only one such loop
//   PRODUCER_REGISTERS, CONSUMER_REGISTERS  registers of a thread; 0 if all threads have the same number
//   GROUP_SIZE_M         tiles along the rows of x that are processed together, to share w in the L2 cache
//   CHOICES              if not 0, source(r) = order[r] / CHOICES, the token of a (token, choice) pair; otherwise r
//   SCATTER              whether row r is written to row order[r] of y
//   READ_BEFORE_WAIT     whether the previous kernel wrote neither `starts` nor w
//   SCALE, OUT           types of the scales (bf16 or f16) and of y
// The generated text before this file defines `multiply` for every number of columns, OTHER_PARAMETERS,
// OTHER_ARGUMENTS, OTHERS, ZEROS and the functions `row_factor`, `load_bias` and `epilogue`. expert_rows.cuh has the
// rows of the experts, transposed_sums.cuh functions of the sums.

constexpr int TILE_BLOCKS = CONSUMERS * BLOCKS;  // blocks of 64 rows of w per tile
// Rows of w per expert, and the blocks and tiles that they form.
constexpr int ROWS = PARTS * N, ROW_BLOCKS = ROWS / BLOCK, ROW_TILES = (ROW_BLOCKS + TILE_BLOCKS - 1) / TILE_BLOCKS;
constexpr int STEPS = K / STEP;
constexpr int SCALES = STEP > GROUP ? STEP / GROUP : 1;  // scales per row and step
constexpr int UNITS = CHUNKS * BLOCKS;  // products per step; each is a block of rows times 64 columns

// A buffer: x [CHUNKS][TILE_M][64] in the 128-byte swizzle, codes [TILE_BLOCKS][CHUNKS][2048],
// scales [TILE_BLOCKS][SCALES][64], zero points [TILE_BLOCKS][SCALES][64].
constexpr int CODE_BYTES = BLOCK * STEP / 2, SCALE_BYTES = BLOCK * 2;
constexpr int CODES_AT = TILE_M * STEP * 2, SCALES_AT = CODES_AT + TILE_BLOCKS * CODE_BYTES;
constexpr int ZEROS_AT = SCALES_AT + TILE_BLOCKS * SCALES * SCALE_BYTES;
constexpr int W_BYTES = TILE_BLOCKS * (CODE_BYTES + SCALES * (SCALE_BYTES + HAS_ZEROS * BLOCK));
constexpr int ROWS_PER_PASS = WARPGROUP / 8;  // rows of 64 columns of x that a warpgroup copies at once
constexpr int PASSES = (TILE_M + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
constexpr bool CHUNKS_AT_ONCE = TILE_M < ROWS_PER_PASS;  // whether a pass copies both chunks of a row

struct Tile {
  int expert;
  int row, count;  // first row of x, and number of rows
  int block;       // first block of rows of w
};

// The weights of all experts.
struct Stack {
  const unsigned char* codes;  // [EXPERTS][ROW_BLOCKS][K / 64][2048]
  const SCALE* scales;         // [EXPERTS][K / GROUP][ROWS]
  const unsigned char* zeros;  // [EXPERTS][K / GROUP][ROWS], or null
};

__device__ inline int tiles_of(const Blocks& blocks) { return blocks.ends[EXPERTS - 1] * ROW_TILES; }

// The tiles of an expert have nearly equal numbers of rows of x. GROUP_SIZE_M of them are processed together, for one block of
// rows of w after the other.
__device__ inline Tile find_tile(const Blocks& blocks, int tile) {
  const int expert = expert_of(blocks, tile / ROW_TILES);
  const int first = expert > 0 ? blocks.ends[expert - 1] : 0, heights = blocks.ends[expert] - first;
  const int rows = blocks.starts[expert + 1] - blocks.starts[expert];
  const int each = ((rows + heights - 1) / heights + 7) / 8 * 8;
  const int inside = tile - first * ROW_TILES;
  const int group = inside / (GROUP_SIZE_M * ROW_TILES), place = inside % (GROUP_SIZE_M * ROW_TILES);
  const int together = min(GROUP_SIZE_M, heights - group * GROUP_SIZE_M);
  const int begin = (group * GROUP_SIZE_M + place % together) * each;
  return {expert, blocks.starts[expert] + begin, min(each, rows - begin), place / together * TILE_BLOCKS};
}

// Copies codes, scales and zero points of one step; each of the first TILE_BLOCKS threads copies those of a block of rows.
__device__ inline void copy_weights(const Ring& ring, const Stack& w, const Tile& tile, int step) {
  const int i = threadIdx.x;
  if (i >= TILE_BLOCKS) return;
  if (i == 0) barrier_expect(ring.arrived(), W_BYTES);
  const int block = min(tile.block + i, ROW_BLOCKS - 1);  // blocks after the last one are copies of it
  const long long place = (long long)(tile.expert * ROW_BLOCKS + block) * (K / BLOCK) + step * CHUNKS;
  copy_bytes(ring.buffer() + CODES_AT + i * CODE_BYTES, w.codes + place * (BLOCK * BLOCK / 2), CODE_BYTES,
             ring.arrived());
#pragma unroll
  for (int s = 0; s < SCALES; s++) {
    const int group = (step * STEP + s * GROUP) / GROUP, to = i * SCALES + s;
    const long long entry = ((long long)tile.expert * (K / GROUP) + group) * ROWS + block * BLOCK;
    copy_bytes(ring.buffer() + SCALES_AT + to * SCALE_BYTES, w.scales + entry, SCALE_BYTES, ring.arrived());
    if (HAS_ZEROS) copy_bytes(ring.buffer() + ZEROS_AT + to * BLOCK, w.zeros + entry, BLOCK, ring.arrived());
  }
}

// Copies the weights of the first steps, as many as there are buffers; returns their number.
__device__ inline int copy_first_weights(Ring ring, const Blocks& blocks, const Stack& w) {
  if (blockIdx.x >= tiles_of(blocks)) return 0;
  constexpr int COUNT = STEPS < STAGES ? STEPS : STAGES;
  const Tile tile = find_tile(blocks, blockIdx.x);
  for (int i = 0; i < COUNT; i++, ring.advance()) copy_weights(ring, w, tile, i);
  return COUNT;
}

// The producer: the warpgroup copies the steps of all tiles, each when its buffer is free.
__device__ inline void produce(Ring ring, const Blocks& blocks, const bf16* x, const int* order, const Stack& w) {
  int early = copy_first_weights(ring, blocks, w);  // steps whose weights have been requested
  if (READ_BEFORE_WAIT) begin_launch();
  const int part = threadIdx.x % 8, line = threadIdx.x / 8, count = tiles_of(blocks);
  const int place = line * BLOCK * 2 + (part ^ line % 8) * 16;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Tile tile = find_tile(blocks, i);
    int from[PASSES];  // the row of x, or -1
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
      const int row = CHUNKS_AT_ONCE ? line % TILE_M : p * ROWS_PER_PASS + line;
      from[p] = -1;
      if (row < tile.count && line < CHUNKS * TILE_M)
        from[p] = CHOICES ? order[tile.row + row] / max(CHOICES, 1) : tile.row + row;
    }
    for (int step = 0; step < STEPS; step++) {
      if (early > 0) {
        early--;
      } else {
        barrier_wait(ring.freed(), ring.parity ^ 1);
        copy_weights(ring, w, tile, step);
      }
      const unsigned to = ring.buffer() + place;
      const bf16* const columns = x + step * STEP + (CHUNKS_AT_ONCE ? line / TILE_M * BLOCK : 0) + part * 8;
#pragma unroll
      for (int p = 0; p < PASSES; p++)
        if (from[p] >= 0)
#pragma unroll
          for (int c = 0; c < (CHUNKS_AT_ONCE ? 1 : CHUNKS); c++)
            copy_or_clear(to + (c * TILE_M + p * ROWS_PER_PASS) * BLOCK * 2, columns + (long long)from[p] * K + c * BLOCK, true);
      arrive_with_copies(ring.arrived());
      ring.advance();
    }
  }
}

// The weights of a block of a buffer.
__device__ inline Weights weights_of(const unsigned char* buffer, int block) {
  return {buffer + CODES_AT + block * CODE_BYTES, buffer + SCALES_AT + block * SCALES * SCALE_BYTES,
          buffer + ZEROS_AT + block * SCALES * BLOCK};
}

// A consumer warpgroup.
struct Consumer {
  Ring ring;
  const unsigned char* memory;  // the buffers
  int consumer;
  Constants constants;

  __device__ Weights weights(int i) const { return weights_of(memory + ring.offset(), consumer * BLOCKS + i); }
  __device__ unsigned rows(int chunk) const {
    return (unsigned)matrix(ring.buffer()) + chunk * (TILE_M * BLOCK * 2 / 16);
  }

  // Scaled factors. With OVERLAP, the products of one unit run while the codes of the next are converted; otherwise those
  // of other warpgroups do. A buffer is released when the products of its last unit have completed.
  template <int W> __device__ void add_steps(float (&sums)[BLOCKS][W / 2]) {
    constexpr int RUNNING = OVERLAP && W == TILE_M && UNITS > 1;
    unsigned a[1 + RUNNING][4][4], previous = 0;
    clear(sums);  // otherwise they would be live, and occupy registers, while tiles of other widths are computed
#pragma unroll 1
    for (int i = 0; i < STEPS; i++) {
      wait_for_buffer(ring);
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        const int chunk = u / BLOCKS, block = u % BLOCKS;
        wait_products<RUNNING>();
        if (u == RUNNING && i > 0) warp_arrive(previous);
        convert<true, E2M1>(a[u % (1 + RUNNING)], weights(block), chunk, constants);
        pin(sums);
        begin_products();
#pragma unroll
        for (int s = 0; s < 4; s++)
          multiply(sums[block], a[u % (1 + RUNNING)][s], rows(chunk) + 2 * s, true);
        end_products();
      }
      previous = ring.freed();
      ring.advance();
    }
    wait_products<0>();
    pin(sums);
    warp_arrive(previous);
  }

  // Scaled sums: a step has separate sums, `fresh`. With OVERLAP, its products run while the codes of the next step are
  // converted.
  template <int W> __device__ void add_scaled_steps(float (&sums)[BLOCKS][W / 2]) {
    constexpr bool AHEAD = OVERLAP && TILE_M <= 32;
    Factors even, odd;
    float fresh[BLOCKS][W / 2];
    clear(sums);
    clear(fresh);
    if (AHEAD) convert_step(even);
#pragma unroll 1
    for (int i = 0; i < (AHEAD ? STEPS / 2 : STEPS); i++) {
      if (!AHEAD) convert_step(even);
      add_scaled_step(sums, fresh, even, odd, AHEAD);
      if (AHEAD) add_scaled_step(sums, fresh, odd, even, STEPS % 2 || i < STEPS / 2 - 1);
    }
    if (AHEAD && STEPS % 2) add_scaled_step(sums, fresh, even, odd, false);
  }

  // The left factors of a step, and the scales of the two rows of this thread.
  struct Factors {
    unsigned a[BLOCKS][CHUNKS][4][4];
    float scale[BLOCKS][2];
  };

  // Waits for the current buffer and converts its codes.
  __device__ void convert_step(Factors& to) const {
    wait_for_buffer(ring);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const Weights from = weights(b);
#pragma unroll
      for (int half = 0; half < 2; half++) to.scale[b][half] = to_float(from.scales[8 * half]);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) convert<false, E2M1>(to.a[b][c], from, c, constants);
    }
  }

  // Adds the products of the current buffer, whose factors are `now`, and converts the next one, if there are `more`.
  template <int count>
  __device__ void add_scaled_step(float (&sums)[BLOCKS][count], float (&fresh)[BLOCKS][count], const Factors& now,
                                  Factors& next, bool more) {
    pin(fresh);
    begin_products();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int s = 0; s < 4; s++) multiply(fresh[b], now.a[b][c][s], rows(c) + 2 * s, c > 0 || s > 0);
    end_products();
    const unsigned current = ring.freed();
    ring.advance();
    if (more) convert_step(next);
    wait_products<0>();
    pin(fresh);
    warp_arrive(current);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int j = 0; j < count; j++) sums[b][j] += fresh[b][j] * now.scale[b][j / 2 % 2];
  }
};

// A row of y and the factor of each row of a tile, in shared memory; a warpgroup has its own.
struct Places {
  int row[TILE_M];
  float factor[TILE_M];
};

// Writes y of a tile from the sums of a warpgroup: a thread has two rows of w, 8 apart, and in each two rows of x of every
// eight. With two parts, these are the two parts of one column of y.
template <int W>
__device__ inline void finish(const float (&sums)[BLOCKS][W / 2], const Tile& tile, int consumer,
                              const Places& places OTHER_ARGUMENTS, OUT* y) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    const int block = tile.block + consumer * BLOCKS + b;
    if (block >= ROW_BLOCKS) break;
    const int column = (block * BLOCK + warp * 16) / PARTS;
    float added[2];
    load_bias(added, tile.expert, column + lane / 4 OTHERS);
#pragma unroll
    for (int j = 0; j < W / 8; j++) {
      if (8 * j >= tile.count) break;
      float value[3 - PARTS][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float low = sums[b][4 * j + i] + added[0], high = sums[b][4 * j + 2 + i] + added[1];
        if (PARTS == 2) {
          value[0][i] = epilogue(low, high);
        } else {
          const float factor = places.factor[8 * j + lane % 4 * 2 + i];
          value[0][i] = low * factor, value[2 - PARTS][i] = high * factor;
        }
      }
      store_columns(y, value, places.row, 8 * j, tile.count, column);
    }
  }
}

// Waits for the threads of this warpgroup.
__device__ inline void join(int consumer) { asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory"); }

// A tile whose rows of x fill at most W columns of the instruction.
template <int W>
__device__ inline void compute(Consumer& c, const Tile& tile, Places& places, const int* order OTHER_ARGUMENTS, OUT* y) {
  constexpr int EACH = (W + WARPGROUP - 1) / WARPGROUP;  // rows whose places a thread looks up
  int row[EACH];
  float factor[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * WARPGROUP + threadIdx.x % WARPGROUP;
    const bool valid = at < tile.count;
    row[i] = valid && SCATTER ? order[tile.row + at] : tile.row + at;
    factor[i] = valid && SCATTER ? row_factor(row[i] OTHERS) : 0;
  }
  float sums[BLOCKS][W / 2];
  if constexpr (W <= 32 && SCALES == 1) {
    c.add_scaled_steps<W>(sums);
  } else {
    c.add_steps<W>(sums);
  }
  join(c.consumer);  // the places of the tile before have been read
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * WARPGROUP + threadIdx.x % WARPGROUP;
    if (at < W) places.row[at] = row[i], places.factor[at] = factor[i];
  }
  join(c.consumer);
  finish<W>(sums, tile, c.consumer, places OTHERS, y);
}

// Calls `compute` with the smallest sufficient W.
template <int W>
__device__ inline void dispatch(Consumer& c, const Tile& tile, Places& places, const int* order OTHER_ARGUMENTS, OUT* y) {
  if constexpr (W > NARROWEST) {
    if (tile.count <= W - NARROWEST) return dispatch<W - NARROWEST>(c, tile, places, order OTHERS, y);
  }
  compute<W>(c, tile, places, order OTHERS, y);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    llmc_expert_codes(const bf16* x, const int* order, const int* starts, const unsigned char* codes, const SCALE* scales,
                      OTHER_PARAMETERS OUT* y) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  __shared__ Blocks blocks;
  __shared__ Places places[CONSUMERS];
  const unsigned offset = (1024 - shared_address(memory)) & 1023;  // a swizzled tile begins at a multiple of 1024
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1 + WARPGROUP);  // bulk copies, and the threads that copy rows
      barrier_init(empty + 8 * i, CONSUMERS * WARPGROUP / 32 * WARP_ARRIVALS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (!READ_BEFORE_WAIT) begin_launch();
  count_blocks(blocks, starts);

  Ring ring(shared_address(memory) + offset, full, empty);
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == 0) {
    if constexpr (PRODUCER_REGISTERS > 0)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    produce(ring, blocks, x, order, {codes, scales, ZEROS});
  } else {
    if constexpr (PRODUCER_REGISTERS > 0)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    if (READ_BEFORE_WAIT) begin_launch();
    Consumer consumer{ring, memory + offset, warpgroup - 1, {}};
    const int count = tiles_of(blocks);
    for (int i = blockIdx.x; i < count; i += gridDim.x)
      dispatch<TILE_M>(consumer, find_tile(blocks, i), places[warpgroup - 1], order OTHERS, y);
  }
}
