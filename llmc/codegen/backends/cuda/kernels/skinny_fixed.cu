// The product of skinny_gemm.cu for fewer tokens, computed in integers by mma.m16n8k32 of i8, which takes half as many
// instructions.
//
// x (times the gain, with NORMED) becomes 16-bit codes with a scale for each ENTRY columns of a token, which is more
// exact than the rounding of x to bf16. The upper and the lower bytes of the codes are multiplied as two separate
// tokens; 256 times the sum of the upper ones is added to the sum of the lower ones.
//
// A warp keeps COLUMNS columns of TOKENS tokens of x in registers, and multiplies them by its columns of one strip of
// 16 rows of w after another. Meanwhile, it copies the codes, scales and zero points of the next DEPTH strips to shared
// memory. The WARPS warps of a block and the SPLIT blocks of a cluster have different columns; strip_sums.cuh adds
// their sums. Clusters take turns in processing the strips.
//
// Constants: those of skinny_gemm.cu, with TOKENS = 4 (or a multiple, which is slower than bf16) and GROUP a multiple
// of 32.

constexpr int TILES = TOKENS / 4;  // tiles of 4 tokens, one instruction each; sums are [TILES][STRIP][4]
constexpr int ENTRY = GROUP < COLUMNS ? GROUP : COLUMNS < 256 ? COLUMNS : 256;  // columns of x that share a scale
constexpr int X_ENTRIES = COLUMNS / ENTRY;
static_assert(ENTRY <= 256, "a sum of an entry is below 2^27, and a warp has an entry at once");
// Shared memory has the scales and sums of x [WARPS][X_ENTRIES][TOKENS][2] at X_SUMS_AT.
constexpr int SLOTS_AT = X_SUMS_AT + WARPS * X_ENTRIES * TOKENS * 2;
constexpr int BARRIERS_AT = SLOTS_AT + WARPS * DEPTH * SLOT_BYTES / 4;

// A thread has pieces of 8 columns of the tokens, and of the gain of a norm.
constexpr int PIECES = COLUMNS / 8, JOBS = TOKENS * PIECES / 32, GAINS = PIECES > 32 ? PIECES / 32 : 1;
struct Gains {
  uint4 of[GAINS];

  __device__ void load(const Problem& p) {
#pragma unroll
    for (int i = 0; i < GAINS; i++) {
      const int piece = (i * 32 + p.lane) % PIECES;
      of[i] = make_uint4(0, 0, 0, 0);
      if (NORMED && p.has(piece / 8)) of[i] = *(const uint4*)(p.gain + p.chunk * BLOCK + piece * 8);
    }
  }
};

// Both bf16 of a word.
__device__ inline void unpack(float* to, unsigned pair) {
  to[0] = __uint_as_float(pair << 16);
  to[1] = __uint_as_float(pair & 0xFFFF0000);
}
__device__ inline void unpack(float (&to)[8], const uint4& words) {
  unpack(to, words.x), unpack(to + 2, words.y), unpack(to + 4, words.z), unpack(to + 6, words.w);
}

// The bytes `byte` of four words.
__device__ inline unsigned bytes_of(const unsigned* words, int byte) {
  const unsigned select = byte | (byte + 4) << 4;
  return __byte_perm(__byte_perm(words[0], words[1], select), __byte_perm(words[2], words[3], select), 0x5410);
}

// Adds or takes the largest over `lanes` neighbouring threads.
template <int lanes, typename T, typename Join> __device__ inline T over_lanes(T x, Join join) {
#pragma unroll
  for (int other = 1; other < lanes; other *= 2) x = join(x, __shfl_xor_sync(0xFFFFFFFF, x, other));
  return x;
}

