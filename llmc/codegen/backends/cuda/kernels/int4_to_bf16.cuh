// Codes of 4 bits as bf16, two at a time, in the words of the op pack_fragments. A pair of bf16 fills a register.

// (word & 0x000F000F) | 0x43004300 as one instruction: 128 + code in bf16, of two codes. A caller keeps both constants in
// registers, which `opaque` makes.
__device__ inline unsigned code_pair(unsigned word, unsigned mask, unsigned base) {
  unsigned pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word), "r"(mask), "r"(base));
  return pair;
}

// A constant of which the compiler does not know the value, so that it stays in a register.
__device__ inline unsigned opaque(unsigned x) {
  unsigned y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ inline unsigned twice(unsigned x) { return x | x << 16; }
__device__ inline unsigned subtract(unsigned x, unsigned y) {
  unsigned z;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
__device__ inline unsigned multiply(unsigned x, unsigned y) {
  unsigned z;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
