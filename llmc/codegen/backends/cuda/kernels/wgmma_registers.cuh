// Products of warpgroups whose left factor is in registers (PTX ISA, "wgmma.mma_async"), for 8 to 128 columns.

// d[64, n] = a[64, 16] @ b[n, 16].T by one warpgroup, asynchronously, plus d if `add` is not 0. `a` must not change and
// `d` is not valid until `wait_products`. b: the low word of the descriptor; MATRIX_HIGH is the other one. A thread has the
// sums of two rows, 8 apart: of two tokens of every 8 each.
#define A_AND_B : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define PRODUCT(n, b, add, sums, factors) \
  "{\n.reg .pred p;\n.reg .b32 high;\n.reg .b64 x;\nsetp.ne.b32 p, " add ", 0;\n" \
  "mov.b32 high, " MATRIX_HIGH ";\nmov.b64 x, {" b ", high};\n" \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" sums "}, " factors ", x, p, 1, 1, 0;\n}"
__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b, int add) {
  asm volatile(PRODUCT(8, "%8", "%9",
                       "%0, %1, %2, %3",
                       "{%4, %5, %6, %7}")
               : R4(0) A_AND_B);
}
__device__ inline void multiply(float (&d)[8], const unsigned (&a)[4], unsigned b, int add) {
  asm volatile(PRODUCT(16, "%12", "%13",
                       "%0, %1, %2, %3, %4, %5, %6, %7",
                       "{%8, %9, %10, %11}")
               : R4(0), R4(4) A_AND_B);
}
__device__ inline void multiply(float (&d)[16], const unsigned (&a)[4], unsigned b, int add) {
  asm volatile(PRODUCT(32, "%20", "%21",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                       "{%16, %17, %18, %19}")
               : R16(0) A_AND_B);
}
__device__ inline void multiply(float (&d)[32], const unsigned (&a)[4], unsigned b, int add) {
  asm volatile(PRODUCT(64, "%36", "%37",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                       "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                       "{%32, %33, %34, %35}")
               : R16(0), R16(16) A_AND_B);
}
__device__ inline void multiply(float (&d)[64], const unsigned (&a)[4], unsigned b, int add) {
  asm volatile(PRODUCT(128, "%68", "%69",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                       "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
                       "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
                       "%56, %57, %58, %59, %60, %61, %62, %63",
                       "{%64, %65, %66, %67}")
               : R16(0), R16(16), R16(32), R16(48) A_AND_B);
}
#undef PRODUCT
#undef R16
#undef R4
#undef A_AND_B
