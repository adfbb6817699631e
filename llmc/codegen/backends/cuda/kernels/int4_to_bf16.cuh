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

// Constants in registers, with which the codes of a strip of 16 rows are converted in the fewest instructions: a code c
// becomes 128 + c in the upper 8 rows, and 8 + c / 2 in the lower ones.
struct Masks {
  unsigned mask[2] = {opaque(0x000F000F), opaque(0x00780078)}, base[2] = {opaque(0x43004300), opaque(0x41004100)};

  // Two codes in bf16, from the bits 4 r to 4 r + 3 of both halves of a word; an odd r belongs to the lower rows.
  __device__ unsigned pair(unsigned word, int r) const {
    return code_pair(word >> (r % 2 ? 4 * r - 3 : 4 * r), mask[r % 2], base[r % 2]);
  }
};

// d[16, 8] = a[16, 16] @ b[8, 16].T, plus d unless this is the first product. A thread has two neighbouring columns of the
// rows g and g + 8.
__device__ inline void add_product(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool first = false) {
  const float c[4] = {first ? 0.0f : d[0], first ? 0.0f : d[1], first ? 0.0f : d[2], first ? 0.0f : d[3]};
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Codes r of a word as floats e2m1: the bits of a code are those of a bf16 whose exponent is 126 less, or of a subnormal.
__device__ inline unsigned float_pair(unsigned word, int r) {
  const unsigned magnitude = (r < 2 ? word << (6 - 4 * r) : word >> (4 * r - 6)) & 0x01C001C0;
  return multiply(magnitude | (word << (12 - 4 * r) & 0x80008000), 0x7E807E80);  // 2^126
}
