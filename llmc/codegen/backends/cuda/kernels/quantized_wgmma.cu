// y[M, N] = epilogue(x[M, K] @ w[0].T, .., x @ w[PARTS - 1].T, others) in bf16 with f32 sums, for Hopper (sm_90a).
// w = (code - zero) * scale has codes of 4 bits in the order of the op pack_fragments, and a scale for each GROUP columns
// of a row. For up to 32 tokens the sums of a group are multiplied by it, otherwise the codes by the scale in bf16.
//
// A block of threads computes ROWS columns of y for TOKENS tokens. Its last warp (the producer) issues bulk copies of x,
// codes, scales and zero points into a ring of STAGES buffers in shared memory. Every other warpgroup (a consumer)
// converts 64 rows of one part of w in registers, from which wgmma takes its left factor, and multiplies them by the
// tokens: the sums are transposed. Two barriers guard each buffer: `full` completes when its bytes have arrived, `empty`
// when every consumer warp has finished reading it.
//
// SPLIT blocks of a cluster compute the same tile over different columns of w. Each writes its sums to shared memory,
// and each adds up those of all blocks for its share of the tokens.
//
// Constants: N, PARTS, K (multiples of 64), GROUP, ZERO_POINT (of all groups, or -1: the pointer ZEROS has one for each),
// TOKENS (8, 16, 32, 64, 128 or 256), ROWS (64 or 128), STAGES, SPLIT (1, 2, 4 or 8; a divisor of the steps), LATE (allow
// the next kernel to begin when the last products are done, not at once), and the types SCALE (bf16 or f16) and OUT. The
// generated text before this file defines OTHER_PARAMETERS, ZEROS, OTHERS and the function `epilogue`.

constexpr int WARPGROUP = 128, BLOCK = 64;          // threads of a warpgroup; rows and columns of a block of codes
constexpr int CONSUMERS = PARTS * ROWS / BLOCK;     // consumer warpgroups
// The producer is a whole warpgroup, which gives its registers to the consumers.
constexpr bool GIVES_REGISTERS = TOKENS > 128 && CONSUMERS > 1;
constexpr int THREADS = CONSUMERS * WARPGROUP + (GIVES_REGISTERS ? WARPGROUP : 32);
constexpr int CHUNKS = K % (2 * BLOCK) == 0 ? 2 : 1, STEP = CHUNKS * BLOCK;  // columns of a step
constexpr int STEPS = K / STEP / SPLIT;             // of a block
constexpr int SCALES = STEP > GROUP ? STEP / GROUP : 1;  // scales of a row in a step
constexpr int WIDTH = TOKENS < 128 ? TOKENS : 128, WIDTHS = TOKENS / WIDTH;  // tokens of an instruction
constexpr bool HAS_ZEROS = ZERO_POINT < 0;
// The scales multiply the sums of a step if that is less work, otherwise the factors.
constexpr bool SCALE_SUMS = TOKENS <= 32 && SCALES == 1;

// A buffer: x [CHUNKS][TOKENS][BLOCK] in the 128-byte swizzle, codes [CONSUMERS][CHUNKS][BLOCK * BLOCK / 2],
// scales [CONSUMERS][SCALES][BLOCK], zero points [CONSUMERS][SCALES][BLOCK].
constexpr int X_BYTES = TOKENS * STEP * 2, CODE_BYTES = BLOCK * STEP / 2, SCALE_BYTES = BLOCK * 2;
constexpr int CODES_AT = X_BYTES, SCALES_AT = CODES_AT + CONSUMERS * CODE_BYTES;
constexpr int ZEROS_AT = SCALES_AT + CONSUMERS * SCALES * SCALE_BYTES;
constexpr int USED_BYTES = ZEROS_AT + (HAS_ZEROS ? CONSUMERS * SCALES * BLOCK : 0);
constexpr int STAGE_BYTES = (USED_BYTES + 1023) / 1024 * 1024;
constexpr int SUMS_STRIDE = PARTS * ROWS + 4;  // floats of a token's sums in shared memory; no bank conflicts

// The inputs of a tile of y.
struct Problem {
  const TensorMap& x;
  const unsigned char* codes;   // [PARTS * N / 64][K / 64][2048]
  const SCALE* scales;          // [K / GROUP][PARTS * N]
  const unsigned char* zeros;   // [K / GROUP][PARTS * N], or null
  int token, column;            // the first of the tile
  int begin;                    // the first step of this block
  unsigned buffers, full, empty;  // addresses in shared memory
};

// The first row in w of the 64 rows of a consumer.
__device__ inline int weight_row(const Problem& p, int consumer) {
  return consumer / (ROWS / BLOCK) * N + p.column + consumer % (ROWS / BLOCK) * BLOCK;
}

