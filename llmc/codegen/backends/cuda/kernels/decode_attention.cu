// Attention of one token per row over the pages of a KV pool (see the op paged_attention), by mma.m16n8k16.
//
// Work. A block computes one token and one key head, or one of SPLITS parts of its keys. The keys are the rows of its
// products, and the query heads that share the key head are the columns, so that 16 keys and 8 query heads fill an
// instruction.
//
// Pipeline. A tile is 16 tokens of a page. Its keys are contiguous, and so are its values: two bulk copies bring them
// to shared memory. Few instructions copy a tile, so that the bytes in flight do not depend on how fast the threads
// issue loads. A warp takes every WARPS-th tile, keeps STAGES tiles in flight, and has a softmax of its own, so warps
// do not wait for each other until the block combines their results.
//
// With SINGLE, the batch also has longer rows, whose results another kernel writes to `longer`; this kernel computes
// the rows of one token (see the op paged_attention_single).
//
// Constants:
//   GROUP              query heads of a key head
//   KV_HEADS           key heads
//   HEAD_DIM           a multiple of 64
//   PAGE               tokens of a page, a multiple of 16
//   SCALE              factor of the logits
//   SOFTCAP, WINDOW    0 for none
//   SPLITS             parts of the keys; 0 if they are not split
//   SINGLE             see above
//   WARPS, STAGES      warps of a block; tiles in flight of each
//   RESIDENT           blocks for which a multiprocessor has memory
//   READ_BEFORE_WAIT   whether the previous kernel writes none of the inputs that can be read early
//   ITEM               bytes of an element of the pool: 2 (of the type FACTOR) or 1 (f8e4m3)
//   QUERY_IS_FACTOR    whether QUERY and FACTOR are the same type
//   QUERY, FACTOR, OUT types of the queries (bf16 or f16), of the factors of products (QUERY or f16), and of the result
// The generated text before this file defines OTHER_PARAMETERS, and the names of operands and results that a node may
// lack: STARTS, LONGER, SCALES, SINKS and LSE. kv_tiles.cuh has the sizes of tiles (TILE, STEPS, COLUMNS, HEADS), and
// Span, Tiles and Queries. A lane is 4 g + q in these comments, as in the fragments of the PTX ISA.

constexpr int THREADS = 32 * WARPS;
constexpr int SUM_STRIDE = HEAD_DIM + 4;  // floats per head in shared memory, padded to avoid bank conflicts
constexpr int TILES_BYTES = WARPS * STAGES * SLOT_BYTES, SUMS_BYTES = WARPS * GROUP * (SUM_STRIDE * 4 + 8);
// The sums take the place of the tiles. The memory of a barrier may not be used for anything else.
constexpr int BARRIERS_AT = TILES_BYTES > SUMS_BYTES ? TILES_BYTES : SUMS_BYTES;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float LOWEST = -1e30f;  // below every logit, but finite: the difference of two maxima is never NaN

__device__ inline float infinity() { return __int_as_float(0x7F800000); }

__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Transposes a matrix of 8 by 8 that the warp holds.
__device__ inline unsigned transposed(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The largest of `x` over the threads that have the same columns.
__device__ inline float largest_of_column(float x) {
#pragma unroll
  for (int other = 4; other < 32; other *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, other));
  return x;
}

// The softmax of a warp's tiles so far. A thread has the query heads 2 q and 2 q + 1 of each tile of columns.
struct Softmax {
  float top[COLUMNS][2], total[COLUMNS][2];  // the largest logit; this thread's part of the sum of exp2(logit - top)
  float sums[STEPS][COLUMNS][4];             // weighted sums of values: elements 16 i + g and 16 i + g + 8

  __device__ void clear() {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      top[c][0] = top[c][1] = LOWEST;
      total[c][0] = total[c][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][c][j] = 0.0f;
    }
  }

  // Replaces a tile's logits by their weights exp2(logit - top). If `top` grows, rescales the earlier sums.
  __device__ void weigh(float (&logits)[COLUMNS][4]) {
    float next[COLUMNS][2];
    bool larger = false;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        next[c][j] = fmaxf(top[c][j], largest_of_column(fmaxf(logits[c][j], logits[c][j + 2])));
        larger |= next[c][j] > top[c][j];
      }
    if (__any_sync(ALL, larger)) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float factor = power_of_2(top[c][j] - next[c][j]);
          top[c][j] = next[c][j];
          total[c][j] *= factor;
#pragma unroll
          for (int i = 0; i < STEPS; i++) {
            sums[i][c][j] *= factor;
            sums[i][c][j + 2] *= factor;
          }
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        logits[c][j] = power_of_2(logits[c][j] - top[c][j % 2]);
        total[c][j % 2] += logits[c][j];
      }
  }
};

