// Matrix product in bf16 with f32 sums, for many tokens on Hopper (sm_90a), by wgmma and tensor maps:
//
//   y[M, N] = epilogue(x[M, K] @ w[0].T, .., x[M, K] @ w[PARTS - 1].T, other operands)
//
// Tiles. The grid is as large as the GPU. A block computes one tile after another, of 128 tokens and ROWS rows of w (of
// all parts together). If whole tiles would leave many multiprocessors idle at the end, the last ones are smaller:
// halves of 64 tokens, whose columns the two consumers divide, or quarters of 64 tokens and half of the columns.
//
// Pipeline. The first warpgroup is the producer: one of its threads copies boxes of x and w by TMA (64 columns of 64
// tokens, or of a quarter of the rows of w) to a ring of STAGES buffers in shared memory, and begins the next tile
// while this one is written. The two other warpgroups are consumers: each multiplies 64 tokens. Every buffer has two
// barriers: `full` completes when its bytes have arrived, `empty` when every consumer warp has read it.
//
// Output. y is written through shared memory, the columns of a box at a time, so that a warp writes whole rows. With
// STAGED, the first of the other operands of y's shape is read in the same way.
//
// Multicast. With ALONG_M = 2, the two blocks of a cluster compute tiles of the same columns of y. Each copies half of
// the boxes of w to the buffers of both. With ALONG_N = 2, they compute tiles of the same tokens, and share x in the
// same way. A block may write to a buffer when the consumers of both blocks have read it.
//
// Constants:
//   N, K              multiples of 8
//   PARTS             1 or 2
//   ROWS              a multiple of 32, at most 256
//   STAGES            buffers of the ring
//   ALONG_M, ALONG_N  1 or 2, not both 2
//   GROUP_SIZE_M      clusters' tiles along the tokens that are processed together, to share w in the L2 cache
//   READ_BEFORE_WAIT  whether w may be read before the previous kernel has completed
//   STAGED            0 or 1, see above
//   OUT               type of y, of two bytes
// The generated text before this file defines `multiply` for ROWS, ROWS / 2 and ROWS / 4 columns, OTHER_PARAMETERS,
// OTHER_ARGUMENTS, OTHERS, Loaded, `load_others`, `epilogue`, FIRST_POINTER (the operand that is staged) and
// `set_first`.

constexpr int TILE_K = 64, WARPGROUP = 128, CONSUMERS = 2, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int ROW_BYTES = TILE_K * 2;          // bytes per row of a box: the width of the swizzle
constexpr int X_BOXES = 2, X_BOX = 64, W_BOXES = 4, W_BOX = ROWS / W_BOXES;  // boxes of a buffer, and their rows
constexpr int X_BYTES = X_BOX * ROW_BYTES, W_BYTES = W_BOX * ROW_BYTES;      // bytes per box
constexpr int W_AT = X_BOXES * X_BYTES, STAGE_BYTES = W_AT + W_BOXES * W_BYTES;
constexpr int TILE_M = X_BOXES * X_BOX, WIDTH = ROWS / PARTS;  // tokens and columns of y of a whole tile
constexpr int SQUARE_BYTES = X_BOX * ROW_BYTES;  // bytes of shared memory for a box of y
constexpr int STEPS = (K + TILE_K - 1) / TILE_K;
constexpr int CLUSTER = ALONG_M * ALONG_N;
constexpr int CLUSTER_M = TILE_M * ALONG_M, CLUSTER_N = WIDTH * ALONG_N;  // tokens and columns of a cluster's tiles
constexpr int COLUMNS = (N + CLUSTER_N - 1) / CLUSTER_N;

using Ring = BufferRing<STAGES, STAGE_BYTES>;

// The first token and column of a block's tile, and its kind: its boxes are those of a whole tile, a half, or a quarter.
enum Kind { WHOLE, HALF, QUARTER };
struct Tile {
  int token, column;
  Kind kind;
  __device__ int x_boxes() const { return kind == WHOLE ? X_BOXES : X_BOXES / 2; }
  __device__ int w_boxes() const { return kind == QUARTER ? W_BOXES / 2 : W_BOXES; }
};

