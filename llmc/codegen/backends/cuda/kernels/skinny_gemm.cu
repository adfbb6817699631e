// Product of few bf16 tokens and weights in 4-bit codes, with f32 sums, by mma.m16n8k16. Weights are read once, and x
// stays in registers:
//
//   y[M, N] = epilogue(x[M, K] @ w[0].T, .., x[M, K] @ w[PARTS - 1].T, other operands), with w = (code - zero) * scale
//
// Codes are in the order of the op pack_fragments. GROUP columns of a row of w share a scale. With NORMED, x is
// rms_norm(x, gain): x * gain is multiplied, and the sums are divided by the root of the mean square at the end.
//
// A warp keeps COLUMNS columns of TOKENS tokens of x in registers, and multiplies them by its columns of one strip of
// 16 rows of w after another. Meanwhile, it copies the codes, scales and zero points of the next DEPTH strips to shared
// memory. The WARPS warps of a block and the SPLIT blocks of a cluster have different columns; strip_sums.cuh adds
// their sums. Clusters take turns in processing the strips.
//
// Arithmetic. Code c becomes the factor 128 + c in the upper 8 rows of a strip, and 8 + c / 2 in the lower ones, which
// takes the fewest instructions. The zero point, converted in the same way and multiplied by the sum of x over the
// columns of the group, is subtracted from the sums; the sums of the lower rows are then doubled.
//
// Constants:
//   N, K          multiples of 64
//   PARTS         parts of w
//   GROUP         columns that share a scale; divides COLUMNS or is a multiple of it
//   ZERO_POINT    the zero point of all groups, or -1 if the pointer ZEROS has one for each
//   TOKENS        8 or 16
//   WARPS         warps of a block
//   CHUNKS        blocks of 64 columns of a warp
//   SPLIT         blocks of a cluster
//   CLUSTERS      number of clusters
//   DEPTH         strips that are copied ahead
//   RESIDENT      blocks for which a multiprocessor has registers
//   NORMED, EPS   whether x is normed; epsilon of the norm
//   SCALE, OUT    types of the scales (bf16 or f16) and of y
// The generated text before this file defines OTHER_PARAMETERS, GAIN, ZEROS, OTHERS and the function `epilogue`.

constexpr int TILES = TOKENS / 8;  // tiles of 8 tokens, one instruction each; sums are [TILES][STRIP][8]
// Shared memory has the sums of x [WARPS][ENTRIES][TOKENS] at X_SUMS_AT.
constexpr int SLOTS_AT = X_SUMS_AT + WARPS * ENTRIES * TOKENS, BARRIERS_AT = SLOTS_AT + WARPS * DEPTH * SLOT_BYTES / 4;

// The gain of a norm at the columns of a thread: 8 columns of each block of columns of its warp.
struct Gains {
  uint4 of[CHUNKS];

  __device__ void load(const Problem& p) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      of[i] = make_uint4(0, 0, 0, 0);
      if (NORMED && p.has(i)) of[i] = *(const uint4*)(p.gain + (p.chunk + i) * BLOCK + p.lane % 8 * 8);
    }
  }
};

// The sum of the squares of two bf16.
__device__ inline float sum_squares(unsigned pair) {
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000);
  return low * low + high * high;
}

constexpr int LOADS = TOKENS / 4;  // loads of 16 bytes of x per thread and block of columns

// Multiplies the tokens of a warp by the gain, and adds their squares at this warp's columns: squares [TOKENS].
__device__ inline void norm_tokens(uint4 (&raw)[CHUNKS][LOADS], const Gains& gains, float* squares, int lane) {
#pragma unroll
  for (int j = 0; j < LOADS; j++) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      uint4& x = raw[i][j];
      const uint4 gain = gains.of[i];
      sum += (sum_squares(x.x) + sum_squares(x.y)) + (sum_squares(x.z) + sum_squares(x.w));
      x = make_uint4(multiply(x.x, gain.x), multiply(x.y, gain.y), multiply(x.z, gain.z), multiply(x.w, gain.w));
    }
    for (int other = 1; other < 8; other *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
    if (lane % 8 == 0) squares[j * 4 + lane / 8] = sum;
  }
}

