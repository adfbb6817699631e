"""Trace a configuration and run the CPU target's pass pipeline over it in this process, without weights and kernels.

python -m bench.stages FOLDER       prints {"import": s, "trace": s, "passes": s, "nodes": n} as JSON
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

BEGIN = time.perf_counter()


def main(folder: Path) -> dict[str, float]:
    """Print the seconds of each stage and the number of nodes of all graphs."""
    from llmc.driver import compile_model  # noqa: F401  the compiler's own import cost belongs to the first stage
    from llmc.extension import load
    from llmc.frontend.trace_model import trace
    from llmc.passes.base import Ctx
    from llmc.passes.pipeline import override, parse_pipeline, run_pipeline
    from llmc.targets import cpu_targets

    marks = [time.perf_counter()]
    traced = trace(folder, max_positions=32768, max_tokens=512, max_rows=16)
    marks.append(time.perf_counter())
    registry, target = load(), cpu_targets.native()
    passes = parse_pipeline(target.pipeline, registry.passes, {"serve": target.pipeline, **registry.pipelines})
    sizes = {"rows": 16, "max_len": 32768, "page": target.page_size, "tokens": 512}
    each: dict[str, float] = {}

    def observe(i: int, p: object, changes: int, seconds: float, m: object) -> None:
        each[getattr(p, "name", str(p))] = seconds

    run_pipeline(
        traced.module,
        override(passes, "page-attention", **sizes),
        Ctx(registry.opset(), target, registry.kernels),
        observe,
    )
    marks.append(time.perf_counter())
    nodes = sum(len(g.nodes) for g in traced.module.graphs.values())
    times = {"import": marks[0] - BEGIN, "trace": marks[1] - marks[0], "passes": marks[2] - marks[1]}
    return {**times, "nodes": nodes, **{f"pass {k}": v for k, v in each.items()}}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
