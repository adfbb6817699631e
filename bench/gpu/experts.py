"""Time the products of experts on this GPU: Triton's best schedules and all of the CUDA C++ kernel.

    python -m bench.gpu.experts [--tokens 1,16,64,128,256,512,2048,8192] [--models qwen3-30b-a3b,mixtral-8x7b,...]
                                [--formats bf16,int4,zeros,mxfp4] [--ways 6] [--cache DIR] [--compile-only]
                                [--json FILE] [--record FILE]

A layer's first product (gate and up) and its second one, for tokens that choose their experts evenly at random. Every
schedule is timed as by `llmc tune`. FILE of --record gets the times as a tuning file, for steps of rows (up to 256) and
of tokens. tests/gpu/test_cuda_kernels.py checks results.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu import schedules
from bench.gpu.floors import H200
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import Tuning, record, save, schedule_text
from llmc.extension import Registry
from llmc.ir.graph import Graph, Node
from llmc.ir.text import parse
from llmc.measure.timing import Trial
from llmc.targets.target import Target

OURS, OF_CODES = "cuda/grouped_wgmma", "cuda/grouped_codes"
ALL = 99  # schedules
MOST_TOKENS, MOST_ROWS = 8192, 256
TOKENS = "1,16,64,128,256,512,2048,8192"
GATHERED = ("norm_moe_gather_up", "moe_gather_down")  # products of one token, whose pairs are not sorted
SWIGLU = "mul(mul(a0, sigmoid(a0)), a1)"


@dataclass(frozen=True)
class Format:
    """A format of the experts' weights. group: columns that share a scale; attrs: of a product over codes, as text."""

    name: str
    bits: float
    group: int = 0
    attrs: str = ""

    @property
    def kernel(self) -> str:
        """The CUDA kernel of its products."""
        return OF_CODES if self.group else OURS


FORMATS = {
    f.name: f
    for f in (
        Format("bf16", 16),
        Format("int4", 4 + 16 / 128, 128, "zero_point=8"),
        Format("zeros", 4 + 24 / 128, 128, "zeros=true"),
        Format("mxfp4", 4 + 16 / 32, 32, 'values="e2m1"'),
    )
}


@dataclass(frozen=True)
class Mixture:
    """A mixture's layer. inner: columns of an expert's first product; chosen: experts of a token."""

    name: str
    hidden: int
    inner: int
    experts: int
    chosen: int

    def touched(self, tokens: int) -> float:
        """Return the mean number of experts that `tokens` tokens choose, if they choose evenly."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)

    def floor_us(self, op: str, tokens: int, form: Format = FORMATS["bf16"]) -> float:
        """Return the lower bound of a product on an H200: the weights of chosen experts are read once."""
        weights = (2 if op.endswith("up") else 1) * self.hidden * self.inner
        read = form.bits / 8 * weights * self.touched(tokens) / H200.read
        return max(read, 2 * weights * tokens * self.chosen / H200.product) * 1e6

    def node(
        self, op: str, tokens: str, registry: Registry, form: Format = FORMATS["bf16"]
    ) -> tuple[Graph, Node]:  # fmt: skip
        """Return a graph of one product and its node. tokens: a symbol, or a number."""
        d, i, e, k = self.hidden, self.inner, self.experts, self.chosen
        pairs = f"{k * int(tokens)}" if tokens.isdigit() else f"{k}*{tokens}"
        routed = f"%o: i32[{pairs}], %s: i32[{e + 1}]"
        if op in GATHERED:
            return self._gathered(op, registry)
        if form.group:
            inputs, call = self._over_codes(op, tokens, pairs, form)
        elif op == "moe_up":
            inputs = f"%x: bf16[{tokens}, {d}], %o, %w: weight bf16[{e}, {2 * i}, {d}]"
            call = f'moe_up(%x, %o, %s, %w) {{k={k}, body="{SWIGLU}"}} : bf16[{pairs}, {i}]'
        else:
            inputs = f"%x: bf16[{pairs}, {i}], %o, %w: weight bf16[{e}, {d}, {i}], %f: bf16[{tokens}, {k}]"
            call = f'moe_down(%x, %o, %s, %w, %f) {{dtype="bf16"}} : bf16[{tokens}, {k}, {d}]'
        symbols = "" if tokens.isdigit() else f"sym {tokens} in [1, {MOST_TOKENS}]\n"
        inputs = inputs.replace("%o", routed, 1)
        text = f"{symbols}graph @main({inputs}) {{\n  %y = {call}\n  return %y\n}}\n"
        graph = parse(text, registry.opset()).graphs["main"]
        return graph, next(iter(graph.nodes))

    def _over_codes(self, op: str, tokens: str, pairs: str, form: Format) -> tuple[str, str]:
        """The inputs of a product over codes, whose routing is "%o", and its call."""
        d, i, e, k = self.hidden, self.inner, self.experts, self.chosen
        rows, columns = (2 * i, d) if op == "moe_up" else (d, i)
        table = f"[{e}, {rows}, {columns // form.group}]"
        inputs = f"%o, %w: weight u8[{e}, {rows}, {columns}], %t: weight bf16{table}"
        zero = ", %z" if "zeros" in form.attrs else ""
        zeros = f", %z: weight u8{table}" if zero else ""
        attrs = f"block=[1, {form.group}], {form.attrs}, bits=4"
        if op == "moe_up":
            call = (
                f'quantized_moe_up(%x, %o, %s, %w, %t{zero}) {{k={k}, body="{SWIGLU}", {attrs}}} : bf16[{pairs}, {i}]'
            )
            return f"%x: bf16[{tokens}, {d}], {inputs}{zeros}", call
        call = f'quantized_moe_down(%x, %o, %s, %w, %t, %f{zero}) {{dtype="bf16", {attrs}}} : bf16[{tokens}, {k}, {d}]'
        return f"%x: bf16[{pairs}, {i}], {inputs}, %f: bf16[{tokens}, {k}]{zeros}", call

    def _gathered(self, op: str, registry: Registry) -> tuple[Graph, Node]:
        """One token's product that needs no sorting."""
        d, i, e, k = self.hidden, self.inner, self.experts, self.chosen
        if op.endswith("up"):
            inputs = f"%x: bf16[1, {d}], %i: i32[1, {k}], %w: weight bf16[{e}, {2 * i}, {d}], %g: weight bf16[{d}]"
            call = f'norm_moe_gather_up(%x, %i, %w, %g) {{eps=1e-06, body="{SWIGLU}"}} : bf16[{k}, {i}]'
        else:
            stack = f"%w: weight bf16[{e}, {d}, {i}]"
            inputs = f"%x: bf16[{k}, {i}], %i: i32[1, {k}], {stack}, %f: bf16[1, {k}], %r: bf16[1, {d}]"
            call = f"moe_gather_down(%x, %i, %w, %f, %r) : bf16[1, {d}]"
        text = f"graph @main({inputs}) {{\n  %y = {call}\n  return %y\n}}\n"
        graph = parse(text, registry.opset()).graphs["main"]
        return graph, next(iter(graph.nodes))


