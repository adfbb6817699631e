// y[M, N] = epilogue(x[M, K] @ w[0].T, .., x @ w[PARTS - 1].T, others) with f32 sums, for few tokens M.
// w = (code - zero) * scale has codes of 4 bits in the order of the op pack_fragments, and a scale for each GROUP columns
// of a row. Weights are read once, from memory to registers; x stays in registers.
//
// A warp holds the left-over factor, COLUMNS columns of TOKENS tokens, and multiplies it by its columns of one strip of 16
// rows of w after the other (mma.m16n8k16). The codes of the next DEPTH strips are on their way meanwhile. The WARPS
// warps of a block, and the SPLIT blocks of a cluster, have different columns; after every DEPTH strips the sums of the
// warps are added in shared memory, and at the end those of the blocks. Clusters take turns at the strips.
//
// Constants: N, PARTS, K, GROUP, ZERO_POINT (of all groups, or -1: the pointer ZEROS has one for each), TOKENS (8 or 16),
// WARPS, CHUNKS (blocks of 64 columns of a warp), SPLIT, CLUSTERS, DEPTH, AHEAD (strips of a warp that are copied to the
// L2 cache before the previous kernel has completed), and the types SCALE and OUT. N is a multiple of 64, K of 64; GROUP
// divides COLUMNS or is a multiple of it. The generated text before this file defines OTHER_PARAMETERS, ZEROS, OTHERS and
// the function `epilogue`.

constexpr int BLOCK = 64, STRIP = 16;  // rows and columns of a block of codes; rows of a product
constexpr int THREADS = WARPS * 32, COLUMNS = CHUNKS * BLOCK;
constexpr int TILES = TOKENS / 8;      // of 8 tokens, for one instruction each
constexpr int ENTRIES = GROUP < COLUMNS ? COLUMNS / GROUP : 1;  // scales of a row that a warp needs
constexpr bool HAS_ZEROS = ZERO_POINT < 0;
constexpr bool WHOLE = SPLIT * WARPS * COLUMNS == K;  // every warp has as many columns as the others
constexpr int STRIPS = N / STRIP;
constexpr int UNITS = (STRIPS + CLUSTERS - 1) / CLUSTERS * PARTS;  // strips of w that a cluster computes, at most
constexpr int SUMS = STRIP * TOKENS;   // of a strip, in shared memory as [TILES][STRIP][8]

struct Problem {
  const bf16* x;                // [m][K]
  const unsigned char* codes;   // [PARTS * N / 64][K / 64][2048]
  const SCALE* scales;          // [K / GROUP][PARTS * N]
  const unsigned char* zeros;   // [K / GROUP][PARTS * N], or null
  int m, token;                 // tokens, and the first of this block
  int cluster, chunk, lane;     // this warp's cluster, first block of columns, and thread
};

// The codes of a warp's columns in a strip of one part, with scales and zero points: those of the rows g and g + 8 for the
// thread 4 g + q.
struct Unit {
  uint4 codes[CHUNKS];
  SCALE scales[ENTRIES][2];
  unsigned char zeros[ENTRIES][2];

  // The first row of the unit u of this cluster, in w; beyond all rows for a unit that does not exist.
  __device__ static int row(const Problem& p, int u) {
    const int strip = p.cluster + u / PARTS * CLUSTERS;
    return strip < STRIPS ? u % PARTS * N + strip * STRIP : PARTS * N;
  }

  // The address of a thread's codes in a block of columns.
  __device__ static const unsigned char* address(const Problem& p, int row, int chunk) {
    const long long block = (long long)(row / BLOCK) * (K / BLOCK) + chunk;
    return p.codes + block * (BLOCK * BLOCK / 2) + (row % BLOCK / STRIP * 32 + p.lane) * 16;
  }

  __device__ void load(const Problem& p, int u) {
    const int first = row(p, u);
    const bool exists = first < PARTS * N;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      codes[i] = make_uint4(0, 0, 0, 0);
      if (exists && (WHOLE || p.chunk + i < K / BLOCK)) codes[i] = load_once(address(p, first, p.chunk + i));
    }
#pragma unroll
    for (int e = 0; e < ENTRIES; e++) {
      const int column = p.chunk * BLOCK + e * GROUP;
      const long long at = (long long)(column / GROUP) * (PARTS * N) + first + p.lane / 4;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const bool needed = exists && (WHOLE || column < K);
        scales[e][half] = needed ? p.scales[at + 8 * half] : SCALE{};
        if (HAS_ZEROS) zeros[e][half] = needed ? p.zeros[at + 8 * half] : 0;
      }
    }
  }
};

// x of a warp's columns as right factors: [CHUNKS][4 steps of 16 columns][TILES][2].
struct Tokens {
  unsigned of[CHUNKS][4][TILES][2];

  __device__ void load(const Problem& p) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
      for (int s = 0; s < 4; s++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int token = p.token + t * 8 + p.lane / 4;
            const int column = (p.chunk + i) * BLOCK + s * 16 + half * 8 + p.lane % 4 * 2;
            const bool exists = token < p.m && (WHOLE || column < K);
            of[i][s][t][half] = exists ? *(const unsigned*)(p.x + (long long)token * K + column) : 0;
          }
  }
};

