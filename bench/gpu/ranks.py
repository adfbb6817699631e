"""Ranks on GPUs: collectives compared with NCCL in microseconds, and a model on one GPU compared with several.

    python -m bench.gpu.ranks [--ranks 2] [--parts collectives,nccl,model,offline,start,account] [--model NAME]
                              [--batches 1,32] [--artifacts DIR] [--alone] [--compile-only] [--limit SECONDS]
                              [--out DIR]

Collectives are replayed one after the other in graphs; NCCL's, through torch, too. The model's weights are random and
filled in by the runtime. A decode step is measured within one call (bench.gpu.engine.Session.steps). Prints tables;
--out also writes them as JSON, after each part, and with "account" the kernels of rank 0 (bench.gpu.account).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import shapes
from bench.gpu import account
from bench.gpu.card import state
from bench.gpu.engine import OFFLINE, Session
from bench.gpu.floors import H200
from bench.gpu.group import Rank, Work, compile_graph, run_group
from bench.gpu.make import SEED, with_weights
from bench.gpu.plan import MODELS, Plan, parser, plan_of
from bench.gpu.rows import Row
from bench.shapes import Shape

KB = 1024
SIZES = (8 * KB, 64 * KB, 256 * KB, 1024 * KB, 4096 * KB, 16384 * KB)  # bytes of bf16
WIDTH, CHAIN = 4096, 20  # columns of an operand; collectives in a graph
REPLAYS, ROUNDS = 20, 3
BATCHES, PROMPT = (1, 32, 128, 256), 2048
PARTS = ("collectives", "nccl", "model", "offline", "start", "account")
# Goals for H200s by model and ranks, and vLLM 0.25.1 on two (2026-11-22): ms a step by batch, ms of a prompt of 2,048,
# tokens/s offline, seconds to the first token.
GOALS = {
    ("llama-3.1-8b", 2): {
        "decode 1": 2.4, "decode 32": 2.85, "decode 128": 4.2, "decode 256": 6.4, "prefill 2048": 31, "offline": 17500,
        "start": 3,
    },
    ("llama-3.1-8b", 4): {
        "decode 1": 1.7, "decode 32": 2.2, "decode 128": 3.3, "decode 256": 4.8, "prefill 2048": 22, "offline": 25000,
        "start": 4,
    },
    ("llama-3.3-70b", 4): {"decode 1": 9.6, "decode 32": 10.6, "start": 12},
}  # fmt: skip
VLLM = {
    "decode 1": 3.48, "decode 32": 3.82, "decode 128": 4.80, "decode 256": 6.89, "prefill 2048": 33.1, "offline": 16508,
    "start": 61.5,
}  # fmt: skip


def chain(op: str, ranks: int) -> str:
    """A graph of CHAIN collectives; each sum, or its norm, is the next one's operand."""
    rows = f"bf16[T, {WIDTH}]"
    lines, last, rest = [], "x", "r"
    for i in range(CHAIN):
        if op == "all_reduce_norm":
            attrs = f"{{eps=1e-05, ranks={ranks}}}"
            lines.append(f"%r{i}, %y{i} = all_reduce_norm(%{last}, %w, %{rest}) {attrs} : {rows}, {rows}")
            rest = f"r{i}"
        elif op == "all_reduce_add, rms_norm":
            lines.append(f"%r{i} = all_reduce_add(%{last}, %{rest}) {{ranks={ranks}}} : {rows}")
            lines.append(f"%y{i} = rms_norm(%r{i}, %w) {{eps=1e-05}} : {rows}")
            rest = f"r{i}"
        elif op == "all_reduce_add":
            lines.append(f"%y{i} = all_reduce_add(%{last}, %r) {{ranks={ranks}}} : {rows}")
        else:
            lines.append(f"%y{i} = all_reduce(%{last}) {{ranks={ranks}}} : {rows}")
        last = f"y{i}"
    used = ["x", *(["r"] if op != "all_reduce" else []), *(["w"] if "norm" in op else [])]
    inputs = ", ".join(f"%{name}: {f'bf16[{WIDTH}]' if name == 'w' else rows}" for name in used)
    body = "\n  ".join([*lines, f"return %{last}"])
    top = SIZES[-1] // WIDTH // 2
    return f"sym T in [1, {top}]\nsym K in [0, {ranks - 1}]\ngraph @main({inputs}) {{\n  {body}\n}}\n"


