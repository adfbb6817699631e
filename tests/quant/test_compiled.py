"""Quantised weights in compiled artifacts for the CPU: log-probabilities compared with the reference interpreter's."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.format.safetensors import header_length, parse_header
from models.kit import fails, ir_logits, prompts
from quant.make.common import base
from quant.test_decode import FIXTURES, opened

from llmc.driver import compile_model
from llmc.extension import load
from llmc.options import Options
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes

pytestmark = pytest.mark.drawn(seconds=10)

# Fixture -> whether its products run on codes.
COMPILED = {
    "gptq-4bit-desc-act-asym": True, "gptq-8bit": True, "gptq-8bit-asym": False, "awq-autoawq": True, "ar-mixed": True,
    "ct-w8a8": True, "hf-fp8-block": False,
}  # fmt: skip
# Mixtures -> the kernels that their products with quantised weights run on.
MIXTURES = {
    "gptq-4bit-moe": {"cpu/experts", "cpu/quantized_linear"}, "ct-moe-w4a16": {"cpu/experts", "cpu/quantized_linear"},
    "ct-moe-fp8": {"cpu/experts", "cpu/linear"}, "hf-fp8-moe": {"cpu/experts", "cpu/linear"},
    "ar-moe": {"cpu/experts", "cpu/quantized_linear"}, "gpt-oss-mxfp4": {"cpu/experts", "cpu/linear"},
    "mo-nvfp4-moe": {"cpu/experts", "cpu/linear"},
}  # fmt: skip
PASSES = (
    "canonicalize, fuse-linear{siblings=false}, %ssplit-moe{quantized=true}, lower-quantized{act=i8, act_block=64%s}"
)


def scored(artifact: Path, tokens: np.ndarray) -> np.ndarray:
    """The log-probability of each token after the first."""
    with LLM(artifact, say=lambda line: None) as llm:
        prompt = {"prompt_token_ids": tokens.tolist()}
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs is not None
    return np.array([row[t].logprob for row, t in zip(output.prompt_logprobs[1:], tokens[1:].tolist(), strict=True)])


def expected(
    folder: Path, tokens: np.ndarray, positions: np.ndarray, made: str = "", codes: bool = True, target: str = ""
) -> np.ndarray:
    """The same by the reference interpreter, with activations rounded as the kernels round them.

    target: that whose kernels decide which products read codes; all of them do if it is empty.
    """
    ops = load().opset()
    with opened(folder) as checkpoint:
        traced = checkpoint.traced
        if codes:
            use_codes(traced.module, checkpoint, ops)
            passes = parse_pipeline(PASSES % (made, "" if target else ", fallback=false"), load().passes)
            run_pipeline(traced.module, passes, Ctx(ops, load().target(target), load().kernels) if target else Ctx(ops))
        logits = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(len(tokens)))
    logits = logits - logits.max(-1, keepdims=True)
    chosen = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(chosen[:-1], tokens[1:, None].astype(np.int64), 1)[:, 0]


def check(got: np.ndarray, want: np.ndarray) -> None:
    """Compare log-probabilities of products whose activations are rounded to 8 bits.

    Kernels and the interpreter add in different orders, so that an activation halfway between two codes may be rounded
    either way, which depends on the processor: it changes the log-probabilities of few tokens, and by little.
    """
    off = np.abs(got - want)
    assert (off < 0.02).mean() >= 0.9 and off.max() < 0.1, f"differences of {np.sort(off)[-5:]}"


def compiled(folder: Path, out: Path, **options: object) -> Path:
    compile_model(folder, out, Options(dtype="float32", cache=CACHE, reuse=False, **options))  # type: ignore[arg-type]
    return out


def kernels(artifact: Path) -> set[str]:
    """The names of the kernels that its nodes run on."""
    return {row["kernel"] for row in json.loads((artifact / "report" / "choices.json").read_text())}


@pytest.mark.parametrize("name", COMPILED)
def test_an_artifact_computes_with_the_codes_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    tokens, positions = prompts((37,), 64)
    artifact = compiled(FIXTURES / name, tmp_path / "model.llmc")
    codes = COMPILED[name]
    assert ("cpu/quantized_linear" in kernels(artifact)) == codes
    got, want = scored(artifact, tokens), expected(FIXTURES / name, tokens, positions, codes=codes)
    if codes:
        check(got, want)
    else:
        np.testing.assert_allclose(got, want, atol=1e-4)
    plain = expected(FIXTURES / name, tokens, positions, codes=False)
    assert np.abs(want - plain).mean() < 0.15  # what rounding the activations costs


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_a_mixture_keep_their_codes(name: str, tmp_path: Path) -> None:
    """In the artifact, too: no stack of experts is stored in floats."""
    tokens, positions = prompts((37,), 64)
    artifact = compiled(FIXTURES / name, tmp_path / "model.llmc")
    found = kernels(artifact)
    assert MIXTURES[name] <= found and not {"cpu/moe", "cpu/quantized_linear"} & (found - MIXTURES[name])
    elements = Counter[bool]()
    for n, info in stored(artifact).items():
        if ".experts." in n:
            elements[info.dtype in ("u8", "i8", "f8e4m3")] += math.prod(info.shape)
    assert elements[True] > 8 * elements[False]  # scales
    got = scored(artifact, tokens)
    check(got, expected(FIXTURES / name, tokens, positions, target="cpu:native"))
    assert np.abs(got - expected(FIXTURES / name, tokens, positions, codes=False)).mean() < 0.15


def stored(artifact: Path) -> Mapping[str, Any]:
    """The tensors of the artifact's weight files, by name."""
    out: dict[str, Any] = {}
    for path in sorted((artifact / "weights").glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + header_length(data[:8], len(data), "")
        out |= parse_header(data[8:start], len(data), "")
    return out


def test_a_compile_quantises(tmp_path: Path) -> None:
    source = FIXTURES / "ct-kv-only"  # its weights are not quantised
    tokens, positions = prompts((37,), 64)
    artifact = compiled(source, tmp_path / "model.llmc", quant="int4", group_size=32, quant_head="int8")
    assert "cpu/quantized_linear" in kernels(artifact) and "cpu/linear" not in kernels(artifact)
    made = "quantize{weights=int4, group=32, head=int8}, "
    check(scored(artifact, tokens), expected(source, tokens, positions, made))


def test_a_compile_quantises_the_experts_of_a_mixture(tmp_path: Path) -> None:
    source = tmp_path / "model"
    base("qwen3_moe").save_pretrained(source)
    tokens, positions = prompts((37,), 64)
    artifact = compiled(source, tmp_path / "model.llmc", quant="int4", group_size=32)
    assert {"cpu/experts", "cpu/quantized_linear"} <= kernels(artifact) and "cpu/moe" not in kernels(artifact)
    made = "quantize{weights=int4, group=32}, "
    want = expected(source, tokens, positions, made, target="cpu:native")
    check(scored(artifact, tokens), want)


def test_a_pipeline_without_the_pass_cannot_quantise(tmp_path: Path) -> None:
    options = Options(quant="int8", pipeline="serve, without quantize", cache=None)
    source = FIXTURES / "ct-kv-only"
    fails("E421", "quantize", do=lambda: compile_model(source, tmp_path / "model.llmc", options))
