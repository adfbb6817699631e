// Shared by grouped_wgmma.cu and grouped_codes.cu: the rows of each expert, and their copies to a ring of buffers.
//
// Constants: EXPERTS, TILE_M (maximum rows per tile), THREADS (per block), and the type Ring.

// The rows of the experts, in shared memory: expert e has the rows [starts[e], starts[e + 1]), and the blocks of rows of
// the experts up to e end at ends[e].
struct Blocks {
  int starts[EXPERTS + 1], ends[EXPERTS];
};

// Computes `blocks` by a prefix sum; all threads of the thread block call it.
__device__ inline void count_blocks(Blocks& blocks, const int* starts) {
  __shared__ int counts[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;  // blocks of the experts before `base`
  for (int base = 0; base < EXPERTS; base += THREADS) {
    const int e = base + threadIdx.x;
    const int first = e <= EXPERTS ? starts[e] : 0, next = e < EXPERTS ? starts[e + 1] : first;
    int count = (next - first + TILE_M - 1) / TILE_M;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFF, count, d);
      if (lane >= d) count += other;
    }
    __syncthreads();  // `counts` of the round before have been read
    if (lane == 31) counts[warp] = count;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) {
      if (i == warp) count += before + all;
      all += counts[i];
    }
    before += all;
    if (e < EXPERTS) blocks.starts[e] = first, blocks.ends[e] = count;
    if (e == EXPERTS - 1) blocks.starts[EXPERTS] = next;
  }
  __syncthreads();
}

// Returns the expert of a block of rows, by binary search.
__device__ inline int expert_of(const Blocks& blocks, int block) {
  int low = 0, high = EXPERTS - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (blocks.ends[middle] > block) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Starts to copy 16 bytes to shared memory, or writes zeros there.
__device__ inline void copy_or_clear(unsigned to, const void* from, bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copies ? 16 : 0) : "memory");
}

// Arrives at the barrier when all earlier copies of this thread have completed.
__device__ inline void arrive_with_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the current buffer. The fence makes the rows, which are not copied by bulk copies, visible to the products.
__device__ inline void wait_for_buffer(const Ring& ring) {
  barrier_wait(ring.arrived(), ring.parity);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void release(unsigned empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}
