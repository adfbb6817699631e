// The epilogue of four neighbouring columns of y. Constants: PARTS and the type OUT; the text before this defines Loaded
// and epilogue, which takes two columns.

struct alignas(4 * sizeof(OUT)) Four { OUT of[4]; };

// sums: of each part. loaded: the other operands of the first and of the last two columns.
__device__ inline Four four_columns(const float (&sums)[PARTS][4], const Loaded (&loaded)[2]) {
  Four four;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float a[PARTS][2], out[2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int j = 0; j < 2; j++) a[part][j] = sums[part][2 * half + j];
    epilogue(out, a, loaded[half]);
#pragma unroll
    for (int j = 0; j < 2; j++) four.of[2 * half + j] = from_float<OUT>(out[j]);
  }
  return four;
}