// Rounds a piece to codes of 16 bits with the scale of its entry. In place of 8 columns of both bytes, a thread gets 16
// columns of one: those of its own piece and of its neighbour's, the upper bytes if its piece is the first of both. They
// are ordered as the bits 0 to 3 of all bytes of a word of codes are: 0, 8, 1, 9, 2, .. in four words.
__device__ inline uint4 round_piece(const float (&x)[8], float2& scale_and_sum, int lane) {
  unsigned top = 0;  // bits of floats without their sign are ordered as the floats are, NaN last
#pragma unroll
  for (int i = 0; i < 8; i++) top = max(top, __float_as_uint(x[i]) & 0x7FFFFFFF);
  const float largest = __uint_as_float(over_lanes<ENTRY / 8>(top, [](unsigned a, unsigned b) { return max(a, b); }));
  const float factor = largest > 1e-30f ? 32512.0f / largest : 0.0f;
  // 1.5 * 2^23 + x in float has the integer nearest to x in its low bits.
  constexpr unsigned shift = 0x4B400000;
  unsigned code[8], upper[8], sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    code[i] = __float_as_uint(fmaf(x[i], factor, __uint_as_float(shift)));
    upper[i] = code[i] + 128;  // a lower byte is signed
    sum += code[i] - shift;
  }
  sum = over_lanes<ENTRY / 8>(sum, [](unsigned a, unsigned b) { return a + b; });
  scale_and_sum = make_float2(largest * (1.0f / 32512.0f), __uint_as_float(sum));
  const bool odd = lane % 2;
  unsigned first[2], second[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const unsigned high = bytes_of(upper + 4 * i, 1), low = bytes_of(code + 4 * i, 0);
    const unsigned got = __shfl_xor_sync(0xFFFFFFFF, odd ? high : low, 1);
    first[i] = odd ? got : high;
    second[i] = odd ? low : got;
  }
  return make_uint4(__byte_perm(first[0], second[0], 0x5140), __byte_perm(first[0], second[0], 0x7362),
                    __byte_perm(first[1], second[1], 0x5140), __byte_perm(first[1], second[1], 0x7362));
}

// x of a warp's columns as right factors: [CHUNKS][4 blocks of 16 columns][TILES].
struct Tokens {
  unsigned of[CHUNKS][4][TILES];

  // `memory`: 128 * TOKENS bytes of shared memory of this warp. squares, with NORMED, and x_sums: of this warp.
  __device__ void load(const Problem& p, const Gains& gains, unsigned char* memory, float* squares, float2* x_sums) {
    uint4 raw[JOBS];
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
      const int token = p.token + (j * 32 + p.lane) / PIECES, piece = (j * 32 + p.lane) % PIECES;
      raw[j] = make_uint4(0, 0, 0, 0);
      if (token < p.m && p.has(piece / 8))
        raw[j] = *(const uint4*)(p.x + (long long)token * K + p.chunk * BLOCK + piece * 8);
    }
#pragma unroll
    for (int j = 0; j < JOBS; j++) round(raw[j], j, gains.of[j % GAINS], squares, x_sums, p);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < JOBS; j++) {
        const int t = (j * 32 + p.lane) / PIECES, piece = (j * 32 + p.lane) % PIECES;
        if (piece / 8 == c)  // [4 blocks of 16 columns][TOKENS][2 bytes of a code][16 bytes]
          *(uint4*)(memory + ((piece % 8 / 2 * TOKENS + t) * 2 + piece % 2) * 16) = raw[j];
      }
      __syncwarp();
#pragma unroll
      for (int s = 0; s < 4; s++)
#pragma unroll
        for (int t = 0; t < TILES; t++) of[c][s][t] = ((const unsigned*)memory)[(s * TILES + t) * 32 + p.lane];
    }
    __syncwarp();
  }

  // Rounds the j-th piece of a thread in place.
  __device__ static void round(uint4& piece, int j, const uint4& gain, float* squares, float2* x_sums, const Problem& p) {
    const int t = (j * 32 + p.lane) / PIECES, entry = (j * 32 + p.lane) % PIECES * 8 / ENTRY;
    float2 scale_and_sum = make_float2(0, 0);
    float square = 0;
    if (PIECES < 32 || p.token + t < p.m) {  // the same for all threads of the warp
      float x[8], g[8];
      unpack(x, piece);
      if (NORMED) {
        unpack(g, gain);
#pragma unroll
        for (int i = 0; i < 8; i++) square += x[i] * x[i], x[i] *= g[i];
      }
      piece = round_piece(x, scale_and_sum, p.lane);
    }
    if (p.lane % (ENTRY / 8) == 0) x_sums[entry * TOKENS + t] = scale_and_sum;
    if (NORMED) {
      constexpr int lanes = PIECES < 32 ? PIECES : 32;
      square = over_lanes<lanes>(square, [](float a, float b) { return a + b; });
      if (p.lane % lanes == 0) squares[t] = PIECES > 32 && j % GAINS ? squares[t] + square : square;
    }
  }
};

