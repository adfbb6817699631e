// Collectives between ranks: processes that run the same program, each on its part of the model.
//
// The ranks share an area of memory. Part `tid` of a collective copies a chunk of its operand into the area, publishes
// it by incrementing its counter, waits until the counters of part `tid` of the other ranks have caught up, and reads
// their chunks in the order of the ranks, so that all ranks compute the same bits. Every part has two chunks, which it
// uses in turn: it overwrites a chunk only when all ranks have published the one after it, hence have read this one.
// That needs a barrier of all threads before each collective, and the same number of threads in all ranks. Parts are
// taken in order in every rank, so waiting for the same part of another rank cannot deadlock.
//
// A rank that waits too long, or a process that watches the ranks, sets the area's error; then no rank waits any more.
#ifndef LLMC_GROUP_H
#define LLMC_GROUP_H
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "llmc_abi.h"
namespace llmc {
constexpr int64_t CHUNK = 64 << 10;        // bytes
constexpr int64_t SLICE = 20 * 1000000;    // nanoseconds that a wait sleeps before it looks at the error
constexpr int SPINS = 256, YIELDS = 200;   // attempts before a wait sleeps
constexpr int64_t LONG_YIELD = 1000000;    // nanoseconds of a yield after which the core counts as busy with other tasks
constexpr int64_t NO_YIELD = 200000000;    // nanoseconds for which waits sleep instead of yielding
struct alignas(64) Area { uint32_t error; };  // an errno or 0; the counters and the chunks follow
struct alignas(64) Counter { uint32_t published, sleepers; };
// The area as one rank sees it. `limit` is the longest wait in nanoseconds. Waits do not yield until the clock
// (group_now) reaches `no_yield_until`.
struct Group {
  Area* area;
  int rank, ranks, threads;
  int64_t limit, no_yield_until;
};

static inline int64_t group_bytes(int ranks, int threads) {
  return (int64_t)sizeof(Area) + (int64_t)ranks * threads * (int64_t)(sizeof(Counter) + 2 * CHUNK);
}
static inline Counter* counter(const Group* g, int rank, int tid) {
  return (Counter*)(g->area + 1) + (int64_t)rank * g->threads + tid;
}
static inline char* chunk(const Group* g, int rank, int tid, uint32_t number) {
  char* first = (char*)counter(g, g->ranks, 0);
  return first + ((int64_t)(rank * g->threads + tid) * 2 + number % 2) * CHUNK;
}
static inline int64_t group_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}
static inline void group_fail(Area* area, uint32_t error) {
  uint32_t none = 0;
  __atomic_compare_exchange_n(&area->error, &none, error, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline void publish(Counter* c, uint32_t number) {
  __atomic_store_n(&c->published, number, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&c->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &c->published, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}
static inline bool is_published(const Counter* c, uint32_t number) {
  return (int32_t)(__atomic_load_n(&c->published, __ATOMIC_ACQUIRE) - number) >= 0;
}
static inline void sleep_until(Counter* c, uint32_t number) {
  timespec slice = {0, (long)SLICE};
  __atomic_add_fetch(&c->sleepers, 1, __ATOMIC_SEQ_CST);
  uint32_t have = __atomic_load_n(&c->published, __ATOMIC_SEQ_CST);
  if ((int32_t)(have - number) < 0) syscall(SYS_futex, &c->published, FUTEX_WAIT, have, &slice, nullptr, 0);
  __atomic_add_fetch(&c->sleepers, -1u, __ATOMIC_SEQ_CST);
}
// Waits until a chunk is published; returns false if the group has an error. Time in which this process was stopped
// does not count towards the limit, beyond two slices.
static inline bool wait_for(Group* g, Counter* c, uint32_t number) {
  for (int i = 0; i < SPINS; i++) {
    if (is_published(c, number)) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  int64_t last = group_now(), waited = 0;
  for (int i = 0; !is_published(c, number); i++) {
    if (__atomic_load_n(&g->area->error, __ATOMIC_SEQ_CST)) return false;
    bool yields = i < YIELDS && last >= __atomic_load_n(&g->no_yield_until, __ATOMIC_RELAXED);
    if (yields) sched_yield();
    else sleep_until(c, number);
    int64_t now = group_now(), passed = now - last;
    if (yields && passed >= LONG_YIELD) __atomic_store_n(&g->no_yield_until, now + NO_YIELD, __ATOMIC_RELAXED);
    waited += passed < 2 * SLICE ? passed : 2 * SLICE;
    last = now;
    if (waited > g->limit) group_fail(g->area, ETIMEDOUT);
  }
  return true;
}
// Publishes a chunk of this rank and waits for those of the others; sets *number, by which `chunk` finds them. Returns
// false if the group has an error.
static inline bool exchange(Group* g, int tid, const void* x, int64_t bytes, uint32_t* number) {
  Counter* own = counter(g, g->rank, tid);
  *number = own->published + 1;
  if (__atomic_load_n(&g->area->error, __ATOMIC_SEQ_CST)) return false;
  memcpy(chunk(g, g->rank, tid, *number), x, bytes);
  publish(own, *number);
  for (int r = 0; r < g->ranks; r++)
    if (r != g->rank && !wait_for(g, counter(g, r, tid), *number)) return false;
  return true;
}
}  // namespace llmc
#endif
