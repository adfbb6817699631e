"""The CUDA C++ kernels on a GPU at shapes and with schedules that are drawn from SEED, run as in test_kernels.py.

Products are compared with references in float64, whose weights are rounded where the kernel rounds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draw import generator
from gpu.launcher import Card
from gpu.test_cuda_expert_codes import coded
from gpu.test_cuda_kernels import SILU, TOLERANCE, check, few_tokens, fragments, mixture, over_codes, product
from gpu.test_decode_attention import F8, MOST, case_of, step_of
from kernels.harness import Case

from llmc.codegen.backends.cuda.decode_attention import DECODE_ATTENTION, SINGLE, SPLIT, WHOLE
from llmc.codegen.backends.cuda.gemm_tiles import GEMM_TILES, MIN_STEPS, STEP
from llmc.codegen.backends.cuda.gemm_wgmma import GEMM_WGMMA
from llmc.codegen.backends.cuda.quantized_tiles import MIN_TOKENS, QUANTIZED_TILES
from llmc.codegen.backends.cuda.quantized_wgmma import QUANTIZED_WGMMA
from llmc.codegen.backends.cuda.skinny_gemm import SKINNY_FIXED, SKINNY_GEMM
from llmc.codegen.backends.cuda.skinny_slices import SKINNY_SLICES
from llmc.codegen.kernel import READ_BEFORE_WAIT, Kernel
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
ROUNDS = range(4)  # of each test
SCHEDULES = 3  # of a shape
TRIES = 1000  # shapes that are drawn until a kernel supports one
MOST_BYTES = 24 << 20  # of the operands and the result
MOST_WORK = 1 << 31  # multiplications
ROUNDED = 2e-2  # an error of a product whose tokens, times the gain of a norm, are rounded to bf16


def logarithmic(rng: np.random.Generator, low: int, high: int, multiple: int = 1) -> int:
    """Draw a multiple between two of them: small ones are as likely as large ones."""
    return round(np.exp(rng.uniform(np.log(low), np.log(high))) / multiple) * multiple or multiple


def some_schedules(cases: Sequence[Case], rng: np.random.Generator) -> Iterator[Case]:
    """Yield the cases with drawn schedules, in float64."""
    for case in cases:
        assert case.kernel.reject(case.node, sm_90()) is None
        found = case.kernel.schedules(case.node, sm_90())
        for i in rng.permutation(len(found))[:SCHEDULES]:
            yield replace(case, schedule=found[i], name=f"{case.name} {found[i]}", exact=True)


def drawn_product(rng: np.random.Generator, dtypes: Sequence[str], fewest: int = 8) -> Case:
    """A product with a result of one of the dtypes and at least so many columns to add up."""
    while True:
        m, n, k = logarithmic(rng, 1, 8192), logarithmic(rng, 8, 4096, 8), logarithmic(rng, fewest, 4096, 8)
        parts, out = int(rng.integers(1, 3)), str(rng.choice(dtypes))
        if m * k * 2 + n * parts * k * 2 + m * n * 6 < MOST_BYTES and m * n * k * parts < MOST_WORK:
            break
    plain = "" if out == "bf16" else "a0"  # a `linear` has the dtype of its operands
    bodies = {1: (plain, "add(a0, a1)", "add(mul(a0, a2), a1)"), 2: (SILU, "add(mul(a0, sigmoid(a1)), a2)")}
    return product(min(m, 4096), n, k, parts, str(rng.choice(bodies[parts])), out, {})


@pytest.mark.parametrize("number", ROUNDS)
def test_dense(number: int, card: Card) -> None:
    rng = generator()
    case = drawn_product(rng, ("bf16", "f16", "f32"))
    assert case.kernel is GEMM_WGMMA
    check(list(some_schedules([case], rng)), card)


@pytest.mark.parametrize("number", ROUNDS)
def test_dense_in_large_tiles(number: int, card: Card) -> None:
    rng = generator()
    case = replace(drawn_product(rng, ("bf16", "f16"), STEP * MIN_STEPS), kernel=GEMM_TILES)
    check(list(some_schedules([case], rng)), card)


def drawn_codes(rng: np.random.Generator, kernel: Kernel, tokens: tuple[int, int], normed: bool = False) -> Case:
    """A product over codes of 4 bits that the kernel supports; the number of tokens is a run-time size."""
    for _ in range(TRIES):
        m, n, k = logarithmic(rng, *tokens), logarithmic(rng, 64, 3072, 64), logarithmic(rng, 64, 4096, 64)
        parts, zeros, scale = int(rng.integers(1, 3)), bool(rng.integers(2)), str(rng.choice(["bf16", "f16"]))
        group = int(rng.choice([g for g in (16, 32, 64, 128, 192, 256, 512, k) if k % g == 0]))
        bodies = ["a0", "add(a1, a0)", *["add(add(a0, a1), a2)"] * (not normed)]
        body = SILU if parts == 2 else str(rng.choice(bodies))
        if m * k * 2 + n * parts * k + m * n * 4 > MOST_BYTES or m * n * k * parts > MOST_WORK:
            continue
        made = fragments(m, n, k, parts, group, zeros, body, scale, "T", normed)
        case = replace(made, kernel=kernel)
        if kernel.reject(case.node, sm_90()) is None:
            return case
    raise AssertionError(f"{kernel.name} supports none of {TRIES} shapes")


@pytest.mark.parametrize("number", ROUNDS)
def test_4_bit_codes_of_many_tokens(number: int, card: Card) -> None:
    rng = generator()
    case = drawn_codes(rng, QUANTIZED_TILES, (MIN_TOKENS, 4096))
    check([over_codes(case, case.kernel, c.schedule) for c in some_schedules([case], rng)], card)


@pytest.mark.parametrize("number", ROUNDS)
def test_4_bit_codes(number: int, card: Card) -> None:
    rng = generator()
    case = drawn_codes(rng, QUANTIZED_WGMMA, (1, 2048))
    check([over_codes(case, case.kernel, c.schedule) for c in some_schedules([case], rng)], card)


@pytest.mark.parametrize("kernel", [SKINNY_GEMM, SKINNY_FIXED, SKINNY_SLICES], ids=lambda k: k.name)
@pytest.mark.parametrize("number", ROUNDS)
def test_4_bit_codes_of_few_tokens(number: int, kernel: Kernel, card: Card) -> None:
    """Half of them include the RMS norm of the tokens."""
    rng, normed = generator(), number % 2 == 1
    case = drawn_codes(rng, kernel, (1, 48), normed)
    case.atol = TOLERANCE
    if normed and kernel is not SKINNY_FIXED:
        case.atol = 3 * ROUNDED if case.node.attrs["parts"] == 2 else ROUNDED  # two parts are multiplied
    check(list(some_schedules([case], rng)), card)


@pytest.mark.parametrize("code", ["f8e4m3", "i8", "bf16"])
@pytest.mark.parametrize("number", ROUNDS)
def test_few_tokens(number: int, code: str, card: Card) -> None:
    rng = generator()
    m, n, k = logarithmic(rng, 1, 130), logarithmic(rng, 8, 2048, 8), logarithmic(rng, 16, 4096, 16)
    parts, residual, out = int(rng.integers(1, 4)), bool(rng.integers(2)), str(rng.choice(["bf16", "f16", "f32"]))
    check(list(some_schedules([few_tokens(m, n, k, parts, residual, out, code)], rng)), card)


@pytest.mark.parametrize("number", ROUNDS)
def test_experts(number: int, card: Card) -> None:
    rng = generator()
    experts = logarithmic(rng, 1, 256)
    t, k, n = logarithmic(rng, 1, 1024), int(rng.integers(1, min(8, experts) + 1)), logarithmic(rng, 8, 512, 8)
    d = min(logarithmic(rng, 8, 1024, 8), MOST_BYTES // (4 * experts * n) // 8 * 8 or 8)
    choice = str(rng.choice(["even", "the same", *["one each"] * (k == 1)]))
    cases = mixture(t, k, experts, n, d, str(rng.choice(["", "bf16", "f32"])), choice)
    check([replace(cases[i], exact=True) for i in rng.permutation(len(cases))[: 2 * SCHEDULES]], card)


@pytest.mark.parametrize("number", ROUNDS)
def test_experts_of_4_bit_codes(number: int, card: Card) -> None:
    """Beside a reference that rounds where the kernel does (`Coded`)."""
    rng = generator()
    experts = logarithmic(rng, 1, 256)
    t, k, n = logarithmic(rng, 1, 1024), int(rng.integers(1, min(8, experts) + 1)), logarithmic(rng, 64, 512, 64)
    d = min(logarithmic(rng, 64, 2048, 64), MOST_BYTES // (2 * experts * n) // 64 * 64 or 64)
    group = int(rng.choice([g for g in (16, 32, 64, 128, 256) if d % g == 0 or g > 64]))
    zero, bias = str(rng.choice(["", "u8", "e2m1"])), str(rng.choice(["", "bf16", "f32"]))
    scale, choice = str(rng.choice(["bf16", "f16"])), str(rng.choice(["even", "the same"]))
    cases = coded(t, k, experts, n, d, group, zero, "bf16" if zero == "e2m1" else scale, bias, choice)
    check([cases[i] for i in rng.permutation(len(cases))[: 2 * SCHEDULES]], card)


def drawn_attention(rng: np.random.Generator, op: str) -> Case:
    """A step of rows of 1 to MOST tokens that the kernel supports, among them rows without tokens."""
    for _ in range(TRIES):
        kv_heads = int(rng.choice([1, 2, 4, 8]))
        shape = (kv_heads * int(rng.integers(1, 17)), kv_heads, int(rng.choice([64, 96, 128, 192, 256])))
        dtypes, sinks = str(rng.choice(["bf16", "f16"])), bool(op != SPLIT and rng.random() < 0.3)
        attrs: dict[str, Any] = {"window": int(rng.integers(1, MOST))} if rng.random() < 0.5 else {}
        attrs |= {"softcap": float(rng.uniform(0.5, 8))} if rng.random() < 0.4 else {}
        dtypes += f" {F8}" if rng.random() < 0.3 else ""
        parts = int(rng.integers(2, 9)) if op == SPLIT else 0
        page = int(rng.choice([16, 32, 64]))
        lengths = [1, MOST, page, page + 1, *(logarithmic(rng, 1, MOST) for _ in range(int(rng.integers(1, 9))))]
        spans: list[tuple[int, int] | None] = [None, *((1, n) for n in lengths)]
        spans += [(int(rng.integers(2, 40)), 300), (0, 20)] if op == SINGLE else []
        step = step_of((shape, page, dtypes, parts, attrs, sinks), spans, rng)
        case = case_of(step, op, rng, parts)
        if DECODE_ATTENTION.reject(case.node, sm_90()) is None:
            return case
    raise AssertionError(f"the kernel supports none of {TRIES} steps")


@pytest.mark.parametrize("op", [WHOLE, SPLIT, SINGLE])
@pytest.mark.parametrize("number", ROUNDS)
def test_attention_of_single_tokens(number: int, op: str, card: Card) -> None:
    rng = generator()
    case = drawn_attention(rng, op)
    found, cases = DECODE_ATTENTION.schedules(case.node, sm_90()), []
    for i, at in enumerate(rng.permutation(len(found))[:SCHEDULES]):
        schedule = {**found[at], **({READ_BEFORE_WAIT: 1} if i % 2 else {})}
        cases.append(replace(case, schedule=schedule, name=f"{case.name} {schedule}"))
    check(cases, card)
