// Product of bf16 tokens and weights in 4-bit codes, with f32 sums, for Hopper (sm_90a):
//
//   y[M, N] = epilogue(x[M, K] @ w[0].T, .., x[M, K] @ w[PARTS - 1].T, other operands), with w = (code - zero) * scale
//
// Codes are in the order of the op pack_fragments. GROUP columns of a row of w share a scale, which multiplies the sums
// of the group if there are at most 32 tokens, and otherwise the codes, in bf16.
//
// Tiles. A block computes TOKENS tokens and ROWS columns of y. SLICES warpgroups multiply different columns of w for
// the same rows. The SPLIT blocks of a cluster compute the same tile over different columns of w: each writes its sums
// to shared memory, and adds up the sums of all blocks for its share of the tokens. If ROUND is not 0, so many blocks
// run at once. If the tiles that are left after whole rounds are at most half a round, they are halved: a block
// computes 128 of their 256 tokens, and the last round takes half as long.
//
// Pipeline. The last warp (for more than 128 tokens and several consumers, the last warpgroup) is the producer: one of
// its threads copies x, codes, scales and zero points by bulk copies to a ring of STAGES buffers in shared memory.
// Every other warpgroup is a consumer: it converts 64 rows of one part of w in registers, from which wgmma takes its
// left factor, and multiplies them by the tokens. The sums are therefore transposed. Every buffer has two barriers:
// `full` completes when its bytes have arrived, `empty` when every consumer warp has read it.
//
// Constants:
//   WARPGROUP, BLOCK     128 threads; 64 rows and columns of a block of codes
//   N, K, PARTS          N and K are multiples of 64
//   GROUP                columns that share a scale
//   ZERO_POINT           the zero point of all groups, or -1 if the pointer ZEROS has one for each
//   TOKENS               8, 16, 32, 64, 128 or 256
//   ROWS                 64, 128 or 192
//   STAGES               buffers of the ring
//   SLICES, SPLIT        their product divides the number of steps
//   ROUND                0, or, if TOKENS = 256 and SPLIT = 1, the number of blocks that run at once
//   TRIGGER_AFTER_LOADS  whether the next kernel may begin only when the last products are done
//   SCALE, OUT           types of the scales (bf16 or f16) and of y
// The generated text before this file defines OTHER_PARAMETERS, ZEROS, OTHER_ARGUMENTS, OTHERS, Loaded, `load_others`
// and `epilogue`.

constexpr int TILE_BLOCKS = PARTS * ROWS / BLOCK;   // blocks of 64 rows of w per tile
constexpr int CONSUMERS = TILE_BLOCKS * SLICES;     // consumer warpgroups
// The producer is a whole warpgroup, which gives its registers to the consumers.
constexpr bool GIVES_REGISTERS = TOKENS > 128 && CONSUMERS > 1;
constexpr int THREADS = CONSUMERS * WARPGROUP + (GIVES_REGISTERS ? WARPGROUP : 32);
constexpr int CHUNKS = K % (2 * BLOCK) == 0 ? 2 : 1, STEP = CHUNKS * BLOCK;  // STEP: columns per step
constexpr int STEPS = K / STEP / SLICES / SPLIT;    // steps per block
constexpr int SCALES = STEP > GROUP ? STEP / GROUP : 1;  // scales per row and step
constexpr int WIDTH = TOKENS < 128 ? TOKENS : 128, WIDTHS = TOKENS / WIDTH;  // WIDTH: tokens per instruction
// The scales multiply the sums of a step if that is less work, otherwise the factors.
constexpr bool SCALE_SUMS = TOKENS <= 32 && SCALES == 1;

// A buffer: x [SLICES][CHUNKS][TOKENS][BLOCK] in the 128-byte swizzle,
// codes [TILE_BLOCKS][SLICES][CHUNKS][BLOCK * BLOCK / 2], scales [TILE_BLOCKS][SLICES][SCALES][BLOCK],
// zero points [TILE_BLOCKS][SLICES][SCALES][BLOCK].
constexpr int X_BYTES = SLICES * TOKENS * STEP * 2, CODE_BYTES = BLOCK * STEP / 2, SCALE_BYTES = BLOCK * 2;
constexpr int CODES_AT = X_BYTES, SCALES_AT = CODES_AT + CONSUMERS * CODE_BYTES;
constexpr int ZEROS_AT = SCALES_AT + CONSUMERS * SCALES * SCALE_BYTES;
constexpr int USED_BYTES = ZEROS_AT + (HAS_ZEROS ? CONSUMERS * SCALES * BLOCK : 0);
constexpr int STAGE_BYTES = (USED_BYTES + 1023) / 1024 * 1024;
constexpr int SUMS_STRIDE = PARTS * ROWS + 4;  // floats per token, padded to avoid bank conflicts
constexpr int WRITERS = CONSUMERS * WARPGROUP, SHARE = TOKENS / SPLIT;  // threads and tokens of a block that write y
constexpr int QUADS = (SHARE * ROWS / 4 + WRITERS - 1) / WRITERS;  // groups of four columns of y that a thread writes
constexpr int BATCH = QUADS < 8 ? QUADS : 8;  // quads whose other operands are loaded together
constexpr bool EARLY_OPERANDS = TOKENS <= 32;   // whether the first batch is loaded before the products

