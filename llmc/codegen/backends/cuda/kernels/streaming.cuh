// Copies of weights that are read once, matrices in shared memory, and sums that the blocks of a cluster share (PTX ISA,
// "cp.async", "ldmatrix"). Needs hopper.cuh.

// Starts to copy 16 bytes to shared memory, or zeros; the copy belongs to the next group that `commit_copies` closes.
__device__ inline void copy_async(unsigned to, const void* from, bool copy) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copy ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most `left` of the thread's groups of copies have not completed.
template <int left> __device__ inline void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

// Loads four matrices of 8 rows and 16 bytes; the thread 8 i + r has the address of row r of matrix i. The thread 4 g + q
// gets the bytes 4 q to 4 q + 3 of row g of each.
__device__ inline void load_matrices(unsigned* to, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// Stores four matrices in the same way.
__device__ inline void store_matrices(unsigned to, const unsigned* from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]), "r"(from[1]),
               "r"(from[2]), "r"(from[3]) : "memory");
}

// Loads a float at this block's address in shared memory from another block of the cluster.
__device__ inline float load_from_block(unsigned address, int rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address_at(address, rank)) : "memory");
  return v;
}
