"""The models that the tests run on the GPU and on the CPU, and their artifacts, which are compiled if missing.

    python tests/gpu/model_cases.py [--all] [--mixtures] [--recurrent] [--only NAME,NAME] [--jobs N]

No GPU is needed. The artifacts are in build/gpu/models.

CPU artifacts are compiled for x86-64-v3, so that they run on most machines. A model that is not in float32 has a third
artifact, "exact": the same weights in float32 on a CPU, from which the errors of the other two are measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from gpu.compile_lock import alone  # noqa: E402
from models.cases import LISTED, ROPES, UNLISTED, Case  # noqa: E402
from models.recurrent_cases import RECURRENT  # noqa: E402

FOLDER = ROOT / "build" / "gpu" / "models"
TARGETS = {"gpu": "cuda:sm_90", "cpu": "cpu:x86-64-v3", "exact": "cpu:x86-64-v3"}
DEMO = ROOT / "examples" / "demo-model"
SEED = 7
# Steps of few tokens, too, compute the last layer for the last tokens of the rows only.
NARROWED = "serve, without narrow-tokens, after specialize: narrow-tokens"
ROWS, TOKENS, LENGTH = 20, 64, 96  # more than 16 rows, so that graphs for all ranges of rows exist


@dataclass(frozen=True)
class Pair:
    """A model in a dtype ("float32", "bfloat16", "auto"), compiled for the GPU and for a CPU.

    case: the model's configuration; None: the demonstration model. forced: kernels that compute all nodes of a mixture
    that they support, in the GPU's artifact; those of the CPU do not depend on it. speculate: the most drafted tokens
    of a row of the GPU's artifact.
    """

    case: Case | None
    dtype: str
    forced: tuple[str, ...] = ()
    speculate: int = 0

    @property
    def name(self) -> str:
        kernel = f"-{self.forced[0].replace('/', '_')}" if self.forced else ""
        drafts = f"-speculate{self.speculate}" * bool(self.speculate)
        return f"{self.case.name if self.case else 'demo'}-{self.dtype}{kernel}{drafts}"

    def path(self, kind: str) -> Path:
        plain = self if kind == "gpu" else Pair(self.case, self.dtype)
        return FOLDER / f"{plain.name}-{kind}.llmc"

    def pipeline(self, kind: str) -> str:
        """The compile option; with forced kernels, single tokens are sorted by expert, too."""
        if kind != "gpu":
            return ""
        if not self.forced:
            return NARROWED
        kernels = ", ".join(f'"{x}"' for x in self.forced)
        return f"{NARROWED}, without gather-experts, without select, before pack: select{{prefer=[{kernels}]}}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("gpu", "cpu") if self.dtype == "float32" else ("gpu", "cpu", "exact")

    @property
    def exact(self) -> str:
        """The kind that computes the model in float32 on a CPU."""
        return self.kinds[-1]

    @property
    def made(self) -> bool:
        return all((self.path(k) / "manifest.json").is_file() for k in self.kinds)


TEXTS = (Pair(None, "auto"), Pair(None, "float32"))  # models with a tokenizer; auto is bfloat16


def _mixture(name: str) -> Case:
    """A mixture of the parity tests with 8 experts, of which a token chooses 3."""
    case = next(c for c in UNLISTED if c.name == name)
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
    config = case.config | {key: n for key, n in experts.items() if key in case.config}
    return replace(case, name=f"{name}-8", config=config | {"num_experts_per_tok": 3})


# Products of experts are computed as they are by default (of one token without sorting), and by each kernel in turn.
MIXTURES = tuple(
    Pair(_mixture(name), "bfloat16", forced)
    for name in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
    for forced in ((), ("cuda/grouped_wgmma",), ("triton/moe_up", "triton/moe_down"))
)


# Without and with drafts: a mixture, the gated delta rule and Mamba-2.
RECURRENT_PAIRS = tuple(
    Pair(case, dtype, speculate=drafts)
    for case in RECURRENT
    if case.name in ("qwen3_next", "qwen3_5_text", "bamba")
    for dtype in ("float32", "bfloat16")
    for drafts in (0, 4)
)


def pairs(every: bool = False) -> list[Pair]:
    """Return the demonstration model and the listed architectures in both dtypes; every: others, too, in float32."""
    found = [*TEXTS, *(Pair(c, d) for d in ("float32", "bfloat16") for c in LISTED)]
    return [*found, *(Pair(c, "float32") for c in (*UNLISTED, *ROPES))] if every else found


def make(pair: Pair) -> str:
    """Compile the missing artifacts of a pair; return "" or the error."""
    if pair.made:
        return ""
    import torch
    from models.kit import save

    from llmc.diagnostics import Diagnostic
    from llmc.driver import compile_model
    from llmc.options import Options

    with tempfile.TemporaryDirectory() as scratch:
        model, length = DEMO, 256
        if pair.case:
            model = Path(scratch) / "model"
            save(pair.case, model, SEED, torch.bfloat16 if pair.dtype == "bfloat16" else torch.float32)
            length = min(pair.case.trace.get("max_positions", LENGTH), LENGTH)
        for kind in pair.kinds:
            if (pair.path(kind) / "manifest.json").is_file():
                continue
            dtype = "float32" if kind == "exact" else pair.dtype
            options = Options(
                target=TARGETS[kind], dtype=dtype, max_model_len=length, max_num_seqs=ROWS,
                max_num_batched_tokens=TOKENS, cache=FOLDER.parent / "cache", reuse=False,
                pipeline=pair.pipeline(kind), speculate=pair.speculate if kind == "gpu" else 0,
            )  # fmt: skip
            try:
                compile_model(model, pair.path(kind), options, force=True)
            except Diagnostic as e:
                return f"{pair.name} for {TARGETS[kind]}: {e}"
    return ""


def make_all(found: Sequence[Pair], jobs: int) -> list[str]:
    """Compile the missing artifacts of all pairs in `jobs` processes; return the errors."""
    if all(p.made for p in found):
        return []
    with alone(FOLDER), ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        missing = [p for p in found if not p.made]
        shared = {p.path("cpu"): p for p in missing}  # one of those that share artifacts for a CPU is made first
        first = [*pool.map(make, shared.values())]
        return [why for why in (*first, *pool.map(make, (p for p in missing if p not in shared.values()))) if why]


def main() -> None:
    ap = argparse.ArgumentParser(description="compile the models of the GPU tests, without a GPU")
    ap.add_argument("--all", action="store_true", help="every architecture of the parity table")
    ap.add_argument("--mixtures", action="store_true", help="the mixtures with each kernel forced in turn, alone")
    ap.add_argument("--recurrent", action="store_true", help="models with recurrent layers, with and without drafts")
    ap.add_argument("--only", default="", metavar="NAME,NAME", help="pairs by name, such as llama-bfloat16")
    ap.add_argument("--jobs", type=int, default=1, metavar="N")
    args = ap.parse_args()
    wanted = set(args.only.split(",")) - {""}
    known = MIXTURES if args.mixtures else pairs(args.all or bool(wanted))
    if args.recurrent or wanted:
        known = [*(known if wanted else ()), *RECURRENT_PAIRS]
    found = [p for p in known if not wanted or p.name in wanted]
    failed = make_all(found, args.jobs)
    print(f"{sum(p.made for p in found)} of {len(found)} pairs in {FOLDER}")
    for why in failed:
        print(f"  {why}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
