// y[M, N] = epilogue(x[M, K] @ w[0].T, .., x @ w[PARTS - 1].T, others) with f32 sums, for few tokens M. With NORMED, x is
// rms_norm(x, gain): x times the gain is multiplied, and the sums are divided by the root of the mean square at the end.
// w = (code - zero) * scale has codes of 4 bits in the order of the op pack_fragments, and a scale for each GROUP columns
// of a row.
//
// A block computes ROWS columns of y for TOKENS tokens. Its warps form GROUPS groups of rows and SLICES slices of columns:
// a warp multiplies STRIPS strips of 16 rows of w by every SLICES-th step of columns (mma.m16n8k16, w is the left factor),
// and keeps all sums in registers until the end. It copies the codes, scales, zero points and the gain of the next STAGES
// steps into a ring of its own, so that warps do not wait for each other. x arrives in boxes of 64 columns by TMA; the
// warps of a slice share them. A slice has memory for TOKEN_STEPS steps of x, which are reused if GROUPS is 1.
//
// SPLIT blocks of a cluster compute the same tile over different columns of w. Each sends its sums of other blocks' tokens
// to their shared memory, and each writes its share of the tokens.
//
// A code c is multiplied as 128 + c in the upper 8 rows of a strip, and as 8 + c / 2 in the lower ones, which takes the
// fewest instructions. The same of the zero point, times the sum of x over the columns of the group, is subtracted.
//
// Constants: N and K (multiples of 64), PARTS, GROUP, ZERO_POINT (of all groups, or -1: the pointer ZEROS has one for each),
// TOKENS (8 or 16), STRIPS (a multiple of PARTS), GROUPS, SLICES, SPLIT, CHUNKS (blocks of 64 columns of a step; GROUP
// divides a step or is a multiple of it), STAGES, TOKEN_STEPS, NORMED and EPS (of the norm), RESIDENT (blocks of a multiprocessor), and the types SCALE (bf16 or
// f16) and OUT. The generated text before this file defines OTHER_PARAMETERS, GAIN, ZEROS, OTHER_ARGUMENTS, OTHERS, Loaded,
// `load_others` and `epilogue`.

constexpr int BLOCK = 64, STRIP = 16, BLOCK_BYTES = BLOCK * BLOCK / 2;  // rows and columns of a block of codes
constexpr int TILES = TOKENS / 8;                                      // of 8 tokens, for one instruction each
constexpr int WARPS = GROUPS * SLICES, THREADS = WARPS * 32;
constexpr int STEP = CHUNKS * BLOCK, ALL_STEPS = K / STEP, STEPS = (ALL_STEPS + SPLIT - 1) / SPLIT;  // of a block
constexpr int WARP_STEPS = (STEPS + SLICES - 1) / SLICES;                // of a warp, at most
constexpr bool REUSED = TOKEN_STEPS < WARP_STEPS;                        // memory for x
constexpr int ENTRIES = STEP > GROUP ? STEP / GROUP : 1;                 // scales of a row in a step
constexpr int SPAN = STEP / ENTRIES / 16;                                // products of 16 columns of an entry
constexpr int OWN = STRIPS / PARTS, ROWS = GROUPS * OWN * STRIP;         // strips of y of a warp; columns of y of a block
constexpr bool HAS_ZEROS = ZERO_POINT < 0, WHOLE = N % ROWS == 0;
static_assert(!REUSED || GROUPS == 1, "warps that share x do not wait for each other");

