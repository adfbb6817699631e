// y[M, N] = epilogue(x[M, K] @ w[0].T, .., x @ w[PARTS - 1].T, others) for few tokens M, where x and w are codes of 8 bits:
// e4m3 with f32 sums, or i8 with i32 sums. Their scales are operands of the epilogue. Weights are read once; x stays in
// registers.
//
// A warp keeps COLUMNS columns of TOKENS tokens of x, and multiplies them by its columns of one strip of 16 rows of w
// after the other (mma.m16n8k16 of f16, which has every e4m3, or mma.m16n8k32 of i8). It copies the codes of the next
// DEPTH strips to shared memory meanwhile. The WARPS warps of a block, and the SPLIT blocks of a cluster, have different
// columns; strip_sums.cuh adds their sums. Clusters process the strips in turn.
//
// An instruction wants few columns of each thread, far from each other; a copy wants neighbouring ones. So the thread
// 4 g + q has 16 neighbouring columns of a row g of both factors, of every 64, and the order of the columns within an
// instruction is another one for both alike.
//
// Constants: N (a multiple of 16), PARTS, K (a multiple of 64), TOKENS (8 or 16), WARPS, CHUNKS (blocks of 64 columns of a
// warp), SPLIT, CLUSTERS, DEPTH, RESIDENT (blocks that a multiprocessor has registers for), E4M3 (or i8), and the type OUT.
// The generated text before this file defines OTHER_PARAMETERS, OTHERS and the function `epilogue`.

constexpr int BLOCK = 64, STRIP = 16;  // columns of a chunk; rows of a product
constexpr int THREADS = WARPS * 32, COLUMNS = CHUNKS * BLOCK;
constexpr int TILES = TOKENS / 8;      // of 8 tokens, for one instruction each
constexpr bool WHOLE = SPLIT * WARPS * COLUMNS == K;  // every warp has as many columns as the others
constexpr int STRIPS = N / STRIP;
constexpr int UNITS = (STRIPS + CLUSTERS - 1) / CLUSTERS * PARTS;  // strips of w that a cluster computes, at most
constexpr int SUMS = STRIP * TOKENS;   // of a strip
// What a warp copies of a strip: [STRIP][PIECES][16 bytes].
constexpr int PIECES = COLUMNS / 16, SLOT_BYTES = STRIP * COLUMNS;
// Shared memory: the sums of two strips [2][WARPS][SUMS], all sums of the block [UNITS][SUMS], the slots [WARPS][DEPTH],
// and two barriers.
constexpr int TOTALS_AT = 2 * WARPS * SUMS, SLOTS_AT = TOTALS_AT + UNITS * SUMS;  // words
constexpr int BARRIERS_AT = SLOTS_AT + WARPS * DEPTH * SLOT_BYTES / 4;

template <bool floats> struct SumOf { using type = float; };
template <> struct SumOf<false> { using type = int; };
using Sum = SumOf<E4M3>::type;

struct Problem {
  const unsigned char* x;  // [m][K]
  const unsigned char* w;  // [PARTS * N][K]
  int m, token;            // tokens, and the first of this block
  int cluster, chunk, lane;  // this warp's cluster, first block of columns, and thread
  unsigned slots;          // the address of this warp's slots in shared memory

  // Whether the i-th block of columns of this warp exists.
  __device__ bool has(int i) const { return WHOLE || chunk + i < K / BLOCK; }
};

// The place of a piece in a row of a slot: two neighbouring rows have different ones, against bank conflicts.
__device__ inline int place(int row, int piece) { return PIECES > 4 ? piece ^ row % 2 * 4 : piece; }

// Starts to copy the weights of the unit u of this cluster, a strip of one part, to a slot of the ring, as one group of
// copies; zeros if it does not exist.
__device__ inline void copy_unit(const Problem& p, int u, int to) {
  const unsigned slot = p.slots + to * SLOT_BYTES;
  const int strip = p.cluster + u / PARTS * CLUSTERS, first = u % PARTS * N + strip * STRIP;
#pragma unroll
  for (int i = 0; i < STRIP * PIECES / 32; i++) {
    const int row = (i * 32 + p.lane) / PIECES, piece = (i * 32 + p.lane) % PIECES;
    const bool needed = strip < STRIPS && p.has(piece / 4);
    const unsigned char* from = p.w + (long long)(first + row) * K + p.chunk * BLOCK + piece * 16;
    copy_async(slot + (row * PIECES + place(row, piece)) * 16, needed ? from : p.w, needed);
  }
  commit_copies();
}

