"""The deterministic artifacts that the tests run on the GPU, compiled if they are missing.

python tests/gpu/deterministic_models.py      writes build/gpu/deterministic; needs no GPU
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from gpu.compile_lock import alone  # noqa: E402
from models.cases import SMALL, Case  # noqa: E402

FOLDER = ROOT / "build" / "gpu" / "deterministic"
ROWS, TOKENS, LENGTH = 24, 160, 1536  # longer than two parts of decode attention
MANY_ROWS, MANY_TOKENS = 256, 2048
SEED = 5
# Heads as wide as those of large models, and products whose sums have many steps.
WIDE = SMALL | {
    "hidden_size": 1024, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 128,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
MANY = Case("many", "llama", WIDE | {"hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 768})
CASES = (
    Case("plain", "llama", WIDE),
    Case("window", "mistral", WIDE | {"sliding_window": 100}),
    Case("experts", "mixtral", WIDE | {"num_local_experts": 4, "intermediate_size": 256}),
)


def path_of(case: Case) -> Path:
    """Return where the artifact of a model is."""
    return FOLDER / f"{case.name}.llmc"


def make(case: Case) -> None:
    """Compile the artifact of a model if it is missing."""
    if (path_of(case) / "manifest.json").is_file():
        return
    import torch
    from models.kit import save

    from llmc.driver import compile_model
    from llmc.options import Options

    rows, tokens = (MANY_ROWS, MANY_TOKENS) if case is MANY else (ROWS, TOKENS)
    options = Options(
        target="cuda:sm_90", deterministic=True, max_model_len=LENGTH, max_num_seqs=rows,
        max_num_batched_tokens=tokens, cache=FOLDER / "cache", reuse=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        save(case, Path(scratch) / "model", SEED, torch.bfloat16)
        compile_model(Path(scratch) / "model", path_of(case), options)


def make_all() -> None:
    """Compile all missing artifacts, several at a time if there are enough cores."""
    jobs = max(1, (os.cpu_count() or 1) // 4)
    with alone(FOLDER), ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(make, (MANY, *CASES)))


if __name__ == "__main__":
    make_all()
