"""Writes the parity table of docs/parity.md: `python tests/models/table.py` runs every case."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from models.cases import FURTHER, LISTED, ROPES, UNLISTED, Case  # noqa: E402
from models.kit import eager_logits, ir_logits, prompts, relative_error, save  # noqa: E402
from models.recent_cases import RECENT  # noqa: E402
from models.recurrent_cases import RECURRENT  # noqa: E402
from models.test_passes import PIPELINE  # noqa: E402

from llmc.extension import load  # noqa: E402
from llmc.frontend.checkpoint import Checkpoint  # noqa: E402
from llmc.frontend.trace_model import trace  # noqa: E402
from llmc.ir.graph import Module  # noqa: E402
from llmc.passes.base import Ctx, Pass  # noqa: E402
from llmc.passes.pipeline import parse_pipeline, run_pipeline  # noqa: E402
from llmc.targets.cpu_targets import portable  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"
MARK = "<!-- parity: written by tests/models/table.py -->\n"


def row(case: Case, folder: Path) -> str:
    """One case: errors of the traced graph and of the worst pass."""
    model = save(case, folder)
    traced = trace(folder, **case.trace)
    tokens, positions = prompts(case.lengths, 320)
    every = np.arange(len(tokens))
    want = eager_logits(model, tokens, case.lengths)
    errors = []
    registry = load()
    nodes = len(traced.module.graphs["main"].nodes)
    with Checkpoint(traced) as checkpoint:

        def measure(m: Module) -> None:
            errors.append(relative_error(ir_logits(m, traced, checkpoint, tokens, positions, every), want))

        def observe(_: int, p: Pass, changes: int, seconds: float, m: Module) -> None:
            if changes:
                measure(m)

        measure(traced.module)
        ctx = Ctx(registry.opset(), portable(), registry.kernels)
        run_pipeline(traced.module, parse_pipeline(PIPELINE, registry.passes), ctx, observe)
    left = len(traced.module.graphs["main"].nodes)
    lengths = " + ".join(map(str, case.lengths))
    return f"| {case.name} | {lengths} | {nodes} | {errors[0]:.1e} | {left} | {max(errors[1:]):.1e} |"


def main() -> None:
    rows = [
        "| case | tokens | nodes | error | nodes after passes | worst error of a pass |",
        "|---|---|---|---|---|---|",
    ]
    for case in (*LISTED, *UNLISTED, *ROPES, *FURTHER, *RECENT, *RECURRENT):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(case, Path(folder)))
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
