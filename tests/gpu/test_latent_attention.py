"""Latent attention and products of heads on a GPU, at the sizes of DeepSeek-V3 and V2-Lite and at odd ones."""

from __future__ import annotations

import pytest
from gpu.kernel_cases import compile_jobs, jobs_of
from gpu.launcher import Card
from gpu.test_kernels import failures
from kernels.test_triton_latent import gpu_cases

from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu


def test_latent_attention(card: Card) -> None:
    """Results are poisoned, buffers guarded, and unused slots of the pool are NaN."""
    toolchain = TritonToolchain.find(sm_90())
    jobs = [job for case in gpu_cases(sm_90()) for job in jobs_of(case, 1, toolchain, sm_90())]
    found = failures(card, jobs, compile_jobs(jobs, sm_90()))
    assert not found, f"{len(found)} of {len(jobs)} cases:\n" + "\n".join(found[:20])
