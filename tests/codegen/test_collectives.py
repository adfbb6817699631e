"""Collectives in shared memory: random sizes, late ranks, ranks that never come, and a group that has ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from draw import of_test

import llmc.codegen.backends.cpp.kernels

HEADERS = Path(llmc.codegen.backends.cpp.kernels.__file__).parent

# Processes with a thread per part run the same collectives of random sizes; one that is late sleeps first. Floats that
# round show another order of the sum.
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <vector>
#define LLMC_MAX_ARGS 1
#define LLMC_MAX_SIZES 1
#define LLMC_MAX_LAUNCHES 1
#define LLMC_SCRATCH INT64_C(64)
#include "llmc_abi.h"
#include "llmc_collective.h"
#include "llmc_pool.h"
#include "llmc_join.h"
using namespace llmc;
static float value(int rank, int64_t i, unsigned round) { return (float)((i * 7 + rank * 13 + round) % 97) / 7; }
static unsigned next(unsigned* r) { return (*r = *r * 1664525u + 1013904223u) >> 8; }
template <class F> static void parts(Group* g, F f) {
  std::vector<std::thread> threads;
  for (int t = 0; t < g->threads; t++)
    threads.emplace_back([=] {
      llmc_ctx ctx = {t, g->threads, nullptr, 0, g};
      f(&ctx);
    });
  for (auto& t : threads) t.join();
}
static int run(Group* g, int rounds, unsigned seed, int lost) {
  unsigned same = seed, own = seed + 77 + g->rank;
  for (int k = 0; k < rounds; k++) {
    int64_t n = 1 + next(&same) % (k % 16 ? 900 : 70000), rows = 1 + next(&same) % 5;
    if (next(&own) % 20 == 0) usleep(next(&own) % 3000);
    if (lost == g->rank && k == rounds / 2) return 0;
    std::vector<float> x(n), y(n), wide(rows * n * g->ranks), part(rows * n);
    for (int64_t i = 0; i < n; i++) x[i] = value(g->rank, i, k);
    for (int64_t i = 0; i < rows * n; i++) part[i] = value(g->rank, i, k + 1);
    bool inplace = next(&same) % 2;
    parts(g, [&](const llmc_ctx* c) { all_reduce(c, inplace ? x.data() : y.data(), x.data(), n); });
    parts(g, [&](const llmc_ctx* c) { all_gather(c, (char*)wide.data(), (char*)part.data(), rows, 4 * n); });
    if (int error = llmc_group_error(g->area)) return error;
    for (int64_t i = 0; i < n; i++) {
      float want = value(0, i, k);
      for (int r = 1; r < g->ranks; r++) want += value(r, i, k);
      if ((inplace ? x : y)[i] != want) return printf("round %d: sum %ld\n", k, (long)i), 1;
    }
    for (int64_t i = 0; i < rows * n * g->ranks; i++) {
      int64_t row = i / (n * g->ranks), r = i / n % g->ranks;
      if (wide[i] != value(r, row * n + i % n, k + 1)) return printf("round %d: part %ld\n", k, (long)i), 1;
    }
  }
  return 0;
}
int main(int argc, char** argv) {
  int ranks = atoi(argv[1]), threads = atoi(argv[2]), rounds = atoi(argv[3]), lost = atoi(argv[5]);
  int64_t bytes = llmc_group_bytes(ranks, threads);
  void* area = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Counter* first = (Counter*)((Area*)area + 1);
  for (int i = 0; i < ranks * threads; i++) first[i].published = 0xffffff00;  // counts past the largest number
  int64_t limit = lost < 0 ? INT64_C(60000000000) : INT64_C(300000000);
  for (int r = 0; r < ranks; r++)
    if (!fork()) {
      Group g = {(Area*)area, r, ranks, threads, limit, 0};
      _exit(run(&g, rounds, atoi(argv[4]), lost));
    }
  int worst = 0, status;
  while (wait(&status) > 0) worst = WEXITSTATUS(status) > worst ? WEXITSTATUS(status) : worst;
  return worst;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "test.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-O2", "-pthread", "-Wall", "-Werror", "-Wno-psabi", "-Wno-unused-function"]
    subprocess.run(["g++", *flags, f"-I{HEADERS}", "test.cpp", "-o", "test"], cwd=folder, check=True)
    return folder / "test"


@pytest.mark.parametrize(("ranks", "threads"), [(2, 1), (2, 3), (4, 2)])
def test_every_rank_has_the_sum_in_order_and_all_parts(program: Path, ranks: int, threads: int) -> None:
    done = subprocess.run(
        [program, *map(str, (ranks, threads, 400, of_test() % 2**31, -1))], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_rank_that_never_comes_ends_the_group(program: Path) -> None:
    done = subprocess.run([program, *map(str, (3, 2, 40, of_test() % 2**31, 1))], capture_output=True, text=True)
    assert done.returncode == 110  # ETIMEDOUT, in the ranks that waited
