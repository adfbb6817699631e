// Tiles of 16 tokens of a paged KV pool as factors of products: where they are, their copies to shared memory by tensor
// maps, and their fragments in registers (PTX ISA, "cp.async.bulk.tensor", "ldmatrix", "mma"). Uses the constants of
// decode_attention.cu; needs hopper.cuh and streaming.cuh.
//
// A pool of 8-bit floats is multiplied in f16. Neighbouring columns of its keys and values are in one register there,
// so that the products have their columns in another order: a thread 4 g + q has the columns 4 q to 4 q + 3 of keys,
// and its sums are of the columns 2 g and 2 g + 1 instead of g and g + 8.

constexpr int TILE = 16, HEADS = GROUP * KV_HEADS;
constexpr int COLUMNS = (GROUP + 7) / 8;  // tiles of 8 query heads
constexpr int STEPS = HEAD_DIM / 16;      // steps of the products of a tile
constexpr int STEPS_OF_LOAD = 2 / ITEM;   // steps whose factors one instruction loads
constexpr int ROW_BYTES = HEAD_DIM * ITEM < 128 ? HEAD_DIM * ITEM : 128;  // bytes per row of a stripe of a key
constexpr int PIECES = ROW_BYTES / 16;  // pieces of 16 bytes per row, which the swizzle permutes
constexpr int STRIPE_BYTES = TILE * ROW_BYTES;
constexpr int KEY_BYTES = TILE * HEAD_DIM * ITEM;  // bytes of a tile's keys; its values follow
constexpr int SLOT_BYTES = 2 * KEY_BYTES;
constexpr unsigned ALL = 0xFFFFFFFF;

// The policy of the L2 cache for data that is read once. With it, an H200 reads keys and values 2 to 5 % faster.
__device__ inline unsigned long long evict_first() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Starts to copy the keys or values of a tile. The axes of the map are the elements of a stripe, the tokens of a tile,
// the stripes of a head, the tiles of a page (of all heads of the keys, then of the values), and pages.
__device__ inline void copy_tile(unsigned to, const TensorMap& map, int page, int tile, unsigned barrier,
                                 unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(0), "r"(tile), "r"(page), "r"(barrier), "l"(policy) : "memory");
}

// The same as `load_matrices`, of transposed matrices: the thread 4 g + q gets column g of the rows 2 q and 2 q + 1.
__device__ inline void load_transposed(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// d[16, 8] += a[16, 16] @ b[8, 16].T. A thread has two neighbouring columns of the rows g and g + 8.
__device__ inline void add_product(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void add_product(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats as factors. What is too large for f16 saturates.
__device__ inline float bounded(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }
__device__ inline unsigned pack(float low, float high) {
  return from_float<FACTOR>(low).bits | (unsigned)from_float<FACTOR>(high).bits << 16;
}

// Two 8-bit floats of a register, the lower or the upper ones, in f16.
__device__ inline unsigned widen(unsigned pairs, bool upper) {
  unsigned y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((unsigned short)(upper ? pairs >> 16 : pairs)));
  return y;
}

// The address of 16 bytes of a token of a tile: the piece number `piece` of its key, or value.
__device__ inline unsigned piece_address(unsigned tile, int token, int piece) {
  const int moved = piece % PIECES ^ token % 8 * ROW_BYTES / 128;
  return tile + piece / PIECES * STRIPE_BYTES + token * ROW_BYTES + moved * 16;
}

// Loads the keys of a tile as left factors of the steps from `step` on: 16 keys by 16 columns.
__device__ inline void load_keys(unsigned (&a)[STEPS_OF_LOAD][4], unsigned tile, int step, int lane) {
  unsigned raw[4];  // words of the keys g and g + 8, in one piece and in the next one
  load_matrices(raw, piece_address(tile, lane % 16, step * ITEM + lane / 16));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (ITEM == 2) {
      a[0][j] = raw[j];
    } else {
#pragma unroll
      for (int i = 0; i < STEPS_OF_LOAD; i++) a[i][j] = widen(raw[2 * i + j % 2], j / 2);
    }
  }
}

// Loads the values as left factors of the steps from `step` on: 16 columns by 16 keys.
__device__ inline void load_values(unsigned (&a)[STEPS_OF_LOAD][4], unsigned tile, int step, int lane) {
  const int half = lane / 8 % 2, quarter = lane / 16;
  unsigned raw[4];
  load_transposed(raw, ITEM == 2 ? piece_address(tile, lane % 8 + quarter * 8, step * 2 + half)
                                 : piece_address(tile, lane % 8 + half * 8, step + quarter));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (ITEM == 2) {
      a[0][j] = raw[j];
    } else {  // a register has two columns of the key 2 q, then of 2 q + 1
#pragma unroll
      for (int i = 0; i < STEPS_OF_LOAD; i++)
        a[i][j] = widen(__byte_perm(raw[2 * i + j / 2], 0, 0x3120), j % 2);
    }
  }
}