// d[16, 8] += a[16, 32] @ b[8, 32].T in integers.
__device__ inline void add_product(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The sums of a thread 4 g + q: of the rows g and g + 8 and the token q of every tile.
struct Sums {
  float of[TILES][2];
};

// Multiplies a unit by the tokens: the sums of an entry are multiplied by both scales.
__device__ inline void multiply_unit(Sums& sums, const Unit& w, const Tokens& x, const float2* x_sums) {
  constexpr int STEPS = COLUMNS / 32, LAST = ENTRY / 32 - 1;
  int fresh[TILES][4];
  uint4 codes;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int within = step % (ENTRY / 32), entry = step / (ENTRY / 32);
    if (within == 0)
#pragma unroll
      for (int t = 0; t < TILES; t++) fresh[t][0] = fresh[t][1] = fresh[t][2] = fresh[t][3] = 0;
    if (step % 2 == 0) codes = w.codes(step / 2);
    const unsigned low = step % 2 ? codes.z : codes.x, high = step % 2 ? codes.w : codes.y;
    constexpr unsigned mask = 0x0F0F0F0F;
    const unsigned a[4] = {low & mask, low >> 4 & mask, high & mask, high >> 4 & mask};
#pragma unroll
    for (int t = 0; t < TILES; t++)
      add_product(fresh[t], a, x.of[step / 2][step % 2 * 2][t], x.of[step / 2][step % 2 * 2 + 1][t]);
    if (within != LAST) continue;
    const int of_w = ENTRIES > 1 ? entry * ENTRY / GROUP : 0;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const float2 scale_and_sum = x_sums[entry * TOKENS + t * 4 + w.lane % 4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int less = w.zero(of_w, half) * __float_as_int(scale_and_sum.y);
        const float sum = 256 * fresh[t][2 * half] + fresh[t][2 * half + 1] - less;
        const float scale = w.scale(of_w, half) * scale_and_sum.x;
        sums.of[t][half] = entry == 0 ? sum * scale : sums.of[t][half] + sum * scale;
      }
    }
  }
}

// Writes the sums of a unit of this warp.
__device__ inline void store_sums(float* to, const Sums& sums, int lane) {
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) to[(t * 2 + half) * 32 + lane] = sums.of[t][half];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    llmc_skinny_fixed(const bf16* x, const unsigned char* codes, const SCALE* scales, OTHER_PARAMETERS OUT* y, int m) {
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
  float2* x_sums = (float2*)(shared + X_SUMS_AT) + warp * (X_ENTRIES * TOKENS);
  const unsigned written = shared_address(shared + BARRIERS_AT);
  start_units(p, written);
  Gains gains;
  gains.load(p);
  wait_for_previous();
  Tokens tokens;
  tokens.load(p, gains, (unsigned char*)(shared + warp * (2 * SUMS)), squares + warp * TOKENS, x_sums);
  __syncthreads();  // the sums overwrite the tokens of other warps, which must have been read
  add_squares(squares);  // read after the barriers of the rounds

  multiply_units<Sums, UNITS, DEPTH, WARPS, SUMS>(
      shared, totals, written,
      [&](Sums& sums, int slot) { multiply_unit(sums, Unit{slots + slot * SLOT_BYTES, lane}, tokens, x_sums); },
      [&](float* to, const Sums& sums) { store_sums(to, sums, lane); },
      [&](int u, int slot) { copy_unit(p, u, slot); });
  wait_for_cluster<SPLIT>();

  write_results<4>(p, totals, squares, [&](const float (&a)[PARTS], int token, int column) {
    y[(long long)token * N + column] = from_float<OUT>(epilogue(a, token, column OTHERS));
  });
  if (SPLIT > 1) wait_for_cluster<SPLIT>();  // no block exits while others read its sums
}
