// The layout of shared memory in skinny_slices.cu, and the copies of weights to it. This text follows its constants.

constexpr int BLOCK = 64, STRIP = 16, BLOCK_BYTES = BLOCK * BLOCK / 2;  // rows and columns of a block of codes
constexpr int TILES = TOKENS / 8;                                      // tiles of 8 tokens, one instruction each
constexpr int WARPS = GROUPS * SLICES, THREADS = WARPS * 32;
constexpr int STEP = CHUNKS * BLOCK, ALL_STEPS = K / STEP;             // columns per step; steps of all blocks
constexpr int STEPS = (ALL_STEPS + SPLIT - 1) / SPLIT;                 // maximum steps per block
constexpr int WARP_STEPS = (STEPS + SLICES - 1) / SLICES;              // maximum steps per warp
constexpr bool REUSED = TOKEN_STEPS < WARP_STEPS;                      // whether memory for x is reused
constexpr int ENTRIES = STEP > GROUP ? STEP / GROUP : 1;               // scales per row and step
constexpr int SPAN = STEP / ENTRIES / 16;                              // products of 16 columns per scale
constexpr int Y_STRIPS = STRIPS / PARTS;                               // strips of y per warp
constexpr int ROWS = GROUPS * Y_STRIPS * STRIP;                        // columns of y per block
constexpr bool HAS_ZEROS = ZERO_POINT < 0, WHOLE = N % ROWS == 0;
static_assert(!REUSED || GROUPS == 1, "warps that share x do not wait for each other");

// A stage: codes [STRIPS][CHUNKS][32][16 bytes], scales [ENTRIES][STRIPS][16], zero points [ENTRIES][STRIPS][16], the gain.
constexpr int COPIES = ENTRIES * STRIPS * (HAS_ZEROS ? 3 : 2);  // copies of 16 bytes: two for scales, one for zero points
constexpr int SCALES_AT = STRIPS * CHUNKS * 512, ZEROS_AT = SCALES_AT + ENTRIES * STRIPS * 32;
constexpr int GAIN_AT = SCALES_AT + COPIES * 16, STAGE_BYTES = GAIN_AT + (NORMED && GROUPS == 1 ? STEP * 2 : 0);
// Shared memory: x [SLICES][TOKEN_STEPS][CHUNKS][TOKENS][BLOCK] in the 128-byte swizzle, and the rings [WARPS][STAGES], in
// whose place the sums [SLICES][TOKENS][SUMS_STRIDE] are written; received sums [SPLIT - 1][SHARE][SUMS_STRIDE], the
// squares [WARPS][TOKENS] and those received [SPLIT - 1][SHARE].
constexpr int BOX_BYTES = TOKENS * BLOCK * 2, X_BYTES = SLICES * TOKEN_STEPS * CHUNKS * BOX_BYTES;
constexpr int SUMS_STRIDE = PARTS * ROWS + 4, SHARE = TOKENS / SPLIT;  // floats per token; tokens that a block writes
constexpr int RING_BYTES = X_BYTES + WARPS * STAGES * STAGE_BYTES, SUMS_BYTES = SLICES * TOKENS * SUMS_STRIDE * 4;
constexpr int RECEIVED_AT = RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES;
constexpr int SQUARES_AT = RECEIVED_AT + (SPLIT - 1) * SHARE * SUMS_STRIDE * 4;
constexpr int PEER_SQUARES_AT = SQUARES_AT + (NORMED ? WARPS * TOKENS * 4 : 0);
// The sums of the groups of x, if the warps of a block prepare x together: [SLICES][TOKEN_STEPS][ENTRIES][TOKENS].
constexpr bool PREPARED = GROUPS > 1;
constexpr int X_SUMS_AT = (PEER_SQUARES_AT + (NORMED ? (SPLIT - 1) * SHARE * 4 : 0) + 15) / 16 * 16;
constexpr int X_SUMS_BYTES = PREPARED ? SLICES * TOKEN_STEPS * ENTRIES * TOKENS * 4 : 0;
static_assert(X_SUMS_AT + X_SUMS_BYTES + 1024 <= SHARED, "the launch has too little shared memory");
static_assert(RECEIVED_AT % 16 == 0 && SQUARES_AT % 16 == 0, "sums are loaded four at a time");
constexpr int PEER_BYTES = (SHARE * PARTS * ROWS + (NORMED ? SHARE : 0)) * 4;  // bytes that a block receives from another
constexpr int QUADS = (SHARE * ROWS / 4 + THREADS - 1) / THREADS;  // groups of four columns of y that a thread writes

struct Problem {
  const unsigned char* codes;  // [PARTS * N / 64][K / 64][2048]
  const SCALE* scales;         // [K / GROUP][PARTS * N]
  const unsigned char* zeros;  // [K / GROUP][PARTS * N], or null
  const bf16* gain;            // [K], or null
  int token, column;           // the first ones of the block's tile
  int strip;                   // this warp's first strip of y
  int lane;                    // this thread's number in its warp
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
