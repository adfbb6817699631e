"""Time steps of a model in the shape of Qwen3-Next with random weights on a GPU: decoding, and a prompt of one step.

    python -m bench.recurrent --compile [--target cuda:sm_90] [--folder build/recurrent]     # on any machine
    python -m bench.recurrent [--rounds 20] [--folder build/recurrent]                       # on one with the GPU

The model has the widths of Qwen3-Next-80B-A3B in its recurrent layers (hidden 2048, 16 key heads and 32 value heads of
128, convolutions over 4 tokens), but few layers, experts and ids. The lower bound of a decode step is the time to
move each weight once, and the states of its rows twice, at the bandwidth of the target's record.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, LENGTH, ROWS, PROMPT = 4096, 4096, 32, 2048
BATCHES = (1, 32)
LAYERS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def compile_models(target: str, folder: Path) -> None:
    """Compile the model without and with speculation into a folder."""
    from transformers import Qwen3NextConfig

    from llmc.driver import compile_model
    from llmc.options import Options

    config = Qwen3NextConfig(
        hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_hidden_layers=len(LAYERS), layer_types=list(LAYERS), num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, num_experts=8, num_experts_per_tok=2, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, vocab_size=VOCAB,
        max_position_embeddings=LENGTH, architectures=["Qwen3NextForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as source:
        config.save_pretrained(source)
        for speculate in (0, 3):
            options = Options(
                target=target, dtype="bfloat16", max_model_len=LENGTH, max_num_seqs=ROWS,
                max_num_batched_tokens=PROMPT, weights="random:3", speculate=speculate,
            )  # fmt: skip
            compile_model(Path(source), path_of(folder, speculate), options, force=True)


def path_of(folder: Path, speculate: int) -> Path:
    """Return the artifact for up to `speculate` drafted tokens."""
    return folder / f"speculate{speculate}.llmc"


def seconds(llm: Any, batch: int, prompt: int, tokens: int, rng: np.random.Generator) -> float:
    """Return the seconds of one greedy generate call with random prompts."""
    from llmc_runtime import SamplingParams

    prompts = [{"prompt_token_ids": rng.integers(0, VOCAB, prompt).tolist()} for _ in range(batch)]
    begin = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - begin


def floor_ms(llm_path: Path, batch: int) -> float:
    """Return the milliseconds to read the weights once, and to read and write the states of `batch` rows."""
    from llmc_runtime.artifact import open_artifact
    from llmc_runtime.format.manifest import RECURRENT

    from llmc.extension import load

    artifact = open_artifact(llm_path)
    states = sum(s.nbytes({}) // ROWS for s in artifact.manifest.states if s.role == RECURRENT)
    buffers = {b.name: b.bytes({}) for p in artifact.programs for b in p.buffers if b.kind == "weight"}
    moved = sum(buffers.values()) + 2 * batch * states
    return 1e3 * moved / load().target(artifact.manifest.target.name).bandwidth


def measure(folder: Path, rounds: int) -> None:
    """Print a table of steps in milliseconds."""
    from llmc_runtime import LLM

    rng = np.random.default_rng(0)
    for speculate in (0, 3):
        with LLM(path_of(folder, speculate)) as llm:
            for batch in BATCHES:
                ms, floor = step_ms(llm, batch, rounds, rng), floor_ms(path_of(folder, speculate), batch)
                print(f"speculate {speculate}, batch {batch:2}: {ms:.3f} ms a step, floor {floor:.3f} ms", flush=True)
            prompts = [seconds(llm, 1, PROMPT, 1, rng) for _ in range(rounds)]
            print(f"speculate {speculate}, prompt of {PROMPT}: {1e3 * statistics.median(prompts):.2f} ms", flush=True)


def step_ms(llm: Any, batch: int, rounds: int, rng: np.random.Generator) -> float:
    """Return the milliseconds of a decode step, the median of the rounds."""
    seconds(llm, batch, 16, 40, rng)
    steps = [(seconds(llm, batch, 16, 300, rng) - seconds(llm, batch, 16, 44, rng)) / 256 for _ in range(rounds)]
    return 1e3 * statistics.median(steps)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--compile", action="store_true", help="compile the models, which needs no GPU")
    ap.add_argument("--target", default="cuda:sm_90")
    ap.add_argument("--rounds", type=int, default=20, metavar="N", help="repetitions of each measurement (20)")
    ap.add_argument("--folder", type=Path, default=Path("build/recurrent"), help="of the compiled models")
    args = ap.parse_args()
    compile_models(args.target, args.folder) if args.compile else measure(args.folder, args.rounds)


if __name__ == "__main__":
    main()
