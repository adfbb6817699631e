"""The plan of a run of the GPU benches: models, suites, sizes, and its command-line options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench import shapes
from bench.gpu.engine import BATCHES, OFFLINE, PROMPTS
from bench.gpu.kernels import Load
from bench.shapes import Shape

_SHAPES = (
    shapes.LLAMA31_8B, shapes.LLAMA33_70B, shapes.LLAMA32_1B, shapes.QWEN3_06B, shapes.QWEN3_30B_A3B, shapes.SMALL,
)  # fmt: skip
RECIPES = ("fp8", "fp8-block", "w8a8", "int8", "int4")  # of `llmc compile --quant`
KV_CACHES = ("auto", "fp8")  # of `llmc compile --kv-cache-dtype`; MODEL-RECIPE and MODEL-RECIPE-fp8kv are models, too
_QUANTISED = [Shape.quantised(s, r, kv) for s in _SHAPES for r in RECIPES for kv in KV_CACHES]
MODELS = {s.name: s for s in [*_SHAPES, *_QUANTISED]}
DEFAULT_MODELS = "qwen3-0.6b,llama-3.2-1b,llama-3.1-8b"
DEFAULT_SUITES = ("decode", "prefill", "offline", "host", "kernels", "mixed", "start")  # ten minutes
SUITES = (*DEFAULT_SUITES, "contexts")
MIXED = Load(64, 1000, 512)  # decoding streams, and a chunk of a prompt
# Limits of the artifacts that a run compiles: those of the peers' figures, except that peers ran 256 sequences.
MAX_LEN, MAX_SEQS, MAX_TOKENS = 16384, 512, 8192


@dataclass(frozen=True)
class Plan:
    """`artifacts`: a folder of NAME.llmc, where missing ones are compiled; `limit`: seconds of the whole run."""

    out: Path
    artifacts: Path
    models: tuple[Shape, ...]
    suites: tuple[str, ...]
    batches: tuple[int, ...]
    kernel_batches: tuple[int, ...]
    prompts: tuple[int, ...]
    requests: int
    target: str
    limit: float
    pipeline: str = ""
    mixed: Load = MIXED
    temperature: float = 0.0
    sequences: int | None = None  # that run at a time; None: as many as the artifact allows

    def artifact(self, shape: Shape) -> Path:
        """Random weights, filled by the runtime."""
        return self.artifacts / f"{shape.name}.llmc"

    def packed(self, shape: Shape) -> Path:
        """Real weight files."""
        return self.artifacts / f"{shape.name}-packed.llmc"


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(
        prog="python -m bench.gpu", description="Measure the engine and its kernels on this machine's GPU."
    )
    ap.add_argument(
        "--out", type=Path, default=Path("build/bench/gpu"), metavar="DIR", help="folder of rows, tables and logs"
    )
    ap.add_argument("--artifacts", type=Path, default=Path("build/bench/gpu/artifacts"), metavar="DIR",
                    help="folder of NAME.llmc of each model; missing ones are compiled")  # fmt: skip
    ap.add_argument(
        "--models",
        default=DEFAULT_MODELS,
        metavar="A,B",
        help=f"of {', '.join(s.name for s in _SHAPES)}, each with -{' or -'.join(RECIPES)} if wanted, then -fp8kv",
    )
    suites = f"suites: {', '.join(SUITES)}; default: {', '.join(DEFAULT_SUITES)}"
    ap.add_argument("--suites", default=",".join(DEFAULT_SUITES), metavar="A,B", help=suites)
    ap.add_argument("--batches", type=_ints, default=BATCHES, metavar="N,N", help="batch sizes of the decode suite")
    ap.add_argument(
        "--kernel-batches", type=_ints, default=(1, 32), metavar="N,N", help="batch sizes of the kernels suite"
    )
    ap.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="temperature of the rows of the kernels suite"
    )
    ap.add_argument("--mixed", type=_ints, default=(MIXED.batch, MIXED.prompt, MIXED.tokens), metavar="ROWS,N,TOKENS",
                    help="mixed suite: rows, tokens of context of each, and tokens of the step")  # fmt: skip
    ap.add_argument(
        "--prompts", type=_ints, default=PROMPTS, metavar="N,N", help="prompt lengths of the prefill suite in tokens"
    )
    ap.add_argument(
        "--offline-requests",
        type=int,
        default=OFFLINE[0],
        metavar="N",
        help="requests of the offline suite; peers ran 512",
    )
    ap.add_argument("--target", default="cuda:sm_90", help="target of artifacts that are compiled")
    ap.add_argument(
        "--pipeline", default="", metavar="TEXT", help="option of the artifacts that are compiled, as for llmc compile"
    )
    ap.add_argument(
        "--limit", type=float, default=570, metavar="SECONDS", help="seconds after which no new part starts"
    )
    ap.add_argument(
        "--max-num-seqs", type=int, metavar="N", help=f"sequences that run at a time; default {MAX_SEQS}, peers had 256"
    )
    ap.add_argument("--compile-only", action="store_true", help="only compile the artifacts; needs no GPU")
    return ap


def plan_of(a: argparse.Namespace) -> Plan:
    """Parse the options; raises ValueError for an unknown model or suite."""
    names, suites = a.models.split(","), tuple(a.suites.split(","))
    for name, known in [*((n, MODELS) for n in names), *((s, SUITES) for s in suites)]:
        if name not in known:
            raise ValueError(f"{name!r} is not known; there are: {', '.join(known)}")
    return Plan(
        a.out, a.artifacts, tuple(MODELS[n] for n in names), suites, a.batches, a.kernel_batches, a.prompts,
        a.offline_requests, a.target, a.limit, a.pipeline, Load(*a.mixed), a.temperature, a.max_num_seqs,
    )  # fmt: skip


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))