// The clusters' tiles in order: first whole ones, GROUP_SIZE_M of them along the tokens at a time, column by column; then
// smaller ones, which are pieces of whole tiles, and tiles of the last tokens if these fill at most half a tile.
struct Tiles {
  int heights;  // whole tiles along the tokens
  int whole;    // whole tiles
  int cut;      // whole tiles that are cut in pieces
  int last;     // pieces of the last tokens
  Kind kind;    // kind of all pieces

  __device__ explicit Tiles(int m) {
    constexpr int HALF_TIME = 58, QUARTER_TIME = 38;  // estimated times of pieces, in percent of a whole tile's
    const int clusters = gridDim.x / CLUSTER, rest = m % CLUSTER_M;
    const bool low = 0 < rest && rest <= CLUSTER_M / 2;
    heights = (m + CLUSTER_M - 1) / CLUSTER_M - low;
    whole = heights * COLUMNS, cut = 0, last = low ? COLUMNS : 0, kind = HALF;
    const int left = whole % clusters, halves = 2 * left + last;
    const int idle = left > 0 ? clusters - left : 0;  // clusters without a tile in the last round of whole tiles
    const int uncut = (left > 0 ? 100 : 0) + HALF_TIME * rounds(max(0, last - idle), clusters);
    const int in_halves = HALF_TIME * rounds(halves, clusters);
    const int in_quarters = PARTS == 1 ? QUARTER_TIME * rounds(2 * halves, clusters) : uncut;
    if (min(in_halves, in_quarters) >= uncut) return;
    cut = left, whole -= left;
    if (in_quarters < in_halves) kind = QUARTER, last *= 2;
  }

  __device__ int pieces() const { return kind == QUARTER ? 4 : 2; }  // per whole tile
  __device__ int count() const { return whole + cut * pieces() + last; }

  // This block's tile of those of its cluster.
  __device__ Tile find(int i) const {
    const int piece = i - whole - cut * pieces();
    Tile tile;
    if (i < whole) {
      tile = place(i);
    } else if (piece < 0) {
      tile = place(whole + (i - whole) / pieces());
      const int part = (i - whole) % pieces();
      tile.kind = kind;
      tile.token += part % 2 * (CLUSTER_M / 2), tile.column += part / 2 * (CLUSTER_N / 2);
    } else {
      tile = {heights * CLUSTER_M, piece * (kind == QUARTER ? CLUSTER_N / 2 : CLUSTER_N), kind};
    }
    const int rank = blockIdx.x % CLUSTER;
    if (ALONG_M > 1) tile.token += rank * tile.x_boxes() * X_BOX;
    if (ALONG_N > 1) tile.column += rank * tile.w_boxes() * W_BOX / PARTS;
    return tile;
  }

 private:
  __device__ static int rounds(int tiles, int clusters) { return (tiles + clusters - 1) / clusters; }

  __device__ Tile place(int i) const {
    const int group = i / (GROUP_SIZE_M * COLUMNS), inside = i % (GROUP_SIZE_M * COLUMNS);
    const int height = min(GROUP_SIZE_M, heights - group * GROUP_SIZE_M);
    return {(group * GROUP_SIZE_M + inside % height) * CLUSTER_M, inside / height * CLUSTER_N, WHOLE};
  }
};

// Copies a box to this block, or to both blocks of the cluster.
__device__ inline void copy(bool shared, unsigned to, const TensorMap& map, int row, int k, const Ring& ring) {
  if (shared) {
    copy_box_to_blocks(to, map, row, k, ring.arrived(), (1 << CLUSTER) - 1);
  } else {
    copy_box(to, map, row, k, ring.arrived());
  }
}

// Copies the boxes of w of one step, of both parts in turn: those that this block copies.
__device__ inline void copy_weights(const Ring& ring, const TensorMap& w, const Tile& tile, int step) {
  barrier_expect(ring.arrived(), tile.x_boxes() * X_BYTES + tile.w_boxes() * W_BYTES);
  for (int b = 0; b < tile.w_boxes(); b++) {
    if (ALONG_M > 1 && b % ALONG_M != blockIdx.x % ALONG_M) continue;
    const int row = b % PARTS * N + tile.column + b / PARTS * W_BOX;
    copy(ALONG_M > 1, ring.buffer() + W_AT + b * W_BYTES, w, row, step * TILE_K, ring);
  }
}

