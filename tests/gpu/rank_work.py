"""What the processes of test_ranks.py run: collectives on random data, compared with sums of the same numbers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llmc_runtime.format.errors import LlmcError

from bench.gpu.group import Rank, Work
from llmc.ir.dtype import DTYPES
from llmc.testing.case import POISON

TOP = 600  # maximum of T
# Results of odd sizes, of several chunks, and a chain whose exchanges follow each other at once. `d` is int32: a word
# may have all bits set.
INPUTS = {"a": ("bf16", 4096), "b": ("f32", 5), "c": ("f16", 1000), "d": ("i32", 642), "e": ("bf16", 1544)}


def text(ranks: int) -> str:
    """The graph that every rank runs."""
    inputs = ", ".join(f"%{name}: {dtype}[T, {width}]" for name, (dtype, width) in INPUTS.items())
    chain, last = [], "a"
    for i in range(8):
        chain += [f"%r{i} = all_reduce(%{last}) {{ranks={ranks}}} : bf16[T, 4096]", f"%h{i} = constant() {{value=0.5, dtype=\"bf16\"}} : bf16[]", f"%s{i} = mul(%r{i}, %h{i}) : bf16[T, 4096]"]  # fmt: skip  # noqa: E501
        last = f"s{i}"
    lines = [
        *chain,
        f"%x = all_reduce(%b) {{ranks={ranks}}} : f32[T, 5]",
        f"%y = all_reduce(%c) {{ranks={ranks}}} : f16[T, 1000]",
        f"%z = all_gather(%d) {{axis=1, ranks={ranks}}} : i32[T, {642 * ranks}]",
        f"%u = all_gather(%e) {{axis=0, ranks={ranks}}} : bf16[{ranks}*T, 1544]",
        f"return %{last}, %x, %y, %z, %u",
    ]
    body = "\n  ".join(lines)
    return f"sym T in [1, {TOP}]\nsym K in [0, {ranks - 1}]\ngraph @main({inputs}) {{\n  {body}\n}}\n"


def operands(seed: int, rank: int, tokens: int) -> dict[str, np.ndarray]:
    """The inputs of a rank."""
    rng = np.random.default_rng([seed, rank])
    out = {}
    for name, (dtype, width) in INPUTS.items():
        whole = DTYPES[dtype].kind != "f"
        x = rng.integers(-1, 2, (tokens, width)) if whole else rng.standard_normal((tokens, width), np.float32)
        out[name] = x.astype(DTYPES[dtype].np)
    return out


def total(xs: list[np.ndarray]) -> np.ndarray:
    """The float64 sum; in order, float32 sums of a few bf16 or f16 numbers, rounded once, are the same bits."""
    out = xs[0].astype(np.float32)
    for x in xs[1:]:
        out = out + x.astype(np.float32)
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
    return out.astype(xs[0].dtype)


def expected(inputs: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """The results, the same on every rank."""
    xs = {name: [x[name] for x in inputs] for name in INPUTS}
    chain = xs["a"]
    for _ in range(8):
        y = (total(chain).astype(np.float32) * 0.5).astype(chain[0].dtype)
        chain = [y] * len(chain)
    return [chain[0], total(xs["b"]), total(xs["c"]), np.concatenate(xs["d"], 1), np.concatenate(xs["e"], 0)]


def collectives(
    rank: int, ranks: int, exchange: Callable[[Any], list[Any]], work: Work, seed: int, replays: int
) -> int:
    """Replay graphs of few sizes with new data each time, late by turns; return the number of replays that were
    compared. Raises AssertionError at the first difference, or if bytes behind a result were written."""
    own = Rank(work, rank, ranks, exchange)
    run, symbols, memories = own.bind(work.program)
    outputs = [b for b in work.program.buffers if b.kind == "output"]
    poison = np.full(1 << 20, POISON, np.uint8)
    sizes = random.Random(seed)
    late = random.Random(seed + rank)
    few = [1, 3, 17, 64, 257, TOP]
    for i in range(replays):
        tokens = sizes.choice(few)
        if late.random() < 0.3:
            time.sleep(late.random() * 0.003)
        every = [operands(seed % 997 + i, r, tokens) for r in range(ranks)]
        for name, x in every[rank].items():
            own.device.write(memories[name], 0, x.view(np.uint8))
        for b in outputs:
            own.device.repeat(memories[b.name], poison, 0)
        symbols[list(work.program.symbols).index("T")] = tokens
        run()
        own.synchronize()
        for b, want in zip(outputs, expected(every), strict=True):
            got = own.device.read(memories[b.name])
            end = want.nbytes
            np.testing.assert_array_equal(
                got[:end].view(want.dtype).reshape(want.shape), want, f"replay {i}, {tokens} tokens, {b.name}"
            )
            assert (got[end:] == POISON).all(), f"replay {i}: bytes behind {b.name} were written"
    own.exchange(None)  # peers may still write
    own.device.close()
    return replays


def bursts(rank: int, ranks: int, exchange: Callable[[Any], list[Any]], work: Work, seed: int, replays: int) -> int:
    """Replay one graph many times without waiting in between; return the number of results that differ."""
    own = Rank(work, rank, ranks, exchange)
    run, symbols, memories = own.bind(work.program)
    late = random.Random(seed + rank)
    outputs = [b for b in work.program.buffers if b.kind == "output"]
    wrong = 0
    for burst, tokens in enumerate((1, 4, 64, 300)):
        every = [operands(seed % 997 + burst, r, tokens) for r in range(ranks)]
        for name, x in every[rank].items():
            own.device.write(memories[name], 0, x.view(np.uint8))
        symbols[list(work.program.symbols).index("T")] = tokens
        for _ in range(replays // 4):
            if late.random() < 0.02:
                time.sleep(late.random() * 0.002)
            run()
        own.synchronize()
        for b, want in zip(outputs, expected(every), strict=True):
            got = own.device.read(memories[b.name])[: want.nbytes].view(want.dtype).reshape(want.shape)
            wrong += int((got.view(np.uint8) != want.view(np.uint8)).any())
    own.exchange(None)
    own.device.close()
    return wrong


def lonely(rank: int, ranks: int, exchange: Callable[[Any], list[Any]], work: Work) -> tuple[float, str]:
    """Rank 0 runs alone: return the seconds until it gives up, and its error."""
    own = Rank(work, rank, ranks, exchange, limit=0.5)
    run, _, _ = own.bind(work.program)
    begin, error = time.perf_counter(), ""
    if rank == 0:
        for _ in range(3):
            run()
        try:
            own.synchronize()
        except LlmcError as e:
            error = f"{e.code} {e.cause}"
    seconds = time.perf_counter() - begin
    own.exchange(None)
    own.device.close()
    return seconds, error


def cancelled(rank: int, ranks: int, exchange: Callable[[Any], list[Any]], work: Work) -> tuple[float, str]:
    """Rank 0 runs alone and the host ends the group meanwhile: return the seconds until it stops, and its error."""
    own = Rank(work, rank, ranks, exchange)
    run, _, _ = own.bind(work.program)
    seconds, error = 0.0, ""
    if rank == 0:
        run()
        time.sleep(0.2)
        own.device.cancel()
        begin = time.perf_counter()
        try:
            own.synchronize()
        except LlmcError as e:
            error = f"{e.code} {e.cause}"
        seconds = time.perf_counter() - begin
    own.exchange(None)
    own.device.close()
    return seconds, error
