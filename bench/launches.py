"""Profile the steps of an artifact launch by launch: microseconds, bytes and flops.

    python -m bench.launches ARTIFACT [--tokens 1] [--context 64] [--rows 1] [--repeat 20] [--top 30] [--each]

Times are those of thread 0, with a barrier after every launch (an ordinary step omits some barriers). Both the minimum
and the median of the repeats are printed, since other load only increases times.
"""

from __future__ import annotations

import argparse
import ctypes
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.device.device import Run
from llmc_runtime.engine.engine import Engine
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.program import Program
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig


class ProfilingDevice(CpuDevice):
    """The CPU device whose steps go through `llmc_profile_NAME`; `times`: (program, symbols, ns of each launch)."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.times: list[tuple[Program, tuple[int, ...], np.ndarray]] = []

    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        super().bind(program, addresses, symbols)
        key, entry = program.step or ("", "")
        unit, pool = self._pool(key)
        run = self._symbol(unit, entry.replace("llmc_run_", "llmc_profile_"))
        run.restype, run.argtypes = ctypes.c_int, [ctypes.c_void_p] * 5
        table, buffers = self._references[-3], self._references[-2]
        ns = np.zeros(max(1, len(program.launches)), np.int64)

        def step() -> None:
            args = (ctypes.addressof(table), ctypes.addressof(buffers), symbols.ctypes.data, ns.ctypes.data)
            assert run(pool, *map(ctypes.c_void_p, args)) == 0
            self.times.append((program, tuple(symbols.tolist()), ns.copy()))

        return step


def engine(path: Path, device: CpuDevice) -> tuple[Engine, Executor]:
    """Return an engine over a profiling device, without prefix caching, so that every prompt is computed."""
    artifact = open_artifact(path, verify=False)
    executor = Executor(artifact, device, 1 << 28)
    m = artifact.manifest
    config = SchedulerConfig(
        num_pages=executor.capacity.pages, page_size=m.kv.page_size, max_model_len=m.limits.max_model_len,
        max_num_seqs=m.limits.max_num_seqs, max_num_batched_tokens=m.limits.max_num_batched_tokens,
        vocab_size=m.vocab_size, eos_token_ids=(), prefix_caching=False, context=artifact.digest,
    )  # fmt: skip
    return Engine(Scheduler(config, lambda: 0), executor), executor


def collect(
    path: Path, tokens: int, context: int, repeat: int, rows: int
) -> tuple[Program, dict[str, int], np.ndarray]:
    """Return (program, its symbols, ns[repeat, launches]) of a prompt of `tokens`; if `tokens` is 1, of `rows` decoding
    after `context` tokens.
    """
    device = ProfilingDevice()
    eng, executor = engine(path, device)
    vocab = executor.artifact.manifest.vocab_size
    decode = tokens == 1
    length, new = (context, repeat + 2 + 2 * rows) if decode else (tokens, 1)
    for i in range(repeat + 1):
        for j in range(rows if decode else 1):
            ids = [random.randrange(vocab) for _ in range(length)]
            eng.add(Request(f"{i}.{j}", ids, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)))
        while eng.has_work():
            eng.step()
        if decode:
            break
    named = [(p, dict(zip(p.symbols, s)), ns) for p, s, ns in device.times]
    count = rows if decode else tokens
    matches = [x for x in named if x[1]["T"] == count and (x[1]["R"] == count) == decode][-repeat:]
    executor.close()
    return matches[0][0], matches[0][1], np.stack([ns for _, _, ns in matches])


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("artifact", type=Path)
    ap.add_argument("--tokens", type=int, default=1)
    ap.add_argument("--context", type=int, default=64)
    ap.add_argument("--rows", type=int, default=1, help="sequences that decode at once")
    ap.add_argument("--repeat", type=int, default=20)
    ap.add_argument("--top", type=int, default=30)
    ap.add_argument("--each", action="store_true", help="every launch in order, not groups")
    a = ap.parse_args()
    program, env, ns = collect(a.artifact, a.tokens, a.context, a.repeat, a.rows)
    median, low_us = np.median(ns, 0) / 1e3, ns.min(0) / 1e3
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, x in enumerate(program.launches):
        where = [p for p in x.loc.split(".") if not p.isdigit()]
        groups[(str(i),) if a.each else (x.op, ".".join(where[-2:]), x.kernel[:8])].append(i)
    total = np.median(ns.sum(1)) / 1e3
    print(f"{program.name} {env}: {len(program.launches)} launches, median {total:.0f} us, least {low_us.sum():.0f} us")
    print(f"{'count':>5} {'median us':>10} {'%':>5} {'least us':>10} {'GB/s':>7} {'GFLOP/s':>8}  op, place")
    order = groups.items() if a.each else sorted(groups.items(), key=lambda g: -median[g[1]].sum())
    for _, where in list(order)[: None if a.each else a.top]:
        x = program.launches[where[0]]
        us, low = median[where].sum(), low_us[where].sum()
        moved = sum(program.launches[i].bytes(env) if program.launches[i].bytes else 0 for i in where)
        flops = sum(program.launches[i].flops(env) if program.launches[i].flops else 0 for i in where)
        rates = f"{moved / max(low, 1e-9) / 1e3:7.1f} {flops / max(low, 1e-9) / 1e3:8.1f}"
        print(
            f"{len(where):5d} {us:10.1f} {100 * us / total:5.1f} {low:10.1f} {rates}  {x.op} {x.loc} [{x.kernel[:8]}]"
        )


if __name__ == "__main__":
    main()
