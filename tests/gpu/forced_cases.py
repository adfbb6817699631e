"""Models in which each kernel that is one of several for an op is forced in turn, and their artifacts.

    python tests/gpu/forced_cases.py [--families A,B] [--all-trials] [--jobs N]

compiles those that are missing into build/gpu/forced, where the tests on a GPU find them.

No GPU is needed. A trial is a model, a variant of the pipeline, and kernels that compute all nodes that they support.
The trials of WIDE, whose sizes all kernels support, are declared; those of a family are derived from the kernels that
support its nodes.

Artifacts for a CPU compute the same weights: codes are read exactly there, and activations are not rounded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from draw import SEED as DRAW  # noqa: E402
from gpu.compile_lock import alone  # noqa: E402
from models.cases import LISTED, SMALL, UNLISTED, Case  # noqa: E402
from models.recurrent_cases import RECURRENT  # noqa: E402

from llmc.extension import load  # noqa: E402

FOLDER = ROOT / "build" / "gpu" / "forced"
GPU, CPU = "cuda:sm_90", "cpu:x86-64-v3"
CPU_DTYPES = ("float32", "bfloat16")
SEED = 11
ROWS, TOKENS = 20, 96  # more than 16 rows, so that programs for all ranges of rows exist; prompts have several chunks
LENGTH = 256
WHOLE, APART, DEPTH, SORTED = "whole", "apart", "depth", "sorted"
# Variants of the pipeline: the target's own, and others that have ops which it does not make for models so small. Rows
# of one token whose attention is not split, or is separate from that of prompts; products that are split along the
# depth; experts of single tokens that are sorted.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "": "serve",
        WHOLE: "serve, without split-kv",
        APART: "serve, without split-single, before split-recurrence: split-single{above=0}",
        DEPTH: "serve, after split-kv: split-k{splits=2, above=1}",
        SORTED: "serve, without gather-experts",
    }
)
# Ops for which a family has trials with a variant.
OPS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        WHOLE: ("paged_attention",),
        APART: ("paged_attention", "paged_attention_single"),
        SORTED: ("moe_up", "moe_down"),
    }
)
ROUNDED = ("w8a8", "fp8", "fp8-block")  # recipes that round activations
# Ops that no trial runs, and the reasons.
PACKED = "`pack` replaces ops by these after `select`, and keeps the kernel"
EXCLUDED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("packed_fragments_linear", "packed_nibbles_linear", "norm_fragments_linear"), PACKED)
)


@dataclass(frozen=True)
class Model:
    """A configuration, compiled in bf16.

    quant: the recipe of its weights. kv: the dtype of its cache. tokens: the maximum of a step.
    """

    case: Case
    quant: str = "none"
    kv: str = "auto"
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        return "-".join([self.case.name, *[self.quant] * (self.quant != "none"), *["kv8"] * (self.kv != "auto")])

    @property
    def rounded(self) -> bool:
        """Whether the GPU rounds values that a CPU does not."""
        return self.quant in ROUNDED or self.kv != "auto"

    @property
    def length(self) -> int:
        return int(self.case.trace.get("max_positions", LENGTH))


@dataclass(frozen=True)
class Trial:
    """A model, a variant of the pipeline, and the kernels that are forced; without kernels: as `select` chooses."""

    model: Model
    variant: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join([self.model.name, *[self.variant] * bool(self.variant), *self.kernels]).replace("/", "_")

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.llmc"

    @property
    def pipeline(self) -> str:
        if not self.kernels:
            return VARIANTS[self.variant]
        names = ", ".join(f'"{k}"' for k in self.kernels)
        return f"{VARIANTS[self.variant]}, without select, before pack: select{{prefer=[{names}]}}"

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The rows of `select` (see `Choices`) in the artifact's report."""
        return list(json.loads((self.path / "report" / "choices.json").read_text()))


