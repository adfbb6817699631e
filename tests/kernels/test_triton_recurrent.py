"""The recurrent kernels in Triton's interpreter compared with their references."""

from __future__ import annotations

import pytest
from draw import generator
from kernels.harness import Case
from kernels.triton_recurrent_cases import cases
from kernels.triton_harness import INTERPRETED, run_case

from llmc.codegen.backends.triton.recurrent import ROW_CONV, ROW_LOG, ROW_RECURRENCE

KERNELS = {
    "row_conv": ROW_CONV, "row_recurrence": ROW_RECURRENCE, "row_recurrence_draft": ROW_RECURRENCE, "row_log": ROW_LOG,
}  # fmt: skip
CASES = list(cases(KERNELS, generator(), INTERPRETED))


@pytest.mark.drawn
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_recurrent(case: Case) -> None:
    run_case(case)
