// Product of few bf16 tokens and weights in 4-bit codes, with f32 sums, by mma.m16n8k16:
//
//   y[M, N] = epilogue(x[M, K] @ w[0].T, .., x[M, K] @ w[PARTS - 1].T, other operands), with w = (code - zero) * scale
//
// Codes are in the order of the op pack_fragments. GROUP columns of a row of w share a scale. With NORMED, x is
// rms_norm(x, gain): x * gain is multiplied, and the sums are divided by the root of the mean square at the end.
//
// Tiles. A block computes TOKENS tokens and ROWS columns of y. Its warps form a grid of GROUPS groups of rows times
// SLICES slices of columns. A warp multiplies STRIPS strips of 16 rows of w (the left factor) by every SLICES-th step
// of columns, and keeps all sums in registers until the end. The SPLIT blocks of a cluster compute the same tile over
// different columns of w: each sends its sums of the other blocks' tokens to their shared memory, and writes its share
// of the tokens.
//
// Pipeline. A warp copies the codes, scales, zero points and gain of the next STAGES steps to a ring of its own, so
// that warps do not wait for each other. x arrives by TMA in boxes of 64 columns, which the warps of a slice share. A
// slice has memory for TOKEN_STEPS steps of x, which is reused only if GROUPS is 1.
//
// Arithmetic. Code c becomes the factor 128 + c in the upper 8 rows of a strip, and 8 + c / 2 in the lower ones, which
// takes the fewest instructions. The zero point is converted in the same way, and subtracted from the factor. If
// several warps share x (PREPARED), it is subtracted from the sums instead, times the sum of x over the columns of the
// group; these warps norm x and compute its sums together, before the products.
//
// Constants:
//   N, K          multiples of 64
//   PARTS         parts of w
//   GROUP         columns that share a scale; divides a step or is a multiple of it
//   ZERO_POINT    the zero point of all groups, or -1 if the pointer ZEROS has one for each
//   TOKENS        8 or 16
//   STRIPS        strips of a warp, a multiple of PARTS
//   GROUPS, SLICES, SPLIT  see above
//   CHUNKS        blocks of 64 columns of a step
//   STAGES        steps of a warp's ring
//   TOKEN_STEPS   steps of x for which a slice has memory
//   NORMED, EPS   whether x is normed; epsilon of the norm
//   SHARED        bytes of shared memory
//   RESIDENT      blocks of a multiprocessor
//   SCALE, OUT    types of the scales (bf16 or f16) and of y
// The generated text before this file defines OTHER_PARAMETERS, GAIN, ZEROS, OTHER_ARGUMENTS, OTHERS, Loaded,
// `load_others` and `epilogue`. sliced_weights.cuh has the layout of shared memory.

// A thread's share of a warp's sums, and of the sums of squares of the tokens 2 q and 2 q + 1 of every tile.
struct Sums {
  float of[STRIPS][TILES][4] = {};
  float squares[TILES][4] = {};
};

// The address that this thread passes to load_matrices or store_matrices: a row of two steps of 16 columns of x, in the
// box at `box`, from step s on.
__device__ inline unsigned token_row(unsigned box, int s, int next, int lane) {
  // Four matrices of 8 tokens and 8 columns at a time: two for a tile and step.
  const int tile = TILES > 1 ? lane / 16 : 0, later = TILES > 1 ? next : lane / 16;
  return box + (tile * 8 + lane % 8) * 128 + ((2 * (s + later) + lane / 8 % 2) ^ lane % 8) * 16;
}

// Loads two steps of x as right factors, from step s of the box on.
__device__ inline void load_tokens(unsigned (&x)[2][TILES][2], unsigned box, int s, int lane) {
#pragma unroll
  for (int next = 0; next < 2; next += 2 / TILES) load_matrices(&x[next][0][0], token_row(box, s, next, lane));
}

// Adds the squares of 16 columns of the tokens, and multiplies them by the gain.
__device__ inline void norm_tokens(Sums& sums, unsigned (&x)[TILES][2], const unsigned (&gain)[2]) {
  const unsigned all[4] = {x[0][0], x[TILES - 1][0], x[0][1], x[TILES - 1][1]};
#pragma unroll
  for (int t = 0; t < TILES; t++) add_product(sums.squares[t], all, x[t]);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) x[t][half] = multiply(x[t][half], gain[half]);
}

// A step has ENTRIES groups of columns, and an entry has a scale and a zero point for each row of the warp's strips. These
// are the zero point at an index, and the index of a row: a thread has the rows lane / 4 and lane / 4 + 8 of every strip.
__device__ inline int zero_point(const unsigned char* w, int row) { return HAS_ZEROS ? w[ZEROS_AT + row] : ZERO_POINT; }
__device__ inline int entry_row(int entry, int strip, int half, int lane) {
  return (entry * STRIPS + strip) * STRIP + half * 8 + lane / 4;
}

