"""Every kernel compared with its op's reference, on poisoned and guarded buffers."""

from __future__ import annotations

import fcntl
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from kernel_cache import CACHE
from kernels.cases import COLLECTIVES, DECODING, GPU_ONLY, PACKED_FIRST, TEXTS, UNPAGED, of_ops, of_random, of_texts
from kernels.harness import Case, compile_cases, run_case

from llmc.extension import load
from llmc.ir.ops import OPS

# The narrowest vectors and the widest: the masked tails differ.
LEVELS = ("cpu:native", "cpu:portable")
OF = [t.call.split()[0] for t in TEXTS]  # the op of each text
# Texts that round activations, and all texts of an op of experts but its first, take as long to compile as the others
# together: each is a test of its own.
SLOW = [
    f"{op}-{i}"
    for i, (op, text) in enumerate(zip(OF, TEXTS, strict=True))
    if "act_block=" in text.call or ("moe_" in op and OF.index(op) < i)
]


@lru_cache(maxsize=4)
def cases(level: str) -> dict[str, Case]:
    target = load().target(level)
    kernels = [k for k in load().kernels.values() if k.language in target.languages]
    found = [*of_ops(kernels, target), *of_texts(kernels, target), *of_random(kernels, target)]
    by_name = {c.name: c for c in found}
    assert len(by_name) == len(found)
    return by_name


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """level -> {case: (source, function)} without the slow ones, compiled on first use."""
    done: dict[str, Any] = {}

    def get(level: str) -> Any:
        if level not in done:
            folder = tmp_path_factory.mktemp("kernels")
            some = [c for c in cases(level).values() if _text(c) not in SLOW]
            cache = CACHE / "cases"
            cache.mkdir(parents=True, exist_ok=True)
            with open(cache / f"{level}.lock", "w") as lock:  # a worker that comes later finds what another compiled
                fcntl.flock(lock, fcntl.LOCK_EX)
                done[level] = compile_cases(some, load().target(level), folder, cache=cache)
        return done[level]

    return get


@pytest.mark.parametrize("level", [LEVELS[0], pytest.param(LEVELS[1], marks=pytest.mark.slow(LEVELS[1]))])
@pytest.mark.parametrize("op", [*OPS, "texts"])
def test_kernel(op: str, level: str, compiled: Any) -> None:
    """All cases of one op (a text's case is named by its op as well) but the slow ones."""
    if op == "texts":
        assert len({_text(c) for c in cases(level).values()} & _text_names()) == len(TEXTS)
        return
    mine = [c for c in cases(level).values() if c.node.op.name == op]
    assert mine or op in (*PACKED_FIRST, *COLLECTIVES, *DECODING, *GPU_ONLY, *UNPAGED), (
        f"no kernel of {level} runs {op}"
    )
    for c in mine:
        if _text(c) not in SLOW:
            for threads in (1, 3):
                run_case(c, *compiled(level)[c.name], threads=threads)


@pytest.mark.drawn
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("text", SLOW)
def test_slow_kernel(text: str, level: str, tmp_path: Path) -> None:
    """Every case of one of the slow texts."""
    mine = [c for c in cases(level).values() if _text(c) == text]
    compiled = compile_cases(mine, load().target(level), tmp_path)
    for c in mine:
        for threads in (1, 3):
            run_case(c, *compiled[c.name], threads=threads)


def _text(case: Case) -> str:
    """The name of the text (or of the op's example) that the case is of."""
    return case.name.rpartition("-cpu/")[0]


def _text_names() -> set[str]:
    return {f"{t.call.split()[0]}-{i}" for i, t in enumerate(TEXTS)}


def test_every_kernel_is_tested() -> None:
    tested = {c.kernel.name for level in LEVELS for c in cases(level).values()}
    elsewhere = {f"cpu/{op}" for op in COLLECTIVES}
    assert tested | elsewhere == {name for name, k in load().kernels.items() if k.language == "cpp"}


def test_all_levels_emit() -> None:
    """Every case has a source for every CPU level, and emitting twice gives the same text."""
    for level in (name for name in load().targets if name.startswith("cpu:")):
        target = load().target(level)
        for c in cases(level).values():
            assert c.kernel.emit(c.node, c.schedule, target) == c.kernel.emit(c.node, c.schedule, target)