MIXTURES = {
    m.name: m
    for m in (
        Mixture("qwen3-30b-a3b", 2048, 768, 128, 8),
        Mixture("mixtral-8x7b", 4096, 14336, 8, 2),
        Mixture("gpt-oss-20b", 2880, 2880, 32, 4),
        Mixture("deepseek-v3", 7168, 2048, 256, 8),
    )
}


def candidates(
    m: Mixture, op: str, tokens: int, ways: int, registry: Registry, target: Target, form: Format = FORMATS["bf16"]
) -> list[Trial]:
    """Return the best `ways` Triton schedules and every schedule of the CUDA kernel for a size."""
    graph, node = m.node(op, "1" if tokens == 1 else "T", registry, form)
    return schedules.candidates(graph, node, {"T": tokens}, (form.kernel,), ways, Tuning(), registry, target)


def ops_of(tokens: int, form: Format = FORMATS["bf16"]) -> tuple[str, ...]:
    """The products of a step of `tokens` tokens; for one token, also those that need no sorting."""
    return ("moe_up", "moe_down", *(GATHERED if tokens == 1 and not form.group else ()))


def main(argv: Sequence[str] | None = None) -> None:
    ap = schedules.parser("time the products of experts in CUDA C++ beside Triton's", TOKENS, 6)
    ap.add_argument("--models", default="qwen3-30b-a3b", help=f"of {', '.join(MIXTURES)}")
    ap.add_argument("--formats", default="bf16", help=f"of {', '.join(FORMATS)}")
    args = ap.parse_args(argv)
    with scratch() as folder:
        run(args, args.cache or folder)


def run(args: argparse.Namespace, cache: Path) -> None:
    """Compile or measure the cases of the arguments."""
    timer, registry, target = schedules.timer_of(args, cache)
    bounds = {"T": (1, MOST_TOKENS)}
    names = itertools.product(args.models.split(","), args.formats.split(","))
    for m, form in ((MIXTURES[name], FORMATS[of]) for name, of in names):
        ways = {
            (op, n): candidates(m, op, n, ALL if op in GATHERED else args.ways, registry, target, form)
            for n in map(int, args.tokens.split(","))
            for op in ops_of(n, form)
        }
        timer.compile([c for trials in ways.values() for c in trials], bounds)
        for (op, tokens), trials in () if args.compile_only else ways.items():
            times = timer.microseconds(trials, bounds)
            rows = sorted((row(m, op, tokens, c, us, form) for c, us in zip(trials, times, strict=True)), key=_us)
            title = f"{m.name} {form.name} {op}, {tokens} tokens, floor {rows[0]['floor_us']} us"
            schedules.report(title, {form.kernel: "CUDA C++"}, rows)
            schedules.save_rows(args, rows)
            if args.record:
                store(args.record, m, op, tokens, list(zip(trials, times, strict=True)), registry, target, form)


def _us(row: schedules.Row) -> float:
    return float(str(row["us"]))


def store(
    path: Path, m: Mixture, op: str, tokens: int, timed: Sequence[tuple[Trial, float]], registry: Registry,
    target: Target, form: Format = FORMATS["bf16"],
) -> None:  # fmt: skip
    """Add the times to a tuning file, for a step with this number of tokens, and for one with this number of rows."""
    symbols = ["1"] if tokens == 1 else ["T"] + ["R"] * (tokens <= MOST_ROWS)
    for symbol in symbols:
        _, node = m.node(op, symbol, registry, form)
        env = {symbol: tokens}
        save(path, [record(node, c.kernel.name, c.schedule, target, us, env) for c, us in timed])


def row(
    m: Mixture, op: str, tokens: int, c: Trial, us: float, form: Format = FORMATS["bf16"]
) -> dict[str, object]:  # fmt: skip
    """Return the row of one way: microseconds of one launch, and its lower bound on an H200."""
    return {
        "model": m.name, "format": form.name, "op": op, "tokens": tokens, "kernel": c.kernel.name,
        "schedule": schedule_text(c.schedule), "us": round(us, 2),
        "floor_us": round(m.floor_us(op, tokens, form), 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