// Loads the converted zero points, which are subtracted from converted codes.
__device__ inline void load_offsets(unsigned (&offset)[STRIPS][2], const unsigned char* w, int entry, int lane) {
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int zero = zero_point(w, entry_row(entry, strip, half, lane));
      offset[strip][half] = twice(half ? 0x4100 + (zero << 3) : 0x4300 + zero);
    }
}

// Adds the sums of a group of columns, times its scales, to `sums`. x_sums: the sums of the group's x, if PREPARED.
__device__ inline void add_fresh(Sums& sums, const float (&fresh)[STRIPS][TILES][4], const unsigned char* w,
                                 const float* x_sums, int entry, int lane) {
  float2 group_sums[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++)
    if (PREPARED) group_sums[t] = *(const float2*)(x_sums + t * 8 + lane % 4 * 2);
#pragma unroll
  for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = entry_row(entry, strip, half, lane);
      const float scale = to_float(((const SCALE*)(w + SCALES_AT))[row]), factor = half ? 2.0f * scale : scale;
      const float offset = -((half ? 16.0f : 128.0f) + zero_point(w, row)) * scale;
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; j++) {
          sums.of[strip][t][j] += factor * fresh[strip][t][j];
          if (PREPARED) sums.of[strip][t][j] += offset * (j % 2 ? group_sums[t].y : group_sums[t].x);
        }
    }
}

// The gain at a thread's columns of a step.
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
  const unsigned one = 0x3F803F80, ones[4] = {one, one, one, one};
  unsigned x[2][TILES][2];
  float x_sums[TILES][4];
#pragma unroll
  for (int step = 0; step < STEP / 16; step++) {
    const unsigned at = box + step / 4 * BOX_BYTES;
    if (step % 2 == 0) load_tokens(x, at, step % 4, lane);
    if (NORMED) norm_tokens(sums, x[step % 2], gains.of[step]);
#pragma unroll
    for (int t = 0; t < TILES; t++) add_product(x_sums[t], ones, x[step % 2][t], step % SPAN == 0);
    if (NORMED && step % 2 == 1)
#pragma unroll
      for (int next = 0; next < 2; next += 2 / TILES) store_matrices(token_row(at, step % 4 - 1, next, lane), &x[next][0][0]);
    if (step % SPAN == SPAN - 1 && lane < 4)
#pragma unroll
      for (int t = 0; t < TILES; t++)
        *(float2*)(to + step / SPAN * TOKENS + t * 8 + lane * 2) = make_float2(x_sums[t][0], x_sums[t][1]);
  }
}

// Multiplies a step. w: its weights. box: the address of its tokens. x_sums: its groups' sums of x, if PREPARED.
__device__ inline void multiply_step(Sums& sums, const unsigned char* w, unsigned box, const float* x_sums,
                                     const Masks& masks, int lane) {
  float fresh[STRIPS][TILES][4];
  uint4 codes[STRIPS];
  unsigned x[2][TILES][2], offset[STRIPS][2];
#pragma unroll
  for (int step = 0; step < STEP / 16; step++) {
    const int entry = step / SPAN;
    const bool first = step % SPAN == 0;
    if (first && !PREPARED) load_offsets(offset, w, entry, lane);
    if (step % 4 == 0)
#pragma unroll
      for (int t = 0; t < STRIPS; t++) codes[t] = *(const uint4*)(w + (t * CHUNKS + step / 4) * 512 + lane * 16);
    if (step % 2 == 0) load_tokens(x, box + step / 4 * BOX_BYTES, step % 4, lane);
    unsigned(&b)[TILES][2] = x[step % 2];
    if (NORMED && !PREPARED) {
      const unsigned* gain = (const unsigned*)(w + GAIN_AT) + step * 8 + lane % 4;
      norm_tokens(sums, b, {gain[0], gain[4]});
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
      const unsigned words[4] = {codes[strip].x, codes[strip].y, codes[strip].z, codes[strip].w};
      unsigned a[4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        a[r] = masks.pair(words[step % 4], r);
        if (!PREPARED) a[r] = subtract(a[r], offset[strip][r % 2]);
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) add_product(fresh[strip][t], a, b[t], first);
    }
    if (step % SPAN == SPAN - 1) add_fresh(sums, fresh, w, x_sums + entry * TOKENS, entry, lane);
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
               (group * Y_STRIPS + strip / PARTS) * STRIP + j / 2 * 8 + lane / 4] = sums.of[strip][t][j];
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
    const int to = (rank + other) % SPLIT;
    const int place = SPLIT - 1 - other;  // the place of this block's sums in the other block's memory
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
    Four* to = (Four*)(y + (long long)(p.token + rank * SHARE + quad.token) * N + p.column + quad.column);
    *to = four_columns(sums, loaded[i]);
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
  const Problem p = {codes, scales, ZEROS, GAIN, tile % tiles * TOKENS, column, column / STRIP + group * Y_STRIPS, lane,
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
  }
  __syncthreads();
  if (SPLIT > 1) {
    if (threadIdx.x == 0) barrier_expect(complete, (SPLIT - 1) * PEER_BYTES);
    cluster_arrive();
  }
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
