// Products of few tokens by strips of 16 rows of a weight, whose columns are divided among the warps of a block and the
// blocks of a cluster: the main loop, and the sums of warps and blocks. Needs hopper.cuh and streaming.cuh.
//
// A unit is a strip of one part. Its sums are [tiles][16 rows][8 tokens], `count` in all; the thread 4 g + q of a warp has
// those of the rows g and g + 8 for the tokens 2 q and 2 q + 1 of every tile.

// Writes the sums of a unit of this warp.
template <int tiles> __device__ inline void store_sums(float* to, const float (&sums)[tiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < tiles; t++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      ((float2*)to)[(t * 2 + half) * 32 + lane] = make_float2(sums[t][2 * half], sums[t][2 * half + 1]);
}

// Adds the sums of the warps of a unit, when all have written them: from [warps][count] to [count], one each by `count`
// threads. `turn` is the first of these threads, and moves on.
template <int warps, int count>
__device__ inline void add_warps(float* to, const float* from, unsigned written, int parity, int& turn) {
  constexpr int threads = warps * 32;
  static_assert(threads >= count, "a thread adds one sum");
  const int i = threadIdx.x - turn + (threadIdx.x < turn ? threads : 0);
  barrier_wait(written, parity);
  if (i < count) {
    float total = from[i];
#pragma unroll
    for (int w = 1; w < warps; w++) total += from[w * count + i];
    to[i] = total;
  }
  turn += count - (turn + count >= threads ? threads : 0);
}

// Computes the units of a block. Groups of copies of the first `depth` units have been started. `multiply(sums, slot)`
// computes this warp's sums of the unit in a slot; `copy(u, slot)` starts to copy the unit u to a slot, as one group.
// shared: [2][warps][count]. totals: [units][count], complete behind the next barrier of the block. written: the address
// of two barriers, at each of which every warp arrives once.
//
// The sums of the warps are added one unit late, so that a warp may be a unit ahead of the slowest one: when all warps
// have written the sums of a unit, they have read those of the unit before.
template <int units, int depth, int warps, int tiles, typename Multiply, typename Copy>
__device__ inline void multiply_units(float* shared, float* totals, unsigned written, Multiply multiply, Copy copy) {
  constexpr int count = tiles * 16 * 8, last = units - 1;
  const int warp = threadIdx.x / 32;
  int turn = 0;
  for (int u = 0, slot = 0; u < units; u++, slot = slot + 1 < depth ? slot + 1 : 0) {
    float sums[tiles][4];
    wait_copies<depth - 1>();
    __syncwarp();
    multiply(sums, slot);
    __syncwarp();  // every thread has read the slot
    copy(u + depth, slot);
    const int before = u - 1;
    if (u > 0)
      add_warps<warps, count>(totals + before * count, shared + before % 2 * (warps * count), written + before % 2 * 8,
                              before / 2 % 2, turn);
    store_sums(shared + (u % 2 * warps + warp) * count, sums);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(written + u % 2 * 8);
  }
  add_warps<warps, count>(totals + last * count, shared + last % 2 * (warps * count), written + last % 2 * 8, last / 2 % 2,
                          turn);
}

// Adds one sum over the blocks of the cluster.
template <int blocks> __device__ inline float add_blocks(const float* sum) {
  if (blocks == 1) return *sum;
  float total = 0.0f;
#pragma unroll
  for (int rank = 0; rank < blocks; rank++) total += load_from_block(shared_address(sum), rank);
  return total;
}
