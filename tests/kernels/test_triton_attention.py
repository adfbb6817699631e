"""Attention in Triton compared with the reference: lengths, windows, caps, sinks, groups, head sizes, parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator, of_test
from kernels.harness import Case
from kernels.triton_harness import INTERPRETED, ONE_TARGET, TARGETS, compile_for, run_case
from kernels.triton_order import memory_order

from llmc.codegen.backends.triton.decode_attention import ATTENTION_COMBINE, DECODE_ATTENTION, SINGLE_TOKEN_ATTENTION
from llmc.codegen.backends.triton.prefill_attention import (
    ATTENTION_PARTS,
    JOIN_PARTS,
    MIXED_ATTENTION,
    PACKED_ATTENTION,
    PREFILL_ATTENTION,
)
from llmc.codegen.backends.triton.triton_kernel import FLOAT8, TritonKernel, float8
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.ir.dim import D
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import Type
from llmc.passes.split import split_kv
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
# h, g, d
SHAPES = ((4, 4, 64), (14, 2, 64), (8, 1, 80), (6, 2, 96), (10, 2, 128), (4, 2, 256), (3, 1, 40), (12, 2, 72))
F8 = "f8e4m3"
DETERMINISTIC = replace(INTERPRETED, deterministic=True)
# A bfloat16 softmax; Triton's interpreter cuts where others round.
ATOL = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2, **dict.fromkeys(FLOAT8, 0.0)}


@dataclass
class Paged:
    """A step over pages. spans: (new tokens, tokens in all) of each row; None is a row of -1 that has one token."""

    shape: tuple[int, int, int]
    spans: list[tuple[int, int] | None]
    page: int = 16
    dtype: str = "f32"
    pool: str = ""  # dtype of the pages; the queries' where empty
    sinks: bool = False
    attrs: dict[str, Any] = field(default_factory=dict)
    behind: int = 0  # tokens after the last row
    dynamic: bool = True
    alibi: bool = False

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Slots that no row has filled are NaN, and pages that no row needs are -1."""
        h, g, d = self.shape
        news = [s[0] if s else 1 for s in self.spans]
        totals = [s[1] if s else 0 for s in self.spans]
        count = len(self.spans)
        table = np.full((count + 2, max(1, -(-max(totals) // self.page)) + 1), -1, np.int32)
        rows = rng.permutation(count + 2)[:count].astype(np.int32)
        free = list(rng.permutation(table.size + 1))
        kv = np.full((table.size + 1, 2, g, self.page, d), np.nan, np.float32)
        starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
        positions = np.full(starts[-1] + self.behind, -1, np.int32)
        for i, (new, total) in enumerate(zip(news, totals, strict=True)):
            for j in range(-(-total // self.page)):
                table[rows[i], j] = free.pop()
                used = min(self.page, total - j * self.page)
                kv[table[rows[i], j], :, :, :used] = rng.standard_normal((2, g, used, d))
            if total:
                positions[starts[i] : starts[i + 1]] = np.arange(total - new, total)
        rows[[s is None for s in self.spans]] = -1
        q = rng.standard_normal((len(positions), h, d)).astype(np.float32)
        scales = [rng.uniform(0.5, 2, 2 * g).astype(np.float32)] if self.pool in FLOAT8 else []
        last = 2 * rng.standard_normal(h) if self.sinks else 2.0 ** rng.uniform(-8, 0, h)
        extra = [last.astype(np.float32)] * (self.sinks or self.alibi)
        return [q, kv, table, rows, starts, positions, *scales, *extra]

    def case(
        self,
        kernel: TritonKernel,
        rng: np.random.Generator,
        schedule: int = 0,
        splits: int = 0,
        on: Target = INTERPRETED,
        least: int = 1,
    ) -> Case:
        """The step on a kernel; with `splits`, one token a row and no sinks; SINGLE_TOKEN_ATTENTION gets such rows."""
        arrays = self.inputs(rng)
        attrs = {"scale": self.shape[2] ** -0.5, **self.attrs}
        if splits:
            rows = np.concatenate([arrays[3], np.full(self.behind, -1, np.int32)])
            scales = arrays[6:7] if self.pool in FLOAT8 else []
            arrays, attrs = [*arrays[:3], rows, arrays[5], *scales], attrs | {"splits": splits}
        if kernel is ATTENTION_PARTS:
            attrs["part"] = split_kv.PART_TOKENS
        if kernel is SINGLE_TOKEN_ATTENTION:
            arrays.insert(6, rng.standard_normal(arrays[0].shape).astype(np.float32))
        elif least > 1:
            attrs["least"] = least
        kind = "_single" if kernel is SINGLE_TOKEN_ATTENTION else ""
        if splits:
            kind = "_parts" if kernel is ATTENTION_PARTS else "_split"
        op = OPS["paged_alibi_attention" if self.alibi else f"paged_attention{kind}"]
        g = Graph("main")
        t, r = (D("T"), D("R")) if self.dynamic else (D(len(arrays[0])), D(len(self.spans)))
        first = {"q": t, "y": t, "rows": t if splits else r, "starts": r + 1, "positions": t}
        slots = [s for s in op.operands if not s.scales or self.pool in FLOAT8]
        for slot, x in zip(slots, arrays, strict=False):
            dtype = "i32" if x.dtype.kind == "i" else slot.dtype if slot.dtype == "f32" else self.dtype
            dtype = self.pool or self.dtype if slot.name == "kv" else dtype
            shape = (first.get(slot.name, D(len(x))), *map(D, x.shape[1:]))
            g.input(slot.name, Type(dtype, shape, slot.state))
        g.outputs = list(g.add(op, g.inputs, attrs).results)
        plan = kernel.schedules(g.nodes.head, on)  # type: ignore[arg-type]
        plan = plan[schedule % len(plan)]
        name = f"{op.name}-{self}-{plan}-{least}"
        atol = max(ATOL[self.dtype], ATOL[self.pool or self.dtype])
        if self.pool in FLOAT8:  # the products' factors are float16, or float32
            atol = ATOL["f32" if self.dtype == "f32" else "f16"]
        return Case(name, g, kernel, plan, arrays, rtol=2e-5, atol=atol)


def drawn(rng: np.random.Generator, one: bool, codes: bool = True) -> Paged:
    """A step of a random shape. one: a token of each row. codes: some pools are of 8-bit floats."""
    spans: list[tuple[int, int] | None] = []
    for _ in range(rng.integers(1, 5)):
        total = int(rng.choice([1, 15, 16, 17, rng.integers(1, 80)]))
        new = 1 if one or rng.random() < 0.3 else int(rng.integers(1, total + 1))
        spans.append(None if rng.random() < 0.2 else (new, total))
    attrs: dict[str, Any] = {}
    if rng.random() < 0.4:
        attrs["window"] = int(rng.integers(1, 40))
    if rng.random() < 0.4:
        attrs["softcap"] = float(rng.uniform(0.5, 5))
    dtype = str(rng.choice(["f32", "bf16", "f16"]))
    pool = str(rng.choice(["f32", "bf16", "f16"])) if rng.random() < 0.2 else F8 if rng.random() < 0.3 and codes else ""
    shape = SHAPES[rng.integers(len(SHAPES))]
    page = int(rng.choice([16, 16, 4, 32, 64]))
    behind = 0 if one and rng.random() < 0.7 else int(rng.integers(0, 4))
    return Paged(shape, spans, page, dtype, pool, bool(rng.random() < 0.4), attrs, behind, bool(rng.random() < 0.7))


def fresh() -> np.random.Generator:
    """The generator of the test that runs now."""
    return np.random.default_rng(of_test())


PINNED = (
    Paged((8, 2, 128), [(1, 1), (1, 16), (1, 17), None, (1, 200)], dtype="bf16"),
    Paged((7, 1, 64), [(1, 150), (1, 3)], dtype="f16", sinks=True, attrs={"window": 20}),
    Paged((4, 4, 80), [(1, 65), None], sinks=True, attrs={"softcap": 2.0, "window": 64}),
    Paged((2, 1, 256), [None, None], sinks=True),
    Paged((20, 1, 16), [(1, 70)], dtype="bf16", dynamic=False),
    Paged((8, 2, 128), [(1, 1), (1, 33), None, (1, 170)], dtype="bf16", pool=F8),
    Paged((5, 1, 80), [(1, 90), (1, 16)], dtype="f32", pool=F8, sinks=True, attrs={"softcap": 3.0}),
)
MIXED = (
    Paged((8, 2, 128), [(1, 40), (35, 35), (1, 1), (20, 70), None, (1, 129)], dtype="bf16", behind=3),
    Paged((14, 2, 64), [(40, 41), (5, 77)], dtype="bf16", sinks=True, attrs={"window": 9, "softcap": 3.0}),
    Paged((4, 2, 40), [None, (33, 33), (17, 80)], attrs={"window": 70}),
    Paged((71, 1, 64), [(3, 20), (1, 5)], dtype="f16"),
    Paged((8, 2, 128), [(1, 40), (35, 35), (1, 1), (20, 70), None], dtype="bf16", pool=F8, behind=2),
    Paged((6, 2, 40), [(33, 50), (1, 20)], dtype="f16", pool=F8, sinks=True, attrs={"window": 9}),
)


@pytest.mark.parametrize("i", range(len(PINNED)))
@pytest.mark.parametrize("splits", [0, 1, 3, 8])
def test_single_tokens(i: int, splits: int) -> None:
    rng = fresh()
    run_case(PINNED[i].case(DECODE_ATTENTION, rng, schedule=i, splits=splits))


@pytest.mark.parametrize("i", range(len(PINNED)))
def test_single_tokens_in_fixed_parts(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "PART_TOKENS", 64)
    run_case(PINNED[i].case(ATTENTION_PARTS, fresh(), schedule=i, splits=4, on=DETERMINISTIC), DETERMINISTIC)


@pytest.mark.parametrize("i", range(len(MIXED)))
def test_mixtures_in_fixed_parts(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "PART_TOKENS", 64)
    case = MIXED[i].case(PREFILL_ATTENTION, fresh(), i, on=DETERMINISTIC)
    assert "PART=64" in case.kernel.emit(case.node, case.schedule, DETERMINISTIC).text
    run_case(case, DETERMINISTIC)


@pytest.mark.parametrize("kernel", [DECODE_ATTENTION, PREFILL_ATTENTION, MIXED_ATTENTION], ids=lambda k: k.name)
@pytest.mark.parametrize("i", range(len(MIXED)))
def test_mixtures(i: int, kernel: TritonKernel) -> None:
    rng = fresh()
    for schedule in range(1 if kernel is DECODE_ATTENTION else 3):
        run_case(MIXED[i].case(kernel, rng, schedule))


@pytest.mark.parametrize("kernel", [DECODE_ATTENTION, PREFILL_ATTENTION, MIXED_ATTENTION], ids=lambda k: k.name)
def test_both_directions(kernel: TritonKernel) -> None:
    """At the position of its prompt's last token, each token attends to the whole prompt."""
    case = Paged((8, 2, 64), [(40, 40), (1, 1), None, (17, 17), (3, 3)], behind=2).case(kernel, fresh())
    case.inputs[5][:] = OPS["row_reach"].ref(case.inputs[4], case.inputs[5])
    run_case(case)


@pytest.mark.parametrize("i", range(len(MIXED)))
def test_rows_of_one_token_apart(i: int) -> None:
    """The kernel of the other rows writes zeros for single tokens; that of single tokens writes only its rows."""
    rng = fresh()
    run_case(MIXED[i].case(PREFILL_ATTENTION, rng, i, least=2))
    for schedule in range(2):
        run_case(MIXED[i].case(SINGLE_TOKEN_ATTENTION, rng, schedule))


@pytest.mark.parametrize("_", range(5))
def test_drawn(_: int) -> None:
    rng = fresh()
    at = int(rng.integers(8))
    run_case(drawn(rng, False).case(SINGLE_TOKEN_ATTENTION, rng, at))
    run_case(drawn(rng, False).case(PREFILL_ATTENTION, rng, at, least=int(rng.integers(2, 20))))
    for splits in (0, int(rng.integers(1, 9))):
        run_case(drawn(rng, True).case(DECODE_ATTENTION, rng, at, splits))
    run_case(drawn(rng, False).case(PREFILL_ATTENTION, rng, at))
    run_case(drawn(rng, False).case(MIXED_ATTENTION, rng, at))


def prompt(
    rng: np.random.Generator,
    lengths: list[int],
    heads: tuple[int, int, int, int],
    dtype: str,
    sinks: bool,
    at: int,
    on: Target = INTERPRETED,
    kernel: TritonKernel = PACKED_ATTENTION,
    **attrs: Any,
) -> Case:
    """Packed prompts, some of which begin at a position other than 0. heads: h, g, d, e. sinks: slopes for ALiBi."""
    h, g, d, e = heads
    pos = np.concatenate([np.arange(n) + rng.integers(0, 3) * 7 for n in lengths])
    t = len(pos)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((t, h, d), (t, g, d), (t, g, e))]
    arrays = [*arrays, pos, *([rng.standard_normal(h).astype(np.float32)] if sinks else [])]
    graph = Graph("main")
    for x in arrays:
        graph.input(
            f"x{len(graph.inputs)}",
            Type(
                "i64" if x is pos else "f32" if kernel is not PACKED_ATTENTION and x.ndim == 1 else dtype,
                (D("T") if x.ndim > 1 or x is pos else D(len(x)), *map(D, x.shape[1:])),
            ),
        )
    graph.outputs = list(graph.add(OPS[kernel.ops[0]], graph.inputs, {"layer": 0, "scale": d**-0.5, **attrs}).results)
    plan = kernel.schedules(graph.nodes.head, on)  # type: ignore[arg-type]
    plan = plan[at % len(plan)]
    return Case(
        f"prompt-{lengths}-{heads}-{dtype}-{attrs}-{plan}",
        graph,
        kernel,
        plan,
        arrays,
        rtol=2e-5,
        atol=ATOL[dtype],
    )


def prompts(rng: np.random.Generator, on: Target = INTERPRETED) -> Iterator[Case]:
    yield prompt(rng, [1, 70, 2, 5], (4, 2, 64, 64), "bf16", False, 0, on)
    yield prompt(rng, [150], (2, 1, 40, 24), "f32", True, 0, on, softcap=2.0)
    yield prompt(rng, [30, 31, 9], (3, 3, 72, 128), "f16", False, 2, on, causal=False)
    yield prompt(rng, [3, 140], (4, 1, 16, 16), "bf16", True, 1, on, window=10)
    yield prompt(rng, [20, 40], (2, 2, 16, 16), "f32", False, 1, on, window=10, causal=False)


@pytest.mark.parametrize("i", range(5))
def test_prompts(i: int) -> None:
    rng = fresh()
    run_case(list(prompts(rng))[i])


def combine(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int],
    dtype: str,
    sinks: bool,
    at: int,
    on: Target = INTERPRETED,
    kernel: TritonKernel = ATTENTION_COMBINE,
) -> Case:
    """Parts of which some, and all of the last token, are empty."""
    t, h, parts, _ = shape
    partial, lse = (
        rng.standard_normal(shape).astype(np.float32),
        4 * rng.standard_normal((t, h, parts)).astype(np.float32),
    )
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[-1] = -np.inf
    partial[np.isinf(lse)] = 0
    g = Graph("main")
    g.input("partial", Type("f32", (D("T"), *map(D, shape[1:]))))
    g.input("lse", Type("f32", (D("T"), D(h), D(parts))))
    arrays = [partial, lse, *([rng.standard_normal(h).astype(np.float32)] if sinks else [])]
    if sinks:
        g.input("sinks", Type(dtype, (D(h),)))
    g.outputs = list(g.add(OPS["attention_combine"], g.inputs, {"dtype": dtype}).results)
    plan = kernel.schedules(g.nodes.head, on)  # type: ignore[arg-type]
    return Case(f"combine-{shape}-{dtype}", g, kernel, plan[at % len(plan)], arrays, rtol=2e-5, atol=2e-5)


def combines(
    rng: np.random.Generator, on: Target = INTERPRETED, kernel: TritonKernel = ATTENTION_COMBINE
) -> Iterator[Case]:
    for i, shape in enumerate([(3, 4, 1, 64), (2, 3, 5, 80), (4, 2, 16, 128), (1, 7, 64, 40)]):
        yield combine(rng, shape, ("f32", "bf16", "f16")[i % 3], i % 2 == 1, i, on, kernel)


@pytest.mark.parametrize("kernel", [ATTENTION_COMBINE, JOIN_PARTS], ids=lambda k: k.name)
def test_combine(kernel: TritonKernel) -> None:
    rng = fresh()
    for case in combines(rng, kernel=kernel):
        run_case(case)


@pytest.mark.parametrize("splits", [0, 4])
@pytest.mark.parametrize("settled", [False, True])
def test_settled_tables_are_read_before_the_wait(settled: bool, splits: int) -> None:
    """The queries never are, nor the pool: the previous launch has written them."""
    target = next(t for t in TARGETS if t.has("pdl"))
    case = PINNED[0].case(DECODE_ATTENTION, fresh(), 0, splits, target)
    schedule = {**case.schedule, **({READ_BEFORE_WAIT: 1} if settled else {})}
    order = memory_order(DECODE_ATTENTION.emit(case.node, schedule, target), target)
    at = order.index("wait")
    tables = {f"load x{i}" for i in DECODE_ATTENTION.reads_before_wait(case.node)}
    assert set(order[:at]) == (tables if settled else set())
    assert {"launch_dependents", "load x0", "load x1", "store y0"} <= set(order[at:]) and order.count("wait") == 1


@pytest.mark.parametrize("settled", [False, True])
def test_single_tokens_are_written_behind_the_wait(settled: bool) -> None:
    """The previous launch may be writing y; everything that is read except y may be there before it ends."""
    target = next(t for t in TARGETS if t.has("pdl"))
    case = MIXED[0].case(SINGLE_TOKEN_ATTENTION, fresh(), 0, on=target)
    schedule = {**case.schedule, **({READ_BEFORE_WAIT: 1} if settled else {})}
    order = memory_order(SINGLE_TOKEN_ATTENTION.emit(case.node, schedule, target), target)
    at = order.index("wait")
    assert set(order[:at]) == ({f"load x{i}" for i in range(6)} if settled else set())
    assert {"load x6", "store y0"} <= set(order[at:]) and order.count("wait") == 1


def gpu_cases(target: Target) -> Iterator[Case]:
    """Yield the cases that run on a GPU: those above, and more of the random ones."""
    rng = generator()
    for i, p in enumerate(PINNED):
        for splits in (0, 1, 3, 8):
            yield p.case(DECODE_ATTENTION, rng, i + splits, splits, target)
    for p in MIXED:
        for schedule in range(6):
            yield p.case(PREFILL_ATTENTION, rng, schedule, on=target)
        yield p.case(DECODE_ATTENTION, rng, 0, on=target)
        yield p.case(PREFILL_ATTENTION, rng, 1, on=target, least=2)
        for schedule in range(3):
            yield p.case(MIXED_ATTENTION, rng, schedule, on=target)
            yield p.case(SINGLE_TOKEN_ATTENTION, rng, schedule, on=target)
    for i in range(24):
        yield drawn(rng, False).case(SINGLE_TOKEN_ATTENTION, rng, i, on=target)
        yield drawn(rng, True).case(DECODE_ATTENTION, rng, i, i % 9, target)
        yield drawn(rng, False).case(PREFILL_ATTENTION, rng, i, on=target)
        yield drawn(rng, False).case(MIXED_ATTENTION, rng, i, on=target)
    yield from prompts(rng, target)
    yield from combines(rng, target)


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_compiles(target: Target, tmp_path: Path) -> None:
    """A few cases of other dtypes and attributes: a text that the interpreter takes may still not compile."""
    rng = fresh()
    codes = float8(target) == F8
    cases = [
        PINNED[0].case(DECODE_ATTENTION, rng, int(rng.integers(6)), 4, target),
        MIXED[1].case(PREFILL_ATTENTION, rng, int(rng.integers(6)), on=target),
        MIXED[1].case(MIXED_ATTENTION, rng, int(rng.integers(3)), on=target),
        drawn(rng, False, codes).case(PREFILL_ATTENTION, rng, int(rng.integers(6)), on=target),
        drawn(rng, True, codes).case(DECODE_ATTENTION, rng, int(rng.integers(6)), on=target),
        drawn(rng, False, codes).case(SINGLE_TOKEN_ATTENTION, rng, int(rng.integers(6)), on=target),
        list(prompts(rng, target))[int(rng.integers(5))],
        list(combines(rng, target))[int(rng.integers(4))],
    ]
    own = replace(PINNED[-2], pool=float8(target) or F8)
    of_codes = own.case(DECODE_ATTENTION, rng, int(rng.integers(6)), on=target)
    if float8(target):
        cases.append(of_codes)
    else:
        assert "f8e4m3" in (DECODE_ATTENTION.reject(of_codes.node, target) or "")
    for case in cases:
        built = compile_for(case, target, tmp_path)
        assert built.shared <= target.limits.shared, case.name
