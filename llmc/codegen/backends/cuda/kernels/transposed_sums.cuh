// Functions of the sums of products whose left factor is the weight, which are transposed: blocks of 64 rows of the
// weight times rows of x. A thread has the sums of two rows of the weight, 8 apart, and of two of every eight rows of x.
// This text follows the constant N, the number of columns of the result y.

// Keeps the compiler from moving the sums to other registers, for which it would have to wait for all products.
template <int blocks, int count> __device__ inline void pin(float (&sums)[blocks][count]) {
#pragma unroll
  for (int b = 0; b < blocks; b++)
#pragma unroll
    for (int i = 0; i < count; i++) asm volatile("" : "+f"(sums[b][i])::"memory");
}

template <int blocks, int count> __device__ inline void clear(float (&sums)[blocks][count]) {
#pragma unroll
  for (int b = 0; b < blocks; b++)
#pragma unroll
    for (int i = 0; i < count; i++) sums[b][i] = 0;
}

// Writes the transposed 8 x 8 values, of which a thread has two rows of x and one column of y each: 16 bytes of each of
// eight rows, or 32 if there are two halves, whose columns are 8 apart.
template <typename T, int HALVES>
__device__ inline void store_columns(T* y, const float (&value)[HALVES][2], const int* row, int first, int count,
                                     int column) {
  const int lane = threadIdx.x % 32, mine = first + lane / 4;
  unsigned word[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; h++)
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(word[h]) : "r"(pack<T>(value[h])));
  if (HALVES == 1) {
    if (mine < count) *(unsigned*)(y + (long long)row[mine] * N + column + lane % 4 * 2) = word[0];
    return;
  }
  // Of two threads side by side, the first gets four columns of the first half, the second four of the second.
  const bool second = lane % 2;
  const unsigned other = __shfl_xor_sync(0xFFFFFFFF, second ? word[0] : word[HALVES - 1], 1);
  const uint2 four = second ? make_uint2(other, word[HALVES - 1]) : make_uint2(word[0], other);
  if (mine < count) *(uint2*)(y + (long long)row[mine] * N + column + lane % 4 * 2 + (second ? 6 : 0)) = four;
}
template <int HALVES>
__device__ inline void store_columns(float* y, const float (&value)[HALVES][2], const int* row, int first, int count,
                                     int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int mine = first + lane % 4 * 2 + i;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      if (mine < count) y[(long long)row[mine] * N + column + 8 * h + lane / 4] = value[h][i];
  }
}
