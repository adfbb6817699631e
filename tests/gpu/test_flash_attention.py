"""FlashAttention's kernel on a GPU against the reference of its op, and in a small model beside llmc's kernels.

    python tests/gpu/test_flash_attention.py      compiles the kernels and models into build/gpu, without a GPU

After this command, the tests need none of the packages of the extra `flash`.
"""

from __future__ import annotations

import json
import sys
import tempfile
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
from kernels.harness import Case  # noqa: E402
from kernels.test_triton_attention import Paged  # noqa: E402

from llmc.codegen.backends.cute.cute_toolchain import CuteToolchain  # noqa: E402
from llmc.codegen.backends.cute.flash_attention import FLASH_ATTENTION  # noqa: E402
from llmc.ir.dim import D  # noqa: E402
from llmc.targets.gpu_targets import sm_90  # noqa: E402

pytestmark = pytest.mark.gpu
TABLE = (40, 320)  # device rows, and pages of each
LONGEST = 2500
KINDS = ("prompt", "single", "mixture")
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

    The numbers of pairs of a query and a key are small enough for the reference.
    """
    if kind == "prompt":
        return [(n := int(rng.integers(1, 400)), n)]
    if kind == "single":
        return [(1, int(n)) for n in rng.integers(1, 700, int(rng.integers(1, 12)))]
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


# A Llama of two layers, with graphs of up to 8 decoding rows, of more, and of up to 256 tokens of prompts.
PIPELINE = "serve, without specialize, after fuse-qkv: specialize{decode=[8], step=[]}"
FORCED = ', without split-kv, without select, before pack: select{prefer=["cute/flash_attention"]}'
PROMPTS = (1, 2, 15, 16, 17, 100, 255, 256, 257, 600, 900)
TOLERANCE = 0.15  # of log-probabilities, in bf16; those of other prompts differ by more than 1


def model(kind: str) -> Path:
    return FOLDER / f"flash-attention-{kind}.llmc"


def make_model(kind: str) -> None:
    """Compile the model with llmc's kernels ("llmc") or with FlashAttention for prompts and single tokens ("flash")."""
    from transformers import LlamaConfig

    from llmc.driver import compile_model
    from llmc.options import Options

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, vocab_size=1024, max_position_embeddings=1024, architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        options = Options(
            target="cuda:sm_90", dtype="bfloat16", max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=256,
            weights="random:3", pipeline=PIPELINE + (FORCED if kind == "flash" else ""), cache=CACHE.parent / "cache",
        )  # fmt: skip
        compile_model(Path(folder), model(kind), options)


def launched(kind: str) -> set[str]:
    """The functions of the kernels of a model's programs."""
    folder = model(kind) / "programs"
    return {x["entry"] for p in folder.glob("*.json") for x in json.loads(p.read_text())["launches"]}


def answers(kind: str) -> list[dict[int, float]]:
    """Return the log-probabilities of the likeliest next tokens, two for each prompt; all prompts are in one batch."""
    from llmc_runtime import LLM, SamplingParams

    rng = np.random.default_rng(5)
    prompts = [{"prompt_token_ids": rng.integers(0, 1024, n).tolist()} for n in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    llm = LLM(model(kind), say=lambda text: None)
    try:
        found = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.close()
    return [{i: x.logprob for i, x in out.logprobs[0].items()} for out in found]


def test_a_model_with_it_answers_as_without_it() -> None:
    if not all((model(kind) / "manifest.json").is_file() for kind in ("llmc", "flash")):
        pytest.skip("compile the models first: python tests/gpu/test_flash_attention.py")
    assert "llmc_paged_attention_0" in launched("flash") and not launched("flash") & {
        "llmc_paged_attention", "llmc_paged_attention_split"
    }  # fmt: skip
    assert "llmc_paged_attention_0" not in launched("llmc")
    ours, theirs = answers("llmc"), answers("flash")
    for length, a, b in zip(PROMPTS, ours, theirs, strict=True):
        both = a.keys() & b.keys()
        assert len(both) >= 10, f"prompt of {length}: only {len(both)} of 20 likeliest tokens are the same"
        assert max(abs(a[i] - b[i]) for i in both) < TOLERANCE, f"prompt of {length}"
    others = [abs(ours[0][i] - b[i]) for b in ours[1:] for i in ours[0].keys() & b.keys()]
    assert not others or max(others) > TOLERANCE, "the answers of all prompts are equal"


if __name__ == "__main__":
    print(f"{len(binaries(jobs()))} binaries in {CACHE}")
    for kind in ("flash", "llmc"):
        if not (model(kind) / "manifest.json").is_file():
            make_model(kind)