// The inputs of a tile of y.
struct Problem {
  const TensorMap& x;
  const unsigned char* codes;   // [PARTS * N / 64][K / 64][2048]
  const SCALE* scales;          // [K / GROUP][PARTS * N]
  const unsigned char* zeros;   // [K / GROUP][PARTS * N], or null
  int token, column;            // the first ones of the tile
  int tokens;                   // number of tokens of this block: TOKENS or half of them
  int begin;                    // the first step of this block
  unsigned buffers, full, empty;  // addresses in shared memory
};

// The first row in w of the i-th block of rows.
__device__ inline int weight_row(const Problem& p, int i) {
  return i / (ROWS / BLOCK) * N + p.column + i % (ROWS / BLOCK) * BLOCK;
}

__device__ inline void copy_weights(const Problem& p, int step, int stage) {
  const unsigned buffer = p.buffers + stage * STAGE_BYTES, barrier = p.full + 8 * stage;
  for (int b = 0; b < TILE_BLOCKS; b++) {
    const int row = weight_row(p, b);
    const long long block = (long long)(row / BLOCK) * (K / BLOCK) + step * (SLICES * CHUNKS);
    copy_bytes(buffer + CODES_AT + b * SLICES * CODE_BYTES, p.codes + block * (BLOCK * BLOCK / 2), SLICES * CODE_BYTES,
               barrier);
    for (int s = 0; s < SLICES * SCALES; s++) {
      const long long column = (long long)step * (SLICES * STEP) + s / SCALES * STEP + s % SCALES * GROUP;
      const long long entry = column / GROUP * (PARTS * N) + row;
      const int to = b * SLICES * SCALES + s;
      copy_bytes(buffer + SCALES_AT + to * SCALE_BYTES, p.scales + entry, SCALE_BYTES, barrier);
      if (HAS_ZEROS) copy_bytes(buffer + ZEROS_AT + to * BLOCK, p.zeros + entry, BLOCK, barrier);
    }
  }
}

__device__ inline void copy_tokens(const Problem& p, int step, int stage) {
  for (int c = 0; c < SLICES * CHUNKS; c++)
    for (int w = 0; w < WIDTHS && (!ROUND || w * WIDTH < p.tokens); w++)
      copy_box(p.buffers + stage * STAGE_BYTES + (c * TOKENS + w * WIDTH) * BLOCK * 2, p.x, p.token + w * WIDTH,
               step * (SLICES * STEP) + c * BLOCK, p.full + 8 * stage);
}

// The producer: one thread issues the copies of all steps, each when its buffer is free. The weights of the first steps
// are copied before the previous kernel has completed.
__device__ inline void produce(const Problem& p) {
  constexpr int first = STEPS < STAGES ? STEPS : STAGES;
  const int bytes = USED_BYTES - (TOKENS - p.tokens) * STEP * SLICES * 2;
  for (int i = 0; i < first; i++) {
    barrier_expect(p.full + 8 * i, bytes);
    copy_weights(p, p.begin + i, i);
  }
  wait_for_previous();
  for (int i = 0; i < first; i++) copy_tokens(p, p.begin + i, i);
  for (int i = first; i < STEPS; i++) {
    const int stage = i % STAGES, round = i / STAGES;
    barrier_wait(p.empty + 8 * stage, (round & 1) ^ 1);
    barrier_expect(p.full + 8 * stage, bytes);
    copy_weights(p, p.begin + i, stage);
    copy_tokens(p, p.begin + i, stage);
  }
}