// A stage: codes [STRIPS][CHUNKS][32][16 bytes], scales [ENTRIES][STRIPS][16], zero points [ENTRIES][STRIPS][16], the gain.
constexpr int COPIES = ENTRIES * STRIPS * (HAS_ZEROS ? 3 : 2);  // of 16 bytes: two for scales, one for zero points
constexpr int SCALES_AT = STRIPS * CHUNKS * 512, ZEROS_AT = SCALES_AT + ENTRIES * STRIPS * 32;
constexpr int GAIN_AT = SCALES_AT + COPIES * 16, STAGE_BYTES = GAIN_AT + (NORMED && GROUPS == 1 ? STEP * 2 : 0);
// Shared memory: x [SLICES][TOKEN_STEPS][CHUNKS][TOKENS][BLOCK] in the 128-byte swizzle, and the rings [WARPS][STAGES], in
// whose place the sums [SLICES][TOKENS][SUMS_STRIDE] are written; received sums [SPLIT - 1][SHARE][SUMS_STRIDE], the
// squares [WARPS][TOKENS] and those received [SPLIT - 1][SHARE].
constexpr int BOX_BYTES = TOKENS * BLOCK * 2, X_BYTES = SLICES * TOKEN_STEPS * CHUNKS * BOX_BYTES;
constexpr int SUMS_STRIDE = PARTS * ROWS + 4, SHARE = TOKENS / SPLIT;  // floats of a token's sums; tokens of a block
constexpr int RING_BYTES = X_BYTES + WARPS * STAGES * STAGE_BYTES, SUMS_BYTES = SLICES * TOKENS * SUMS_STRIDE * 4;
constexpr int RECEIVED_AT = RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES;
constexpr int SQUARES_AT = RECEIVED_AT + (SPLIT - 1) * SHARE * SUMS_STRIDE * 4;
constexpr int PEER_SQUARES_AT = SQUARES_AT + (NORMED ? WARPS * TOKENS * 4 : 0);
// The sums of the groups of x, if the warps of a block prepare x together: [SLICES][TOKEN_STEPS][ENTRIES][TOKENS].
constexpr bool PREPARED = GROUPS > 1;
constexpr int X_SUMS_AT = PEER_SQUARES_AT + (NORMED ? (SPLIT - 1) * SHARE * 4 : 0);
constexpr int PEER_BYTES = (SHARE * PARTS * ROWS + (NORMED ? SHARE : 0)) * 4;  // that a block receives of another
constexpr int QUADS = (SHARE * ROWS / 4 + THREADS - 1) / THREADS;  // groups of four columns of y that a thread writes

struct Problem {
  const unsigned char* codes;  // [PARTS * N / 64][K / 64][2048]
  const SCALE* scales;         // [K / GROUP][PARTS * N]
  const unsigned char* zeros;  // [K / GROUP][PARTS * N], or null
  const bf16* gain;            // [K], or null
  int token, column;           // the first of the block's tile
  int strip, lane;             // this warp's first strip of y, and thread
  unsigned ring;               // the address of this warp's ring in shared memory

  // The row of w of the warp's t-th strip, and whether it exists.
  __device__ int row(int t) const { return t % PARTS * N + (strip + t / PARTS) * STRIP; }
  __device__ bool exists(int t) const { return WHOLE || strip + t / PARTS < N / STRIP; }
};

// Starts to copy the weights of a step to a stage of the warp's ring. Strips that do not exist are zeros.
__device__ inline void copy_weights(const Problem& p, int step, int stage) {
  const unsigned to = p.ring + stage * STAGE_BYTES;
#pragma unroll
  for (int t = 0; t < STRIPS; t++) {
    const int row = p.row(t);
    const long long block = (long long)(row / BLOCK) * (K / BLOCK) + step * CHUNKS;
    const unsigned char* from = p.codes + block * BLOCK_BYTES + row % BLOCK * 32 + p.lane * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      copy_async(to + (t * CHUNKS + c) * 512 + p.lane * 16, from + c * BLOCK_BYTES, p.exists(t));
  }
#pragma unroll
  for (int i = 0; i < COPIES; i += 32)
    if (i + p.lane < COPIES) {
      const int at = i + p.lane, scale = at < 2 * ENTRIES * STRIPS, entry = scale ? at / 2 : at - 2 * ENTRIES * STRIPS;
      const int t = entry % STRIPS, column = step * STEP + entry / STRIPS * GROUP;
      const long long from = (long long)(column / GROUP) * (PARTS * N) + p.row(t);
      copy_async(to + SCALES_AT + at * 16, scale ? (const void*)(p.scales + from + at % 2 * 8) : (const void*)(p.zeros + from),
                 p.exists(t));
    }
  if (NORMED && GROUPS == 1 && p.lane < STEP / 8) copy_async(to + GAIN_AT + p.lane * 16, p.gain + step * STEP + p.lane * 8, true);
}