// x of a warp's columns as right factors: [CHUNKS][4 steps of 16 columns][TILES][2].
struct Tokens {
  unsigned of[CHUNKS][4][TILES][2];

  // `memory`: TOKENS rows of 128 bytes of shared memory of this warp, whose 16-byte pieces change places row by row, as
  // matrices are loaded without bank conflicts then. squares: of this warp, with NORMED.
  __device__ void load(const Problem& p, const Gains& gains, unsigned char* memory, float* squares) {
    uint4 raw[CHUNKS][LOADS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
      for (int j = 0; j < LOADS; j++) {
        const int token = p.token + j * 4 + p.lane / 8, column = (p.chunk + i) * BLOCK + p.lane % 8 * 8;
        raw[i][j] = make_uint4(0, 0, 0, 0);
        if (token < p.m && p.has(i)) raw[i][j] = *(const uint4*)(p.x + (long long)token * K + column);
      }
    if (NORMED) norm_tokens(raw, gains, squares, p.lane);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < LOADS; j++)
        *(uint4*)(memory + (j * 4 + p.lane / 8) * 128 + (p.lane ^ (j * 4 + p.lane / 8)) % 8 * 16) = raw[i][j];
      __syncwarp();
      // Four matrices of 8 tokens and 8 columns at a time: two for a tile and step.
      const int tile = TILES > 1 ? p.lane / 16 : 0, next = TILES > 1 ? 0 : p.lane / 16;
      const unsigned row = shared_address(memory) + (tile * 8 + p.lane % 8) * 128;
#pragma unroll
      for (int s = 0; s < 4; s += 2 / TILES)
        load_matrices(&of[i][s][0][0], row + ((2 * (s + next) + p.lane / 8 % 2) ^ p.lane % 8) * 16);
    }
    __syncwarp();
  }
};

// Whether a step of 16 columns is the first or the last one of a group, and which group of the warp's columns that is.
__device__ constexpr int group_of(int step) { return ENTRIES > 1 ? step * 16 / GROUP : 0; }
__device__ constexpr bool first_of_group(int step) { return step == 0 || group_of(step) != group_of(step - 1); }
__device__ constexpr bool last_of_group(int step) {
  return step == COLUMNS / 16 - 1 || group_of(step) != group_of(step + 1);
}

// Adds up the columns of each group of the tokens: to [ENTRIES][TOKENS].
__device__ inline void sum_tokens(float* to, const Tokens& x, int lane) {
  const unsigned one = 0x3F803F80, ones[4] = {one, one, one, one};
  float sums[2][TILES][4];  // sums of even and of odd steps
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; step++)
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float(&own)[4] = sums[step % 2][t], (&other)[4] = sums[1 - step % 2][t];
      if (first_of_group(step))
#pragma unroll
        for (int j = 0; j < 4; j++) own[j] = other[j] = 0.0f;
      add_product(own, ones, x.of[step / 4][step % 4][t]);
      if (last_of_group(step) && lane < 4)
        *(float2*)(to + group_of(step) * TOKENS + t * 8 + lane * 2) = make_float2(own[0] + other[0], own[1] + other[1]);
    }
  __syncwarp();
}