// Copies the boxes of x of one step: those that this block copies. Of a single box, these are every other step's.
__device__ inline void copy_tokens(const Ring& ring, const TensorMap& x, const Tile& tile, int step) {
  for (int b = 0; b < tile.x_boxes(); b++) {
    if (ALONG_N > 1 && (tile.kind == WHOLE ? b : step) % ALONG_N != blockIdx.x % ALONG_N) continue;
    copy(ALONG_N > 1, ring.buffer() + b * X_BYTES, x, tile.token + b * X_BOX, step * TILE_K, ring);
  }
}

// Tells the producers that write to a buffer that this warp has read it: a lane for each.
__device__ inline void release(unsigned empty) {
  const int lane = threadIdx.x % 32;
  if (CLUSTER == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else if (lane < CLUSTER) {
    barrier_arrive_at(empty, lane);
  }
}

// The products of a tile by a consumer. Its boxes in a buffer are those of w from `w_box` on, and x_box.
template <int count>
__device__ inline void multiply_tile(float (&sums)[count], Ring& ring, int x_box, int w_box) {
  const unsigned long long x = matrix(ring.buffers + x_box * X_BYTES);
  const unsigned long long w = matrix(ring.buffers + W_AT + w_box * W_BYTES);
#pragma unroll
  for (int i = 0; i < count; i++) sums[i] = 0;
  consume_steps<STEPS>(
      ring,
      [&](int) {
        const unsigned at = ring.offset() / 16;  // descriptors count in 16 bytes
        barrier_wait(ring.arrived(), ring.parity);
        begin_products();
#pragma unroll
        for (int k = 0; k < TILE_K; k += 16) multiply(sums, x + (at + k / 8), w + (at + k / 8), true);
      },
      release);
}

// Waits for the threads of a consumer.
__device__ inline void wait_for_consumer(int consumer) {
  if (consumer == 0) {
    asm volatile("bar.sync 1, %0;" ::"n"(WARPGROUP) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(WARPGROUP) : "memory");
  }
}

// The numbers of y that a consumer writes: 64 tokens times the columns of a box. They have a buffer of 64 rows of 128
// bytes in shared memory. A thread has pairs of neighbouring columns of the products, and writes pieces of 16 bytes of y.
// Pieces are swizzled, so that pairs have no bank conflicts.
struct Square {
  unsigned buffer;
  int token, column, m;

  // The square `count` squares to the right, with the buffer that it takes.
  __device__ Square next(int count) const {
    return {buffer + count % 2 * SQUARE_BYTES, token, column + count * W_BOX, m};
  }

  __device__ static int thread() { return threadIdx.x % WARPGROUP; }
  __device__ unsigned place(int row, int eight) const { return buffer + row * ROW_BYTES + (eight ^ row % 8) * 16; }

  __device__ static int row(int half) { return thread() / 32 * 16 + half * 8 + thread() % 32 / 4; }
  __device__ unsigned pair(int half, int eight) const {  // columns 8 * eight + thread % 4 * 2
    return place(row(half), eight) + thread() % 4 * 4;
  }

  static constexpr int EIGHTS = W_BOX / 8, PIECES = (X_BOX * EIGHTS + WARPGROUP - 1) / WARPGROUP;  // PIECES: per thread
  __device__ static int piece_row(int i) { return (i * WARPGROUP + thread()) / EIGHTS; }
  __device__ static int piece_column(int i) { return (i * WARPGROUP + thread()) % EIGHTS * 8; }
  __device__ unsigned piece(int i) const { return place(piece_row(i), piece_column(i) / 8); }
  __device__ bool inside(int i) const {
    return piece_row(i) < X_BOX && token + piece_row(i) < m && column + piece_column(i) < N;
  }
  __device__ long long offset(int i) const { return (long long)(token + piece_row(i)) * N + column + piece_column(i); }
};

// Starts to copy this thread's pieces of the staged operand to shared memory.
__device__ inline void copy_first(const Square& at, const void* from) {
#pragma unroll
  for (int i = 0; i < Square::PIECES; i++)
    if (at.inside(i)) copy_piece(at.piece(i), (const char*)from + 2 * at.offset(i));
  commit_pieces();
}

// Writes y of the tile of a consumer, whose first number is at `at`, in squares that have two buffers in turn.
template <int count>
__device__ inline void finish(const float (&sums)[count], Square at, int consumer OTHER_ARGUMENTS, OUT* y) {
  constexpr int BOX_SUMS = W_BOX / 2, SQUARES = count / (BOX_SUMS * PARTS);
#pragma unroll
  for (int s = 0; s < SQUARES; s++) {
    const Square square = at.next(s);
    if (STAGED) {
      s + 1 < SQUARES ? wait_pieces<1>() : wait_pieces<0>();
      wait_for_consumer(consumer);
    }
#pragma unroll
    for (int i = 0; i < 2 * Square::EIGHTS; i++) {
      const int half = i % 2, eight = i / 2, t = square.token + Square::row(half);
      const int column = square.column + 8 * eight + Square::thread() % 4 * 2;
      Loaded loaded;
      if (t < square.m && column < N) load_others(loaded, t, column OTHERS);
      if (STAGED) set_first(loaded, load_word(square.pair(half, eight)));
      float a[PARTS][2], out[2];
#pragma unroll
      for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int n = 0; n < 2; n++) a[p][n] = sums[BOX_SUMS * (s * PARTS + p) + 4 * eight + 2 * half + n];
      epilogue(out, a, loaded);
      store_word(square.pair(half, eight), pack<OUT>(out));
    }
    wait_for_consumer(consumer);
#pragma unroll
    for (int i = 0; i < Square::PIECES; i++)
      if (square.inside(i)) *(uint4*)(y + square.offset(i)) = load_piece(square.piece(i));
    if (STAGED && s + 2 < SQUARES) copy_first(at.next(s + 2), FIRST_POINTER);
  }
  // The first square of the next tile has the buffer of this one.
  if (!STAGED && SQUARES % 2) wait_for_consumer(consumer);
}

