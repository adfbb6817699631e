"""A sampling parameter that kernels read is added in three files: declaration, reference, arithmetic of the kernels."""

from __future__ import annotations

from pathlib import Path

from tests.test_declared import answers, before, changed

KERNEL_PARAMETER = {
    "llmc_runtime/sched/sampling_params.py": [
        before(
            "    presence_penalty: float",
            '    repeat_offset: float = parameter(0.0, _PENALTY, "subtracted from repeated logits", float_column=6)\n',
        )
    ],
    "llmc/ir/ops/sample.py": [
        before('    return x - param(f, "frequency_penalty")', '    x = x - param(f, "repeat_offset") * repeated\n')
    ],
    "llmc/codegen/backends/triton/kernels/sampling_rules.py": [
        before("\n\n@triton.jit\ndef load_", '\nREPEAT_OFFSET = tl.constexpr(FLOAT_COLUMNS.index("repeat_offset"))'),
        before("    return repetition, presence, frequency", "    offset = tl.load(floats_ptr + REPEAT_OFFSET)\n"),
        ("repetition, presence, frequency", "repetition, presence, frequency, offset"),
        ("(frequency != 0.0)", "(frequency != 0.0) | (offset != 0.0)"),
        before("    return logit - frequency", "    logit = tl.where(repeated, logit - offset, logit)\n"),
    ],
}
KERNEL_PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from kernels import harness, triton_harness
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import RowParams
from llmc.codegen.backends.cpp.state import SAMPLE
from llmc.codegen.backends.triton.sample import ROW_PENALIZE
from llmc.extension import load
from llmc.ir.example import example_graph, op_example
from llmc.ir.interp import run
from llmc.ir.ops import OPS
op = OPS["row_penalize"]
arrays, attrs = op_example(op, np.random.default_rng(1))
off = example_graph(op, arrays, attrs).graphs["main"]
old = run(off, arrays, {})[0]
names = [slot.name for slot in op.operands]
params = arrays[names.index("fparams")]
params[:] = RowParams.of(SamplingParams(repeat_offset=0.75)).floats()
case = harness.Case("penalize", example_graph(op, arrays, attrs).graphs["main"], SAMPLE, {}, arrays)
compiled = harness.compile_cases([case], load().target("cpu:native"), Path(sys.argv[1]))
harness.run_case(case, *compiled["penalize"])
triton_harness.run_case(replace(case, kernel=ROW_PENALIZE, schedule={"block": 256, "warps": 4}))
new = run(case.graph, arrays, {})[0]
print(json.dumps({"column": FLOAT_COLUMNS.index("repeat_offset"), "used": bool((old != new).any())}))
"""


def test_a_new_sampling_parameter_of_kernels_is_three_files(tmp_path: Path) -> None:
    """The kernels of both back ends, changed in one file, agree with the changed reference."""
    assert len(KERNEL_PARAMETER) == 3
    found = answers(changed(tmp_path, KERNEL_PARAMETER), KERNEL_PROGRAM, str(tmp_path))
    assert found == {"column": 6, "used": True}
