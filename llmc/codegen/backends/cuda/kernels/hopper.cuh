// Hopper's instructions for asynchronous work: barriers in shared memory, bulk copies, and products of warpgroups
// (PTX ISA, "mbarrier", "cp.async.bulk" and "wgmma"). Addresses in shared memory are 32-bit.

// For one thread: if threads of a warp initialize a barrier each, racecheck of compute-sanitizer takes the other threads to
// do so too, at the addresses that their registers happen to hold.
__device__ inline void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether every thread of a warp arrives at a barrier, not one of them for all. Both order the warp's accesses before those
// after the barrier, and one arrival is faster in some kernels. racecheck of compute-sanitizer only knows the accesses of
// threads that arrive: for it, the tests set this constant.
constexpr bool EVERY_THREAD_ARRIVES = false;
constexpr int WARP_ARRIVALS = EVERY_THREAD_ARRIVES ? 32 : 1;

// Arrives at a barrier for this warp, all of whose threads call it: WARP_ARRIVALS times, or never. Between products of a
// warpgroup, the condition must not be a branch of the caller: NVCC would then wait for all products.
__device__ inline void warp_arrive(unsigned barrier, bool arrives = true) {
  if (!EVERY_THREAD_ARRIVES) __syncwarp();
  if ((EVERY_THREAD_ARRIVES || threadIdx.x % 32 == 0) && arrives) barrier_arrive(barrier);
}

// The address that the block `rank` of the cluster has for this address in shared memory.
__device__ inline unsigned address_at(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Arrives at the barrier of a block of the cluster, to tell it that a buffer has been read. Writes of this thread are not
// made visible to the other block: `release.cluster` would flush them with a fence of a microsecond.
__device__ inline void barrier_arrive_at(unsigned barrier, int rank) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_at(barrier, rank)) : "memory");
}

// Waits until every thread of the cluster has arrived here. Unlike cluster_publish, it needs no fence of a microsecond.
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The same, after which the cluster sees what this thread has written.
__device__ inline void cluster_publish() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The two halves of `cluster_wait`.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_wait_arrived() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Stores to the shared memory of a block of the cluster, and counts the bytes at a barrier of that block, after which
// they are visible.
__device__ inline void send_four(unsigned to, float4 v, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
}
__device__ inline void send_float(unsigned to, float v, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
               "r"(barrier) : "memory");
}

// Waits for all threads of the cluster of `blocks` blocks, whose writes to shared memory are visible then.
template <int blocks> __device__ inline void wait_for_cluster() {
  if (blocks > 1) {
    cluster_publish();
  } else {
    __syncthreads();
  }
}

// Arrives, and adds `bytes` of bulk copies to what the current phase waits for.
__device__ inline void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Initializes the barriers of a ring of `stages` buffers, at `full` and, after those, at `empty`, for all threads of
// the block: one thread arrives at a barrier of `full`, and `readers` at one of `empty`.
__device__ inline void init_ring(unsigned full, unsigned empty, int stages, int readers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

// Returns when the phase of this parity has completed. A new barrier behaves as if a phase of parity 1 had completed.
__device__ inline void barrier_wait(unsigned barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Starts to copy the box at (row, column) of a tensor to shared memory; elements outside of the tensor are zeros.
__device__ inline void copy_box(unsigned to, const TensorMap& map, int row, int column, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// The same to this address in every block of the cluster that is a bit of `blocks`. The barrier is the one at this
// address in each of them.
__device__ inline void copy_box_to_blocks(unsigned to, const TensorMap& map, int row, int column, unsigned barrier,
                                          int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)blocks) : "memory");
}

// Starts to copy `bytes` contiguous bytes to shared memory; the addresses and the number are multiples of 16.
__device__ inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier) : "memory");
}

// Copies of 16 bytes by a thread, asynchronously; returns when at most `left` of its committed groups are not complete.
__device__ inline void copy_piece(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_pieces() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left> __device__ inline void wait_pieces() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// Loads and stores of shared memory.
__device__ inline unsigned load_word(unsigned from) {
  unsigned word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ inline void store_word(unsigned to, unsigned word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ inline uint4 load_piece(unsigned from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// The descriptor of a matrix in shared memory: rows of 128 bytes in the 128-byte swizzle, 1024 bytes for 8 rows. Its high
// word does not depend on the address: the layout in bits 30 and 31, the bytes of 8 rows / 16 from bit 0 on.
#define MATRIX_HIGH "0x40000040"
__device__ inline unsigned long long matrix(unsigned address) {
  return (unsigned long long)((address & 0x3FFFF) >> 4) | 1ull << 16 | 0x40000040ull << 32;
}

// Begins a group of products: orders earlier writes of the sums before them.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most `left` of the committed groups are still running.
template <int left> __device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