// Keeps the compiler from moving the sums to other registers, for which it would have to wait for all products.
template <int count> __device__ inline void pin(float (&sums)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Issues the products of a chunk. x: the descriptor of its tokens. add: whether to add to the sums.
__device__ inline void multiply_chunk(float (&sums)[WIDTH / 2], const unsigned (&a)[4][4], unsigned x, bool add) {
#pragma unroll
  for (int s = 0; s < 4; s++) multiply(sums, a[s], x + 32 * s / 16, add || s > 0);
}

// A position in the ring of buffers.
struct Ring {
  int steps = 0, stage = 0, parity = 0;
  __device__ void advance() {
    steps++;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// A consumer warpgroup; `sums[w]` is 64 rows times the tokens from 128 w on.
struct Consumer {
  const Problem& p;
  const unsigned char* memory;
  int consumer;
  Constants constants;
  Ring ring;
  float sums[WIDTHS][WIDTH / 2];

  __device__ Consumer(const Problem& p, const unsigned char* memory, int consumer)
      : p(p), memory(memory), consumer(consumer), sums{} {}

  // Waits for the current buffer.
  __device__ Weights arrived() const {
    const unsigned char* buffer = memory + ring.stage * STAGE_BYTES;
    barrier_wait(p.full + 8 * ring.stage, ring.parity);
    return {buffer + CODES_AT + consumer * CODE_BYTES, buffer + SCALES_AT + consumer * SCALES * SCALE_BYTES,
            buffer + ZEROS_AT + consumer * SCALES * BLOCK};
  }

  __device__ unsigned tokens(int chunk) const {
    const int at = consumer % SLICES * CHUNKS + chunk;
    return (unsigned)matrix(p.buffers + ring.stage * STAGE_BYTES) + at * (TOKENS * BLOCK * 2 / 16);
  }

  // Releases the buffer before the current one, if there is one.
  __device__ void release_previous() const {
    const int previous = ring.stage == 0 ? STAGES - 1 : ring.stage - 1;
    warp_arrive(p.empty + 8 * previous, ring.steps > 0);
  }

  // Scaled factors: the products of a chunk run while the codes of the next are converted; a buffer is released when
  // the products of its last chunk have completed. widths: of the tokens of this block.
  template <int widths> __device__ void add_steps() {
    unsigned a[CHUNKS][4][4];
    for (int i = 0; i < STEPS; i++) {
      const Weights from = arrived();
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        wait_products<CHUNKS - 1>();
        if (c == CHUNKS - 1) release_previous();
        convert<!SCALE_SUMS>(a[c], from, c, constants);
        pin_sums();
        begin_products();
#pragma unroll
        for (int w = 0; w < widths; w++) multiply_chunk(sums[w], a[c], tokens(c) + w * WIDTH * BLOCK * 2 / 16, true);
        end_products();
      }
      ring.advance();
    }
    wait_products<0>();
    pin_sums();
  }

  // Scaled sums: a step has separate sums, `fresh`. The factors of the step before must not change while its products run.
  __device__ void add_scaled_steps() {
    unsigned even[CHUNKS][4][4], odd[CHUNKS][4][4];
    float fresh[WIDTH / 2] = {}, scale[2] = {};
    for (int i = 0; i < STEPS / 2; i++) {
      add_scaled_step(even, fresh, scale);
      add_scaled_step(odd, fresh, scale);
    }
    if (STEPS % 2) add_scaled_step(even, fresh, scale);
    wait_products<0>();
    add(fresh, scale);
  }

  // Begins the products of a step, and adds the sums of the step before.
  __device__ void add_scaled_step(unsigned (&a)[CHUNKS][4][4], float (&fresh)[WIDTH / 2], float (&scale)[2]) {
    const Weights from = arrived();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) convert<!SCALE_SUMS>(a[c], from, c, constants);
    wait_products<0>();
    release_previous();
    add(fresh, scale);
#pragma unroll
    for (int half = 0; half < 2; half++) scale[half] = to_float(from.scales[8 * half]);
    begin_products();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) multiply_chunk(fresh, a[c], tokens(c), c > 0);
    end_products();
    ring.advance();
  }

  __device__ void add(float (&fresh)[WIDTH / 2], const float (&scale)[2]) {
    pin(fresh);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) sums[0][i] += fresh[i] * scale[i / 2 % 2];
    pin(fresh);
  }

  __device__ void pin_sums() {
#pragma unroll
    for (int w = 0; w < WIDTHS; w++) pin(sums[w]);
  }
};

// Writes a warpgroup's sums to shared memory as [SLICES][TOKENS][SUMS_STRIDE].
__device__ inline void share(float* shared, const float (&sums)[WIDTHS][WIDTH / 2], int consumer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float* to = shared + consumer % SLICES * (TOKENS * SUMS_STRIDE) + lane % 4 * 2 * SUMS_STRIDE +
              consumer / SLICES * BLOCK + warp * 16 + lane / 4;
#pragma unroll
  for (int w = 0; w < WIDTHS; w++)
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)  // 4 j + 2 half + pair
      to[(w * WIDTH + i / 4 * 8 + i % 2) * SUMS_STRIDE + i / 2 % 2 * 8] = sums[w][i];
}

