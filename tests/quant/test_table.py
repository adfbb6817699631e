"""The table of formats in docs/tested-checkpoints.md: how each target computes with the checkpoints of each producer.

`PYTHONPATH=.:runtime:tests python tests/quant/test_table.py` rewrites it.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from models.kit import eager_logits, ir_logits, prompts, relative_error
from pages import DOCS
from quant.test_decode import FIXTURES, READ, decoder, float_model

from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace
from llmc.ir.graph import Module
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes

PAGE = DOCS / "tested-checkpoints.md"
START, END = "<!-- table of formats -->\n", "<!-- end of the table -->\n"
# Target -> dtype of the model, and the passes of the target's pipeline that lower quantised weights.
TARGETS = {
    "cpu:x86-64-v4": ("f32", "split-moe{quantized=true}, lower-quantized{act=i8, act_block=64}"),
    "cuda:sm_90": ("bf16", "split-moe{quantized=true}, lower-quantized"),
    "hip:gfx942": ("bf16", "to-fnuz, split-moe{quantized=true}, lower-quantized"),
}
HEAD = (
    "| checkpoint | written by | formats | CPU | GPU (`cuda:sm_90`) | GPU (`hip:gfx942`) |\n|---|---|---|---|---|---|\n"
)
PRODUCTS = ("linear_map", "linear", "block_scaled_linear")
CODES = ("i8", "f8e4m3", "f8e4m3fnuz")
EXACT = 1e-4
ROW = re.compile(r"([\d.]+) %")


def ways(module: Module, dequantised: bool) -> str:
    """How the products with quantised weights of @main compute."""
    found = []
    for n in module.graphs["main"].nodes:
        if n.op.name in ("quantized_linear", "quantized_moe_up", "quantized_moe_down"):
            floats = n.attrs.get("values") or (n.operands[3].type.dtype if "moe" in n.op.name else "")
            found.append(f"{floats} codes" if floats[:1] in ("e", "f") else f"{n.attrs['bits']}-bit codes")
        elif n.op.name in ("scaled_moe_up", "scaled_moe_down"):
            found.append(f"{n.operands[3].type.dtype} codes x {n.operands[0].type.dtype}")
        elif n.op.name in PRODUCTS and n.operands[1].type.dtype in CODES:
            x = n.operands[0].type.dtype
            found.append(f"{n.operands[1].type.dtype} codes" + (f" x {x}" if x in CODES else ""))
    return ", ".join(dict.fromkeys([*sorted(found), *(["dequantised"] if dequantised else [])])) or "not quantised"


def cell(name: str, target: str, want: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> tuple[str, str]:
    """Return the formats of a checkpoint, and the products of a target with the error of the logits."""
    registry, (dtype, lowering) = load(), TARGETS[target]
    found = decoder(FIXTURES / name)
    with Checkpoint(trace(FIXTURES / name, dtype=dtype), decoder=found) as checkpoint:
        module = checkpoint.traced.module
        kept = use_codes(module, checkpoint, registry.opset())
        ctx = Ctx(registry.opset(), registry.target(target), registry.kernels)
        text = f"canonicalize, fuse-linear, {lowering}"
        passes = parse_pipeline(text, registry.passes)
        run_pipeline(module, passes, ctx)
        got = ir_logits(module, checkpoint.traced, checkpoint, tokens, positions, np.arange(len(tokens)))
    labels = found.labels if found else {}
    error = relative_error(got.astype(np.float32), want)
    shown = "exact" if error <= EXACT else f"{100 * error:.1f} %"
    how = ways(module, dequantised=bool(ctx.notes) or kept < sum(labels.values()))
    return ", ".join(sorted(labels)) or "none", f"{how}: {shown}"


def row(name: str) -> str:
    """The line of a checkpoint."""
    tokens, positions = prompts((37,), 64)
    want = eager_logits(float_model(FIXTURES / name), tokens, (37,))
    cells = {target: cell(name, target, want, tokens, positions) for target in TARGETS}
    versions = json.loads((FIXTURES / name / "oracle.json").read_text())["made_with"]
    by = ", ".join(f"{k} {v}" for k, v in versions.items() if k not in ("torch", "transformers", "compressed-tensors"))
    (formats,) = {f for f, _ in cells.values()}
    return f"| `{name}` | {by or 'a script of ours'} | {formats} | {' | '.join(c for _, c in cells.values())} |\n"


def lines() -> dict[str, str]:
    """The lines of the page's table by checkpoint."""
    text = PAGE.read_text()
    inside = text[text.index(START) + len(START) : text.index(END)]
    assert inside.startswith(HEAD)
    return {line.split("`")[1]: line for line in inside.removeprefix(HEAD).splitlines(keepends=True)}


def test_the_table_has_every_checkpoint() -> None:
    assert list(lines()) == READ


@pytest.mark.drawn
@pytest.mark.parametrize("name", READ)
def test_a_line_of_the_table_is_current(name: str) -> None:
    """Errors may differ a little between machines, which add in different orders."""
    have, want = lines()[name], row(name)
    say = f"run tests/quant/test_table.py as a program: {want}"
    assert ROW.sub("%", have) == ROW.sub("%", want), say
    errors = [[float(x) for x in ROW.findall(line)] for line in (have, want)]
    np.testing.assert_allclose(*errors, rtol=0.2, atol=0.2, err_msg=say)


def main() -> None:
    """Write the table."""
    text = PAGE.read_text()
    made = []
    for name in READ:
        made.append(row(name))
        print(made[-1], end="", flush=True)
    before, after = text[: text.index(START)], text[text.index(END) :]
    PAGE.write_text(before + START + HEAD + "".join(made) + after)


if __name__ == "__main__":
    main()
