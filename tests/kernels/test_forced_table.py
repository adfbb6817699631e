"""The trials of tests/gpu/forced_cases.py without a GPU: their table is complete, and they force what they name."""

from __future__ import annotations

from random import Random

import pytest
from draw import SEED
from gpu.forced_cases import WIDE, missing, not_forced, rivals, select_only


def test_every_competing_kernel_is_forced() -> None:
    declared = {k for t in WIDE for k in t.kernels}
    assert {k for kernels in rivals().values() for k in kernels} - declared == set()


@pytest.mark.drawn
def test_a_trial_forces_its_kernels() -> None:
    trial = Random(SEED).choice([t for t in WIDE if not missing(t)])
    assert not not_forced(trial, select_only(trial)), trial.name