def cpu_path(model: Model, dtype: str) -> Path:
    """The artifact for a CPU; dtype: one of CPU_DTYPES."""
    return FOLDER / f"{model.name}-cpu-{dtype}.llmc"


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
DENSE = SMALL | HEADS | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512}
EXPERTS = DENSE | {
    "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 256, "num_local_experts": 8,
    "num_experts_per_tok": 3,
}  # fmt: skip
LLAMA, MIXTRAL = Case("wide", "llama", DENSE), Case("wide-experts", "mixtral", EXPERTS)
# Steps of so many tokens have optional kernels if their packages are installed.
LONG = Model(Case("long", "llama", DENSE | {"max_position_embeddings": 700}, trace={"max_positions": 700}), tokens=1024)
DECODE, SINGLE, CUDA = "triton/decode_attention", "triton/single_token_attention", "cuda/decode_attention"
PREFILL, MIXED = "triton/prefill_attention", "triton/mixed_attention"
FLASH, XQA = "cute/flash_attention", "flashinfer/xqa"
GEMMS = ("triton/gemm", "triton/gemm_small", "triton/gemm_tma", "triton/gemv")
CODES = ("triton/quantized_gemv", "triton/quantized_gemm")
INT4 = ("cuda/quantized_tiles", "cuda/quantized_wgmma", "cuda/skinny_fixed", "cuda/skinny_gemm", "cuda/skinny_slices")
SCALED = ("triton/scaled_gemm", "triton/scaled_gemm_tma", "triton/scaled_gemm_small")
UP_DOWN, CODED_UP_DOWN = ("triton/moe_up", "triton/moe_down"), ("triton/quantized_moe_up", "triton/quantized_moe_down")
SKINNY, SKINNY_BF16 = "cuda/skinny_wgmma", "cuda/skinny_wgmma_bf16"


def _each(model: Model, kernels: Sequence[str], variant: str = "") -> tuple[Trial, ...]:
    """A trial of each kernel."""
    return tuple(Trial(model, variant, (kernel,)) for kernel in kernels)


WIDE = (
    *_each(Model(LLAMA), (*GEMMS, "cuda/gemm_tiles", "cuda/gemm_wgmma", SKINNY_BF16)),
    *_each(Model(LLAMA), (DECODE, CUDA, XQA, PREFILL, MIXED, FLASH)),
    *_each(Model(LLAMA), (DECODE, CUDA, XQA, PREFILL, MIXED, FLASH), WHOLE),
    *_each(Model(LLAMA), (SINGLE, CUDA, PREFILL, FLASH), APART),
    *_each(Model(LLAMA), ("triton/attention_combine", "triton/join_parts")),
    *_each(Model(LLAMA), ("triton/gemm_splitk", "triton/gemm_tma_splitk"), DEPTH),
    *_each(Model(LLAMA, quant="int4"), (*CODES, *INT4)),
    *_each(Model(LLAMA, quant="int8"), CODES),
    *_each(Model(LLAMA, quant="w8a8"), (*GEMMS, SKINNY)),
    *_each(Model(LLAMA, quant="fp8"), (*GEMMS, SKINNY)),
    *_each(Model(LLAMA, quant="fp8-block"), SCALED),
    *_each(Model(LLAMA, kv="fp8"), (DECODE, CUDA, XQA, PREFILL, MIXED)),
    *_each(Model(LLAMA, kv="fp8"), (SINGLE, CUDA), APART),
    *(Trial(Model(MIXTRAL), SORTED, kernels) for kernels in (UP_DOWN, ("cuda/grouped_wgmma",))),
    *(Trial(Model(MIXTRAL, quant="int4"), SORTED, kernels) for kernels in (CODED_UP_DOWN, ("cuda/grouped_codes",))),
)
FAMILIES = {c.name: Model(c) for c in (*LISTED, *UNLISTED, *RECURRENT)}


def rivals() -> dict[str, list[str]]:
    """Return op -> kernels of the target, of the ops that have several."""
    registry = load()
    languages, found = registry.target(GPU).languages, dict[str, list[str]]()
    for name in registry.kernels:
        kernel = registry.kernels[name]
        for op in kernel.ops if kernel.language in languages else ():
            found.setdefault(op, []).append(name)
    return {op: kernels for op, kernels in found.items() if len(kernels) > 1 and op not in EXCLUDED}


