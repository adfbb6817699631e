"""Deterministic artifacts on the GPU: requests by themselves and in random batches, and products of all tile sizes, are
bitwise equal.

pytest tests/gpu/test_deterministic.py --confcutdir tests/gpu      about a minute; less if the artifacts are there

10,000 requests in batches of up to 256 rows take two minutes more:

python tests/mixtures.py build/gpu/deterministic/many.llmc --requests 10000 --share 0.2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from draw import SEED, generator
from gpu.deterministic_models import CASES, LENGTH, MANY, make_all, path_of
from gpu.kernel_cases import Job, compile_jobs
from gpu.launcher import Card
from gpu.test_kernels import HOW, launch, prepare
from kernels.harness import Case as KernelCase
from llmc_runtime.format.manifest import Manifest
from mixtures import check, draw
from models.cases import Case

from llmc.codegen.backends.triton.gemm_small import GEMM, GEMM_SMALL
from llmc.codegen.backends.triton.gemm_tma import GEMM_TMA
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
REQUESTS, MANY_REQUESTS, SHORT = 24, 400, 96
TOKENS, DEPTH, COLUMNS = (1, 7, 70, 200), 4096, 512


@pytest.fixture(scope="module")
def artifacts() -> None:
    """Compile the artifacts that are missing."""
    make_all()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.usefixtures("artifacts")
def test_mixtures(case: Case) -> None:
    path = path_of(case)
    manifest = Manifest.load((path / "manifest.json").read_bytes())
    requests = draw(np.random.default_rng(SEED), REQUESTS, manifest, LENGTH - 32)
    report = check(path, requests, SEED)
    assert report.compared > 50 * REQUESTS and report.preemptions and report.hits, report
    assert not report.differences, f"SEED={SEED}, {report.compared} values: {report.differences[:8]}"


@pytest.mark.usefixtures("artifacts")
def test_many_short_requests() -> None:
    manifest = Manifest.load((path_of(MANY) / "manifest.json").read_bytes())
    requests = draw(np.random.default_rng(SEED), MANY_REQUESTS, manifest, SHORT)
    report = check(path_of(MANY), requests, SEED, share=0.5)
    assert report.compared > 50 * MANY_REQUESTS and report.preemptions and report.hits, report
    assert not report.differences, f"SEED={SEED}, {report.compared} values: {report.differences[:8]}"


def product(tokens: int, x: np.ndarray, w: np.ndarray) -> Iterator[tuple[str, KernelCase]]:
    """Yield a product of the first `tokens` rows of x under every schedule, with the order of its sums."""
    g = Graph("test")
    operands = [g.input("x", tensor("bf16", "T", DEPTH)), g.input("w", tensor("bf16", COLUMNS, DEPTH), weight=True)]
    node = g.add(OPS["linear"], operands)
    g.outputs = [node.result]
    seen = set()
    for kernel in (GEMM_SMALL, GEMM, GEMM_TMA):
        for s in kernel.schedules(node, sm_90()):
            order, shape = (
                kernel.reduction_order(node, s, sm_90()),
                (kernel.name, s["bm"], s["bn"], s["bk"], s["warps"]),
            )
            if order and shape not in seen and s["stages"] <= 4:
                seen.add(shape)
                yield order, KernelCase(f"{kernel.name} {s} {tokens}", g, kernel, s, [x[:tokens], w])


def test_tiles_of_all_sizes_give_the_same_bits(card: Card) -> None:
    rng, toolchain = generator(), TritonToolchain.find(sm_90())
    x, w = (rng.standard_normal((n, DEPTH)).astype(np.float32) for n in (max(TOKENS), COLUMNS))
    jobs: dict[str, list[Job]] = defaultdict(list)
    for tokens in TOKENS:
        for order, case in product(tokens, x, w):
            source = case.kernel.emit(case.node, case.schedule, sm_90())
            jobs[order].append(Job(case, source, toolchain.key(source)))
    assert set(jobs) == {"wgmma bf16", "mma bf16"}
    binaries = compile_jobs([j for found in jobs.values() for j in found], sm_90())
    for order, found in jobs.items():
        first: np.ndarray | None = None
        wrong = []
        for job in found:
            prepared, binary = prepare(job), binaries[job.key]
            assert not isinstance(binary, str), binary
            launch(card, job, binary, prepared, HOW[0])
            row = prepared.results[0].body.view(np.uint16)[:COLUMNS].copy()
            first = row if first is None else first
            wrong += [job.case.name] * bool((row != first).any())
        assert not wrong, f"{order}: {len(wrong)} of {len(found)} schedules differ from the first: {wrong[:6]}"