// d[16, 8] += a[16, 16] @ b[8, 16].T. A thread has two neighbouring tokens of the rows g and g + 8.
__device__ inline void add_product(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Multiplies a unit by the tokens: the sums of a group of columns are multiplied by its scale.
__device__ inline void multiply_unit(float (&sums)[TILES][4], const Unit& w, const Tokens& x, unsigned mask,
                                     unsigned base) {
  float fresh[TILES][4];
  unsigned offset[2];
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; step++) {
    const int entry = ENTRIES > 1 ? step * 16 / GROUP : 0;
    const bool first = step == 0 || (ENTRIES > 1 && step * 16 % GROUP == 0);
    const bool last = step == COLUMNS / 16 - 1 || (ENTRIES > 1 && (step + 1) * 16 % GROUP == 0);
    if (first) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        offset[half] = twice(0x4300 + (HAS_ZEROS ? w.zeros[entry][half] : ZERO_POINT));
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) fresh[t][j] = 0.0f;
    }
    const uint4 codes = w.codes[step / 4];
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    unsigned a[4];
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = subtract(code_pair(words[step % 4] >> 4 * r, mask, base), offset[r % 2]);
#pragma unroll
    for (int t = 0; t < TILES; t++) add_product(fresh[t], a, x.of[step / 4][step % 4][t]);
    if (last) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float scaled = fresh[t][j] * to_float(w.scales[entry][j / 2]);
          sums[t][j] = entry == 0 ? scaled : sums[t][j] + scaled;
        }
    }
  }
}

// Adds the sums of the warps for DEPTH units: from [DEPTH][WARPS][SUMS] to [DEPTH][SUMS].
__device__ inline void add_warps(float* to, const float* from) {
#pragma unroll
  for (int i = threadIdx.x; i < DEPTH * SUMS; i += THREADS) {
    const float* sums = from + i / SUMS * (WARPS * SUMS) + i % SUMS;
    float total = sums[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) total += sums[w * SUMS];
    to[i] = total;
  }
}

// Adds one sum over the blocks of the cluster.
__device__ inline float add_blocks(const float* sum) {
  if (SPLIT == 1) return *sum;
  float total = 0.0f;
#pragma unroll
  for (int rank = 0; rank < SPLIT; rank++) total += load_from_block(shared_address(sum), rank);
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    llmc_skinny_gemm(const bf16* x, const unsigned char* codes, const SCALE* scales, OTHER_PARAMETERS OUT* y, int m) {
  constexpr int ROUNDS = (UNITS + DEPTH - 1) / DEPTH;
  extern __shared__ float shared[];            // [2][DEPTH][WARPS][SUMS], then [ROUNDS * DEPTH][SUMS]
  float* totals = shared + 2 * DEPTH * WARPS * SUMS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % SPLIT;
  const int cluster = blockIdx.x / SPLIT % CLUSTERS, token = blockIdx.x / (SPLIT * CLUSTERS) * TOKENS;
  const Problem p = {x, codes, scales, ZEROS, m, token, cluster, (rank * WARPS + warp) * CHUNKS, lane};
  const unsigned mask = opaque(0x000F000F), base = opaque(0x43004300);
  launch_dependents();
  Unit units[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++) units[d].load(p, d);
  for (int u = DEPTH; u < DEPTH + AHEAD; u++) {
    const int row = Unit::row(p, u);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
      if (lane % 8 == 0 && row < PARTS * N && (WHOLE || p.chunk + i < K / BLOCK))
        prefetch(Unit::address(p, row, p.chunk + i));
  }
  wait_for_previous();
  Tokens tokens;
  tokens.load(p);

  for (int round = 0; round < ROUNDS; round++) {
    float* own = shared + round % 2 * (DEPTH * WARPS * SUMS);  // of this round; the other half is still being read
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      float sums[TILES][4];
      multiply_unit(sums, units[d], tokens, mask, base);
      units[d].load(p, (round + 1) * DEPTH + d);
      float2* to = (float2*)(own + (d * WARPS + warp) * SUMS) + lane;
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          to[(t * 2 + half) * 32] = make_float2(sums[t][2 * half], sums[t][2 * half + 1]);
    }
    __syncthreads();
    add_warps(totals + round * DEPTH * SUMS, own);
  }
  wait_for_cluster<SPLIT>();

  // Each block computes its share of the cluster's results.
  for (int i = rank * THREADS + threadIdx.x; i < UNITS / PARTS * SUMS; i += SPLIT * THREADS) {
    const int unit = i / SUMS * PARTS, r = i % STRIP, t = i % SUMS / STRIP;
    const int column = (cluster + i / SUMS * CLUSTERS) * STRIP + r;
    if (token + t >= m || column >= N) continue;
    float a[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      a[part] = add_blocks(totals + (unit + part) * SUMS + t / 8 * (STRIP * 8) + r * 8 + t % 8);
    y[(long long)(token + t) * N + column] = from_float<OUT>(epilogue(a, token + t, column OTHERS));
  }
  if (SPLIT > 1) wait_for_cluster<SPLIT>();  // no block exits while others read its sums
}
