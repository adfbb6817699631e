"""A Llama of two layers, compiled with attention kernels of choice, and a comparison of its artifacts' answers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gpu.kernel_cases import CACHE

# Graphs of up to 8 decoding rows, of more, and of up to 256 tokens of prompts.
PIPELINE = "serve, without specialize, after fuse-qkv: specialize{decode=[8], step=[]}"
LENGTHS = (1, 2, 15, 16, 17, 100, 255, 256, 257, 600, 900)  # of prompts
TOLERANCE = 0.15  # of log-probabilities, in bf16; those of other prompts differ by more than 1

Said = list[
    tuple[int, dict[int, float]]
]  # of each prompt: a token, and log-probabilities of the likeliest at its place


def compile_llama(path: Path, more: str = "") -> None:
    """Compile the model for an H100 or H200. more: the rest of the pipeline."""
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
            weights="random:3", pipeline=PIPELINE + more, cache=CACHE.parent / "cache",
        )  # fmt: skip
        compile_model(Path(folder), path, options)


def launched(path: Path) -> set[str]:
    """The functions of the kernels of an artifact's programs."""
    programs = (path / "programs").glob("*.json")
    return {x["entry"] for p in programs for x in json.loads(p.read_text())["launches"]}


def likeliest(path: Path, place: int) -> Said:
    """Return the generated token number `place` of each prompt and the log-probabilities of the likeliest tokens there.

    All prompts are in one batch.
    """
    from llmc_runtime import LLM, SamplingParams

    rng = np.random.default_rng(5)
    prompts = [{"prompt_token_ids": rng.integers(0, 1024, n).tolist()} for n in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    llm = LLM(path, say=lambda text: None)
    try:
        found = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.close()
    return [(out.token_ids[place], {i: x.logprob for i, x in out.logprobs[place].items()}) for out in found]


def differences(ours: Said, theirs: Said) -> Sequence[str]:
    """Return what differs between the answers to the same prompts, and whether all answers are equal."""
    found = []
    for length, (_, a), (_, b) in zip(LENGTHS, ours, theirs, strict=True):
        both = a.keys() & b.keys()
        if len(both) < 10:
            found.append(f"prompt of {length}: only {len(both)} of 20 likeliest tokens are the same")
        elif (most := max(abs(a[i] - b[i]) for i in both)) >= TOLERANCE:
            found.append(f"prompt of {length}: log-probabilities differ by {most}")
    first, others = ours[0][1], [b for _, b in ours[1:]]
    apart = [abs(first[i] - b[i]) for b in others for i in first.keys() & b.keys()]
    if apart and max(apart) <= TOLERANCE:
        found.append("the answers to all prompts are equal")
    return found