// d[16, 8] = a[16, 16] @ b[8, 16].T + c. A thread has two neighbouring tokens of the rows g and g + 8.
__device__ inline void add_product(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool first) {
  const float c[4] = {first ? 0.0f : d[0], first ? 0.0f : d[1], first ? 0.0f : d[2], first ? 0.0f : d[3]};
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Constants in registers, with which codes are converted: of the upper and the lower rows of a strip.
#ifndef SHIFTED
#define SHIFTED(word, n) ((word) >> (n))
#endif
struct Masks {
  unsigned mask[2] = {opaque(0x000F000F), opaque(0x00780078)}, base[2] = {opaque(0x43004300), opaque(0x41004100)};

  // Two codes in bf16, from the bits 4 r to 4 r + 3 of both halves of a word; an odd r belongs to the lower rows.
  __device__ unsigned pair(unsigned word, int r) const {
    return code_pair(SHIFTED(word, r % 2 ? 4 * r - 3 : 4 * r), mask[r % 2], base[r % 2]);
  }
};

// The sums of a warp, and the squares of the tokens 2 q and 2 q + 1 of every tile.
struct Sums {
  float of[STRIPS][TILES][4] = {};
  float squares[TILES][4] = {};
};

// The address of the thread's row of two steps of 16 columns of x at `box`, from the step s of the box on.
__device__ inline unsigned token_row(unsigned box, int s, int next, int lane) {
  // Four matrices of 8 tokens and 8 columns at a time: two for a tile and step.
  const int tile = TILES > 1 ? lane / 16 : 0, later = TILES > 1 ? next : lane / 16;
  return box + (tile * 8 + lane % 8) * 128 + ((2 * (s + later) + lane / 8 % 2) ^ lane % 8) * 16;
}

// Loads them as right factors.
__device__ inline void load_tokens(unsigned (&x)[2][TILES][2], unsigned box, int s, int lane) {
#pragma unroll
  for (int next = 0; next < 2; next += 2 / TILES) load_matrices(&x[next][0][0], token_row(box, s, next, lane));
}

// Adds the squares of 16 columns of the tokens, and multiplies them by the gain.
__device__ inline void norm_tokens(Sums& sums, unsigned (&x)[TILES][2], const unsigned (&gain)[2]) {
  const unsigned all[4] = {x[0][0], x[TILES - 1][0], x[0][1], x[TILES - 1][1]};
#pragma unroll
  for (int t = 0; t < TILES; t++) add_product(sums.squares[t], all, x[t], false);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) x[t][half] = multiply(x[t][half], gain[half]);
}

// Adds up 16 columns of the tokens.
__device__ inline void add_tokens(float (&x_sums)[TILES][4], const unsigned (&x)[TILES][2], bool first) {
  const unsigned one = 0x3F803F80, ones[4] = {one, one, one, one};
#pragma unroll
  for (int t = 0; t < TILES; t++) add_product(x_sums[t], ones, x[t], first);
}

// The gain at the columns of a step that a thread has.
struct Gains {
  unsigned of[STEP / 16][2];

  __device__ void load(const bf16* gain, int lane) {
#pragma unroll
    for (int step = 0; step < STEP / 16; step++)
#pragma unroll
      for (int half = 0; half < 2; half++) of[step][half] = *(const unsigned*)(gain + step * 16 + half * 8 + lane % 4 * 2);
  }
};

// Prepares a step of x at `box` for all warps of the block: norms it, and writes the sums of its groups to `to`.
__device__ inline void prepare_tokens(Sums& sums, unsigned box, const Gains& gains, float* to, int lane) {
  unsigned x[2][TILES][2];
  float x_sums[TILES][4];
#pragma unroll
  for (int step = 0; step < STEP / 16; step++) {
    const unsigned at = box + step / 4 * BOX_BYTES;
    if (step % 2 == 0) load_tokens(x, at, step % 4, lane);
    if (NORMED) norm_tokens(sums, x[step % 2], gains.of[step]);
    add_tokens(x_sums, x[step % 2], step % SPAN == 0);
    if (NORMED && step % 2 == 1)
#pragma unroll
      for (int next = 0; next < 2; next += 2 / TILES) store_matrices(token_row(at, step % 4 - 1, next, lane), &x[next][0][0]);
    if (step % SPAN == SPAN - 1 && lane < 4)
#pragma unroll
      for (int t = 0; t < TILES; t++)
        *(float2*)(to + step / SPAN * TOKENS + t * 8 + lane * 2) = make_float2(x_sums[t][0], x_sums[t][1]);
  }
}