__device__ inline void copy_weights(const Problem& p, int step, int stage) {
  const unsigned buffer = p.buffers + stage * STAGE_BYTES, barrier = p.full + 8 * stage;
  for (int c = 0; c < CONSUMERS; c++) {
    const int row = weight_row(p, c);
    const long long block = (long long)(row / BLOCK) * (K / BLOCK) + step * CHUNKS;
    copy_bytes(buffer + CODES_AT + c * CODE_BYTES, p.codes + block * (BLOCK * BLOCK / 2), CODE_BYTES, barrier);
    for (int s = 0; s < SCALES; s++) {
      const long long entry = (long long)(step * STEP / GROUP + s) * (PARTS * N) + row;
      copy_bytes(buffer + SCALES_AT + (c * SCALES + s) * SCALE_BYTES, p.scales + entry, SCALE_BYTES, barrier);
      if (HAS_ZEROS) copy_bytes(buffer + ZEROS_AT + (c * SCALES + s) * BLOCK, p.zeros + entry, BLOCK, barrier);
    }
  }
}

__device__ inline void copy_tokens(const Problem& p, int step, int stage) {
  for (int c = 0; c < CHUNKS; c++)
    copy_box(p.buffers + stage * STAGE_BYTES + c * TOKENS * BLOCK * 2, p.x, p.token, step * STEP + c * BLOCK,
             p.full + 8 * stage);
}

// The producer: one thread issues the copies of all steps, each when its buffer is free. The weights of the first steps
// are copied before the previous kernel has completed.
__device__ inline void produce(const Problem& p) {
  constexpr int first = STEPS < STAGES ? STEPS : STAGES;
  for (int i = 0; i < first; i++) {
    barrier_expect(p.full + 8 * i, USED_BYTES);
    copy_weights(p, p.begin + i, i);
  }
  wait_for_previous();
  for (int i = 0; i < first; i++) copy_tokens(p, p.begin + i, i);
  for (int i = first; i < STEPS; i++) {
    const int stage = i % STAGES, round = i / STAGES;
    barrier_wait(p.empty + 8 * stage, (round & 1) ^ 1);
    barrier_expect(p.full + 8 * stage, USED_BYTES);
    copy_weights(p, p.begin + i, stage);
    copy_tokens(p, p.begin + i, stage);
  }
}

// What a consumer reads of a buffer: the codes of this thread, and the scales and zero points of its two rows.
struct Weights {
  const uint4* codes;             // [CHUNKS][128]
  const SCALE* scales;            // [SCALES][BLOCK]
  const unsigned char* zeros;     // [SCALES][BLOCK]
};

// Converts the codes of a chunk into the left factors of four products; without SCALE_SUMS, times their scales.
__device__ inline void convert(unsigned (&a)[4][4], const Weights& from, int chunk, unsigned mask, unsigned base) {
  const uint4 words = from.codes[chunk * WARPGROUP];
  const unsigned word[4] = {words.x, words.y, words.z, words.w};
  unsigned scale[2], offset[2];
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const int column = chunk * BLOCK + 16 * s, entry = column / GROUP;
    if (s == 0 || column % GROUP == 0) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (!SCALE_SUMS) scale[half] = twice(to_bf16(from.scales[entry * BLOCK + 8 * half]).bits);
        offset[half] = twice(0x4300 + (HAS_ZEROS ? from.zeros[entry * BLOCK + 8 * half] : ZERO_POINT));
      }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const unsigned less = subtract(code_pair(word[s] >> 4 * r, mask, base), offset[r % 2]);
      a[s][r] = SCALE_SUMS ? less : multiply(less, scale[r % 2]);
    }
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
  unsigned mask, base;
  Ring ring;
  float sums[WIDTHS][WIDTH / 2];

  __device__ Consumer(const Problem& p, const unsigned char* memory, int consumer)
      : p(p), memory(memory), consumer(consumer), mask(opaque(0x000F000F)), base(opaque(0x43004300)), sums{} {}

  // Waits for the current buffer.
  __device__ Weights arrived() const {
    const int thread = threadIdx.x % WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
    const unsigned char* buffer = memory + ring.stage * STAGE_BYTES;
    barrier_wait(p.full + 8 * ring.stage, ring.parity);
    return {(const uint4*)(buffer + CODES_AT + consumer * CODE_BYTES) + thread,
            (const SCALE*)(buffer + SCALES_AT + consumer * SCALES * SCALE_BYTES) + row,
            buffer + ZEROS_AT + consumer * SCALES * BLOCK + row};
  }

  __device__ unsigned tokens(int chunk) const {
    return (unsigned)matrix(p.buffers + ring.stage * STAGE_BYTES) + chunk * (TOKENS * BLOCK * 2 / 16);
  }

  // Releases the buffer before the current one, if there is one.
  __device__ void release_previous() const {
    const int previous = ring.stage == 0 ? STAGES - 1 : ring.stage - 1;
    if (threadIdx.x % 32 == 0 && ring.steps > 0) barrier_arrive(p.empty + 8 * previous);
  }

  // Scaled factors: the products of a chunk run while the codes of the next are converted; a buffer is released when
  // the products of its last chunk have completed.
  __device__ void add_steps() {
    unsigned a[CHUNKS][4][4];
    for (int i = 0; i < STEPS; i++) {
      const Weights from = arrived();
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        wait_products<CHUNKS - 1>();
        if (c == CHUNKS - 1) release_previous();
        convert(a[c], from, c, mask, base);
        pin_sums();
        begin_products();
#pragma unroll
        for (int w = 0; w < WIDTHS; w++) multiply_chunk(sums[w], a[c], tokens(c) + w * WIDTH * BLOCK * 2 / 16, true);
        end_products();
      }
      ring.advance();
    }
    wait_products<0>();
    pin_sums();
  }

  // Scaled sums: a step has separate sums, `fresh`. Its products run while the codes of the next step are converted.
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
    for (int c = 0; c < CHUNKS; c++) convert(a[c], from, c, mask, base);
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

