"""A hand-made artifact for the tests: one C++ kernel, a plain step unit, and nothing of our compiler but the writer.

The toy has the states, inputs and outputs of a real one, so device, executor and folder are tried end to end.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from kernel_cache import library
from llmc_runtime.format import expr
from llmc_runtime.format.manifest import Limits, Source, State, TargetInfo
from llmc_runtime.format.program import Buffer, Launch, Program

from llmc.artifact.write import PackedWeights, Parts
from llmc.codegen.build import Binary
from llmc.ir.graph import Graph
from llmc.ir.types import tensor

V, ROWS, MAXLEN, PAGE, TOP, TOKENS = 64, 4, 32, 4, 5, 48
M = MAXLEN // PAGE

KERNEL = r"""
#include <stdint.h>
typedef struct { int tid, nthreads; char* scratch; int64_t scratch_bytes; } llmc_ctx;
extern "C" void toy(const llmc_ctx* ctx, void* const* a, const int64_t* n) {
  if (ctx->tid) return;
  const int32_t *rows = (int32_t*)a[0], *qlens = (int32_t*)a[1], *emit = (int32_t*)a[2];
  int32_t *tokens = (int32_t*)a[3], *length = (int32_t*)a[4], *pages = (int32_t*)a[5], *counts = (int32_t*)a[6];
  float* kv = (float*)a[7];
  const int32_t* table = (int32_t*)a[8];
  int32_t* ids = (int32_t*)a[9]; float* lp = (float*)a[10]; int32_t* rank = (int32_t*)a[11];
  int32_t* top = (int32_t*)a[12]; float* tops = (float*)a[13];
  int64_t R = n[0], maxlen = n[1], m = n[2], V = n[3], page = n[4], K = n[5];
  for (int64_t i = 0; i < R; i++) {
    int32_t r = rows[i], len = length[r];
    int64_t sum = 0;  // the token at every position, read back through the pages
    for (int end = len + qlens[i]; len < end; len++)
      kv[pages[r * m + len / page] * page + len % page] = tokens[r * maxlen + len];
    for (int p = 0; p < len; p++) sum += (p + 1) * (int64_t)kv[pages[r * m + p / page] * page + p % page];
    int32_t id = table[(sum + counts[r * V + 1]) % V];
    ids[i] = id; lp[i] = -0.5f * id; rank[i] = 1;
    for (int k = 0; k < K; k++) { top[i * K + k] = (id + k) % V; tops[i * K + k] = lp[i] - k; }
    length[r] = len;
    if (emit[i]) { if (len < maxlen) tokens[r * maxlen + len] = id; counts[r * V + id]++; }
  }
}
"""

UNIT = r"""
#include <stdint.h>
#include <stdlib.h>
typedef struct { int tid, nthreads; char* scratch; int64_t scratch_bytes; } llmc_ctx;
typedef void (*kernel)(const llmc_ctx*, void* const*, const int64_t*);
extern "C" void* llmc_open(int nthreads) { return calloc(1, 64); }
extern "C" void llmc_close(void* pool) { free(pool); }
extern "C" int llmc_run(void* pool, void* const* kernels, void* const* buffers, const int64_t* symbols) {
  llmc_ctx ctx = {0, 1, 0, 0};
  if (symbols[0] == 47) return 22;
  int64_t sizes[6] = {symbols[1], 32, 8, 64, 4, 5};
  ((kernel)kernels[0])(&ctx, buffers, sizes);
  return 0;
}
"""


def table() -> np.ndarray:
    return np.random.default_rng(3).permutation(V).astype(np.int32)


def expected(tokens: list[int], counted: int = 0) -> int:
    """The toy's next token, by definition."""
    return int(table()[(sum((p + 1) * t for p, t in enumerate(tokens)) + counted) % V])


class Checkpoint:
    """Weights from a dict."""

    def __init__(self, **tensors: np.ndarray) -> None:
        self.tensors = tensors

    def read(self, name: str, rows: slice) -> np.ndarray:
        x = self.tensors[name]
        return x[rows] if x.ndim else x


