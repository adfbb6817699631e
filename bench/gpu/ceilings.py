"""This card's ceilings, measured with torch and a Triton kernel: read and copy bandwidth, bf16 product, launch.

    python -m bench.gpu.ceilings        prints {"read": byte/s, "copy": byte/s, "product": flop/s, "node_us": us, ...}

It runs in a separate process, so that torch is not loaded in the measured one. Random data, medians.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

GIB = 1 << 30
BLOCK = 4096


def main() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {**facts, **bandwidths(), "product": product(), "node_us": node_us()}


def bandwidths() -> dict[str, float]:
    """Return bytes per second of reading 4 GiB, and of copying 2 GiB (read plus written)."""
    import torch

    big = torch.randint(0, 1 << 30, (GIB,), dtype=torch.int32, device="cuda")
    half = big[: GIB // 2]
    other = torch.empty_like(half)
    return {
        "read": big.nbytes / seconds(reader(big)),
        "copy": 2 * half.nbytes / seconds(lambda: other.copy_(half)),
    }


def product(n: int = 8192) -> float:
    """Return flops per second of a library's n^3 product of random bf16 matrices."""
    import torch

    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / seconds(lambda: torch.mm(a, b, out=out))


def seconds(run: Callable[[], Any], rounds: int = 20) -> float:
    """Return the median time of one call, between device events."""
    import torch

    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def reader(data: Any) -> Callable[[], Any]:
    """Return a call that reads an i32 tensor once: 4096 elements per program, 8 warps."""
    import torch

    from bench.gpu.read_kernel import read as kernel

    programs = data.numel() // BLOCK
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    return lambda: kernel[(programs,)](data, sums, BLOCK, num_warps=8)


def node_us(count: int = 500) -> float:
    """Return the microseconds of one node of a graph of tiny launches."""
    import torch

    x = torch.randn(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1.0)
    return seconds(graph.replay) / count * 1e6


if __name__ == "__main__":
    print(json.dumps(main()))
