// Times a kernel and this machine's ceilings (read bandwidth, multiply-add rate) on the same threads. Not a pool to
// serve with: its barrier spins. Time is processor time inside the work, of the thread that took longest: on a machine
// whose cores are shared it differs from run to run far less than the clock on the wall, and cannot be shorter than
// what the same threads would take alone.
#include "llmc_abi.h"
#include "llmc_linear.h"
#include <stdlib.h>
#include <sched.h>
#include <thread>
#include <time.h>
#include <vector>
#define EXPORT extern "C" __attribute__((visibility("default")))
typedef void (*kernel)(const llmc_ctx*, void* const*, const int64_t*);

namespace {
struct barrier {
  int n, arrived = 0, turn = 0;
  void wait() {
    int t = __atomic_load_n(&turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == n) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELEASE);
      __atomic_add_fetch(&turn, 1, __ATOMIC_RELEASE);
    } else {
      for (int i = 0; __atomic_load_n(&turn, __ATOMIC_ACQUIRE) == t; i++)
        if (i > 20000) sched_yield();
    }
  }
};
double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
// Seconds of processor time of the slowest of `threads` threads in `times` rounds of work(tid, round), all together.
template <class F> double timed(int threads, int times, F work) {
  barrier b{threads};
  std::vector<double> took(threads * 8);
  auto one = [&](int t) {
    b.wait();
    for (int i = 0; i < times; i++) {
      double start = now();
      work(t, i);
      took[t * 8] += now() - start;
      b.wait();
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) others.emplace_back(one, t);
  one(0);
  for (auto& o : others) o.join();
  double most = 0;
  for (double x : took) most = x > most ? x : most;
  return most;
}
}  // namespace

// Seconds a call, over `sets` argument sets in turn (so that weights come from memory), a barrier after each.
EXPORT double bench_kernel(kernel f, void* const* const* args, const int64_t* sizes, int sets, int threads, int64_t scratch) {
  std::vector<char*> mem(threads);
  for (auto& m : mem) m = (char*)aligned_alloc(64, (scratch + 127) / 64 * 64);
  double took = timed(threads, sets, [&](int t, int s) {
    llmc_ctx ctx = {t, threads, mem[t], scratch};
    f(&ctx, args[s], sizes);
  });
  for (auto m : mem) free(m);
  return took / sets;
}
// Bytes a second of summing `bytes` bytes at p, in rounds of 4 MiB with a barrier after each, so that the threads
// share the memory as a kernel's do; every thread reads its own half of a round, front to back.
EXPORT double bench_read(const char* p, int64_t bytes, int threads) {
  constexpr int64_t ROUND = 4 << 20;
  volatile float sink = 0;
  double took = timed(threads, (int)(bytes / ROUND), [&](int t, int round) {
    llmc::vf a[8] = {};
    const char *q = p + round * ROUND + ROUND / threads * t, *end = q + ROUND / threads / 512 * 512;
    for (; q < end; q += 8 * sizeof(llmc::vf))
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) a[i] += llmc::vload((const float*)q + i * llmc::VN);
    sink = llmc::hsum(a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7]);
  });
  return bytes / ROUND * ROUND / took;
}
// Flop a second of the product's own inner loop with everything in the first-level cache.
template <class X> static double peak(int threads) {
  constexpr int NV = 2, MR = llmc::VN == 16 ? 12 : llmc::VN == 8 ? 6 : 4, PAIR = sizeof(X) == 2 ? 2 : 1, STEPS = 128, N = 20000;
  double took = timed(threads, 1, [&](int, int) {
    alignas(64) static X w[STEPS * NV * llmc::VN * PAIR], x[MR * STEPS * PAIR];
    alignas(64) float c[MR * NV * llmc::VN];
    for (int i = 0; i < N; i++) {
      llmc::run_tile<MR, NV, PAIR>(MR, w, x, STEPS * PAIR, STEPS, c, i > 0, llmc::ahead{(const char*)w, 0});
      asm volatile("" : : "r"(w), "r"(x), "r"(c) : "memory");  // the sums are wanted
    }
  });
  return 2.0 * N * MR * NV * llmc::VN * PAIR * STEPS * threads / took;
}
EXPORT double bench_peak_f32(int threads) { return peak<float>(threads); }
EXPORT double bench_peak_bf16(int threads) {
#if defined(LLMC_DPBF16)
  return peak<llmc::bf16>(threads);
#else
  return peak<float>(threads);
#endif
}
