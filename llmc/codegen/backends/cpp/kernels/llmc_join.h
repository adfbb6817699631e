// The functions by which a process makes its thread pool a rank of a group.
#ifndef LLMC_JOIN_H
#define LLMC_JOIN_H
#include "llmc_group.h"
#include "llmc_pool.h"
// The size of the area that the ranks share, which is zero at first.
LLMC_EXPORT int64_t llmc_group_bytes(int ranks, int threads) { return llmc::group_bytes(ranks, threads); }
// Makes the pool this rank of the group. `group` is memory of llmc_group_size() bytes, which lives as long as the pool.
LLMC_EXPORT void llmc_group_join(void* pool, void* group, void* area, int rank, int ranks, int64_t limit) {
  llmc_pool* p = (llmc_pool*)pool;
  *(llmc::Group*)group = llmc::Group{(llmc::Area*)area, rank, ranks, p->n, limit, 0};
  for (int i = 0; i < p->n; i++) p->threads[i].ctx.group = group;
}
LLMC_EXPORT int64_t llmc_group_size() { return sizeof(llmc::Group); }
// The error of the group as an errno, 0 without one, and setting it, after which no rank waits for another.
LLMC_EXPORT int llmc_group_error(const void* area) {
  return (int)__atomic_load_n(&((const llmc::Area*)area)->error, __ATOMIC_SEQ_CST);
}
LLMC_EXPORT void llmc_group_fail(void* area, int error) { llmc::group_fail((llmc::Area*)area, (uint32_t)error); }
#endif