def missing(trial: Trial) -> str:
    """Return which package the kernels of a trial need to be compiled, or ""."""
    kernels = load().kernels
    return next((why for name in trial.kernels if (why := kernels[name].missing())), "")


def supporting(row: Mapping[str, Any], kernels: Sequence[str]) -> list[str]:
    """Return those of the kernels of a node's op that support it; row: of `Choices`."""
    return [k for k in kernels if row["refused"].get(k, "opt-in").startswith("opt-in")]


def op_of(row: Mapping[str, Any]) -> str:
    """The op of a row of `Choices`."""
    return str(row["node"]).partition("(")[0]


def ran(choices: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return the pairs of op and kernel."""
    return {(op_of(row), str(row["kernel"])) for row in choices}


def not_forced(trial: Trial, choices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is not forced: nodes that a kernel of the trial supports and another one runs, and idle kernels."""
    ops, found = rivals(), list[str]()
    for row in choices:
        able = [k for k in supporting(row, ops.get(op_of(row), ())) if k in trial.kernels]
        if able and row["kernel"] not in able:
            found.append(f"@{row['graph']}: {row['node']} has {row['kernel']}, not {', '.join(able)}")
    idle = set(trial.kernels) - {kernel for _, kernel in ran(choices)}
    return [*found, *(f"no node has {k}" for k in sorted(idle))]


def derived(model: Model) -> Iterator[Trial]:
    """Yield trials in which each kernel that supports a node of the model is forced, in all variants.

    A trial forces at most one of the kernels that compete for a node.
    """
    ops = rivals()
    for variant in ("", *OPS_OF):
        groups: list[set[str]] = []
        for row in select_only(Trial(model, variant)):
            kernels = set(supporting(row, ops.get(op_of(row), ())))
            if len(kernels) > 1 and op_of(row) in OPS_OF.get(variant, ops):
                groups = [g for g in groups if not g & kernels] + [kernels.union(*(g for g in groups if g & kernels))]
        for together in zip_longest(*map(sorted, sorted(groups, key=sorted))):
            yield Trial(model, variant, tuple(k for k in together if k))


def save_model(model: Model, folder: Path) -> None:
    """Save a checkpoint in bf16. Sums of a product are as large as those of 64 columns are in the parity tests."""
    import torch
    import transformers
    from models.kit import build

    network = build(model.case, SEED)
    for p in network.parameters():
        if p.dim() > 1:
            p.data.mul_((64 / p.shape[-1]) ** 0.5)
    transformers.utils.logging.disable_progress_bar()
    network.to(torch.bfloat16).save_pretrained(folder)


def select_only(trial: Trial) -> list[dict[str, Any]]:
    """Return the rows of `select` (see `Choices`) without compiling a kernel."""
    from llmc.console import Quiet
    from llmc.driver import start

    with tempfile.TemporaryDirectory() as folder:
        save_model(trial.model, Path(folder) / "model")
        options = replace(_options(trial.model), pipeline=trial.pipeline, weights="none")
        job = start(Path(folder) / "model", Path(os.devnull), options, False, Quiet())
        traced = job.trace()
        job.optimise(traced.module, traced.facts.max_positions)
    return list(job.reports["choices.json"])


def _options(model: Model) -> Any:
    from llmc.options import Options

    return Options(
        target=GPU, dtype="bfloat16", max_model_len=model.length, max_num_seqs=ROWS,
        max_num_batched_tokens=model.tokens, cache=FOLDER.parent / "cache", reuse=False, quant=model.quant,
        kv_cache_dtype=model.kv,
    )  # fmt: skip


def compile_trial(trial: Trial, weights: str = "packed") -> str:
    """Compile the artifact of a trial if it is missing; return "" or the error."""
    options = replace(_options(trial.model), pipeline=trial.pipeline, weights=weights)
    return _compile(trial.model, trial.path, options)


def compile_for_cpu(model: Model) -> str:
    """Compile the missing artifacts of a model for a CPU, whose products read codes without rounding activations."""
    exact = "serve, without lower-quantized, before select: lower-quantized" if model.quant != "none" else "serve"
    for dtype in CPU_DTYPES:
        options = replace(_options(model), target=CPU, dtype=dtype, pipeline=exact, kv_cache_dtype="auto")
        if why := _compile(model, cpu_path(model, dtype), options):
            return why
    return ""


def _compile(model: Model, path: Path, options: Any) -> str:
    if made(path):
        return ""
    from llmc.diagnostics import Diagnostic
    from llmc.driver import compile_model

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model")
        try:
            compile_model(Path(folder) / "model", path, options, force=True)
        except Diagnostic as e:
            return f"{path.stem}: {e}"
    return ""


def made(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def compile_all(trials: Sequence[Trial], jobs: int) -> list[str]:
    """Compile the missing artifacts of trials and their models in `jobs` processes; return the errors."""
    models = list({t.model.name: t.model for t in trials}.values())
    wanted = [t for t in (*(Trial(m) for m in models if m.rounded), *trials) if not missing(t)]
    with alone(FOLDER):
        models = [m for m in models if not all(made(cpu_path(m, dtype)) for dtype in CPU_DTYPES)]
        wanted = [t for t in wanted if not made(t.path)]
        if not models and not wanted:
            return []
        with _pool(jobs) as pool:
            why = [*pool.map(compile_for_cpu, models), *pool.map(compile_trial, wanted)]
    return [x for x in why if x]


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def drawn_trials(families: Sequence[str], every: bool, seed: int, jobs: int) -> list[Trial]:
    """Return a trial of each family, drawn from those that are derived from it; every: all of them.

    The lists of derived trials are in the folder of the artifacts.
    """
    with alone(FOLDER):
        new = [name for name in families if not _list_of(name).is_file()]
        if new:
            with _pool(jobs) as pool:
                for name, trials in zip(new, pool.map(_derived, new), strict=True):
                    _list_of(name).write_text(json.dumps([(t.variant, t.kernels) for t in trials]))
    rng, found = Random(seed), list[Trial]()
    for name in families:
        listed = json.loads(_list_of(name).read_text())
        trials = [Trial(FAMILIES[name], variant, tuple(kernels)) for variant, kernels in listed]
        found += trials if every else rng.sample(trials, min(1, len(trials)))
    return found


def _list_of(family: str) -> Path:
    return FOLDER / f"{family}.json"


def _derived(family: str) -> list[Trial]:
    return list(derived(FAMILIES[family]))


def one_of_each(trials: Sequence[Trial], seed: int) -> list[Trial]:
    """Draw one trial of those that force the same kernels."""
    by_kernels: dict[tuple[str, ...], list[Trial]] = {}
    for t in trials:
        by_kernels.setdefault(t.kernels, []).append(t)
    rng = Random(seed)
    return [rng.choice(same) for same in by_kernels.values()]


def main() -> None:
    ap = argparse.ArgumentParser(description="compile the models with forced kernels, without a GPU")
    ap.add_argument("--all-trials", action="store_true", help="all trials, not one for each kernel or family")
    ap.add_argument("--families", default="", metavar="A,B", help=f"trials of families instead: {', '.join(FAMILIES)}")
    ap.add_argument("--jobs", type=int, default=1, metavar="N")
    args = ap.parse_args()
    if args.families:
        trials = drawn_trials(args.families.split(","), args.all_trials, DRAW, args.jobs)
    else:
        trials = WIDE if args.all_trials else one_of_each(WIDE, DRAW)
    failed = compile_all(trials, args.jobs)
    print(f"{len(trials)} trials in {FOLDER}, {len(failed)} failed; SEED={DRAW}")
    for why in failed:
        print(f"  {why}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
