"""The deterministic artifacts that the tests run on the GPU, compiled if they are missing.

    python tests/gpu/deterministic_models.py      writes build/gpu/deterministic; needs no GPU
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from models.cases import SMALL, Case  # noqa: E402

FOLDER = ROOT / "build" / "gpu" / "deterministic"
DEMO = ROOT / "examples" / "demo-model"
ROWS, TOKENS, LENGTH = 24, 160, 512
SEED = 5
# Heads as wide as those of large models, and products whose sums have many steps.
WIDE = SMALL | {
    "hidden_size": 1024, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 128,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
MODELS = {
    "demo": None,
    "wide": Case("wide", "llama", WIDE),
    "window": Case("window", "mistral", WIDE | {"sliding_window": 100}),
    "experts": Case("experts", "mixtral", WIDE | {"num_local_experts": 4, "intermediate_size": 256}),
}


def artifact(name: str) -> Path:
    """Return the artifact of a model."""
    path = FOLDER / f"{name}.llmc"
    if (path / "manifest.json").is_file():
        return path
    import torch
    from models.kit import save

    from llmc.driver import compile_model
    from llmc.options import Options

    options = Options(
        target="cuda:sm_90", deterministic=True, max_model_len=LENGTH, max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS, cache=FOLDER / "cache", reuse=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        case, model = MODELS[name], DEMO
        if case:
            model = Path(scratch) / "model"
            save(case, model, SEED, torch.bfloat16)
        compile_model(model, path, options)
    return path


def main() -> None:
    for name in MODELS:
        print(artifact(name))


if __name__ == "__main__":
    main()