// Four neighbouring sums of one token, added over the slices and the blocks of the cluster.
__device__ inline void add_up(float (&out)[4], const float* shared, int offset) {
  const unsigned address = shared_address(shared + offset);
#pragma unroll
  for (int rank = 0; rank < SPLIT; rank++) {
    const unsigned peer = SPLIT > 1 ? address_at(address, rank) : address;
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      float v[4];
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(peer + slice * TOKENS * SUMS_STRIDE * 4) : "memory");
#pragma unroll
      for (int i = 0; i < 4; i++) out[i] = rank + slice == 0 ? v[i] : out[i] + v[i];
    }
  }
}

// The i-th group of four neighbouring columns of y that a thread writes: its token and first column within the tile.
struct Quad {
  int token, column;
  bool exists;

  __device__ Quad(const Problem& p, int rank, int i, int m) {
    const int at = i * WRITERS + threadIdx.x;
    token = rank * SHARE + at / (ROWS / 4), column = at % (ROWS / 4) * 4;
    exists = at < SHARE * (ROWS / 4) && p.token + token < m && (!ROUND || token < p.tokens);
  }
};

// Loads the other operands of the quads from `first` on, all before any is used.
__device__ inline void load_batch(Loaded (&loaded)[BATCH][2], const Problem& p, int rank, int first,
                                  int m OTHER_ARGUMENTS) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const Quad quad(p, rank, first + i, m);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (quad.exists) load_others(loaded[i][half], p.token + quad.token, p.column + quad.column + 2 * half OTHERS);
  }
}

// Writes y for this block's share of the tokens. `loaded` has the other operands of the first batch.
__device__ inline void finish(const Problem& p, const float* shared, int rank, int m,
                              Loaded (&loaded)[BATCH][2] OTHER_ARGUMENTS, OUT* y) {
#pragma unroll 1
  for (int first = 0; first < QUADS; first += BATCH) {
    if (first > 0) load_batch(loaded, p, rank, first, m OTHERS);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const Quad quad(p, rank, first + i, m);
      if (!quad.exists) continue;
      float sums[PARTS][4];
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        add_up(sums[part], shared, quad.token * SUMS_STRIDE + part * ROWS + quad.column);
      Four* to = (Four*)(y + (long long)(p.token + quad.token) * N + p.column + quad.column);
      *to = four_columns(sums, loaded[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    llmc_quantized_linear(const __grid_constant__ TensorMap x, const unsigned char* codes, const SCALE* scales,
                          OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  const unsigned buffers = (shared_address(dynamic_memory) + 1023) & ~1023u;  // a swizzled box begins at such a multiple
  unsigned char* memory = dynamic_memory + (buffers - shared_address(dynamic_memory));
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  init_ring(full, empty, STAGES, CONSUMERS * WARPGROUP / 32 * WARP_ARRIVALS);

  const int rank = blockIdx.x % SPLIT, tiles = (m + TOKENS - 1) / TOKENS;
  int tile = blockIdx.x / SPLIT, token = 0;
  bool whole = true;
  if (ROUND > 0) {
    const int all = tiles * (N / ROWS), left = all % ROUND, half = tile - (all - left);
    if (2 * left > ROUND && tile >= all) return wait_for_previous();
    if (2 * left <= ROUND && half >= 0) whole = false, tile = all - left + half / 2, token = half % 2 * WIDTH;
  }
  const Problem p = {x, codes, scales, ZEROS, token + tile % tiles * TOKENS, tile / tiles * ROWS,
                     whole ? TOKENS : WIDTH, rank * STEPS, buffers, full, empty};
  const int consumer = threadIdx.x / WARPGROUP;
  Loaded loaded[BATCH][2];
  if (!TRIGGER_AFTER_LOADS) launch_dependents();
  if (consumer == CONSUMERS) {
    if (GIVES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == CONSUMERS * WARPGROUP) produce(p);
    __syncwarp();
  } else {
    if (GIVES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (EARLY_OPERANDS) {
      wait_for_previous();
      load_batch(loaded, p, rank, 0, m OTHERS);
    }
    Consumer c(p, memory, consumer);
    if (SCALE_SUMS) {
      c.add_scaled_steps();
    } else if (whole) {
      c.add_steps<WIDTHS>();
    } else {
      c.add_steps<1>();
    }
    if (!EARLY_OPERANDS) {  // the other operands are written, and the memory of the result is not read any more
      wait_for_previous();
      load_batch(loaded, p, rank, 0, m OTHERS);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * WARPGROUP) : "memory");  // no consumer reads the buffers any more
    share((float*)memory, c.sums, consumer);
  }
  if (TRIGGER_AFTER_LOADS) launch_dependents();
  wait_for_cluster<SPLIT>();

  if (consumer < CONSUMERS) finish(p, (const float*)memory, rank, m, loaded OTHERS, y);
  if (SPLIT > 1) wait_for_cluster<SPLIT>();  // no block exits while others read its sums
}
