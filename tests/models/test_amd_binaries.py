"""Code objects of whole models for AMD GPUs, without a GPU: the kernels that a compile of each family emits, with their
registers, spilled registers and shared memory. By this file as a program those of all families or a share of them,
each for one target (a step of CI); in the tests a sample of families, and a third of their kernels, all drawn.

    python tests/models/test_amd_binaries.py [--every] [--share X]      with --every each family for every target
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest
import torch

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "runtime"), str(root / "tests")]

from draw import SEED, left_out
from kernels.test_triton_binaries import failures
from models.cases import LISTED, ROPES, UNLISTED, Case
from models.kit import save

from llmc import driver
from llmc.codegen.backends.triton.triton_toolchain import Job
from llmc.codegen.build import place_graphs
from llmc.codegen.toolchain import Toolset
from llmc.options import Options
from llmc.targets.target import Target

FAMILIES = (*LISTED, *UNLISTED, *ROPES)
ARCHES = ("gfx90a", "gfx942", "gfx950")
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64}

Work = Mapping[str, tuple[Target, Job]]  # by the key of the binary


def jobs_of(case: Case, arches: tuple[str, ...], folder: Path) -> Iterator[tuple[str, tuple[Target, Job]]]:
    """Yield the key and the job of every kernel that a compile of a family for the targets emits."""
    save(case, folder, SEED, torch.bfloat16)
    length = min(case.trace.get("max_positions", 64), 64)
    for arch in arches:
        options = Options(target=f"hip:{arch}", weights="none", max_model_len=length, **LIMITS)  # type: ignore[arg-type]
        compilation = driver.start(folder, Path(os.devnull), options, False, driver.Quiet())
        traced = compilation.trace()
        compilation.optimise(traced.module, traced.facts.max_positions)
        target, registry = compilation.target, compilation.registry
        tools = Toolset(target, registry.toolchains)
        for placed in place_graphs(traced.module, target, registry.kernels):
            for source in placed.emitted.sources:
                what = f"{case.name} for {target.name}, {source.entry}"
                yield f"{target.name} {tools.key(source)}", (target, Job.of(what, source, target))


def own_arch(case: Case) -> str:
    """The target of a family in this run."""
    return Random(f"{SEED} {case.name}").choice(ARCHES)


@pytest.mark.drawn(seconds=10)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", FAMILIES, ids=lambda c: c.name)
def test_code_objects_of_a_family(case: Case, tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    work = dict(jobs_of(case, (own_arch(case),), tmp_path / "model"))
    assert len(work) > 5
    some = Random(f"{SEED} {case.name}").sample(list(work.values()), len(work) // 3)
    failed = list(failures(some))
    assert not failed, f"{len(failed)} of {len(some)}:\n" + "\n".join(failed)


def main() -> int:
    """Compile the kernels of all families, equal ones once; return 1 if one fails."""
    parser = ArgumentParser(description="compile the kernels of all families for AMD GPUs, and check their resources")
    parser.add_argument("--every", action="store_true", help="each family for every target, not for one")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="of the families")
    args = parser.parse_args()
    work: dict[str, tuple[Target, Job]] = {}
    out = left_out([case.name for case in FAMILIES], args.share)
    families = [case for case in FAMILIES if case.name not in out]
    with tempfile.TemporaryDirectory() as folder:
        for case in families:
            arches = ARCHES if args.every else (own_arch(case),)
            work |= jobs_of(case, arches, Path(folder) / case.name)
    failed = list(failures(list(work.values())))
    summary = f"{len(work)} binaries of {len(families)} families, {len(failed)} failed"
    print("\n".join([f"SEED={SEED}", *failed, summary]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
