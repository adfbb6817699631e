// A thread pool that runs a list of launches.
//
// Every launch is cut into as many parts as there are threads, and a thread takes the next free part. A thread that is
// preempted therefore delays only the part it works on. If a launch depends on earlier ones, threads wait for all parts
// so far: they spin briefly, then yield (waking a sleeping thread takes longer than most launches), and sleep after
// about a millisecond. On a core that other tasks keep busy they sleep instead of yielding.
//
// Only one step runs at a time. The caller of llmc_run is one of the threads and can complete the step alone.
#ifndef LLMC_POOL_H
#define LLMC_POOL_H
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {
typedef void (*llmc_kernel)(const llmc_ctx*, void* const*, const int64_t*);
struct llmc_launch {
  int32_t args, sizes;  // offsets into the step's argument and size arrays
  int32_t sync;         // whether the next launch waits for this one and all before it
};
struct llmc_step {
  const llmc_launch* launches;
  int count;
  const int32_t* args;  // buffer indices of all launches, concatenated
  int nargs;
  void (*sizes)(const int64_t* symbols, int64_t* out);
};
struct alignas(64) llmc_word { uint32_t v; };
struct llmc_pool;
struct llmc_thread {
  llmc_ctx ctx;
  llmc_pool* pool;
  pthread_t id;
  int spin;         // iterations that a wait spins before it yields
  long preempted;   // involuntary context switches so far
  // While other tasks keep the core busy, waits sleep instead of yielding (llmc_avoid_yields):
  int64_t no_yield_until;   // llmc_now() at the end of the last such period
  int64_t no_yield_period;  // its length in nanoseconds
};
struct llmc_pool {
  llmc_word done, sleepers;  // finished parts of this step; threads that sleep until it changes
  llmc_word job, waiters;    // changes when a step begins; threads that sleep until it changes
  uint64_t serial;           // twice the step number; odd while the next step is being set up
  int n, started;
  bool quit;
  llmc_thread* threads;
  const llmc_step* step;
  void* const* kernels;
  int64_t* ns;  // where thread 0 records nanoseconds per launch, or null
  void** args;
  int64_t* sizes;
  uint64_t* taken;  // parts taken of each launch, counted over all steps (n per step)
};

// Tells the core that the thread spins.
inline void llmc_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}
inline uint32_t llmc_get(const llmc_word& w) { return __atomic_load_n(&w.v, __ATOMIC_SEQ_CST); }
inline uint32_t llmc_add(llmc_word& w, uint32_t x) { return __atomic_add_fetch(&w.v, x, __ATOMIC_SEQ_CST); }
// Sleeps until w differs from `old`. No wake-up is lost: the sleeper increments the count before the kernel reads w
// again, and the waker changes w before it reads the count.
inline void llmc_sleep(llmc_word& w, llmc_word& count, uint32_t old) {
  llmc_add(count, 1);
  while (llmc_get(w) == old) syscall(SYS_futex, &w.v, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  llmc_add(count, -1u);
}
// Increments w, and wakes the threads that sleep until it changes; `count` is their number.
inline void llmc_signal(llmc_word& w, llmc_word& count) {
  llmc_add(w, 1);
  if (llmc_get(count)) syscall(SYS_futex, &w.v, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}
// Returns the nanoseconds of the monotonic clock.
inline int64_t llmc_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}
constexpr int LLMC_YIELDS = 4000;             // maximum number of yields of a wait
constexpr int64_t LLMC_LONG_YIELD = 1000000;  // nanoseconds of a yield after which the core counts as busy
constexpr int64_t LLMC_NO_YIELD_MIN = 50000000, LLMC_NO_YIELD_MAX = 1600000000;  // nanoseconds of a period
// Notes that a yield took long. It gave the core to another task, even one of lower priority, until the scheduler's next
// tick, while a thread that sleeps would have preempted that task as soon as it was woken. So waits do not yield for
// some time, which doubles if the core is still busy afterwards.
inline void llmc_avoid_yields(llmc_thread* t, int64_t now) {
  bool again = t->no_yield_period && now < t->no_yield_until + 2 * t->no_yield_period;
  if (!again) t->no_yield_period = LLMC_NO_YIELD_MIN;
  else if (t->no_yield_period < LLMC_NO_YIELD_MAX) t->no_yield_period *= 2;
  t->no_yield_until = now + t->no_yield_period;
}
// Waits until w differs from `old`: spins, then yields, then sleeps. `count` is that of llmc_sleep.
inline void llmc_wait(llmc_word& w, llmc_word& count, uint32_t old, llmc_thread* t) {
  for (int i = 0; i < t->spin; i++) {
    if (llmc_get(w) != old) return;
    llmc_relax();
  }
  int64_t last = llmc_now();
  for (int i = 0; i < LLMC_YIELDS && last >= t->no_yield_until; i++) {
    if (llmc_get(w) != old) return;
    sched_yield();
    int64_t now = llmc_now();
    if (now - last >= LLMC_LONG_YIELD) llmc_avoid_yields(t, now);
    last = now;
  }
  if (llmc_get(w) == old) llmc_sleep(w, count, old);
}
// Adapts the spin time. Spinning pays only if every thread has its own core: after a step in which this thread was
// preempted, its waits sleep sooner, since others need the core, perhaps the very thread it waits for; otherwise they
// spin longer.
inline void llmc_learn(llmc_thread* t) {
  rusage u;
  if (getrusage(RUSAGE_THREAD, &u)) return;
  bool taken = u.ru_nivcsw != t->preempted;
  t->preempted = u.ru_nivcsw;
  t->spin = taken ? (t->spin > 512 ? t->spin / 8 : 64) : (t->spin < 2048 ? t->spin * 2 : 4096);
}
// Returns the serial number of the step.
inline uint64_t llmc_serial(const llmc_pool* p) { return __atomic_load_n(&p->serial, __ATOMIC_SEQ_CST); }
// Increments the serial number, before and after a step is set up.
inline void llmc_turn(llmc_pool* p) { __atomic_store_n(&p->serial, p->serial + 1, __ATOMIC_SEQ_CST); }
// Returns the next part of launch i in step `serial`, or n if all are taken. A thread that still works on a finished
// step takes nothing, because the counter is already past that step's parts.
inline int llmc_take(llmc_pool* p, int i, uint64_t serial) {
  uint64_t first = serial / 2 * (uint64_t)p->n, have = __atomic_load_n(&p->taken[i], __ATOMIC_SEQ_CST);
  for (;;) {
    uint64_t next = have > first ? have : first;
    if (next >= first + (uint64_t)p->n) return p->n;
    if (__atomic_compare_exchange_n(&p->taken[i], &have, next + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      return (int)(next - first);
  }
}
// Waits until `parts` parts of step `serial` are finished, or the step is over.
inline void llmc_until(llmc_pool* p, llmc_thread* t, uint32_t parts, uint64_t serial) {
  for (;;) {
    uint32_t d = llmc_get(p->done);
    if (d >= parts || llmc_serial(p) != serial) return;
    llmc_wait(p->done, p->sleepers, d, t);
  }
}
// Runs the free parts of every launch of step `serial` on this thread; returns when the step is over.
void llmc_work(llmc_pool* p, llmc_thread* t, uint64_t serial) {
  const llmc_step* s = __atomic_load_n(&p->step, __ATOMIC_SEQ_CST);
  void* const* kernels = __atomic_load_n(&p->kernels, __ATOMIC_SEQ_CST);
  int64_t* ns = __atomic_load_n(&p->ns, __ATOMIC_SEQ_CST);
  if (serial % 2 || llmc_serial(p) != serial) return;  // the values read may belong to another step
  bool each = ns != nullptr;
  if (t != p->threads) ns = nullptr;
  int64_t last = ns ? llmc_now() : 0;
  for (int i = 0; i < s->count; i++) {
    const llmc_launch& l = s->launches[i];
    while ((t->ctx.tid = llmc_take(p, i, serial)) < p->n) {
      ((llmc_kernel)kernels[i])(&t->ctx, p->args + l.args, p->sizes + l.sizes);
      llmc_signal(p->done, p->sleepers);
    }
    if (llmc_serial(p) != serial) return;
    if (l.sync || i + 1 == s->count || each) llmc_until(p, t, (uint32_t)(i + 1) * p->n, serial);
    if (ns) {
      int64_t now = llmc_now();
      ns[i] = now - last;
      last = now;
    }
  }
  if (p->n > 1) llmc_learn(t);
}
// The main function of the threads that the pool started: works on one step after another until the pool closes.
void* llmc_loop(void* arg) {
  llmc_thread* t = (llmc_thread*)arg;
  llmc_pool* p = t->pool;
  for (uint32_t seen = 0;;) {
    llmc_wait(p->job, p->waiters, seen, t);
    seen = llmc_get(p->job);
    if (__atomic_load_n(&p->quit, __ATOMIC_SEQ_CST)) return nullptr;
    llmc_work(p, t, llmc_serial(p));
  }
}
// Runs a step: sets it up while the serial number is odd, wakes the threads, and works on it as thread 0. Returns 0, or
// EINVAL if an argument is missing. ns: where to write the nanoseconds of each launch, or null.
int llmc_go(llmc_pool* p, const llmc_step* s, void* const* kernels, void* const* buffers, const int64_t* symbols,
            int64_t* ns) {
  if (!p || !kernels || !buffers) return EINVAL;
  if (s->count == 0) return 0;
  llmc_turn(p);
  for (int i = 0; i < s->nargs; i++) p->args[i] = buffers[s->args[i]];
  s->sizes(symbols, p->sizes);
  __atomic_store_n(&p->step, s, __ATOMIC_SEQ_CST);
  __atomic_store_n(&p->kernels, kernels, __ATOMIC_SEQ_CST);
  __atomic_store_n(&p->ns, ns, __ATOMIC_SEQ_CST);
  __atomic_store_n(&p->done.v, 0u - 1, __ATOMIC_SEQ_CST);
  llmc_signal(p->done, p->sleepers);  // back to 0; wakes threads that still wait for the last step
  llmc_turn(p);
  if (p->n > 1) llmc_signal(p->job, p->waiters);
  llmc_work(p, &p->threads[0], p->serial);
  return 0;
}
}  // namespace

#define LLMC_EXPORT extern "C" __attribute__((visibility("default")))
// Ends the threads of a pool and frees it; null is permitted.
LLMC_EXPORT void llmc_close(void* pool) {
  llmc_pool* p = (llmc_pool*)pool;
  if (!p) return;
  __atomic_store_n(&p->quit, true, __ATOMIC_SEQ_CST);
  llmc_turn(p);
  // A thread that was not scheduled since an earlier step may wait for a change of any count that a step has.
  __atomic_store_n(&p->done.v, 1u << 31, __ATOMIC_SEQ_CST);
  llmc_signal(p->done, p->sleepers);
  llmc_signal(p->job, p->waiters);
  for (int i = 1; i < p->started; i++) pthread_join(p->threads[i].id, nullptr);
  for (int i = 0; p->threads && i < p->n; i++) free(p->threads[i].ctx.scratch);
  free(p->args), free(p->sizes), free(p->taken);
  free(p->threads);
  free(p);
}
// What steps need of a pool: the numbers of arguments, sizes and launches, and the bytes of scratch memory.
enum { LLMC_ROOM_ARGS, LLMC_ROOM_SIZES, LLMC_ROOM_LAUNCHES, LLMC_ROOM_SCRATCH, LLMC_ROOM };
#ifndef LLMC_LAYOUT
#define LLMC_LAYOUT 0
#endif
// Writes what the steps of this unit need, and returns the layout of its pools. Units with the same layout, not 0, can
// share a pool that has room for all of them.
LLMC_EXPORT int64_t llmc_room(int64_t* room) {
  const int64_t needed[LLMC_ROOM] = {LLMC_MAX_ARGS, LLMC_MAX_SIZES, LLMC_MAX_LAUNCHES, LLMC_SCRATCH};
  memcpy(room, needed, sizeof(needed));
  return LLMC_LAYOUT;
}
// Creates a pool of `nthreads` threads including the caller, for steps that need up to this `room`; returns null if
// memory or threads are unavailable.
LLMC_EXPORT void* llmc_open_room(int nthreads, const int64_t* room) {
  void* mem = nullptr;
  if (nthreads < 1 || posix_memalign(&mem, 64, sizeof(llmc_pool))) return nullptr;
  memset(mem, 0, sizeof(llmc_pool));
  llmc_pool* p = (llmc_pool*)mem;
  p->n = nthreads;
  p->started = 1;
  p->args = (void**)calloc(room[LLMC_ROOM_ARGS], sizeof(void*));
  p->sizes = (int64_t*)calloc(room[LLMC_ROOM_SIZES], sizeof(int64_t));
  p->taken = (uint64_t*)calloc(room[LLMC_ROOM_LAUNCHES], sizeof(uint64_t));
  p->threads = (llmc_thread*)calloc(nthreads, sizeof(llmc_thread));
  if (!p->args || !p->sizes || !p->taken || !p->threads) return llmc_close(p), nullptr;
  sigset_t all, old;  // signals are delivered to the caller's threads only
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  bool good = true;
  for (int i = 0; i < nthreads && good; i++) {
    llmc_thread* t = &p->threads[i];
    void* scratch = nullptr;
    good = !posix_memalign(&scratch, 64, room[LLMC_ROOM_SCRATCH] + 64);
    t->ctx = llmc_ctx{i, nthreads, (char*)scratch, room[LLMC_ROOM_SCRATCH], nullptr};
    t->pool = p;
    t->spin = 1024;
    if (good && i > 0) good = !pthread_create(&t->id, nullptr, llmc_loop, t);
    if (good && i > 0) p->started++;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (!good) return llmc_close(p), nullptr;
  return p;
}
// Creates a pool for the steps of this unit.
LLMC_EXPORT void* llmc_open(int nthreads) {
  int64_t room[LLMC_ROOM];
  llmc_room(room);
  return llmc_open_room(nthreads, room);
}
#endif