// Computes the logits of a tile, times log2(e). A thread has those of the keys g and g + 8 and of its two query heads.
// scale: the factor of the logits, times the scale of the keys.
__device__ inline void find_logits(float (&logits)[COLUMNS][4], unsigned keys, const Queries& queries, float scale,
                                   int lane) {
  float odd[COLUMNS][4];  // sums of odd steps; a product waits for the previous one that adds to the same sums
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
#pragma unroll
    for (int j = 0; j < 4; j++) logits[c][j] = odd[c][j] = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; i += STEPS_OF_LOAD) {
    unsigned a[STEPS_OF_LOAD][4];
    load_keys(a, keys, i, lane);
#pragma unroll
    for (int k = i; k < i + STEPS_OF_LOAD; k++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) add_product(k % 2 ? odd[c] : logits[c], a[k - i], queries.of[c][k], FACTOR());
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float logit = logits[c][j] + odd[c][j];
      if (SOFTCAP != 0.0f) {  // tanh(x) = 1 - 2 / (exp(2 x) + 1)
        const float power = power_of_2(logit * (2.0f * LOG2_E / (SOFTCAP != 0.0f ? SOFTCAP : 1.0f) * scale));
        logits[c][j] = (1.0f - __fdividef(2.0f, power + 1.0f)) * (SOFTCAP * LOG2_E);
      } else {
        logits[c][j] = logit * (scale * LOG2_E);
      }
    }
}

// Adds a tile's values, times their weights. visible: masks of the keys 2 q, 2 q + 1 and of those + 8, in 16 bits each;
// slots that hold no token may contain NaN.
__device__ inline void add_values(Softmax& softmax, unsigned values, const float (&weights)[COLUMNS][4], bool whole,
                                  const unsigned (&visible)[2], int lane) {
  unsigned b[COLUMNS][2];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
#pragma unroll
    for (int j = 0; j < 2; j++) b[c][j] = transposed(pack(weights[c][2 * j], weights[c][2 * j + 1]));
#pragma unroll
  for (int i = 0; i < STEPS; i += STEPS_OF_LOAD) {
    unsigned a[STEPS_OF_LOAD][4];
    load_values(a, values, i, lane);
#pragma unroll
    for (int k = 0; k < STEPS_OF_LOAD; k++) {
      if (!whole)
#pragma unroll
        for (int j = 0; j < 4; j++) a[k][j] &= visible[j / 2];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) add_product(softmax.sums[i + k][c], a[k], b[c], FACTOR());
    }
  }
}

// Computes the tiles of one warp.
__device__ inline void attend(Softmax& softmax, Tiles& tiles, const Queries& queries, float scale) {
  const int lane = tiles.lane;
  for (int i = 0; i < tiles.count; i++) {
    const unsigned keys = tiles.wait(i);
    const int begin = tiles.number(i) * TILE, low = tiles.span.low, length = tiles.span.length;
    const bool whole = begin >= low && begin + TILE <= length;
    float logits[COLUMNS][4];
    unsigned visible[2];
    find_logits(logits, keys, queries, scale, lane);
    if (!whole) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int key = begin + lane / 4 + 8 * j, pair = begin + lane % 4 * 2 + 8 * j;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          if (key < low || key >= length) logits[c][2 * j] = logits[c][2 * j + 1] = -infinity();
        visible[j] = pair >= low && pair < length ? 0xFFFF : 0;
        visible[j] |= pair + 1 >= low && pair + 1 < length ? 0xFFFF0000 : 0;
      }
    }
    softmax.weigh(logits);
    add_values(softmax, keys + KEY_BYTES, logits, whole, visible, lane);
    __syncwarp();  // all threads have read the tile
    tiles.copy(i + STAGES);
  }
}

// The sums of the warps in shared memory: [WARPS][GROUP][SUM_STRIDE] floats, then the maxima and totals.
struct Shared {
  float* sums;
  float2* tops;  // [WARPS][GROUP]: the largest logit, and the total

  __device__ void store(Softmax& softmax, int warp, int lane) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int head = c * 8 + lane % 4 * 2 + j;
        float total = softmax.total[c][j];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) total += __shfl_xor_sync(ALL, total, other);
        if (head >= GROUP) continue;
        if (lane < 4) tops[warp * GROUP + head] = make_float2(softmax.top[c][j], total);
        float* to = sums + (warp * GROUP + head) * SUM_STRIDE + lane / 4 * STEPS_OF_LOAD;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          to[i * 16] = softmax.sums[i][c][j];
          to[i * 16 + (ITEM == 2 ? 8 : 1)] = softmax.sums[i][c][j + 2];
        }
      }
  }
};

__device__ inline void store_four(float* to, const float (&x)[4]) {
  *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
}
template <typename T> __device__ inline void store_four(T* to, const float (&x)[4]) {
  unsigned short bits[4];
#pragma unroll
  for (int j = 0; j < 4; j++) bits[j] = from_float<T>(x[j]).bits;
  *(uint2*)to = make_uint2(bits[0] | (unsigned)bits[1] << 16, bits[2] | (unsigned)bits[3] << 16);
}

