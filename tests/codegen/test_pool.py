"""The thread pool under stress: every step sees all results of the previous one, whatever the threads per core."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import llmc.codegen.backends.cpp.kernels

HEADERS = Path(llmc.codegen.backends.cpp.kernels.__file__).parent

# Each launch computes y[i] = x[i + 101] + 1 from the last one's result: a part that is skipped, run twice, run early or
# run with another step's arguments shows in the sum. Two programs of different length alternate at random.
PROGRAM = r"""
#define LLMC_MAX_ARGS 12
#define LLMC_MAX_SIZES 1
#define LLMC_MAX_LAUNCHES 6
#define LLMC_SCRATCH INT64_C(64)
#include "llmc_abi.h"
#include "llmc_pool.h"
#include <stdio.h>
enum { N = 257 };
static void shift(const llmc_ctx* c, void* const* a, const int64_t*) {
  int64_t lo, hi;
  llmc_split(c, N, 1, &lo, &hi);
  for (int64_t i = lo; i < hi; i++) ((int64_t*)a[1])[i] = ((int64_t*)a[0])[(i + 101) % N] + 1;
}
static void none(const int64_t*, int64_t*) {}
static int periods() {
  const int64_t ms = 1000000, s = 1000 * ms;
  llmc_thread t = {};
  int64_t now = 7 * s;
  const int64_t lengths[] = {50, 100, 200, 400, 800, 1600, 1600};
  for (int64_t want : lengths) {
    llmc_avoid_yields(&t, now);
    if (t.no_yield_period != want * ms || t.no_yield_until != now + want * ms)
      return printf("%ld\n", (long)t.no_yield_period), 1;
    now = t.no_yield_until + ms;
  }
  llmc_avoid_yields(&t, now + 4 * s);
  return t.no_yield_period != 50 * ms;
}
int main(int argc, char** argv) {
  if (argc == 1) return periods();
  static int64_t x[N], y[N], zero;
  static llmc_launch launches[6];
  static int32_t args[12];
  void* buffers[2] = {x, y};
  void* kernels[6];
  for (int i = 0; i < 6; i++) {
    launches[i] = {2 * i, 0, 1}, kernels[i] = (void*)shift;
    args[2 * i] = i % 2, args[2 * i + 1] = 1 - i % 2;
  }
  llmc_step programs[2] = {{launches, 2, args, 4, none}, {launches, 6, args, 12, none}};
  void* pool = llmc_open(atoi(argv[1]));
  bool sleep = argc > 4;
  for (int i = 0; sleep && i < atoi(argv[1]); i++)
    __atomic_store_n(&((llmc_pool*)pool)->threads[i].no_yield_until, INT64_MAX, __ATOMIC_RELAXED);
  int64_t want = 0;
  unsigned r = atoi(argv[3]);
  for (int k = 0; k < atoi(argv[2]); k++) {
    r = r * 1664525u + 1013904223u;
    const llmc_step* s = &programs[r >> 16 & 1];
    llmc_go((llmc_pool*)pool, s, kernels, buffers, &zero, nullptr);
    want += s->count;
    if ((r >> 20) % 64 == 0) usleep(r % 300);
    for (int i = 0; i < N; i++)
      if (x[i] != want) return printf("step %d: %ld, not %ld\n", k, (long)x[i], (long)want), 1;
  }
  llmc_close(pool);
}
"""


def build(folder: Path, *flags: str) -> Path:
    (folder / "pool.cpp").write_text(PROGRAM)
    command = [
        "g++",
        "-std=c++17",
        *flags,
        f"-I{HEADERS}",
        str(folder / "pool.cpp"),
        "-o",
        str(folder / "pool"),
        "-pthread",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and any("sanitize" in f for f in flags):
        pytest.skip("this compiler has no thread sanitizer")
    assert done.returncode == 0, done.stderr
    return folder / "pool"


def test_every_part_runs_once_and_in_time(tmp_path: Path) -> None:
    program = build(tmp_path, "-O2")
    for threads in (1, 2, 3, 7):
        subprocess.run([program, str(threads), "8000", str(threads)], check=True, timeout=120)
        subprocess.run([program, str(threads), "4000", str(threads), "sleep"], check=True, timeout=120)


def test_long_yields_are_avoided_for_growing_periods(tmp_path: Path) -> None:
    """Beside a task that keeps its core a thread yields again after 50 ms, then after twice as long, up to 1.6 s."""
    subprocess.run([build(tmp_path, "-O1")], check=True, timeout=30)


def test_there_is_no_data_race(tmp_path: Path) -> None:
    program = build(tmp_path, "-O1", "-g", "-fsanitize=thread")
    done = subprocess.run([program, "3", "1500", "9"], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


# A pool of one thread, and a second one that waits for more parts of a step that is long over: it was not scheduled
# while `done` had any other value than the one that it waits to change, and adding one at the end gives that value.
STALE = r"""
#define LLMC_MAX_ARGS 1
#define LLMC_MAX_SIZES 1
#define LLMC_MAX_LAUNCHES 1
#define LLMC_SCRATCH INT64_C(64)
#include "llmc_abi.h"
#include "llmc_pool.h"
static llmc_pool* pool;
static llmc_thread second;
static void* wait(void*) {
  llmc_until(pool, &second, 1000, 0);
  return nullptr;
}
int main() {
  pool = (llmc_pool*)llmc_open(1);
  pool->started = 2;  // so that the end of the pool waits for it
  pool->threads = (llmc_thread*)realloc(pool->threads, 2 * sizeof(llmc_thread));
  second.no_yield_until = INT64_MAX;
  pool->done.v = 12;
  if (pthread_create(&pool->threads[1].id, nullptr, wait, nullptr)) return 2;
  while (!llmc_get(pool->sleepers)) sched_yield();
  usleep(50000);
  __atomic_store_n(&pool->done.v, 11u, __ATOMIC_SEQ_CST);
  llmc_close(pool);
  return 0;
}
"""


def test_the_end_wakes_a_thread_that_waits_for_an_earlier_step(tmp_path: Path) -> None:
    (tmp_path / "stale.cpp").write_text(STALE)
    command = ["g++", "-O1", "-std=c++17", "-pthread", f"-I{HEADERS}", "-o", tmp_path / "stale", tmp_path / "stale.cpp"]
    subprocess.run([str(c) for c in command], check=True)
    subprocess.run([tmp_path / "stale"], check=True, timeout=60)
