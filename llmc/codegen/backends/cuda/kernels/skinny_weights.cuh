// Shared by skinny_gemm.cu and skinny_fixed.cu: copies of weights in 4-bit codes to shared memory, strip by strip, and
// the results of a cluster. This text follows their constants.

constexpr int BLOCK = 64, STRIP = 16;  // rows and columns of a block of codes; rows of a product
constexpr int THREADS = WARPS * 32, COLUMNS = CHUNKS * BLOCK;
constexpr int ENTRIES = GROUP < COLUMNS ? COLUMNS / GROUP : 1;  // scales of a row that a warp needs
constexpr bool HAS_ZEROS = ZERO_POINT < 0;
constexpr bool WHOLE = SPLIT * WARPS * COLUMNS == K;  // every warp has as many columns as the others
constexpr int STRIPS = N / STRIP;
constexpr int UNITS = (STRIPS + CLUSTERS - 1) / CLUSTERS * PARTS;  // maximum number of strips of w per cluster
constexpr int SUMS = STRIP * TOKENS;   // sums per strip
// A warp's copy of a strip: codes [CHUNKS][32][16 bytes], scales [ENTRIES][STRIP], zero points [ENTRIES][STRIP].
constexpr int BLOCK_BYTES = BLOCK * BLOCK / 2;
constexpr int COPIES = ENTRIES * (HAS_ZEROS ? 3 : 2);  // copies of 16 bytes: two for a group's scales, one for zero points
constexpr int CODE_BYTES = CHUNKS * 512, SCALE_BYTES = ENTRIES * STRIP * 2;
constexpr int SLOT_BYTES = CODE_BYTES + SCALE_BYTES + (HAS_ZEROS ? ENTRIES * STRIP : 0);

// Shared memory, in floats: the sums of two strips [2][WARPS][SUMS], all sums of the block [UNITS][SUMS], with NORMED the
// sums of squares of the warps and of the block [WARPS + 1][TOKENS], then the kernel's sums of x, the slots [WARPS][DEPTH],
// and two barriers. Tokens pass through the first part.
constexpr int TOTALS_AT = 2 * WARPS * SUMS, SQUARES_AT = TOTALS_AT + UNITS * SUMS;
constexpr int X_SUMS_AT = SQUARES_AT + (NORMED ? (WARPS + 1) * TOKENS : 0);

struct Problem {
  const bf16* x;                // [m][K]
  const bf16* gain;             // [K], or null
  const unsigned char* codes;   // [PARTS * N / 64][K / 64][2048], from this thread's part of a strip on
  const SCALE* scales;          // [K / GROUP][PARTS * N]
  const unsigned char* zeros;   // [K / GROUP][PARTS * N], or null
  int m, token;                 // number of tokens, and the first one of this block
  int cluster, chunk;           // this warp's cluster, and its first block of columns
  int lane;                     // this thread's number in its warp
  unsigned slots;               // the address of this warp's slots in shared memory

  // Whether the i-th block of columns of this warp exists.
  __device__ bool has(int i) const { return WHOLE || chunk + i < K / BLOCK; }
};

// Starts to copy the weights of the unit u of this cluster, a strip of one part, to a slot of the ring, as one group of
// copies. Nothing is copied for a unit that does not exist, whose sums are not used; columns that do not exist are zeros.
__device__ inline void copy_unit(const Problem& p, int u, int to) {
  const unsigned slot = p.slots + to * SLOT_BYTES;
  const int strip = p.cluster + u / PARTS * CLUSTERS, row = u % PARTS * N + strip * STRIP;
  if (strip < STRIPS) {
    const unsigned char* codes = p.codes + (long long)(row / BLOCK) * (K / BLOCK * BLOCK_BYTES) + row % BLOCK * 32;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) copy_async(slot + (i * 32 + p.lane) * 16, codes + i * BLOCK_BYTES, p.has(i));
#pragma unroll
    for (int i = 0; i < COPIES; i += 32)
      if (i + p.lane < COPIES) {
        const bool scale = i + p.lane < 2 * ENTRIES;
        const int entry = scale ? (i + p.lane) / 2 : i + p.lane - 2 * ENTRIES, column = p.chunk * BLOCK + entry * GROUP;
        const long long at = (long long)(column / GROUP) * (PARTS * N) + row;
        const void* from = scale ? (const void*)(p.scales + at + p.lane % 2 * 8) : (const void*)(p.zeros + at);
        copy_async(slot + CODE_BYTES + (i + p.lane) * 16, from, WHOLE || column < K);
      }
  }
  commit_copies();
}

// Starts to copy the first units, and initializes the barriers at the address `written`, at which all warps arrive.
__device__ inline void start_units(const Problem& p, unsigned written) {
  launch_dependents();
  for (int u = 0; u < DEPTH; u++) copy_unit(p, u, u);
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) barrier_init(written + 8 * i, WARPS * WARP_ARRIVALS);
}

// A copied unit as the thread 4 g + q needs it: codes, and scales and zero points of the rows g and g + 8.
struct Unit {
  const unsigned char* slot;
  int lane;

  __device__ uint4 codes(int chunk) const { return *(const uint4*)(slot + chunk * 512 + lane * 16); }
  __device__ float scale(int entry, int half) const {
    return to_float(((const SCALE*)(slot + CODE_BYTES))[entry * STRIP + half * 8 + lane / 4]);
  }
  __device__ int zero(int entry, int half) const {
    return HAS_ZEROS ? slot[CODE_BYTES + SCALE_BYTES + entry * STRIP + half * 8 + lane / 4] : ZERO_POINT;
  }
};

// Adds up the squares of each token over the warps of the block. squares: [WARPS + 1][TOKENS]; the last row is the totals.
__device__ inline void add_squares(float* squares) {
  if (!NORMED || threadIdx.x >= TOKENS) return;
  float sum = 0.0f;
  for (int w = 0; w < WARPS; w++) sum += squares[w * TOKENS + threadIdx.x];
  squares[WARPS * TOKENS + threadIdx.x] = sum;
}

// Computes this block's share of the results of its cluster: calls `write(a, token, column)` with the sums of each part.
// totals: [UNITS], each [TOKENS / TILE][STRIP][TILE]. squares: see add_squares.
template <int TILE, typename Write>
__device__ inline void write_results(const Problem& p, const float* totals, const float* squares, Write write) {
  const int rank = blockIdx.x % SPLIT;
  for (int i = rank * THREADS + threadIdx.x; i < UNITS / PARTS * SUMS; i += SPLIT * THREADS) {
    const int unit = i / SUMS * PARTS, r = i % STRIP, t = i % SUMS / STRIP;
    const int column = (p.cluster + i / SUMS * CLUSTERS) * STRIP + r;
    if (p.token + t >= p.m || column >= N) continue;
    const float scale = NORMED ? rsqrtf(add_blocks<SPLIT>(squares + WARPS * TOKENS + t) / K + EPS) : 1.0f;
    const float* sums = totals + unit * SUMS + t / TILE * (STRIP * TILE) + r * TILE + t % TILE;
    float a[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) a[part] = add_blocks<SPLIT>(sums + part * SUMS) * scale;
    write(a, p.token + t, column);
  }
}