def _kernel(text: str, entry: str) -> Binary:
    return Binary(hashlib.sha256(text.encode()).hexdigest()[:32], text, library(text, "-O1"), entry)


def _buffer(name: str, kind: str, dtype: str, *shape: object, alias: str | None = None) -> Buffer:
    dims = tuple(expr.of(str(d)) for d in shape)
    count = "*".join(f"({d})" for d in shape)
    return Buffer(name, kind, dtype, dims, expr.parse(f"4*{count}"), alias=alias)


def program(name: str, kernel: str, unit: str, uniform: bool, tokens: int = TOKENS) -> Program:
    buffers = (
        _buffer("rows", "input", "i32", "R"), _buffer("qlens", "input", "i32", "R"),
        _buffer("emit", "input", "i32", "R"),
        _buffer("tokens", "state", "i32", ROWS, MAXLEN), _buffer("length", "state", "i32", ROWS),
        _buffer("pages", "state", "i32", ROWS, M), _buffer("counts", "state", "i32", ROWS, V),
        _buffer("kv.0", "state", "f32", "P", PAGE), _buffer("table", "weight", "i32", V),
        _buffer("ids", "output", "i32", "R"), _buffer("logprob", "output", "f32", "R"),
        _buffer("rank", "output", "i32", "R"),
        _buffer("top_ids", "output", "i32", "R", TOP), _buffer("top_logprobs", "output", "f32", "R", TOP),
        _buffer("length'", "state", "i32", ROWS, alias="length"),
    )  # fmt: skip
    sizes = tuple(expr.of(str(s)) for s in ("R", MAXLEN, M, V, PAGE, TOP))
    launch = Launch(kernel, "toy", tuple(range(14)), sizes, loc="model.toy", op="toy", bytes=expr.parse("T*8"))
    sizes_of = {"T": (1, tokens), "R": (1, ROWS)}
    symbols = {**sizes_of, "P": (1, 1 << 20)}
    serves = {"R": (1, ROWS)} if uniform else sizes_of
    return Program(name, symbols, serves, buffers, (launch,), 0, uniform, (unit, "llmc_run"))


def states() -> tuple[State, ...]:
    def state(name: str, role: str, *shape: object, dtype: str = "i32") -> State:
        return State(name, dtype, tuple(expr.of(str(d)) for d in shape), role)

    return (
        state("tokens", "tokens", ROWS, MAXLEN), state("length", "length", ROWS), state("pages", "pages", ROWS, M),
        state("fparams", "fparams", ROWS, 8, dtype="f32"), state("iparams", "iparams", ROWS, 8),
        state("stops", "stops", ROWS, 32), state("seen", "seen", ROWS, 2), state("counts", "counts", ROWS, V),
        state("kv.0", "kv", "P", PAGE, dtype="f32"),
    )  # fmt: skip


def parts(folder: Path, features: tuple[str, ...] = (), arch: str = "x86-64", weights: object = ...) -> Parts:
    """The toy as the writer takes it; `folder` gets its tokenizer file."""
    import platform

    kernel, unit = _kernel(KERNEL, "toy"), _kernel(UNIT, "llmc_run")
    graph = Graph("weights")
    graph.outputs = [graph.input("table", tensor("i32", V), weight=True)]
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text('{"toy": true}\n')
    return Parts(
        compiler="0.0-test",
        source=Source("hf", "toy", "0" * 40, {"config.json": "ab" * 32}),
        target=TargetInfo("cpu:test", platform.machine() if arch == "x86-64" else arch, features),
        limits=Limits(MAXLEN, ROWS, TOKENS),
        vocab_size=V,
        eos_token_ids=(0,),
        page_size=PAGE,
        states=states(),
        kernels=(kernel, unit),
        programs=(program("decode", kernel.hash, unit.hash, True), program("step", kernel.hash, unit.hash, False)),
        weights=PackedWeights(graph, Checkpoint(table=table())) if weights is ... else weights,  # type: ignore[arg-type]
        tokenizer=(tokenizer,),
        generation={"temperature": 0.7},
        ir=(("canonicalize", "graph @main() {\n}\n"),),
        reports={"memory.json": {"arena": 0}},
    )
