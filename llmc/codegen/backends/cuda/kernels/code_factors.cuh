// Left factors of wgmma from weights of 4 bits in shared memory, in the order of the op pack_fragments, for kernels that
// keep the sums transposed. Constants: WARPGROUP (its threads), BLOCK (rows and columns of a block of codes), GROUP,
// ZERO_POINT (of all groups, or -1: there is one for each), and the type SCALE (bf16 or f16).

constexpr bool HAS_ZEROS = ZERO_POINT < 0;

// Constants that stay in registers.
struct Constants {
  unsigned mask, base;
  __device__ Constants() : mask(opaque(0x000F000F)), base(opaque(0x43004300)) {}
};

// The part of a block of a buffer that one consumer thread reads: codes, and the scales and zero points of its two rows.
struct Weights {
  const uint4* codes;          // [CHUNKS][128]
  const SCALE* scales;         // [SCALES][BLOCK]
  const unsigned char* zeros;  // [SCALES][BLOCK]

  // Derives this thread's pointers from those of the block.
  __device__ Weights(const unsigned char* codes, const unsigned char* scales, const unsigned char* zeros) {
    const int thread = threadIdx.x % WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
    this->codes = (const uint4*)codes + thread;
    this->scales = (const SCALE*)scales + row;
    this->zeros = zeros + row;
  }
};

// Converts the codes of 64 columns into the left factors of four products; with SCALED, times their scales. FLOATS: the
// codes are floats e2m1.
template <bool SCALED, bool FLOATS = false>
__device__ inline void convert(unsigned (&a)[4][4], const Weights& from, int chunk, const Constants& constants) {
  const uint4 words = from.codes[chunk * WARPGROUP];
  const unsigned word[4] = {words.x, words.y, words.z, words.w};
  unsigned scale[2], offset[2];
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const int column = chunk * BLOCK + 16 * s, entry = column / GROUP;
    if (s == 0 || column % GROUP == 0) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (SCALED) scale[half] = twice(to_bf16(from.scales[entry * BLOCK + 8 * half]).bits);
        offset[half] = twice(0x4300 + (HAS_ZEROS ? from.zeros[entry * BLOCK + 8 * half] : ZERO_POINT));
      }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const unsigned less = FLOATS ? float_pair(word[s], r)
                                   : subtract(code_pair(word[s] >> 4 * r, constants.mask, constants.base), offset[r % 2]);
      a[s][r] = SCALED ? multiply(less, scale[r % 2]) : less;
    }
  }
}
