"""Code of the processes of test_ranks.py: collectives on random data, compared with sums of the same numbers."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.program import Buffer

from bench.gpu.group import Rank, Work
from llmc.ir.dtype import DTYPES
from llmc.testing.case import POISON_BYTE

TOP = 600  # maximum of T
HIDDEN = 4096
# Results of odd sizes, of several chunks, and a chain whose exchanges follow each other at once. `d` is int32: a word
# may have all bits set.
INPUTS = {"a": ("bf16", HIDDEN), "b": ("f32", 5), "c": ("f16", 1000), "d": ("i32", 642), "e": ("bf16", 1544)}
# Sums with norms: one lane, a chunk, two chunks, masked lanes; those with a residual, which all ranks have, as a gain.
NORMS = {"n": ("f32", 5), "o": ("bf16", HIDDEN), "p": ("bf16", 8192), "q": ("f16", 1000)}
RESIDUALS, EPS = ("o", "q"), 1e-5
UNITS = {"bf16": 2.0**-7, "f16": 2.0**-10, "f32": 1e-5}  # by which a norm may differ, relative to the value
CANCELLED = 4e-6  # by which a norm may differ anyway: float32 sums of a few numbers up to 5, by a mean of 0.5 or more


def text(ranks: int) -> str:
    """The graph that every rank runs."""
    inputs = [f"%{name}: {dtype}[T, {width}]" for name, (dtype, width) in (*INPUTS.items(), *NORMS.items())]
    inputs += [f"%{name}_gain: {dtype}[{width}]" for name, (dtype, width) in NORMS.items()]
    inputs += [f"%{name}_rest: {NORMS[name][0]}[T, {NORMS[name][1]}]" for name in RESIDUALS]
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
    ]
    outs = [last, "x", "y", "z", "u"]
    for name, (dtype, width) in NORMS.items():
        more, t = f", %{name}_rest" * (name in RESIDUALS), f"{dtype}[T, {width}]"
        lines.append(
            f"%{name}_sum, %{name}_norm = all_reduce_norm(%{name}, %{name}_gain{more}) "
            f"{{eps={EPS}, ranks={ranks}}} : {t}, {t}"
        )
        outs += [f"{name}_sum", f"{name}_norm"]
    body = "\n  ".join([*lines, f"return {', '.join(f'%{x}' for x in outs)}"])
    return f"sym T in [1, {TOP}]\nsym K in [0, {ranks - 1}]\ngraph @main({', '.join(inputs)}) {{\n  {body}\n}}\n"


def operands(seed: int, rank: int, tokens: int) -> dict[str, np.ndarray]:
    """The inputs of a rank."""
    rng, same = np.random.default_rng([seed, rank]), np.random.default_rng([seed, 1 << 20])
    out = {}
    for name, (dtype, width) in (*INPUTS.items(), *NORMS.items()):
        whole = DTYPES[dtype].kind != "f"
        x = rng.integers(-1, 2, (tokens, width)) if whole else rng.standard_normal((tokens, width), np.float32)
        out[name] = x.astype(DTYPES[dtype].np)
    for name, (dtype, width) in NORMS.items():
        out[f"{name}_gain"] = same.standard_normal(width, np.float32).astype(DTYPES[dtype].np)
        if name in RESIDUALS:
            out[f"{name}_rest"] = same.standard_normal((tokens, width), np.float32).astype(DTYPES[dtype].np)
    return out


def in_order(xs: list[np.ndarray], dtype: type) -> np.ndarray:
    """The sum in this dtype, term by term."""
    out = xs[0].astype(dtype)
    for x in xs[1:]:
        out += x.astype(dtype)
    return out


def total(xs: list[np.ndarray]) -> np.ndarray:
    """The float64 sum; in order, float32 sums of a few bf16 or f16 numbers, rounded once, are the same bits."""
    out = in_order(xs, np.float32)
    np.testing.assert_allclose(out, in_order(xs, np.float64), rtol=1e-5, atol=1e-5)
    return out.astype(xs[0].dtype)


def expected(inputs: list[dict[str, np.ndarray]]) -> list[tuple[np.ndarray, float]]:
    """The results, the same on every rank, each with the relative error that is allowed: none but for norms."""
    xs = {name: [x[name] for x in inputs] for name in (*INPUTS, *NORMS)}
    y = total(xs["a"])
    chain = [(y.astype(np.float32) * 0.5).astype(y.dtype)] * len(inputs)
    for _ in range(7):
        y = in_order(chain, np.float32).astype(y.dtype)
        chain = [(y.astype(np.float32) * 0.5).astype(y.dtype)] * len(chain)
    exact = [chain[0], total(xs["b"]), total(xs["c"]), np.concatenate(xs["d"], 1), np.concatenate(xs["e"], 0)]
    out = [(x, 0.0) for x in exact]
    for name, (dtype, _) in NORMS.items():
        terms = xs[name] + ([inputs[0][f"{name}_rest"]] if name in RESIDUALS else [])
        whole, gain = in_order(terms, np.float64), inputs[0][f"{name}_gain"].astype(np.float64)
        norm = whole / np.sqrt(np.mean(whole**2, -1, keepdims=True) + EPS) * gain
        out += [(total(terms), 0.0), (norm.astype(DTYPES[dtype].np), UNITS[dtype])]
    return out


def outputs_of(work: Work) -> list[Buffer]:
    """The buffers of the results, in the order in which the graph returns them."""
    return [b for b in work.program.buffers if b.kind == "output"]


def differs(got: np.ndarray, want: np.ndarray, error: float) -> int:
    """The number of elements that differ by more than the relative error; of exact ones, of bytes."""
    if not error:
        return int((got.view(np.uint8) != want.view(np.uint8)).sum())
    a, b = got.astype(np.float64), want.astype(np.float64)
    return int((~(np.abs(a - b) <= error * np.abs(b) + CANCELLED)).sum())


def collectives(
    rank: int, ranks: int, exchange: Callable[[Any], list[Any]], work: Work, seed: int, replays: int
) -> int:
    """Replay graphs of few sizes with new data each time, late by turns; return the number of replays that were
    compared. Raises AssertionError at the first difference, or if bytes after a result were written."""
    own = Rank(work, rank, ranks, exchange)
    run, symbols, memories = own.bind(work.program)
    outputs = outputs_of(work)
    poison = np.full(1 << 20, POISON_BYTE, np.uint8)
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
        mine = hashlib.sha256()
        for b, (want, error) in zip(outputs, expected(every), strict=True):
            got = own.device.read(memories[b.name])
            y = got[: want.nbytes].view(want.dtype).reshape(want.shape)
            assert not differs(y, want, error), f"replay {i}, {tokens} tokens, {b.name}: {y} {want}"
            assert (got[want.nbytes :] == POISON_BYTE).all(), f"replay {i}: bytes after {b.name} were written"
            mine.update(y.tobytes())
        assert len(set(own.exchange(mine.digest()))) == 1, f"replay {i}: the ranks have different bits"
    own.exchange(None)  # peers may still write
    own.device.close()
    return replays


def bursts(rank: int, ranks: int, exchange: Callable[[Any], list[Any]], work: Work, seed: int, replays: int) -> int:
    """Replay one graph many times without waiting in between; return the number of results that differ."""
    own = Rank(work, rank, ranks, exchange)
    run, symbols, memories = own.bind(work.program)
    late = random.Random(seed + rank)
    outputs = outputs_of(work)
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
        for b, (want, error) in zip(outputs, expected(every), strict=True):
            got = own.device.read(memories[b.name])[: want.nbytes].view(want.dtype).reshape(want.shape)
            wrong += differs(got, want, error) > 0
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
