// Loads and stores of neighbouring numbers by the threads of a product of warpgroups.

// 1 / (1 + exp(-x)), to about 21 bits.
__device__ inline float fast_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Loads two neighbouring numbers; packs two into a word.
__device__ inline void load_pair(float (&to)[2], const float* from) {
  const float2 pair = *(const float2*)from;
  to[0] = pair.x, to[1] = pair.y;
}
template <typename T> __device__ inline void load_pair(float (&to)[2], const T* from) {
  const unsigned pair = *(const unsigned*)from;
  to[0] = to_float(T{(unsigned short)pair}), to[1] = to_float(T{(unsigned short)(pair >> 16)});
}
template <typename T> __device__ inline unsigned pack(const float (&from)[2]) {
  return from_float<T>(from[0]).bits | (unsigned)from_float<T>(from[1]).bits << 16;
}

// Stores two neighbouring numbers.
__device__ inline void store_pair(float* y, const float (&from)[2]) { *(float2*)y = make_float2(from[0], from[1]); }
template <typename T> __device__ inline void store_pair(T* y, const float (&from)[2]) { *(unsigned*)y = pack<T>(from); }

// Stores columns j and j + 8 of a row, two neighbours each, that this thread has: `inside` tells which are in y. The
// threads of a row write 32 bytes together.
__device__ inline void store(float* y, const float (&from)[2][2], const bool (&inside)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (inside[i]) *(float2*)(y + 8 * i) = make_float2(from[i][0], from[i][1]);
}
template <typename T> __device__ inline void store(T* y, const float (&from)[2][2], const bool (&inside)[2]) {
  // Of two threads side by side, the first gets the four numbers at j, the second those at j + 8.
  const unsigned low = pack<T>(from[0]), high = pack<T>(from[1]);
  const bool second = threadIdx.x % 2;
  const unsigned other = __shfl_xor_sync(0xFFFFFFFF, second ? low : high, 1);
  const uint2 four = second ? make_uint2(other, high) : make_uint2(low, other);
  if (second ? inside[1] : inside[0]) *(uint2*)(y + (second ? 6 : 0)) = four;
}
