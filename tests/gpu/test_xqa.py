"""FlashInfer's XQA on a GPU against the reference of its ops, and in a small model compared with llmc's kernels.

    python tests/gpu/test_xqa.py      compiles the kernels and models into build/gpu, without a GPU

After this command, the tests need none of the packages of the extra `flashinfer`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from draw import generator  # noqa: E402
from gpu.kernel_cases import CACHE, Job, jobs_of  # noqa: E402
from gpu.launcher import Card  # noqa: E402
from gpu.model_cases import FOLDER  # noqa: E402
from gpu.small_llama import compile_llama, differences, launched, likeliest  # noqa: E402
from kernels.harness import Case  # noqa: E402
from kernels.test_triton_attention import ATOL, F8, Paged  # noqa: E402

from llmc.codegen.backends.flashinfer.flashinfer_toolchain import FlashinferToolchain  # noqa: E402
from llmc.codegen.backends.flashinfer.xqa import XQA  # noqa: E402
from llmc.ir.dim import D  # noqa: E402
from llmc.targets.gpu_targets import sm_90  # noqa: E402

pytestmark = pytest.mark.gpu
ROWS = 16  # of the page table
LONGEST, LIMIT = 2500, 32768  # tokens of a row: drawn, and in one step
# Versions are those of the machine that compiled: the one with the GPU needs none of them.
TOOL = FlashinferToolchain(sm_90(), "as compiled")


@dataclass
class Step(Paged):
    """A step whose page table has a fixed size, so that steps of a variant share a binary. most: tokens of a row."""

    most: int = LONGEST

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Slots that no row has filled are NaN; pages that no row needs are -1. The pool has one unused page."""
        arrays = super().inputs(rng)
        needed = arrays[2] >= 0
        count = int(needed.sum())
        order = rng.permutation(count + 1)[:count].astype(np.int32)
        pool = np.full((count + 1, *arrays[1].shape[1:]), np.nan, np.float32)
        pool[order] = arrays[1][arrays[2][needed]]
        table = np.full((ROWS, -(-self.most // self.page)), -1, np.int32)
        at = np.nonzero(needed)
        table[at] = order
        return [arrays[0], pool, table, *arrays[3:]]


# What a step computes, and its number of parts.
VARIANTS: tuple[tuple[Step, int], ...] = (
    (Step((32, 8, 128), [], dtype="bf16"), 0),
    (Step((32, 8, 128), [], dtype="bf16"), 4),
    (Step((32, 8, 128), [], dtype="bf16", attrs={"window": 100}), 0),
    (Step((32, 8, 128), [], dtype="bf16", attrs={"window": 1000}), 3),
    (Step((16, 2, 64), [], dtype="bf16", sinks=True, attrs={"window": 128}), 0),
    (Step((16, 2, 64), [], dtype="bf16", sinks=True), 0),
    (Step((8, 2, 64), [], dtype="bf16"), 7),
    (Step((16, 2, 256), [], dtype="bf16"), 0),
    (Step((16, 2, 256), [], dtype="bf16"), 2),
    (Step((4, 4, 128), [], dtype="f16"), 0),
    (Step((6, 2, 96), [], page=32, dtype="f16"), 8),
    (Step((32, 1, 128), [], page=64, dtype="f16"), 0),
    (Step((32, 8, 128), [], dtype="bf16", pool=F8), 0),
    (Step((32, 8, 128), [], dtype="bf16", pool=F8), 4),
    (Step((16, 2, 64), [], dtype="f16", pool=F8, sinks=True, attrs={"window": 77}), 0),
    (Step((8, 2, 256), [], dtype="bf16", pool=F8), 3),
)


def spans_of(rng: np.random.Generator, most: int) -> list[tuple[int, int] | None]:
    """Draw rows of one token, of lengths around the sizes of pages and tiles, and padding, in any order."""
    lengths = [1, 15, 16, 17, 64, 255, 256, 257, int(rng.integers(1, most + 1)), most]
    spans = [(1, n) for n in lengths]
    return [spans[i] if i < len(spans) else None for i in rng.permutation(len(spans) + 2)]


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for step, splits in VARIANTS:
        yield case_of(replace(step, spans=spans_of(rng, step.most)), splits, rng)
    for step, splits in (VARIANTS[6], VARIANTS[5]):
        yield case_of(replace(step, most=LIMIT, spans=[(1, LIMIT), (1, LIMIT - 1), (1, 3)]), splits, rng)


def case_of(step: Step, splits: int, rng: np.random.Generator) -> Case:
    """A case with one symbol for tokens and rows, and one for the pages of the pool."""
    case = step.case(XQA, rng, splits=splits, on=sm_90())  # type: ignore[arg-type]
    for v in (*case.graph.inputs, *case.node.results):
        first = D("P") if v.name == "kv" else D("R") if v.type.shape[0] == D("T") else v.type.shape[0]
        v.type = replace(v.type, shape=(first, *v.type.shape[1:]))
    return replace(case, atol=ATOL[step.dtype])  # the probabilities have the dtype of the queries


def jobs() -> list[Job]:
    return [job for case in cases(generator()) for job in jobs_of(case, 1, TOOL, sm_90())]  # type: ignore[arg-type]


def binaries(found: list[Job]) -> dict[str, Any]:
    """Compile the kernels, or read them from the cache."""
    return dict(TOOL.compile([(job.source, "") for job in found], CACHE, jobs=os.cpu_count() or 1))


def test_steps_of_all_kinds(card: Card) -> None:
    from gpu.test_kernels import failures

    found = jobs()
    wrong = failures(card, found, binaries(found))
    assert not wrong, f"{len(wrong)} of {len(found)} cases:\n" + "\n".join(wrong[:20])


PREFER = 'without select, before pack: select{prefer=["flashinfer/xqa"]}'
MODELS = {"llmc": "", "parts": f", {PREFER}", "whole": f", without split-kv, {PREFER}"}


def model(kind: str) -> Path:
    return FOLDER / f"xqa-{kind}.llmc"


@pytest.mark.parametrize("kind", ["parts", "whole"])
def test_a_model_with_it_answers_as_without_it(kind: str) -> None:
    if not all((model(x) / "manifest.json").is_file() for x in ("llmc", kind)):
        pytest.skip("compile the models first: python tests/gpu/test_xqa.py")
    assert "llmc_xqa" in launched(model(kind)) and "llmc_xqa" not in launched(model("llmc"))
    first = likeliest(model("llmc"), 0), likeliest(model(kind), 0)
    assert [token for token, _ in first[0]] == [token for token, _ in first[1]], "prompts have the same kernels"
    assert not differences(likeliest(model("llmc"), 1), likeliest(model(kind), 1))


if __name__ == "__main__":
    print(f"{len(binaries(jobs()))} binaries in {CACHE}")
    for kind, more in MODELS.items():
        if not (model(kind) / "manifest.json").is_file():
            compile_llama(model(kind), more)
