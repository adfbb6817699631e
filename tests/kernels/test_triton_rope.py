"""Rotary kernels in Triton compared with the reference: partial and paired rotations, norms, gains, positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draw import generator, of_test
from kernels.harness import Case
from kernels.triton_harness import INTERPRETED, ONE_TARGET, TARGETS, compile_for, run_case
from kernels.triton_order import memory_order

from llmc.codegen.backends.triton.rope import KV_APPEND, ROPE, ROPE_APPEND, ROPE_TABLES
from llmc.codegen.backends.triton.triton_kernel import FLOAT8, TritonKernel
from llmc.ir.dim import D
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import Type
from llmc.targets.target import Target

# tokens, query heads, key heads, page, head size, pairs (0: no rotation), whether normed, whether in pairs
APPENDS = (
    (1, 32, 8, 16, 128, 64, True, False),
    (5, 7, 1, 16, 64, 32, False, False),
    (3, 4, 2, 4, 80, 16, True, False),
    (9, 3, 3, 16, 96, 48, False, True),
    (6, 2, 1, 32, 20, 3, True, True),
    (13, 4, 4, 16, 40, 0, False, False),
    (2, 2, 2, 8, 256, 128, True, False),
)
DTYPES = ("f32", "f16", "bf16")
F8 = "f8e4m3"


def fresh() -> np.random.Generator:
    """The generator of the test that runs now."""
    return np.random.default_rng(of_test())


def case(
    name: str,
    kernel: TritonKernel,
    values: list[tuple[np.ndarray, str]],
    attrs: dict,
    at: int,
    on: Target,
    axis: int = 0,
) -> Case:
    """One node over arrays with dtypes ("state bf16", "weight f32"), on the schedule numbered `at`. T is as long as the
    operand `axis`; a bfloat16 that is rounded thrice is allowed as many units: Triton's interpreter cuts."""
    g, tokens = Graph("main"), len(values[axis][0])
    for i, (x, dtype) in enumerate(values):
        kind = dtype.split()[-1]
        first = D(len(x)) if "state" in dtype or "weight" in dtype or len(x) != tokens else D("T")
        g.input(f"x{i}", Type(kind, (first, *map(D, x.shape[1:])), "state" in dtype), weight="weight" in dtype)
    node = g.add(OPS[name], g.inputs, attrs)
    g.outputs = list(node.results)
    plan = kernel.schedules(node, on)
    rough = any("bf16" in dtype for _, dtype in values) or attrs.get("dtype") == "bf16"
    tolerance = (3e-2, 3e-2) if rough and on is INTERPRETED else (1e-2, 1e-2) if rough else (2e-3, 2e-3)
    if all(dtype.split()[-1] in ("f32", "i32", "i64") for _, dtype in values) and not rough:
        tolerance = (2e-5, 2e-5)
    label = f"{name}-{[d for _, d in values]}-{[x.shape for x, _ in values]}-{attrs}"
    return Case(label, g, kernel, plan[at % len(plan)], [x for x, _ in values], *tolerance)


def slots_of(rng: np.random.Generator, tokens: int, pages: int, page: int) -> np.ndarray:
    """Distinct slots, some of them -1."""
    slots = rng.permutation(pages * page)[:tokens].astype(np.int32)
    slots[rng.random(tokens) < 0.2] = -1
    return slots


def tables(rng: np.random.Generator, tokens: int, pairs: int, dtype: str) -> list[tuple[np.ndarray, str]]:
    angle = rng.uniform(0, 7, (tokens, pairs))
    return [(np.cos(angle), dtype), (np.sin(angle), dtype)]


def append(rng: np.random.Generator, i: int, dtype: str, pool: str, at: int, on: Target = INTERPRETED) -> Case:
    tokens, h, g, page, d, pairs, normed, paired = APPENDS[i]
    pages = tokens // page + 3
    values = [
        (rng.standard_normal((tokens, (h + 2 * g) * d)).astype(np.float32), dtype),
        (rng.standard_normal((pages, 2, g, page, d)).astype(np.float32), f"state {pool}"),
        (slots_of(rng, tokens, pages, page), "i32"),
        *([(rng.uniform(0.5, 2, 2 * g).astype(np.float32), "f32")] if pool in FLOAT8 else []),
        *(tables(rng, tokens, pairs, dtype) if pairs else []),
    ]
    if normed:
        kind = "weight " if i % 2 else ""
        values += [(rng.standard_normal(d).astype(np.float32), f"{kind}{dtype}") for _ in range(2)]
    attrs = {"heads": h, "dtype": dtype, "eps": 1e-5 if normed else 0.0, "interleaved": paired}
    return case("rope_append", ROPE_APPEND, values, attrs, at, on)


