"""FlashAttention's kernel on a GPU against the reference of its op, and in a small model compared with llmc's kernels.

    python tests/gpu/test_flash_attention.py      compiles the kernels and models into build/gpu, without a GPU

After this command, the tests need none of the packages of the extra `flash`.
"""

from __future__ import annotations

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
from gpu.kernel_cases import CACHE, Job  # noqa: E402
from gpu.launcher import Card  # noqa: E402
from gpu.model_cases import FOLDER  # noqa: E402
from gpu.small_llama import compile_llama, differences, launched, likeliest  # noqa: E402
from kernels.harness import Case  # noqa: E402
from kernels.test_triton_attention import Paged  # noqa: E402

from llmc.codegen.backends.cute.cute_toolchain import CuteToolchain  # noqa: E402
from llmc.codegen.backends.cute.flash_attention import FLASH_ATTENTION  # noqa: E402
from llmc.ir.dim import D  # noqa: E402
from llmc.targets.gpu_targets import sm_90  # noqa: E402

pytestmark = pytest.mark.gpu
TABLE = (300, 320)  # device rows, and pages of each
LONGEST = 2500
KINDS = ("prompt", "single", "mixture", "many")
UNUSED = 30.0  # the kernel multiplies unused slots of pages by 0: they must be finite


@dataclass
class Step(Paged):
    """A step whose page table has a fixed size, so that all steps of a variant share a binary."""

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Slots that no row has filled are UNUSED; pages that no row needs are -1. The pool has one unused page."""
        arrays = super().inputs(rng)
        pages = arrays[2]
        needed = pages[pages >= 0]
        pool = np.full((len(needed) + 1, *arrays[1].shape[1:]), UNUSED, np.float32)
        order = rng.permutation(len(pool))[: len(needed)]
        pool[order] = np.nan_to_num(arrays[1][needed], nan=UNUSED)
        table = np.full(TABLE, -1, np.int32)
        corner = table[: pages.shape[0], : pages.shape[1]]
        corner[pages >= 0] = order
        return [arrays[0], pool, table, *arrays[3:]]


HIGH, LOW, ONE_HEAD = {"rows": 128, "packed": 1}, {"rows": 64, "packed": 1}, {"rows": 128, "packed": 0}
# What a step computes, its `least` and the schedule.
VARIANTS: tuple[tuple[Step, int, dict[str, int]], ...] = (
    (Step((32, 8, 128), [], dtype="bf16"), 1, HIGH),
    (Step((32, 8, 128), [], dtype="bf16"), 1, LOW),
    (Step((32, 8, 128), [], dtype="bf16"), 1, ONE_HEAD),
    (Step((32, 8, 128), [], dtype="bf16"), 2, HIGH),
    (Step((32, 8, 128), [], dtype="bf16", attrs={"window": 100}), 1, HIGH),
    (Step((16, 2, 64), [], dtype="bf16", sinks=True, attrs={"window": 300}), 1, HIGH),
    (Step((32, 8, 128), [], dtype="bf16", sinks=True, attrs={"softcap": 5.0}), 1, LOW),
    (Step((16, 2, 64), [], dtype="f16", attrs={"softcap": 3.0, "window": 77}), 1, ONE_HEAD),
    (Step((16, 2, 256), [], dtype="bf16"), 1, HIGH),
)


def spans_of(rng: np.random.Generator, kind: str) -> list[tuple[int, int] | None]:
    """Draw (new tokens, tokens in all) of rows: one prompt, single tokens, or these, chunks and padding in any order.

    "many" are more rows than the kernel's search divides in one round, 32. The numbers of pairs of a query and a key
    are small enough for the reference.
    """
    if kind == "prompt":
        return [(n := int(rng.integers(1, 400)), n)]
    if kind == "single":
        return [(1, int(n)) for n in rng.integers(1, 700, int(rng.integers(1, 12)))]
    if kind == "many":
        lengths = rng.integers(1, 60, int(rng.integers(33, TABLE[0] - 2)))
        spans = [(int(n) if rng.random() < 0.1 else 1, int(n)) for n in lengths]
        return [None if rng.random() < 0.05 else span for span in spans]
    totals = [1, 16, 17, *rng.integers(1, 300, 2).tolist(), int(rng.integers(1000, LONGEST))]
    spans = [(1 if rng.random() < 0.4 else int(rng.integers(1, min(40, n) + 1)), int(n)) for n in totals]
    return [spans[i] if i < len(spans) else None for i in rng.permutation(len(spans) + 2)]


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for step, least, schedule in VARIANTS:
        for kind in KINDS:
            drawn = replace(step, spans=spans_of(rng, kind))
            case = drawn.case(FLASH_ATTENTION, rng, on=sm_90(), least=least)  # type: ignore[arg-type]
            kv = case.graph.inputs[1]
            kv.type = replace(kv.type, shape=(D("P"), *kv.type.shape[1:]))  # all steps of a variant share a binary
            yield replace(case, schedule=schedule, name=f"{drawn}-{schedule}-{least}")


def jobs() -> list[Job]:
    tool = CuteToolchain(sm_90())
    made = [(case, FLASH_ATTENTION.emit(case.node, case.schedule, sm_90())) for case in cases(generator())]
    return [Job(case, source, tool.key(source)) for case, source in made]


def binaries(found: list[Job]) -> dict[str, Any]:
    """Compile the kernels, or read them from the cache."""
    return dict(CuteToolchain(sm_90()).compile([(job.source, "") for job in found], CACHE))


def test_steps_of_all_kinds(card: Card) -> None:
    from gpu.test_kernels import failures

    found = jobs()
    wrong = failures(card, found, binaries(found))
    assert not wrong, f"{len(wrong)} of {len(found)} cases:\n" + "\n".join(wrong[:20])


FORCED = ', without split-kv, without select, before pack: select{prefer=["cute/flash_attention"]}'
MODELS = {"llmc": "", "flash": FORCED}


def model(kind: str) -> Path:
    return FOLDER / f"flash-attention-{kind}.llmc"


def test_a_model_with_it_answers_as_without_it() -> None:
    if not all((model(kind) / "manifest.json").is_file() for kind in MODELS):
        pytest.skip("compile the models first: python tests/gpu/test_flash_attention.py")
    ours, theirs = launched(model("llmc")), launched(model("flash"))
    assert "llmc_paged_attention_0" in theirs - ours
    assert not theirs & {"llmc_paged_attention", "llmc_paged_attention_split"}
    assert not differences(likeliest(model("llmc"), 0), likeliest(model("flash"), 0))


if __name__ == "__main__":
    print(f"{len(binaries(jobs()))} binaries in {CACHE}")
    for kind, more in MODELS.items():
        if not (model(kind) / "manifest.json").is_file():
            compile_llama(model(kind), more)
