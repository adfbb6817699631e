"""Check and time every schedule of products with quantised weights on this GPU, and the best bf16 product.

    python -m bench.gpu.quantized_products -o FOLDER [--tokens 1,16,256] [--shapes qkv,o] [--ways 14] [--compile-only]

The shapes are those of Llama-3.1-8B. Weights are cycled through more memory than the L2 cache holds, in a CUDA graph
with dependent launches. Every schedule is first compared with a float32 product of the dequantised weights. FOLDER gets
`products.jsonl`, a row for every schedule, and `table.md`, the best ones compared with the floor.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from bench.gpu.graph_time import graph_microseconds  # noqa: E402
from gpu.launcher import Card  # noqa: E402
from llmc.codegen.backends.cuda.nvrtc_toolchain import NvrtcToolchain  # noqa: E402
from llmc.codegen.backends.cuda.quantized_tiles import QUANTIZED_TILES  # noqa: E402
from llmc.codegen.backends.cuda.quantized_wgmma import QUANTIZED_WGMMA  # noqa: E402
from llmc.codegen.backends.cuda.skinny_gemm import SKINNY_FIXED, SKINNY_GEMM  # noqa: E402
from llmc.codegen.backends.cuda.skinny_slices import SKINNY_SLICES  # noqa: E402
from llmc.codegen.backends.triton.quantized_gemm import QUANTIZED_GEMM  # noqa: E402
from llmc.codegen.backends.triton.quantized_gemv import QUANTIZED_GEMV  # noqa: E402
from llmc.codegen.backends.triton.quantized_problem import halves  # noqa: E402
from llmc.codegen.backends.triton.triton_toolchain import Compiled, Job, compile_one  # noqa: E402
from llmc.codegen.candidates import candidates as node_candidates  # noqa: E402
from llmc.codegen.kernel import Schedule, Source  # noqa: E402
from llmc.codegen.scratch_dir import scratch  # noqa: E402
from llmc.codegen.tuning_records import Tuning  # noqa: E402
from llmc.extension import Registry, load  # noqa: E402
from llmc.ir.graph import Node  # noqa: E402
from llmc.ir.ops.packed_codes import unpack_fragments  # noqa: E402
from llmc.ir.text import parse  # noqa: E402
from llmc.targets.target import Target  # noqa: E402

SILU = "mul(mul(a0, sigmoid(a0)), a1)"
SHAPES = {"qkv": (6144, 4096, 1), "o": (4096, 4096, 1), "up": (14336, 4096, 2), "down": (4096, 14336, 1)}
TOKENS = "1,2,4,8,16,32,64,128,256,2048"
# dtype of the codes, columns that share a scale (0: all), dtype of zero points. wgmma: as pack_fragments packs them;
# normed: the product of a norm's result. residual: the product added to a residual. For the products that have one.
FORMATS = {
    "g128": ("u8", 128, ""), "wgmma": ("u8", 128, ""), "normed": ("u8", 128, ""), "residual": ("u8", 128, ""),
    "g32": ("u8", 32, ""), "zeros": ("u8", 128, "u8"), "int8": ("i8", 0, ""),
}  # fmt: skip
FRAGMENTS, EPS = ("wgmma", "normed", "residual"), 1e-5
SHAPES_OF = {"normed": ("qkv", "up"), "residual": ("o", "down")}  # which products these forms are of
BANDWIDTH = 4.6e12
MOST_TOKENS = 8192
SPREAD = 320 << 20  # bytes through which weights are cycled
SECONDS = 0.002
WRONG = 2e-2


@dataclass(frozen=True)
class Way:
    """A schedule of a kernel for a product: n rows of `parts` parts, k columns, m tokens."""

    shape: str
    form: str
    m: int
    kernel: str
    schedule: Schedule
    source: Source

    @property
    def sizes(self) -> tuple[int, int, int]:
        return SHAPES[self.shape]

    @property
    def weight_bytes(self) -> int:
        n, k, parts = self.sizes
        if self.form == "bf16":
            return 2 * n * k * parts
        code, block, zero = FORMATS[self.form]
        blocks = k // block if block else 1
        return n * parts * ((k if code == "i8" else k // 2) + blocks * (4 if code == "i8" else 2 + bool(zero)))

    @property
    def row(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "form": self.form, "m": self.m, "kernel": self.kernel,
            "schedule": ",".join(f"{k}={v}" for k, v in self.schedule.items()),
        }  # fmt: skip


def node_of(shape: str, form: str, m: int, registry: Registry) -> Node:
    """Return the product's node, with 4-bit codes in the layout of the kernels."""
    n, k, parts = SHAPES[shape]
    body = SILU if parts == 2 else "a0"
    rows, values = n * parts, ""
    if form == "bf16":
        weights = {"w": f"bf16[{rows}, {k}]"}
        call = f'linear_map(%x, %w) {{parts={parts}, body="{body}"}}' if parts > 1 else "linear(%x, %w)"
    else:
        code, block, zero = FORMATS[form]
        blocks, attrs = (k // block if block else 1), f'block=[1, {block}], parts={parts}, body="{body}"'
        if code == "i8":
            weights = {"w": f"i8[{rows}, {k}]", "s": f"f32[{rows}, 1]"}
            call = f"quantized_linear(%x, %w, %s) {{{attrs}}}"
        elif form in FRAGMENTS:
            weights = {"w": f"u8[{rows}, {k // 2}]", "s": f"bf16[{blocks}, {rows}]"}
            call = f"packed_fragments_linear(%x, %w, %s) {{{attrs}, zero_point=8}}"
            if form == "residual":
                return residual_node(m, n, k, attrs, weights, registry)
            if form == "normed":
                weights["g"] = f"bf16[{k}]"
                call = f"norm_fragments_linear(%x, %w, %s, %g) {{{attrs}, zero_point=8, eps={EPS}}}"
        else:
            weights = {"w": f"u8[{rows}, {k // 2}]", "s": f"bf16[{blocks}, {rows}]"}
            weights |= {"z": f"u8[{blocks}, {rows}]"} if zero else {}
            values = ", %z" if zero else ""
            attrs += f", half={halves(k, block)}, " + ("zeros=true" if zero else "zero_point=8")
            call = f"packed_nibbles_linear(%x, %w, %s{values}) {{{attrs}}}"
    operands = "".join(f", %{name}: weight {t}" for name, t in weights.items())
    text = f"graph @main(%x: bf16[{m}, {k}]{operands}) {{\n  %y = {call} : bf16[{m}, {n}]\n  return %y\n}}\n"
    (node,) = parse(text, registry.opset()).graphs["main"].nodes
    return node


def residual_node(m: int, n: int, k: int, attrs: str, weights: Mapping[str, str], registry: Registry) -> Node:
    """Return the node of a product that is added to a residual."""
    operands = "".join(f", %{name}: weight {t}" for name, t in weights.items())
    attrs = attrs.replace('"a0"', '"add(a1, a0)"')
    text = f"""graph @main(%x: bf16[{m}, {k}]{operands}, %r: bf16[{m}, {n}]) {{
  %y = packed_fragments_linear(%x, %w, %s, %r) {{{attrs}, zero_point=8}} : bf16[{m}, {n}]
  return %y
}}
"""
    (node,) = parse(text, registry.opset()).graphs["main"].nodes
    return node


def ways(
    shapes: Sequence[str], tokens: Sequence[int], forms: Sequence[str], count: int, registry: Registry, target: Target
) -> Iterator[Way]:
    """Yield the schedules to compare; only a few for formats with groups other than 128."""
    for shape in shapes:
        for m in tokens:
            node = node_of(shape, "bf16", m, registry)
            options = node_candidates(node, registry.kernels, target, {}, Tuning.shipped(target))
            for o in [o for o in options if o.kernel.language == "triton"][:2]:
                yield Way(shape, "bf16", m, o.kernel.name, o.schedule, o.kernel.emit(node, o.schedule, target))
            for form in forms:
                whole = form in ("g128", "wgmma") or shape in SHAPES_OF.get(form, ())
                if whole or (form not in SHAPES_OF and shape in ("qkv", "up") and m in (1, 16, 64)):
                    node = node_of(shape, form, m, registry)
                    yield from _ours(shape, form, m, node, count if whole else 3, target)


def _ours(shape: str, form: str, m: int, node: Node, count: int, target: Target) -> Iterator[Way]:
    if form in FRAGMENTS:
        for kernel in (QUANTIZED_TILES, QUANTIZED_WGMMA, SKINNY_SLICES, SKINNY_GEMM, SKINNY_FIXED):
            if kernel.reject(node, target) is None:
                schedules = sorted(kernel.schedules(node, target), key=lambda s: kernel.cost_us(node, s, target, {}))
                for schedule in schedules[: 2 * count]:
                    yield Way(shape, form, m, kernel.name, schedule, kernel.emit(node, schedule, target))
        return
    for kernel, share in ((QUANTIZED_GEMV, count // 2 + 1 if m <= 4 else 2), (QUANTIZED_GEMM, count)):
        if (why := kernel.reject(node, target)) is None:
            for schedule in kernel.schedules(node, target)[:share]:
                yield Way(shape, form, m, kernel.name, schedule, kernel.emit(node, schedule, target))
        elif m <= 8:
            print(f"{shape} {form} {m}: {kernel.name} rejects it: {why}")


def compiled(ways: Sequence[Way], target: Target, jobs: int) -> list[Compiled | str]:
    """Return the binary of every schedule, or the error message."""
    limits = target.limits
    triton = [w for w in ways if w.source.language == "triton"]
    work = [Job.of(str(i), w.source, target) for i, w in enumerate(triton)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        done = (c for _, c in pool.map(compile_one, work, chunksize=2))
        compiled_of: dict[int, Compiled | str] = {id(w): c for w, c in zip(triton, done, strict=True)}
    nvrtc = NvrtcToolchain.find(target)
    sources = [w.source for w in ways if w.source.language == "cuda"]
    with scratch() as folder:
        binaries = nvrtc.compile([(s, "") for s in sources], folder, jobs)
    out = [compiled_of[id(w)] if id(w) in compiled_of else binaries[nvrtc.key(w.source)] for w in ways]
    return [
        f"{c.shared} bytes of shared memory" if isinstance(c, Compiled) and c.shared > limits.shared else c for c in out
    ]


class Bench:
    """Buffers of random contents on the device, and the launches that use them."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.init()
        self.card = Card(nbytes=1 << 20)
        make = torch.Generator(device="cuda").manual_seed(1)
        self.codes = torch.randint(0, 256, (SPREAD + (256 << 20),), dtype=torch.uint8, device="cuda", generator=make)
        self.scales = torch.rand((32 << 20,), device="cuda", generator=make) * 0.01 + 0.005
        self.scales16 = self.scales.to(torch.bfloat16)
        self.zeros = torch.randint(0, 16, (32 << 20,), dtype=torch.uint8, device="cuda", generator=make)
        self.plain = torch.randn((SPREAD // 2 + (128 << 20),), device="cuda", generator=make).to(torch.bfloat16)
        self.gain = torch.rand((1 << 14,), device="cuda", generator=make).to(torch.bfloat16) + 0.5
        self.x = torch.randn((MOST_TOKENS * 14336,), device="cuda", generator=make).to(torch.bfloat16)
        self.out = torch.empty((MOST_TOKENS * 14336,), dtype=torch.bfloat16, device="cuda")
        self.residual = torch.randn((MOST_TOKENS * 4096,), device="cuda", generator=make).to(torch.bfloat16)
        torch.cuda.synchronize()

    def arguments(self, way: Way, i: int) -> list[int]:
        """Return the addresses of the i-th copy: x, weight, result."""
        n, k, parts = way.sizes
        rows, x, out = n * parts, self.x.data_ptr(), self.out.data_ptr()
        if way.form == "bf16":
            return [x, self.plain.data_ptr() + i * rows * k * 2, out]
        code, block, zero = FORMATS[way.form]
        codes = self.codes.data_ptr() + i * rows * (k if code == "i8" else k // 2)
        if code == "i8":
            return [x, codes, self.scales.data_ptr() + i * rows * 4, out]
        entries = rows * (k // block)
        at = i % (len(self.zeros) // entries) * entries
        tables = [self.scales16.data_ptr() + at * 2] + [self.zeros.data_ptr() + at] * bool(zero)
        gain = [self.gain.data_ptr()] * (way.form == "normed")
        residual = [self.residual.data_ptr()] * (way.form == "residual")
        return [x, codes, *tables, *gain, *residual, out]

    def launch(self, way: Way, binary: Compiled, i: int) -> None:
        if way.source.passes:
            self.launch_cuda(way, binary, i)
            return
        pointers: list[Any] = list(self.arguments(way, i))
        for m, (box, swizzle) in zip(way.source.maps, binary.boxes, strict=True):
            shape = [int(d.const or 0) for d in m.shape]
            pointers[m.param] = self.card.mapped(pointers[m.param], "bf16", shape, box, swizzle)
        grid = [int(d.const or 0) for d in way.source.grid]
        fn = self.card.function(binary, way.source.entry)
        assert not way.source.sizes
        self.card.launch(fn, binary, grid, pointers, [], way.source.pdl)

    def launch_cuda(self, way: Way, binary: Compiled, i: int) -> None:
        """Launch a CUDA C++ kernel: x as a tensor map if it takes one; the number of tokens is the last parameter."""
        x, *rest = self.arguments(way, i)
        params: list[Any] = [(p, ctypes.c_void_p) for p in (x, *rest)]
        for box, swizzle in binary.boxes:
            params[0] = self.card.mapped(x, "bf16", (way.m, way.sizes[1]), box, swizzle)[0]
        fn = self.card.function(binary, way.source.entry)
        grid = [int(d.const or 0) for d in way.source.grid]
        params.append((way.m, ctypes.c_int))
        self.card.launch_params(fn, binary, grid, params, way.source.pdl, way.source.cluster)

    def weights(self, way: Way) -> Any:
        """Return the dequantised weight of copy 0 in float32: [parts * n, k]."""
        t, (n, k, parts) = self.torch, way.sizes
        rows = n * parts
        if way.form == "bf16":
            return self.plain[: rows * k].view(rows, k).float()
        code, block, zero = FORMATS[way.form]
        if code == "i8":
            return self.codes[: rows * k].view(t.int8).view(rows, k).float() * self.scales[:rows, None]
        half, blocks = halves(k, block), k // block
        scales = self.scales16[: rows * blocks].view(blocks, rows).T[:, :, None].float()
        if way.form in FRAGMENTS:
            codes = unpack_fragments(self.codes[: rows * k // 2].view(rows, k // 2).cpu().numpy())
            return ((t.from_numpy(codes).cuda().view(rows, blocks, block).float() - 8.0) * scales).view(rows, k)
        packed = self.codes[: rows * k // 2].view(rows, k // (2 * half), 1, half)
        codes = t.cat([packed & 15, packed >> 4], 2).reshape(rows, blocks, block).float()
        zeros = self.zeros[: rows * blocks].view(blocks, rows).T[:, :, None].float() if zero else 8.0
        return ((codes - zeros) * scales).view(rows, k)

    def reference(self, way: Way) -> Any:
        n, k, parts = way.sizes
        x = self.x[: way.m * k].view(way.m, k).float()
        if way.form == "normed":
            x = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.gain[:k].float()
        sums = x @ self.weights(way).T
        if way.form == "residual":
            return sums + self.residual[: way.m * n].view(way.m, n).float()
        if parts == 1:
            return sums
        return self.torch.nn.functional.silu(sums[:, :n]) * sums[:, n:]

    def error(self, way: Way, binary: Compiled, want: Any) -> float:
        """Return ‖result - reference‖ / ‖reference‖ of one launch, whose result buffer is poisoned before."""
        n = way.sizes[0]
        self.out.fill_(float("nan"))
        self.torch.cuda.synchronize()
        self.launch(way, binary, 0)
        self.card.wait()
        got = self.out[: way.m * n].view(way.m, n).float()
        beyond = self.out[way.m * n :]
        if not bool(beyond.isnan().all()):
            return float("inf")
        return float((got - want).norm() / want.norm())

    def microseconds(self, way: Way, binary: Compiled) -> float:
        """Return the median microseconds of a launch, from a graph that cycles through the copies."""
        copies = max(2, SPREAD // max(1, way.weight_bytes))
        return graph_microseconds(self.card, lambda i: self.launch(way, binary, i), copies, SECONDS)


def measure(ways: Sequence[Way], binaries: Sequence[Compiled | str], target: Target) -> Iterator[dict[str, Any]]:
    """Return a row per schedule, with its error and time, or the reason why it has none."""
    bench = Bench()
    known: dict[tuple[str, str, int], Any] = {}
    for way, binary in zip(ways, binaries, strict=True):
        floor = (way.weight_bytes + 2 * way.m * (way.sizes[0] + way.sizes[1])) / BANDWIDTH * 1e6
        row = {**way.row, "floor": round(floor, 2)}
        if isinstance(binary, str):
            yield {**row, "failed": binary}
            continue
        key = way.shape, way.form, way.m
        if key not in known:
            known = {key: bench.reference(way)}
        row["error"] = error = bench.error(way, binary, known[key])
        if not error < WRONG:
            row["failed"] = f"error {error}"
        yield {**row, "us": round(bench.microseconds(way, binary), 2), "shared": binary.shared}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the best schedules of every format, with the floor and the best bf16 product."""
    lines = ["| shape | format | m | us | share of floor | bf16 us | kernel | schedule | next |", "|" + "---|" * 9]
    good = [r for r in rows if "failed" not in r]
    for key in dict.fromkeys((r["shape"], r["form"], r["m"]) for r in good if r["form"] != "bf16"):
        timed = sorted((r for r in good if (r["shape"], r["form"], r["m"]) == key), key=lambda r: r["us"])
        plain = [r["us"] for r in good if (r["shape"], r["form"], r["m"]) == (key[0], "bf16", key[2])]
        best, nearby = timed[0], "; ".join(f"{r['us']} {r['kernel'][17:]} {r['schedule']}" for r in timed[1:3])
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {best['us']} | {best['floor'] / best['us']:.2f} | "
            f"{min(plain, default=0)} | {best['kernel'][17:]} | {best['schedule']} | {nearby} |"
        )
    totals: dict[str, float] = {}
    for form, m in dict.fromkeys((r["form"], r["m"]) for r in good):
        keys = [(shape, form, m) for shape in SHAPES]
        each = [min((r["us"] for r in good if (r["shape"], r["form"], r["m"]) == key), default=0) for key in keys]
        totals[f"{form} {m}"] = round(32 * sum(each) / 1000, 3)
    failed = [
        f"FAILED {r['shape']} {r['form']} {r['m']} {r['kernel']} {r['schedule']}: {r['failed']}"
        for r in rows
        if "failed" in r
    ]
    return "\n".join([*lines, "", f"ms of 32 layers by format and tokens: {totals}", *failed])


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description="check and time the products with quantised weights")
    ap.add_argument("-o", "--output", type=Path, required=True)
    ap.add_argument("--tokens", default=TOKENS)
    ap.add_argument("--shapes", default=",".join(SHAPES))
    ap.add_argument("--forms", default=",".join(FORMATS))
    ap.add_argument("--ways", type=int, default=13, help="schedules of each kernel")
    ap.add_argument("--compile-only", action="store_true")
    args = ap.parse_args(argv)
    registry = load()
    target = registry.target("cuda:sm_90")
    tokens = [int(m) for m in args.tokens.split(",")]
    all_ways = list(ways(args.shapes.split(","), tokens, args.forms.split(","), args.ways, registry, target))
    print(f"{len(all_ways)} binaries", flush=True)
    binaries = compiled(all_ways, target, os.cpu_count() or 1)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.compile_only:
        print("\n".join(f"{w.row}: {b}" for w, b in zip(all_ways, binaries, strict=True) if isinstance(b, str)))
        return
    rows = []
    with (args.output / "products.jsonl").open("w") as file:
        for row in measure(all_ways, binaries, target):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    text = table(rows)
    (args.output / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