def timed(rank: int, ranks: int, exchange: Callable[[Any], list[Any]], works: dict[str, Work]) -> dict[str, float]:
    """Microseconds of one collective of each kind and size, the best of a few rounds, on this rank."""
    this_rank, out, bound = None, {}, {}
    for name, work in works.items():
        this_rank = this_rank or Rank(replace_kernels(work, works), rank, ranks, exchange)
        bound[name] = this_rank.bind(work.program)
    assert this_rank is not None
    for name, work in works.items():
        run, symbols, memories = bound[name]
        for operand in (b.name for b in work.program.buffers if b.kind == "input"):
            this_rank.device.write(memories[operand], 0, noise(memories[operand].nbytes))
        for nbytes in SIZES:
            symbols[list(work.program.symbols).index("T")] = nbytes // WIDTH // 2
            best = 1e9
            for _ in range(ROUNDS):
                run()
                this_rank.synchronize()
                exchange(None)
                begin = time.perf_counter()
                for _ in range(REPLAYS):
                    run()
                this_rank.synchronize()
                best = min(best, (time.perf_counter() - begin) / REPLAYS / CHAIN * 1e6)
            out[f"{name} {nbytes}"] = best
    exchange(None)
    this_rank.device.close()
    return out


def noise(nbytes: int) -> np.ndarray:
    """Random bf16 numbers of about 1e-3, u8[nbytes]: a chain of sums doubles them CHAIN times."""
    values = np.random.default_rng(0).standard_normal(nbytes // 2, np.float32) * 1e-3
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


def replace_kernels(work: Work, works: dict[str, Work]) -> Work:
    """The work with the kernels of all."""
    kernels = {k.hash: (k, binary) for w in works.values() for k, binary in w.kernels}
    return replace(work, kernels=tuple(kernels.values()))


def collectives(plan: Plan, ranks: int) -> dict[str, float]:
    """Microseconds of the slowest rank, by kind and size."""
    cache = plan.artifacts / "cache"
    works = {
        f"{op}, {warps} warps": compile_graph(chain(op, ranks), cache, {"warps": warps})
        for op in ("all_reduce", "all_reduce_add", "all_reduce_norm")
        for warps in (16, 8)
    }
    two = "all_reduce_add, rms_norm"
    works[two] = compile_graph(chain(two, ranks), cache, {"warps": 16})
    if ranks > 2:
        works["all_reduce in parts"] = compile_graph(chain("all_reduce", ranks), cache, {"parts": ranks})
    times = run_group(ranks, timed, works)
    return {key: max(f[key] for f in times) for key in times[0]}


def nccl(rank: int, ranks: int, exchange: Callable[[Any], list[Any]], store: str) -> dict[str, float]:
    """The same with NCCL through torch, with and without torch's addition and norm after it, captured in graphs."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device)
    stream = torch.cuda.Stream()
    out = {}
    for nbytes in SIZES:
        x, r = (torch.randn(nbytes // 2 // WIDTH, WIDTH, device=device).bfloat16() * 1e-3 for _ in range(2))
        gain = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)

        def normed(x: Any = x, r: Any = r, gain: Any = gain) -> None:
            dist.all_reduce(x, dist.ReduceOp.AVG)
            r.add_(x)
            x.copy_(torch.nn.functional.rms_norm(r, (WIDTH,), gain, 1e-5))

        def alone(x: Any = x) -> None:
            dist.all_reduce(x, dist.ReduceOp.AVG)  # a sum would grow without limit

        out[f"NCCL {nbytes}"] = captured(alone, stream, exchange)
        out[f"NCCL, add, rms_norm {nbytes}"] = captured(normed, stream, exchange)
        exchange(None)
    return out


def captured(work: Callable[[], Any], stream: Any, exchange: Callable[[Any], list[Any]]) -> float:
    """Microseconds of torch's `work`, the best of a few rounds of replays of a graph of CHAIN of them."""
    import torch

    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    exchange(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CHAIN):
            work()
    best = 1e9
    for _ in range(ROUNDS):
        graph.replay()
        torch.cuda.synchronize()
        exchange(None)
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begin) / REPLAYS / CHAIN * 1e6)
    return best


def artifact(plan: Plan, shape: Shape, ranks: int) -> Path:
    """Return the artifact for this number of ranks, compiling it if it is missing."""
    path = plan.artifacts / f"{shape.name}-tp{ranks}.llmc"
    if not (path / "manifest.json").is_file():
        with_weights(plan, shapes.folder(shape, plan.artifacts), path, f"random:{SEED}", shape, ranks=ranks)
    return path