// Multiplies a unit by the tokens: the sums of a group of columns are multiplied by its scale. Even and odd steps have
// separate sums, since a product waits for the previous one that adds to the same sums. x_sums: as `sum_tokens` wrote it.
__device__ inline void multiply_unit(float (&sums)[TILES][4], const Unit& w, const Tokens& x, const float* x_sums,
                                     const Masks& masks) {
  float fresh[2][TILES][4];
  uint4 codes;
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; step++) {
    const int entry = group_of(step);
    if (first_of_group(step)) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) fresh[0][t][j] = fresh[1][t][j] = 0.0f;
    }
    if (step % 4 == 0) codes = w.codes(step / 4);
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    unsigned a[4];
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = masks.pair(words[step % 4], r);
#pragma unroll
    for (int t = 0; t < TILES; t++) add_product(fresh[step % 2][t], a, x.of[step / 4][step % 4][t]);
    if (last_of_group(step)) {
      const float scale[2] = {w.scale(entry, 0), 2.0f * w.scale(entry, 1)};
      const float offset[2] = {128.0f + w.zero(entry, 0), 8.0f + 0.5f * w.zero(entry, 1)};
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const float2 x_sum = *(const float2*)(x_sums + entry * TOKENS + t * 8 + w.lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float less = offset[j / 2] * (j % 2 ? x_sum.y : x_sum.x);
          const float scaled = (fresh[0][t][j] + fresh[1][t][j] - less) * scale[j / 2];
          sums[t][j] = entry == 0 ? scaled : sums[t][j] + scaled;
        }
      }
    }
  }
}

// The sums of a thread 4 g + q: of the rows g and g + 8 and the tokens 2 q and 2 q + 1 of every tile.
struct Sums {
  float of[TILES][4];
};

// Writes the sums of a unit of this warp.
__device__ inline void store_sums(float* to, const Sums& sums, int lane) {
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      ((float2*)to)[(t * 2 + half) * 32 + lane] = make_float2(sums.of[t][2 * half], sums.of[t][2 * half + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    llmc_skinny_gemm(const bf16* x, const unsigned char* codes, const SCALE* scales, OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ uint4 dynamic_memory[];
  float* shared = (float*)dynamic_memory;
  float* totals = shared + TOTALS_AT;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % SPLIT;
  const int cluster = blockIdx.x / SPLIT % CLUSTERS, token = blockIdx.x / (SPLIT * CLUSTERS) * TOKENS;
  const unsigned char* slots = (const unsigned char*)(shared + SLOTS_AT) + warp * (DEPTH * SLOT_BYTES);
  const int chunk = (rank * WARPS + warp) * CHUNKS;
  const unsigned char* own = codes + (long long)chunk * BLOCK_BYTES + lane * 16;
  const Problem p = {x, GAIN, own, scales, ZEROS, m, token, cluster, chunk, lane, shared_address(slots)};
  float* squares = shared + SQUARES_AT;
  float* x_sums = shared + X_SUMS_AT + warp * (ENTRIES * TOKENS);
  const unsigned written = shared_address(shared + BARRIERS_AT);
  const Masks masks;
  start_units(p, written);
  Gains gains;
  gains.load(p);
  wait_for_previous();
  Tokens tokens;
  tokens.load(p, gains, (unsigned char*)(shared + warp * (2 * SUMS)), squares + warp * TOKENS);
  sum_tokens(x_sums, tokens, lane);
  __syncthreads();  // the sums overwrite the tokens of other warps, which must have been read
  add_squares(squares);  // read after the barriers of the rounds

  multiply_units<Sums, UNITS, DEPTH, WARPS, SUMS>(
      shared, totals, written,
      [&](Sums& sums, int slot) {
        multiply_unit(sums.of, Unit{slots + slot * SLOT_BYTES, lane}, tokens, x_sums, masks);
      },
      [&](float* to, const Sums& sums) { store_sums(to, sums, lane); },
      [&](int u, int slot) { copy_unit(p, u, slot); });
  wait_for_cluster<SPLIT>();

  write_results<8>(p, totals, squares, [&](const float (&a)[PARTS], int token, int column) {
    y[(long long)token * N + column] = from_float<OUT>(epilogue(a, token, column OTHERS));
  });
  if (SPLIT > 1) wait_for_cluster<SPLIT>();  // no block exits while others read its sums
}
