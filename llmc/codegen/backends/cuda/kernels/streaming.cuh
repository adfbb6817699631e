// Loads of weights that are read once, and sums that the blocks of a cluster share (PTX ISA, "ld", "prefetch",
// "barrier.cluster").

// Loads 16 bytes that are not written while the kernel runs and that no other thread of the block needs.
__device__ inline uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Starts to copy the 128 bytes at an address to the L2 cache.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Loads a float at this block's address in shared memory from another block of the cluster.
__device__ inline float load_from_block(unsigned address, int rank) {
  unsigned there;
  float v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
}

// Waits for all threads of the cluster of `blocks` blocks, whose writes to shared memory are visible then.
template <int blocks> __device__ inline void wait_for_cluster() {
  if (blocks > 1) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  } else {
    __syncthreads();
  }
}