// The queries as right factors: 8 query heads, 16 columns a step. Heads after the last one are zeros.
struct Queries {
  unsigned of[COLUMNS][STEPS][2];

  __device__ void load(const QUERY* q, int lane) {  // q: the first query head of the key head
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int head = c * 8 + lane / 4;
#pragma unroll
      for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int column = i * 16 + (ITEM == 2 ? lane % 4 * 2 + j * 8 : lane % 4 * 4 + j * 2);
          of[c][i][j] = head < GROUP ? factors(*(const unsigned*)(q + head * HEAD_DIM + column)) : 0;
        }
    }
  }
  static __device__ unsigned factors(unsigned pair) {
    if (QUERY_IS_FACTOR) return pair;
    const QUERY low = {(unsigned short)pair}, high = {(unsigned short)(pair >> 16)};
    return pack(bounded(to_float(low)), bounded(to_float(high)));
  }
};

// Where a token's keys are: its row of the page table, the number of keys, the first one that it attends to, and the
// tiles of this block. Padding has no keys.
struct Span {
  const int* pages;
  int length, low, first, last;
};

__device__ inline Span span_of(const int* pages, int width, int row, int position) {
  constexpr int tiles_of_page = PAGE / TILE;
  const int length = row < 0 ? 0 : position + 1, low = WINDOW ? max(0, length - WINDOW) : 0;
  int first = low / PAGE, last = (length + PAGE - 1) / PAGE;
  if (SPLITS) {
    const int each = (last - first + SPLITS - 1) / (SPLITS ? SPLITS : 1);
    first += blockIdx.z * each;
    last = min(last, first + each);
  }
  const int tiles = min(last * tiles_of_page, (length + TILE - 1) / TILE);
  return {pages + (long long)max(row, 0) * width, length, low, first * tiles_of_page, tiles};
}

// The row of the page table of a token; -1 for none. Without `starts`, rows [tokens] has it. Otherwise it is that of
// the entry of the batch with the same number, unless entries have no or several tokens.
__device__ inline int row_of(const int* rows, const int* starts, int entries, int token) {
  if (!starts) return rows[token];
  if (token < entries) {
    const int row = rows[token], start = starts[token], stop = starts[token + 1];
    if (start == token && stop > token) return row;
  }
  for (int i = 0; i < entries; i++)
    if (starts[i] <= token && token < starts[i + 1]) return rows[i];
  return -1;
}

// The tiles of one warp: every WARPS-th one, of which STAGES are in flight.
struct Tiles {
  const TensorMap& map;
  const Span& span;
  unsigned slots, barriers;  // addresses of this warp's slots and barriers
  int warp, lane, head;
  unsigned long long policy;  // the L2 cache policy
  int count;
  int page, next_page;  // page of tile number `lane` among the 32 tiles being copied, and among the next 32

  __device__ int number(int i) const { return span.first + warp + i * WARPS; }
  __device__ int load_page(int i) const { return i < count ? span.pages[number(i) * TILE / PAGE] : 0; }
  __device__ void load_pages() {
    count = max(0, (span.last - span.first - warp + WARPS - 1) / WARPS);
    page = load_page(lane);
    next_page = load_page(lane + 32);
  }

  // Starts the copy of tile i of this warp, one after the other.
  __device__ void copy(int i) {
    if (i >= count) return;
    if (i % 32 == 0 && i > 0) {
      page = next_page;
      next_page = load_page(i + 32 + lane);
    }
    if (lane != i % 32) return;
    const unsigned barrier = barriers + i % STAGES * 8;
    barrier_expect(barrier, SLOT_BYTES);
    constexpr int tiles_of_page = PAGE / TILE;
    const int tile = head * tiles_of_page + number(i) % tiles_of_page;
    const unsigned slot = slots + i % STAGES * SLOT_BYTES;
    copy_tile(slot, map, page, tile, barrier, policy);
    copy_tile(slot + KEY_BYTES, map, page, tile + KV_HEADS * tiles_of_page, barrier, policy);
  }

  // Waits for tile i; returns its address.
  __device__ unsigned wait(int i) const {
    barrier_wait(barriers + i % STAGES * 8, i / STAGES % 2);
    return slots + i % STAGES * SLOT_BYTES;
  }
};