// Multiplies a step. w: its weights; box: the address of its tokens; prepared: the sums of their groups, if PREPARED.
__device__ inline void multiply_step(Sums& sums, const unsigned char* w, unsigned box, const float* prepared,
                                     const Masks& masks, int lane) {
  float fresh[STRIPS][TILES][4], x_sums[TILES][4];
  uint4 codes[STRIPS];
  unsigned x[2][TILES][2];
#ifdef SUBTRACTED
  unsigned offset[STRIPS][2];
#endif
#pragma unroll
  for (int step = 0; step < STEP / 16; step++) {
    const int entry = step / SPAN;
    const bool first = step % SPAN == 0;
    if (step % 4 == 0)
#pragma unroll
      for (int t = 0; t < STRIPS; t++) codes[t] = *(const uint4*)(w + (t * CHUNKS + step / 4) * 512 + lane * 16);
    if (step % 2 == 0) load_tokens(x, box + step / 4 * BOX_BYTES, step % 4, lane);
    unsigned(&b)[TILES][2] = x[step % 2];
    if (NORMED && !PREPARED) {
      const unsigned* gain = (const unsigned*)(w + GAIN_AT) + step * 8 + lane % 4;
      norm_tokens(sums, b, {gain[0], gain[4]});
    }
#ifdef SUBTRACTED
    if (first)
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = (entry * STRIPS + strip) * STRIP + half * 8 + lane / 4;
          const unsigned zero = HAS_ZEROS ? w[ZEROS_AT + row] : ZERO_POINT;
          offset[strip][half] = twice(half ? 0x4100 + (zero << 3) : 0x4300 + zero);
        }
#else
    if (!PREPARED) add_tokens(x_sums, b, first);
#endif
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
      const unsigned words[4] = {codes[strip].x, codes[strip].y, codes[strip].z, codes[strip].w};
      unsigned a[4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        a[r] = masks.pair(words[step % 4], r);
#ifdef SUBTRACTED
        a[r] = subtract(a[r], offset[strip][r % 2]);
#endif
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) add_product(fresh[strip][t], a, b[t], first);
    }
    if (step % SPAN < SPAN - 1) continue;
#ifndef SUBTRACTED
    if (PREPARED)
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const float2 pair = *(const float2*)(prepared + entry * TOKENS + t * 8 + lane % 4 * 2);
        x_sums[t][0] = x_sums[t][2] = pair.x, x_sums[t][1] = x_sums[t][3] = pair.y;
      }
#endif
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = (entry * STRIPS + strip) * STRIP + half * 8 + lane / 4;
        const float scale = to_float(((const SCALE*)(w + SCALES_AT))[row]);
        const float zero = (half ? 16.0f : 128.0f) + (HAS_ZEROS ? w[ZEROS_AT + row] : ZERO_POINT);
        const float factor = half ? 2.0f * scale : scale, less = -zero * scale;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int j = 2 * half; j < 2 * half + 2; j++) {
#ifdef SUBTRACTED
            sums.of[strip][t][j] += factor * fresh[strip][t][j];
#else
            sums.of[strip][t][j] += factor * fresh[strip][t][j] + less * x_sums[t][j];
#endif
          }
      }
  }
}

// Writes the sums of a warp to shared memory as [SLICES][TOKENS][SUMS_STRIDE], and its squares as [WARPS][TOKENS].
__device__ inline void share(float* shared, float* squares, const Sums& sums, int group, int slice, int warp, int lane) {
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        shared[(slice * TOKENS + t * 8 + lane % 4 * 2 + j % 2) * SUMS_STRIDE + strip % PARTS * ROWS +
               (group * OWN + strip / PARTS) * STRIP + j / 2 * 8 + lane / 4] = sums.of[strip][t][j];
  // The square of a token is on the diagonal of its tile: in the rows of the tile's tokens.
  if (NORMED && lane / 8 == lane % 4)
#pragma unroll
    for (int t = 0; t < TILES; t++)
      squares[warp * TOKENS + t * 8 + lane / 4] = lane / 4 % 2 ? sums.squares[t][2 * t + 1] : sums.squares[t][2 * t];
}

