"""Attention kernels on a GPU over long contexts, in pools of 8-bit and of 16-bit floats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from draw import generator
from gpu.kernel_cases import compile_jobs, jobs_of
from gpu.launcher import Card
from gpu.test_kernels import failures
from kernels.harness import Case
from kernels.test_triton_attention import F8, Paged

from llmc.codegen.backends.triton.decode_attention import DECODE_ATTENTION, SINGLE_TOKEN_ATTENTION
from llmc.codegen.backends.triton.prefill_attention import PREFILL_ATTENTION
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
LONGEST = 5000


def steps(rng: np.random.Generator, one: bool) -> Iterator[Paged]:
    """Yield steps whose rows have 1 to LONGEST tokens. one: each row computes one token; else up to 300."""
    for i, pool in enumerate((F8, F8, F8, "bf16")):
        totals = [1, LONGEST, *rng.integers(1, LONGEST, 2).tolist()]
        spans = [(1 if one else int(rng.integers(1, min(300, n) + 1)), n) for n in totals]
        attrs = {"window": int(rng.integers(1, 4000))} if i == 1 else {"softcap": 5.0} if i == 2 else {}
        yield Paged((8, 2, 128), [*spans, None], dtype="bf16", pool=pool, sinks=i == 2, attrs=attrs)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    target = sm_90()
    for p in steps(rng, True):
        for schedule in range(0, 12, 3):
            yield p.case(DECODE_ATTENTION, rng, schedule, on=target)
            yield p.case(SINGLE_TOKEN_ATTENTION, rng, schedule + 1, on=target)
            if not p.sinks:
                yield p.case(DECODE_ATTENTION, rng, schedule + 2, 1 << schedule // 3, target)
    for p in steps(rng, False):
        for schedule in range(5):
            yield p.case(PREFILL_ATTENTION, rng, schedule, on=target)
        yield p.case(SINGLE_TOKEN_ATTENTION, rng, 0, on=target)


def test_long_contexts(card: Card) -> None:
    """Results are poisoned, buffers guarded, and unused slots of the pool are NaN."""
    toolchain = TritonToolchain.find(sm_90())
    jobs = [job for case in cases(generator()) for job in jobs_of(case, 1, toolchain, sm_90())]
    found = failures(card, jobs, compile_jobs(jobs, sm_90()))
    assert not found, f"{len(found)} of {len(jobs)} cases:\n" + "\n".join(found[:20])