// The two e4m3 in the low or high half of a word, as f16.
__device__ inline unsigned to_f16(unsigned word, int half) {
  unsigned pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(pair) : "r"(half ? word >> 16 : word));
  return pair;
}

// d[16, 8] += a[16, 16] @ b[8, 16].T of f16. A thread has two neighbouring tokens of the rows g and g + 8.
__device__ inline void add_product(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[16, 8] += a[16, 32] @ b[8, 32].T of i8.
__device__ inline void add_product(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The columns of a thread in a chunk are those of STEPS instructions, WORDS registers each of a row.
constexpr int STEPS = E4M3 ? 4 : 2, WORDS = 2;

// The registers of a step, from the 16 columns of a row.
__device__ inline void factor(unsigned (&out)[WORDS], const uint4& columns, int step) {
  const unsigned words[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
  for (int i = 0; i < WORDS; i++) out[i] = E4M3 ? to_f16(words[step], i) : words[2 * step + i];
}

// x of a warp's columns as right factors.
struct Tokens {
  unsigned of[CHUNKS][STEPS][TILES][WORDS];

  __device__ void load(const Problem& p) {
    uint4 raw[CHUNKS][TILES];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int token = p.token + t * 8 + p.lane / 4;
        raw[c][t] = make_uint4(0, 0, 0, 0);
        if (token < p.m && p.has(c))
          raw[c][t] = *(const uint4*)(p.x + (long long)token * K + (p.chunk + c) * BLOCK + p.lane % 4 * 16);
      }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int t = 0; t < TILES; t++) factor(of[c][s][t], raw[c][t], s);
  }
};

// Multiplies a unit by the tokens. Even and odd steps have separate sums, since a product waits for the previous one that
// adds to the same sums.
__device__ inline void multiply_unit(Sum (&sums)[TILES][4], const unsigned char* slot, const Tokens& x, int lane) {
  Sum odd[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[t][j] = odd[t][j] = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    uint4 rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = half * 8 + lane / 4;
      rows[half] = *(const uint4*)(slot + (row * PIECES + place(row, c * 4 + lane % 4)) * 16);
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      unsigned low[WORDS], high[WORDS];
      factor(low, rows[0], s);
      factor(high, rows[1], s);
      const unsigned a[4] = {low[0], high[0], low[1], high[1]};
#pragma unroll
      for (int t = 0; t < TILES; t++) add_product(s % 2 ? odd[t] : sums[t], a, x.of[c][s][t]);
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[t][j] += odd[t][j];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    llmc_skinny_scaled(const unsigned char* x, const unsigned char* w, OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ uint4 dynamic_memory[];
  Sum *shared = (Sum*)dynamic_memory, *totals = shared + TOTALS_AT;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % SPLIT;
  const int cluster = blockIdx.x / SPLIT % CLUSTERS, token = blockIdx.x / (SPLIT * CLUSTERS) * TOKENS;
  const unsigned char* slots = (const unsigned char*)(shared + SLOTS_AT) + warp * (DEPTH * SLOT_BYTES);
  const Problem p = {x, w, m, token, cluster, (rank * WARPS + warp) * CHUNKS, lane, shared_address(slots)};
  const unsigned written = shared_address(shared + BARRIERS_AT);
  launch_dependents();
  for (int u = 0; u < DEPTH; u++) copy_unit(p, u, u);
  if (threadIdx.x < 2) barrier_init(written + 8 * threadIdx.x, WARPS);
  wait_for_previous();
  Tokens tokens;
  tokens.load(p);
  __syncthreads();  // the barriers are initialized

  multiply_units<UNITS, DEPTH, WARPS, TILES>(
      shared, totals, written,
      [&](Sum (&sums)[TILES][4], int slot) { multiply_unit(sums, slots + slot * SLOT_BYTES, tokens, lane); },
      [&](int u, int slot) { copy_unit(p, u, slot); });
  wait_for_cluster<SPLIT>();

  // Each block computes its share of the cluster's results.
  for (int i = rank * THREADS + threadIdx.x; i < UNITS / PARTS * SUMS; i += SPLIT * THREADS) {
    const int unit = i / SUMS * PARTS, r = i % STRIP, t = i % SUMS / STRIP;
    const int column = (cluster + i / SUMS * CLUSTERS) * STRIP + r;
    if (token + t >= m || column >= N) continue;
    float a[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      a[part] = add_blocks<SPLIT>(totals + (unit + part) * SUMS + t / 8 * (STRIP * 8) + r * 8 + t % 8);
    y[(long long)(token + t) * N + column] = from_float<OUT>(epilogue(a, token + t, column OTHERS));
  }
  if (SPLIT > 1) wait_for_cluster<SPLIT>();  // no block exits while others read its sums
}