// Four neighbouring sums of a token, added over the slices.
__device__ inline float4 add_slices(const float* shared, int token, int row) {
  float4 sum = *(const float4*)(shared + token * SUMS_STRIDE + row);
#pragma unroll
  for (int slice = 1; slice < SLICES; slice++) {
    const float4 v = *(const float4*)(shared + (slice * TOKENS + token) * SUMS_STRIDE + row);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  return sum;
}

// The squares of a token at this block's columns.
__device__ inline float add_squares(const float* squares, int token) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += squares[warp * TOKENS + token];
  return sum;
}

// Sends this block's sums of the other blocks' tokens to them.
__device__ inline void send(const float* shared, const float* squares, unsigned received, unsigned peer_squares,
                            unsigned barrier, int rank) {
  constexpr int quads = PARTS * ROWS / 4;
#pragma unroll 1
  for (int other = 1; other < SPLIT; other++) {
    const int to = (rank + other) % SPLIT, place = SPLIT - 1 - other;  // of this block's sums at the other one
    const unsigned there = address_at(received, to) + place * SHARE * SUMS_STRIDE * 4, done = address_at(barrier, to);
    for (int i = threadIdx.x; i < SHARE * quads; i += THREADS) {
      const int token = i / quads, row = i % quads * 4;
      const float4 sum = add_slices(shared, to * SHARE + token, row);
      send_four(there + (token * SUMS_STRIDE + row) * 4, sum, done);
    }
    if (NORMED && threadIdx.x < SHARE)
      send_float(address_at(peer_squares, to) + (place * SHARE + threadIdx.x) * 4,
                 add_squares(squares, to * SHARE + threadIdx.x), done);
  }
}

// The i-th group of four neighbouring columns of y that a thread writes: its token, among those of the block's share, and
// its first column within the tile.
struct Quad {
  int token, column;
  bool exists;

  __device__ Quad(const Problem& p, int rank, int i, int m) {
    const int at = i * THREADS + threadIdx.x;
    token = at / (ROWS / 4), column = at % (ROWS / 4) * 4;
    exists = at < SHARE * (ROWS / 4) && p.token + rank * SHARE + token < m && (WHOLE || p.column + column < N);
  }
};