def model_rows(session: Session, batches: Sequence[int], parts: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a model that is open."""
    if "model" in parts:
        for batch in batches:
            yield session.steps(batch, 5 if batch <= 32 else 3)
        yield session.prefill(PROMPT, 9)
    if "offline" in parts:
        yield session.offline(*OFFLINE)


def accounts(session: Session, batches: Sequence[int], prefix: Path) -> None:
    """Write the kernels of steps of each batch size, and of a prompt, to files that begin with `prefix`."""
    for batch in batches:
        prompts = session.prompts(batch, 128)
        account.save(Path(f"{prefix}-{batch}.json"), account.recorded(partial(session.seconds, prompts, 33)))
    prompts = session.prompts(1, PROMPT)
    account.save(Path(f"{prefix}-prompt.json"), account.recorded(partial(session.seconds, prompts, 1)))


def started(plan: Plan, shape: Shape, ranks: int) -> float:
    """Seconds from process start to the first token of an artifact whose weights are random: without reading files.
    The median of three."""
    command = [sys.executable, "-m", "bench.gpu.first", str(artifact(plan, shape, ranks))]
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            times.append(time.perf_counter() - begin)
        assert line, f"{command} failed"
    return statistics.median(times)


def print_collectives(times: dict[str, float]) -> None:
    names = list(dict.fromkeys(key.rpartition(" ")[0] for key in times))
    sizes = [f"{s // KB} KB" if s < KB * KB else f"{s // KB // KB} MB" for s in SIZES]
    print("us, slowest rank        " + "".join(f"{s:>9}" for s in sizes))
    for name in names:
        print(f"{name:24}" + "".join(f"{times[f'{name} {s}']:9.2f}" for s in SIZES), flush=True)


def options() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ranks", type=int, default=2, metavar="N", help="number of GPUs (2)")
    ap.add_argument("--parts", default="collectives,nccl,model,offline,start", metavar="A,B",
                    help=f"of {', '.join(PARTS)} (all but account)")  # fmt: skip
    ap.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODELS), metavar="NAME", help="(llama-3.1-8b)")
    ap.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=BATCHES, metavar="N,N",
                    help="rows of decode steps (1,32,128,256)")  # fmt: skip
    ap.add_argument("--artifacts", type=Path, default=Path("build/bench/gpu/artifacts"), metavar="DIR",
                    help="folder of artifacts and of compiled kernels")  # fmt: skip
    ap.add_argument("--out", type=Path, metavar="DIR", help="folder for ranks-N.json and the files of account")
    ap.add_argument("--limit", type=float, default=570, metavar="SECONDS", help="after which no new part starts (570)")
    ap.add_argument("--alone", action="store_true", help="without the same model on one GPU")
    ap.add_argument("--compile-only", action="store_true", help="only compile; needs no GPU")
    return ap


class Report:
    """The measurements, written to a file after each part if there is a folder."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results: dict[str, Any] = {"card": state()}
        print(self.results["card"], flush=True)

    def keep(self, name: str, value: Any) -> None:
        self.results[name] = value
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")


def measure_model(args: argparse.Namespace, plan: Plan, ranks: int, parts: Sequence[str], report: Report) -> None:
    """Measure the model on this number of GPUs."""
    shape, goals = MODELS[args.model], GOALS.get((args.model, ranks), {})
    session = Session(artifact(plan, shape, ranks), shape, H200)
    print(f"  {ranks} rank(s), opened in {session.open_seconds:.1f} s: {'; '.join(session.log_lines)}", flush=True)
    try:
        for row in model_rows(session, args.batches, parts):
            report.keep(f"{ranks} {row.suite} {row.case}", {"measured": row.measured, **row.extra})
            goal = goals.get(row.suite if row.suite == "offline" else f"{row.suite} {row.case}", "-")
            print(
                f"  {ranks} rank(s) {row.suite:8} {row.case:>26} {row.measured:10.3f} {row.unit}, goal {goal}",
                flush=True,
            )
        if "account" in parts and args.out is not None:
            accounts(session, args.batches, args.out / f"kernels-{shape.name}-tp{ranks}")
    finally:
        session.close()


def main() -> None:
    args = options().parse_args()
    plan = replace(plan_of(parser().parse_args([])), artifacts=args.artifacts)
    shape, parts, begin = MODELS[args.model], args.parts.split(","), time.monotonic()
    measured = (args.ranks,) if args.alone else (args.ranks, 1)
    if args.compile_only:
        for ranks in measured:
            artifact(plan, shape, ranks)
        return
    report = Report(args.out and args.out / f"ranks-{args.ranks}-{shape.name}.json")
    if "collectives" in parts:
        report.keep("collectives", collectives(plan, args.ranks))
        print_collectives(report.results["collectives"])
    if "nccl" in parts:
        with tempfile.TemporaryDirectory() as folder:
            results = run_group(args.ranks, nccl, f"{folder}/store")
        report.keep("nccl", {key: max(r[key] for r in results) for key in results[0]})
        print_collectives(report.results["nccl"])
    for ranks in measured:
        if {"model", "offline", "account"} & set(parts) and time.monotonic() - begin < args.limit:
            measure_model(args, plan, ranks, parts, report)
    if "start" in parts and time.monotonic() - begin < args.limit:
        report.keep("start", {str(ranks): started(plan, shape, ranks) for ranks in measured})
        goal = GOALS.get((args.model, args.ranks), {}).get("start", "-")
        print(f"start to first token, s: {report.results['start']}, goal with {args.ranks}: {goal}", flush=True)
    print(f"vLLM 0.25.1, Llama-3.1-8B on two H200s: {VLLM}", flush=True)


if __name__ == "__main__":
    main()
