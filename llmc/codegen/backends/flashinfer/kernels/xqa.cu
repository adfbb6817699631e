// Paged attention of one token per row by FlashInfer's XQA, for all query heads of a key head in one block.
//
// A block computes a token's attention over the pages of its row, or over one of PARTS parts of them. `mha.cu` is
// FlashInfer's with the changes of `xqa_source.py`. To it, every block is a launch of its own: of one request, whose
// keys are those of the block's span.
//
// Constants: those of mha.cu, and HEADS, KV_HEADS, TABLE_WIDTH, WINDOW (0: none), SCALE, PARTS (0: the whole row), SHARED
// (bytes of dynamic shared memory), RESIDENT (blocks of a multiprocessor), HAS_SCALES, HAS_SINKS, SINK (their type),
// READ_BEFORE_WAIT (whether the previous kernel does not write the tables), PDL.

// XQA has blocks of three axes; launches have blocks of one.
__device__ inline uint3 xqa_thread() { return uint3{threadIdx.x % 128, 0, threadIdx.x / 128}; }

// The distance of the heads of a result, in heads.
#define HEAD_STRIDE (PARTS > 0 ? PARTS : 1)

#include "mha.cu"

static_assert(sizeof(SharedMem) == SHARED, "the bytes of shared memory differ from those of the launch");

// The keys that a block reads: its first entry of the page table, their number, and how many of them come before the
// window. The length of padding and of a part without pages is 0.
struct Span {
  KVCachePageIndex const* pages;
  uint32_t length, before;
};

__device__ inline Span find_span(int const* pages, int row, int position, int part) {
  if (row < 0 || position < 0) return Span{pages, 0, 0};
  int const low = WINDOW > 0 ? max(0, position + 1 - WINDOW) : 0;
  int first = low / TOKENS_PER_PAGE, end = position / TOKENS_PER_PAGE + 1;
  if constexpr (PARTS > 0) {
    int const each = (end - first + HEAD_STRIDE - 1) / HEAD_STRIDE;
    first += part * each;
    end = min(end, first + each);
  }
  if (first >= end) return Span{pages, 0, 0};
  int const begin = first * TOKENS_PER_PAGE;
  int const length = min(position + 1, end * TOKENS_PER_PAGE) - begin;
  return Span{pages + (long long)row * TABLE_WIDTH + first, (uint32_t)length, (uint32_t)max(0, low - begin)};
}

// The row of a token: nearly always that of the same number. -1 if no row has the token.
__device__ inline int row_of(int const* starts, int rows, int token) {
  if (token < rows && starts[token] == token && starts[token + 1] > token) return token;
  for (int i = 0; i < rows; i++)
    if (starts[i] <= token && token < starts[i + 1]) return i;
  return -1;
}

__device__ inline void wait_for_previous() {
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
    llmc_xqa(IOHead const* q, GMemCacheHead* kv, int const* pages, int const* rows,
#if PARTS == 0
             int const* starts,
#endif
             int const* positions,
#if HAS_SCALES
             float const* scales,
#endif
#if HAS_SINKS
             SINK const* sinks,
#endif
             OutputHead* out
#if PARTS > 0
             , float* lse
#else
             , int row_count
#endif
    ) {
  int const part = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
#if !READ_BEFORE_WAIT
  wait_for_previous();
#endif
#if PARTS > 0
  Span const span = find_span(pages, rows[token], positions[token], part);
  float* const sums = lse + (long long)token * HEADS * PARTS + part;
  out += (long long)token * HEADS * PARTS + part;
#else
  int const i = row_of(starts, row_count, token);
  Span const span = find_span(pages, i < 0 ? -1 : rows[i], positions[token], part);
  float* const sums = nullptr;
  out += (long long)token * HEADS;
#endif
#if READ_BEFORE_WAIT
  wait_for_previous();
#endif
#if PDL
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  float const* head_sinks = nullptr;
#if HAS_SINKS
  __shared__ float sink_of[HEADS / KV_HEADS];
  if (threadIdx.x < HEADS / KV_HEADS) sink_of[threadIdx.x] = float(sinks[head * (HEADS / KV_HEADS) + threadIdx.x]);
  head_sinks = sink_of - head * (HEADS / KV_HEADS);  // XQA adds the block's first head; a barrier precedes its reads
#endif
  float const* head_scales = nullptr;
#if HAS_SCALES
  head_scales = scales + head;
#endif
  // Both are heads of the pool: the values of a page follow its keys.
  KVCacheList<true> const cache{kv, kv + KV_HEADS * TOKENS_PER_PAGE, span.pages, nullptr, span.length};
  kernel_mha_impl(KV_HEADS,
#if SLIDING_WINDOW
                  span.length - span.before,
#endif
                  SCALE, nullptr, out, q + (long long)token * HEADS, head_sinks, cache, gridDim.z, 1.0f, head_scales,
                  2 * KV_HEADS * TOKENS_PER_PAGE, 1, TOKENS_PER_PAGE, nullptr, sums);
}