// Writes y for this block's share of the tokens.
__device__ inline void finish(const Problem& p, const unsigned char* memory, int rank, int m,
                              const Loaded (&loaded)[QUADS][2], OUT* y) {
  struct alignas(4 * sizeof(OUT)) Four { OUT of[4]; };
  const float *shared = (const float*)memory, *received = (const float*)(memory + RECEIVED_AT);
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const Quad quad(p, rank, i, m);
    if (!quad.exists) continue;
    float root = 1.0f, sums[PARTS][4];
    if (NORMED) {
      float square = add_squares((const float*)(memory + SQUARES_AT), rank * SHARE + quad.token);
#pragma unroll
      for (int peer = 0; peer < SPLIT - 1; peer++)
        square += ((const float*)(memory + PEER_SQUARES_AT))[peer * SHARE + quad.token];
      root = rsqrtf(square / K + EPS);
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const int row = part * ROWS + quad.column;
      float4 sum = add_slices(shared, rank * SHARE + quad.token, row);
#pragma unroll
      for (int peer = 0; peer < SPLIT - 1; peer++) {
        const float4 v = *(const float4*)(received + (peer * SHARE + quad.token) * SUMS_STRIDE + row);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      sums[part][0] = sum.x * root, sums[part][1] = sum.y * root, sums[part][2] = sum.z * root;
      sums[part][3] = sum.w * root;
    }
    Four four;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float a[PARTS][2], out[2];
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int j = 0; j < 2; j++) a[part][j] = sums[part][2 * half + j];
      epilogue(out, a, loaded[i][half]);
#pragma unroll
      for (int j = 0; j < 2; j++) four.of[2 * half + j] = from_float<OUT>(out[j]);
    }
    *(Four*)(y + (long long)(p.token + rank * SHARE + quad.token) * N + p.column + quad.column) = four;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    llmc_skinny_slices(const __grid_constant__ TensorMap x, const unsigned char* codes, const SCALE* scales,
                       OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ unsigned long long barriers[SLICES * TOKEN_STEPS + 1];
  const unsigned begin = (shared_address(dynamic_memory) + 1023) & ~1023u;  // a swizzled box begins at such a multiple
  unsigned char* memory = dynamic_memory + (begin - shared_address(dynamic_memory));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / SLICES, slice = warp % SLICES;
  const int rank = blockIdx.x % SPLIT, tiles = (m + TOKENS - 1) / TOKENS, tile = blockIdx.x / SPLIT;
  const int column = tile / tiles * ROWS;
  const unsigned char* ring = memory + X_BYTES + warp * (STAGES * STAGE_BYTES);
  const Problem p = {codes, scales, ZEROS, GAIN, tile % tiles * TOKENS, column, column / STRIP + group * OWN, lane,
                     shared_address(ring)};
  const unsigned arrived = shared_address(barriers) + 8 * slice * TOKEN_STEPS;
  const unsigned complete = shared_address(barriers + SLICES * TOKEN_STEPS);
  const unsigned boxes = begin + slice * TOKEN_STEPS * CHUNKS * BOX_BYTES;
  const int first = rank * STEPS + slice, end = min(ALL_STEPS, (rank + 1) * STEPS);

  launch_dependents();
#pragma unroll
  for (int i = 0; i < STAGES; i++) {
    if (first + i * SLICES < end) copy_weights(p, first + i * SLICES, i);
    commit_copies();
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLICES * TOKEN_STEPS + 1; i++) barrier_init(shared_address(barriers + i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (SPLIT > 1) barrier_expect(complete, (SPLIT - 1) * PEER_BYTES);
  }
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();
  const auto copy_tokens = [&](int step, int slot) {
    barrier_expect(arrived + 8 * slot, CHUNKS * BOX_BYTES);
    for (int c = 0; c < CHUNKS; c++)
      copy_box(boxes + (slot * CHUNKS + c) * BOX_BYTES, x, p.token, step * STEP + c * BLOCK, arrived + 8 * slot);
  };
  wait_for_previous();
  if (group == 0 && lane == 0)
    for (int i = 0; i < TOKEN_STEPS && first + i * SLICES < end; i++) copy_tokens(first + i * SLICES, i);
  Loaded loaded[QUADS][2];
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const Quad quad(p, rank, i, m);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (quad.exists)
        load_others(loaded[i][half], p.token + rank * SHARE + quad.token, p.column + quad.column + 2 * half OTHERS);
  }

  const Masks masks;
  Sums sums;
  float* x_sums = (float*)(memory + X_SUMS_AT);
  if (PREPARED) {
    const int block_steps = min(ALL_STEPS - rank * STEPS, STEPS);
#pragma unroll 1
    for (int step = warp; step < block_steps; step += WARPS) {
      const int at = step % SLICES * TOKEN_STEPS + step / SLICES;
      Gains gains;
      if (NORMED) gains.load(p.gain + (rank * STEPS + step) * STEP, lane);
      barrier_wait(shared_address(barriers + at), 0);
      prepare_tokens(sums, begin + at * CHUNKS * BOX_BYTES, gains, x_sums + at * ENTRIES * TOKENS, lane);
    }
    __syncthreads();
  }
  int stage = 0, slot = 0, parity = 0;
  for (int step = first; step < end; step += SLICES) {
    wait_copies<STAGES - 1>();
    __syncwarp();
    if (!PREPARED) barrier_wait(arrived + 8 * slot, parity);
    multiply_step(sums, ring + stage * STAGE_BYTES, boxes + slot * CHUNKS * BOX_BYTES,
                  x_sums + (slice * TOKEN_STEPS + slot) * ENTRIES * TOKENS, masks, lane);
    __syncwarp();  // every thread has read the stage and the tokens
    if (step + STAGES * SLICES < end) copy_weights(p, step + STAGES * SLICES, stage);
    commit_copies();
    if (REUSED && lane == 0 && step + TOKEN_STEPS * SLICES < end) copy_tokens(step + TOKEN_STEPS * SLICES, slot);
    if (++stage == STAGES) stage = 0;
    if (++slot == TOKEN_STEPS) slot = 0, parity ^= 1;
  }
  __syncthreads();  // the sums are written in place of the rings
  float *shared = (float*)memory, *squares = (float*)(memory + SQUARES_AT);
  share(shared, squares, sums, group, slice, warp, lane);
  __syncthreads();
  if (SPLIT > 1) {
    cluster_wait_arrived();  // the other blocks have begun
    send(shared, squares, begin + RECEIVED_AT, begin + PEER_SQUARES_AT, complete, rank);
    barrier_wait(complete, 0);
  }
  finish(p, memory, rank, m, loaded, y);
}