// Combines the warps' softmaxes. out, lse: of the first query head; heads are SPLITS apart. scale: of the values.
template <typename Sink>
__device__ inline void combine(const Shared& shared, OUT* out, float* lse, const Sink* sinks, float scale) {
  constexpr int PIECES = HEAD_DIM / 4, APART = SPLITS ? SPLITS : 1;
  for (int i = threadIdx.x; i < GROUP * PIECES; i += THREADS) {
    const int head = i / PIECES, column = i % PIECES * 4;
    const float sink = sinks ? to_float(sinks[head]) * LOG2_E : LOWEST;
    float top = sink, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, shared.tops[w * GROUP + head].x);
    float total = sinks ? power_of_2(sink - top) : 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2 of = shared.tops[w * GROUP + head];
      const float weight = power_of_2(of.x - top);
      const float4 sum = *(const float4*)(shared.sums + (w * GROUP + head) * SUM_STRIDE + column);
      total += of.y * weight;
      x[0] += sum.x * weight;
      x[1] += sum.y * weight;
      x[2] += sum.z * weight;
      x[3] += sum.w * weight;
    }
    const float inverse = scale / fmaxf(total, 1e-30f);
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] *= inverse;
    store_four(out + (long long)head * APART * HEAD_DIM + column, x);
    if (SPLITS && column == 0)
      lse[head * APART] = total > 0.0f ? (top + log2f(total)) * LN_2 : -infinity();
  }
}

// Copies the results of the tokens from `begin` to `end` of the query heads of this block.
__device__ inline void copy_longer(const OUT* from, OUT* to, int begin, int end, int head) {
  constexpr int PIECES = GROUP * HEAD_DIM * (int)sizeof(OUT) / 16;
  for (int i = threadIdx.x; i < (end - begin) * PIECES; i += THREADS) {
    const long long at = ((long long)(begin + i / PIECES) * HEADS + head * GROUP) * HEAD_DIM;
    ((uint4*)(to + at))[i % PIECES] = ((const uint4*)(from + at))[i % PIECES];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    llmc_decode_attention(const QUERY* q, const __grid_constant__ TensorMap kv, const int* pages, const int* rows,
                          OTHER_PARAMETERS int width, int row_count, int token_count) {
  extern __shared__ unsigned char dynamic_memory[];
  unsigned char* memory = dynamic_memory + (-shared_address(dynamic_memory) & 1023);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Blocks of the heads of a row follow each other: they read whole pages, which is faster than one head of many rows.
  const int entry = blockIdx.x / KV_HEADS, head = blockIdx.x % KV_HEADS;
  const unsigned ring = shared_address(memory) + warp * STAGES * SLOT_BYTES;
  const unsigned barriers = shared_address(memory) + BARRIERS_AT + warp * STAGES * 8;
  if (threadIdx.x == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(&kv) : "memory");
  if (lane == 0)
    for (int i = 0; i < STAGES; i++) barrier_init(barriers + i * 8, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();

  if (!READ_BEFORE_WAIT) begin_launch();
  // The token of this block, and the first one after its row.
  const int token = SINGLE ? STARTS[entry] : entry, next = SINGLE ? STARTS[entry + 1] : token + 1;
  const int row = SINGLE ? rows[entry] : row_of(rows, STARTS, row_count, token);
  const bool computed = !SINGLE || (next - token == 1 && row >= 0);
  const Span span = span_of(pages, width, computed ? row : -1, next > token ? positions[token] : -1);
  Tiles tiles = {kv, span, ring, barriers, warp, lane, head, evict_first()};
  tiles.load_pages();
  if (READ_BEFORE_WAIT && !SINGLE) begin_launch();
#pragma unroll
  for (int i = 0; i < STAGES; i++) tiles.copy(i);

  const long long first = (long long)token * HEADS + head * GROUP;
  Softmax softmax;
  softmax.clear();
  if (computed) {
    Queries queries;
    queries.load(q + first * HEAD_DIM, lane);
    attend(softmax, tiles, queries, SCALE * (SCALES ? SCALES[head] : 1.0f));
  }
  __syncthreads();  // the sums take the place of the tiles
  const Shared shared = {(float*)memory, (float2*)(memory + WARPS * GROUP * SUM_STRIDE * 4)};
  shared.store(softmax, warp, lane);
  __syncthreads();
  if (READ_BEFORE_WAIT && SINGLE) begin_launch();
  constexpr int APART = SPLITS ? SPLITS : 1;
  const long long part = first * APART + (SPLITS ? blockIdx.z : 0);
  if (computed) {
    const float scale = SCALES ? SCALES[KV_HEADS + head] : 1.0f;
    combine(shared, y + part * HEAD_DIM, LSE ? LSE + part : nullptr, SINKS, scale);
  }
  if (SINGLE && LONGER != y) {
    // The blocks of the last row also copy the padding.
    const int end = entry == row_count - 1 ? token_count : next;
    copy_longer(LONGER, y, computed ? next : token, end, head);
  }
}