// A tile by a consumer, which has BOXES boxes of w.
template <int BOXES>
__device__ inline void compute(Ring& ring, unsigned staged, const Tile& tile, int consumer, int m OTHER_ARGUMENTS,
                               OUT* y) {
  const int x_box = tile.kind == WHOLE ? consumer : 0, w_box = tile.kind == WHOLE ? 0 : consumer * BOXES;
  const Square at = {staged, tile.token + x_box * X_BOX, tile.column + w_box / PARTS * W_BOX, m};
  float sums[BOXES * W_BOX / 2];
  if (STAGED) {
    copy_first(at, FIRST_POINTER);
    if (BOXES / PARTS > 1) copy_first(at.next(1), FIRST_POINTER);
  }
  multiply_tile(sums, ring, x_box, w_box);
  finish(sums, at, consumer OTHERS, y);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    llmc_tiles(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, OTHER_PARAMETERS OUT* y, int m) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned long long barriers[2 * STAGES];
  const unsigned buffers = (shared_address(memory) + 1023) & ~1023u;  // a swizzled box begins at a multiple of 1024
  const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
  init_ring(full, empty, STAGES, CLUSTER * CONSUMERS * WARPGROUP / 32);
  if (CLUSTER > 1) cluster_wait();  // the other block's barriers are initialized

  Ring ring(buffers, full, empty);
  const Tiles tiles(m);
  const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP, 0);  // in a register of the warp
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      produce_tiles<STEPS, CLUSTER, READ_BEFORE_WAIT>(
          ring, tiles, [&](const Ring& at, const Tile& tile, int step) { copy_weights(at, w, tile, step); },
          [&](const Ring& at, const Tile& tile, int step) { copy_tokens(at, x, tile, step); });
    } else {
      begin_launch();
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    begin_launch();
    const int consumer = warpgroup - 1, first = blockIdx.x / CLUSTER, count = tiles.count();
    const unsigned staged = buffers + STAGES * STAGE_BYTES + consumer * 2 * SQUARE_BYTES;
    int i = first;
    for (; i < tiles.whole; i += gridDim.x / CLUSTER)
      compute<W_BOXES>(ring, staged, tiles.find(i), consumer, m OTHERS, y);
    if (tiles.kind == HALF) {
      for (; i < count; i += gridDim.x / CLUSTER)
        compute<W_BOXES / 2>(ring, staged, tiles.find(i), consumer, m OTHERS, y);
    } else if constexpr (PARTS == 1) {
      for (; i < count; i += gridDim.x / CLUSTER)
        compute<W_BOXES / 4>(ring, staged, tiles.find(i), consumer, m OTHERS, y);
    }
  }
  if (CLUSTER > 1) {  // no block of the cluster accesses this one's memory any more
    __syncwarp();
    cluster_wait();
  }
}