// Writes a warpgroup's sums to shared memory as [TOKENS][SUMS_STRIDE].
__device__ inline void share(float* shared, const float (&sums)[WIDTHS][WIDTH / 2], int consumer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float* to = shared + lane % 4 * 2 * SUMS_STRIDE + consumer * BLOCK + warp * 16 + lane / 4;
#pragma unroll
  for (int w = 0; w < WIDTHS; w++)
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)  // 4 j + 2 half + pair
      to[(w * WIDTH + i / 4 * 8 + i % 2) * SUMS_STRIDE + i / 2 % 2 * 8] = sums[w][i];
}

// Four neighbouring sums of one token, added over the blocks of the cluster.
__device__ inline void add_up(float (&out)[4], const float* shared, int offset) {
  const unsigned address = shared_address(shared + offset);
#pragma unroll
  for (int rank = 0; rank < SPLIT; rank++) {
    float v[4];
    unsigned peer = address;
    if (SPLIT > 1) asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(peer) : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = rank == 0 ? v[i] : out[i] + v[i];
  }
}

__device__ inline void wait_for_cluster() {
  if (SPLIT > 1) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  } else {
    __syncthreads();
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
  init_ring(full, empty, STAGES, CONSUMERS * WARPGROUP / 32);

  const int rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT, tiles = (m + TOKENS - 1) / TOKENS;
  const Problem p = {x, codes, scales, ZEROS, tile % tiles * TOKENS, tile / tiles * ROWS,
                     rank * STEPS, buffers, full, empty};
  const int consumer = threadIdx.x / WARPGROUP;
  if (!LATE) launch_dependents();
  if (consumer == CONSUMERS) {
    if (GIVES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == CONSUMERS * WARPGROUP) produce(p);
    __syncwarp();
  } else {
    if (GIVES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consumer c(p, memory, consumer);
    if (SCALE_SUMS) {
      c.add_scaled_steps();
    } else {
      c.add_steps();
    }
    wait_for_previous();  // the other operands are written, and the memory of the result is not read any more
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * WARPGROUP) : "memory");  // no consumer reads the buffers any more
    share((float*)memory, c.sums, consumer);
  }
  if (LATE) launch_dependents();
  wait_for_cluster();

  constexpr int SHARE = TOKENS / SPLIT, QUADS = ROWS / 4;  // tokens of this block; groups of four columns
  for (int i = threadIdx.x; i < SHARE * QUADS && consumer < CONSUMERS; i += CONSUMERS * WARPGROUP) {
    const int t = rank * SHARE + i / QUADS, c = i % QUADS * 4;
    const int token = p.token + t, column = p.column + c;
    if (token >= m) break;
    float sums[PARTS][4];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      add_up(sums[part], (const float*)memory, t * SUMS_STRIDE + part * ROWS + c);
    struct alignas(4 * sizeof(OUT)) Quad { OUT of[4]; } out;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float a[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; part++) a[part] = sums[part][j];
      out.of[j] = from_float<OUT>(epilogue(a, token, column + j OTHERS));
    }
    *(Quad*)(y + (long long)token * N + column) = out;
  }
  if (SPLIT > 1) wait_for_cluster();  // no block exits while others read its sums
}