def others(rng: np.random.Generator, on: Target = INTERPRETED) -> Iterator[Case]:
    """Cases of rope, rope_tables and kv_append."""
    for i, (tokens, h, d, pairs, paired) in enumerate(
        ((1, 9, 64, 32, False), (7, 3, 80, 16, False), (5, 2, 34, 17, True))
    ):
        x = rng.standard_normal((tokens, h, d)).astype(np.float32)
        dtype = DTYPES[i % 3]
        for at in range(2):
            values = [(x, dtype), *tables(rng, tokens, pairs, DTYPES[(i + at) % 3])]
            yield case("rope", ROPE, values, {"interleaved": paired}, at, on)
    for tokens, g, page, d in ((1, 8, 16, 128), (11, 2, 4, 80), (6, 3, 16, 20)):
        k, v = rng.standard_normal((2, tokens, g, d)).astype(np.float32)
        kv = rng.standard_normal((5, 2, g, page, d)).astype(np.float32)
        values = [(kv, "state bf16"), (k, "bf16"), (v, "f32"), (slots_of(rng, tokens, 5, page), "i32")]
        yield case("kv_append", KV_APPEND, values, {}, tokens, on, axis=1)
    for n, dtype in ((64, "f32"), (20, "bf16")):
        freq = (10000.0 ** -(np.arange(n) / n)).astype(np.float32)
        pos = np.concatenate([[0, 131071, 99991], rng.integers(0, 131072, 6)]).astype(np.int32)
        values = [(freq, "weight f32"), (pos, "i32")]
        yield case("rope_tables", ROPE_TABLES, values, {"scaling": 1.25, "dtype": dtype}, 0, on, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i", range(len(APPENDS)))
def test_append(i: int, dtype: str) -> None:
    rng = fresh()
    for at in range(2):
        run_case(append(rng, i, dtype, str(rng.choice((*DTYPES, F8))), at))


def coded(rng: np.random.Generator, dtype: str, at: int, on: Target = INTERPRETED, pool: str = F8) -> Case:
    """An append to a pool of 8-bit floats that is rounded exactly: ties, subnormals, numbers that saturate, NaN."""
    k, v = (300 * rng.standard_normal((2, 9, 3, 20)) ** 3).astype(np.float32)
    k[0, 0, :10] = [0.0, 448, 464, 465, 6e4, np.inf, -np.inf, np.nan, -0.0, -1e-7]
    k[0, 1, :8] = [17, 19, 2.0**-9, 2.0**-10, 2.0**-10 * 1.5, -(2.0**-6), 240, 248]
    v[:2] *= 1e-5
    kv = rng.standard_normal((4, 2, 3, 4, 20)).astype(np.float32)
    scales = np.concatenate([[1, 0.25], rng.uniform(1e-3, 9, 4)]).astype(np.float32)
    values = [(kv, f"state {pool}"), (k, dtype), (v, dtype), (np.arange(9)[::-1] - 1, "i32"), (scales, "weight f32")]
    c = case("kv_append", KV_APPEND, values, {}, at, on, axis=1)
    return replace(c, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_rounded_exactly(dtype: str) -> None:
    run_case(coded(fresh(), dtype, 0))


def test_others() -> None:
    for c in others(fresh()):
        run_case(c)


def test_gains_of_two_dtypes_are_refused() -> None:
    c = append(fresh(), 0, "bf16", "bf16", 0)
    values = c.graph.inputs
    values[6].type = replace(values[6].type, dtype="f32")
    assert "different dtypes" in (ROPE_APPEND.reject(c.node, INTERPRETED) or "")


@pytest.mark.parametrize("known", [False, True])
def test_known_gains_are_read_before_the_wait(known: bool) -> None:
    """Gains that are weights do not wait for the launches in front; computed ones do."""
    c = append(fresh(), 0, "bf16", "bf16", 0)
    for v in c.node.operands[5:]:
        v.weight = known
    target = next(t for t in TARGETS if t.has("pdl"))
    order = memory_order(ROPE_APPEND.emit(c.node, c.schedule, target), target)
    assert order.count("wait") == 1
    before = set(order[: order.index("wait")])
    assert before == ({"load x5"} if known else set())  # a pointer selected from x5 and x6


def gpu_cases(target: Target) -> Iterator[Case]:
    """Yield the cases that run on a GPU."""
    rng = generator()
    for i in range(len(APPENDS)):
        for dtype in DTYPES:
            for at in range(2):
                yield append(rng, i, dtype, str(rng.choice(DTYPES)), at, target)
    yield from others(rng, target)


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_compiles(target: Target, tmp_path: Path) -> None:
    rng = fresh()
    cases = list(others(rng, target))
    picked = [cases[i] for i in rng.permutation(len(cases))[:3]]
    picked += [append(rng, int(i), DTYPES[i % 3], "bf16", int(i), target) for i in rng.permutation(len(APPENDS))[:3]]
    for c in [*picked, cases[-1]]:
        compile_for(c, target, tmp_path)


def test_tables_reduce_the_angle_in_full(tmp_path: Path) -> None:
    """The fast sine of a GPU is wrong by more than a hundredth at 100000 radians."""
    from llmc.codegen.backends.triton.triton_toolchain import load_entry

    target = next(t for t in TARGETS if t.name == "cuda:sm_90")
    c = list(others(fresh(), target))[-1]
    source = c.kernel.emit(c.node, c.schedule, target)
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        fn = load_entry(source.text, source.entry)
        ast = ASTSource(fn, dict(zip(fn.arg_names, source.params, strict=True)), {}, {})
        ptx = triton.compile(ast, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "sin.approx" not in ptx and "cos.approx" not in ptx
