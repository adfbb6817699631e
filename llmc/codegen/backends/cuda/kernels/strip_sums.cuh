// Products of few tokens by strips of 16 rows of a weight, whose columns are divided among the warps of a block and the
// blocks of a cluster: the main loop, and the sums of warps and blocks. Needs hopper.cuh and streaming.cuh.
//
// A unit is a strip of one part. It has `count` sums, one for each of its rows and each token.

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
// computes this warp's sums of the unit in a slot; `store(to, sums)` writes them to shared memory; `copy(u, slot)` starts to
// copy the unit u to a slot, as one group. A thread of a warp has `Sums`.
// shared: [2][warps][count]. totals: [units][count], complete after the next barrier of the block. written: the address
// of two barriers, at each of which every warp arrives (`warp_arrive`).
//
// The sums of the warps are added one unit late, so that a warp may be a unit ahead of the slowest one: when all warps
// have written the sums of a unit, they have read those of the unit before.
template <typename Sums, int units, int depth, int warps, int count, typename Multiply, typename Store, typename Copy>
__device__ inline void multiply_units(float* shared, float* totals, unsigned written, Multiply multiply, Store store,
                                      Copy copy) {
  constexpr int last = units - 1;
  const int warp = threadIdx.x / 32;
  int turn = 0;
  for (int u = 0, slot = 0; u < units; u++, slot = slot + 1 < depth ? slot + 1 : 0) {
    Sums sums;
    wait_copies<depth - 1>();
    __syncwarp();
    multiply(sums, slot);
    __syncwarp();  // every thread has read the slot
    copy(u + depth, slot);
    const int before = u - 1;
    if (u > 0)
      add_warps<warps, count>(totals + before * count, shared + before % 2 * (warps * count), written + before % 2 * 8,
                              before / 2 % 2, turn);
    store(shared + (u % 2 * warps + warp) * count, sums);
    warp_arrive(written + u % 2 * 8);
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
