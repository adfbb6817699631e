"""Quantised checkpoints of every producer are read exactly, give the producer's logits, and fail clearly if damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.kit import eager_logits, fails, ir_logits, prompts, relative_error
from quant.reference import decode as reference
from safetensors.torch import load_file, save_file

from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.export import quiet
from llmc.frontend.model_folder import open_source
from llmc.frontend.quantization_files import FILES as SIDE_FILES
from llmc.frontend.trace_model import trace
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.decoder import Decoder, decoder_of
from llmc.quant.typed_weights import use_codes

FIXTURES = Path(__file__).parent / "fixtures"
READ = sorted(p.parent.name for p in FIXTURES.glob("*/oracle.json"))
FILE = "model.safetensors"
# Fixtures without a weight that a QFormat describes.
UNTYPED = {
    "ao-int4-tiles", "ao-nvfp4", "ar-mxfp4", "ar-nvfp4", "ar-to-ct-nvfp4", "bnb-fp4", "bnb-int8", "bnb-nf4",
    "bnb-nf4-double", "ct-kv-only", "ct-mxfp4", "ct-nvfp4", "ct-nvfp4a16", "hqq-2bit-axis0", "hqq-3bit", "metal",
    "mlx-3bit", "mlx-4bit", "mlx-mxfp4", "mo-nvfp4", "quanto-int4",
}  # fmt: skip


def decoder(folder: Path) -> Decoder | None:
    return decoder_of(open_source(folder).config, load().schemes)


@contextmanager
def opened(folder: Path) -> Iterator[Checkpoint]:
    with Checkpoint(trace(folder, dtype="f32"), decoder=decoder(folder)) as checkpoint:
        yield checkpoint


def float_model(folder: Path) -> Any:
    """transformers' model of a fixture in float32, with its quantised weights as the plain reference decodes them."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with quiet():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    found = reference(folder)
    plain = {k: v for k, v in load_file(folder / FILE).items() if k in dict(model.named_parameters())}
    state = {k: v.float() for k, v in plain.items() if v.dtype in (torch.float32, torch.bfloat16, torch.float16)}
    for name, w in found.items():
        if w.ndim == 3:  # gpt-oss holds the transposes of its experts
            state[name] = w.transpose(1, 2)
        elif f"{name}.weight" in dict(model.named_parameters()):
            state[f"{name}.weight"] = w
    state |= experts(model, found)
    left = model.load_state_dict(state, strict=False)
    tied = set(model.all_tied_weights_keys)
    assert not left.unexpected_keys and set(left.missing_keys) <= tied, left
    model.tie_weights()
    return model.eval()


def experts(model: Any, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stacked experts of mixtures whose checkpoints hold one weight for each: gate, up and down."""
    out = {}
    for name, p in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if p.ndim == 3 and parts and f"{stem}.0.{parts[0]}" in found:
            out[name] = torch.stack([torch.cat([found[f"{stem}.{e}.{x}"] for x in parts]) for e in range(len(p))])
    return out


@pytest.mark.drawn
@pytest.mark.parametrize("name", READ)
def test_weights_equal_what_the_producer_dequantises(name: str) -> None:
    record = json.loads((FIXTURES / name / "oracle.json").read_text())["weights"]
    stacked = {}
    with opened(FIXTURES / name) as checkpoint:
        for module, facts in record.items():
            weight = next((n for n in (module, f"{module}.weight") if n in checkpoint.names), None)
            if weight is None:
                stacked[module] = facts
                continue
            x = checkpoint.read(weight)
            x = x.swapaxes(1, 2) if x.ndim == 3 else x
            assert list(x.shape) == facts["shape"]
            assert hashlib.sha256(np.ascontiguousarray(x + 0.0).tobytes()).hexdigest() == facts["sha256"], module
    assert all(".experts." in module for module in stacked)  # the logits compare them
    assert len(stacked) < len(record) or not record


@pytest.mark.drawn
@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_the_dequantised_weights(name: str) -> None:
    tokens, positions = prompts((9,), 64)
    with opened(FIXTURES / name) as checkpoint:
        traced = checkpoint.traced
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(9))
    assert relative_error(got, eager_logits(float_model(FIXTURES / name), tokens, (9,))) <= 1e-4


@pytest.mark.drawn
@pytest.mark.parametrize("name", READ)
def test_quantised_types_compute_the_same_logits(name: str) -> None:
    """Weights of a quantised type, joined by fusion and lowered to their parts, are the numbers that `read` returns."""
    tokens, positions = prompts((9,), 64)
    ops = load().opset()
    with opened(FIXTURES / name) as checkpoint:
        traced = checkpoint.traced
        want = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(9))
        kept = use_codes(traced.module, checkpoint, ops)
        counts = checkpoint.counts
        known = {x: f for x, f in checkpoint.formats.items() if "embed_tokens" not in x}
        read = [x for x, f in known.items() if not f.values or ".experts." in x]  # by products as codes
        assert kept == sum(counts[x] for x in read) and bool(kept) == (name not in UNTYPED)
        text = "canonicalize, fuse-linear, split-moe{quantized=true}, lower-quantized{fallback=false}"
        passes = parse_pipeline(text, load().passes)
        run_pipeline(traced.module, passes, Ctx(ops))
        nodes = traced.module.graphs["main"].nodes
        products = [n for n in nodes if n.op.name == "quantized_linear"]
        experts = [n for n in nodes if n.op.name in ("quantized_moe_up", "quantized_moe_down")]
        assert len(experts) == sum(x.endswith(("gate_up_proj", "down_proj")) and ".experts." in x for x in read)
        plain = [x for x in read if ".experts." not in x]
        assert len(products) > len(plain) // 3 or not plain
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(9))
    assert relative_error(got, want) <= 1e-5


# Fixtures whose checkpoints name 8-bit activations, and the dtype of these. Others leave activations as they are.
ACTIVATIONS = {
    **dict.fromkeys(("ct-w8a8", "ct-w8a8-static", "ct-w8a8-static-asym", "bitnet", "gemma", "quanto-int8"), "i8"),
    **dict.fromkeys(
        (
            "ar-fp8-block", "ar-fp8-static", "ct-fp8", "ct-fp8-block", "ct-fp8-block-ragged", "ct-fp8-dynamic",
            "ct-fp8-kv", "ct-mixed", "ct-moe-fp8", "ct-w4afp8", "hf-fp8-block", "hf-fp8-block-ragged",
            "hf-fp8-block-ue8m0", "hf-fp8-channel", "hf-fp8-channel-flat", "hf-fp8-moe", "hf-fp8-tensor",
            "hf-fp8-tensor-names", "mo-fp8-kv",
        ),
        "f8e4m3",
    ),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", sorted(set(READ) - UNTYPED))
def test_formats_name_the_activations_of_the_checkpoint(name: str) -> None:
    with opened(FIXTURES / name) as checkpoint:
        found = {weight: f.act for weight, f in checkpoint.formats.items()}
    want = ACTIVATIONS.get(name, "")
    without = {"ct-mixed": ".mlp.", "gemma": "embed_tokens"}.get(name, " ")  # in the names of weights that have none
    assert found == {weight: "" if without in weight else want for weight in found}


@pytest.mark.drawn
def test_joined_weights_keep_the_activations_of_their_format() -> None:
    with opened(FIXTURES / "ct-w8a8") as checkpoint:
        module = checkpoint.traced.module
        use_codes(module, checkpoint, load().opset())
        run_pipeline(module, parse_pipeline("canonicalize, fuse-linear", load().passes), Ctx(load().opset()))
        weights = [n.operands[1] for n in module.graphs["main"].nodes if n.op.name in ("linear", "linear_map")]
        joined = [w.type.format for w in weights if w.node is not None and w.node.op.name == "concat"]
    assert joined and all(f is not None and f.act == "i8" for f in joined)


def acts(**changes: Any) -> dict[str, Any]:
    """The `config_groups` of a compressed-tensors fixture with other activations."""
    config = json.loads((FIXTURES / "ct-w8a8" / "config.json").read_text())["quantization_config"]["config_groups"]
    (name,) = config
    return {"config_groups": {name: {**config[name], "input_activations": {"type": "int", "num_bits": 8} | changes}}}


Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj"


def changed(source: str, folder: Path, tensors: Callable[[Tensors], Any], **config: Any) -> Callable[[], None]:
    """Open a copy of a fixture whose tensors and quantization_config are changed, without its side files."""
    shutil.copytree(FIXTURES / source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*SIDE_FILES))
    found = load_file(folder / FILE)
    tensors(found)
    save_file({k: v.contiguous() for k, v in found.items()}, folder / FILE)
    facts = json.loads((folder / "config.json").read_text())
    if config:
        facts["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(facts))

    def run() -> None:
        with opened(folder):
            pass

    return run


def put(name: str, value: Any) -> Callable[[Tensors], None]:
    """A change of one tensor's first entry."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    return change


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "change", "code", "words"),
    [
        ("gptq-4bit", put(f"{Q}.scales", float("nan")), "E342", (f"{Q}.scales", "nan")),
        ("gptq-4bit", put(f"{Q}.scales", 0), "E342", (f"{Q}.scales", "0.0")),
        ("hf-fp8-block", put(f"{Q}.weight_scale_inv", float("inf")), "E342", (f"{Q}.weight_scale_inv", "inf")),
        ("ct-mxfp4", put(f"{Q}.weight_scale", 255), "E342", (f"{Q}.weight_scale", "nan")),
        ("gptq-4bit-desc-act", put(f"{Q}.g_idx", 99), "E342", (f"{Q}.g_idx", "group 99")),
        ("gptq-4bit-desc-act", put(f"{Q}.g_idx", -1), "E342", (f"{Q}.g_idx", "group -1")),
        ("gptq-4bit-desc-act", lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].clamp(min=1)), "E342",
         (f"{Q}.g_idx", "puts 0 columns in group 0")),
        ("gptq-4bit", lambda t: t.pop(f"{Q}.scales"), "E340", (Q, "lacks scales")),
        ("gptq-4bit", lambda t: t.pop(f"{Q}.qzeros"), "E340", (Q, "lacks qzeros")),
        ("ct-w4a16-asym", lambda t: t.pop(f"{Q}.weight_zero_point"), "E340", (Q, "lacks weight_zero_point")),
        ("ct-w4a16-asym", put(f"{Q}.weight_shape", 7), "E341", (f"{Q}.weight_packed", "[7, ")),
        ("gptq-4bit", lambda t: t.update({f"{Q}.weight": torch.ones(4, 4)}), "E340", (Q, "qweight")),
        ("gptq-4bit", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :1]}), "E341", (f"{Q}.scales",)),
        ("gptq-4bit", lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:, :1]}), "E341", (f"{Q}.qzeros",)),
        ("awq-autoawq", lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}), "E341", (f"{Q}.qweight",)),
        ("hf-fp8-block", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 5)}), "E341", ("scale_inv",)),
        ("bnb-nf4", lambda t: t.pop(f"{Q}.weight.quant_state.bitsandbytes__nf4"), "E340", (Q, "lacks")),
        ("bnb-nf4", put(f"{Q}.weight.quant_state.bitsandbytes__nf4", 7), "E340", (Q, "cannot be read")),
        ("bnb-nf4", put(f"{Q}.weight.absmax", 0), "E342", (f"{Q}.weight.absmax",)),
        ("ct-nvfp4", lambda t: t.pop(f"{Q}.weight_global_scale"), "E340", (Q, "weight_global_scale")),
    ],
)  # fmt: skip
def test_damaged_tensors(
    source: str, change: Callable[[Tensors], Any], code: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    fails(code, *words, do=changed(source, tmp_path, change))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "config", "code", "words"),
    [
        ("gptq-4bit", {"checkpoint_format": "gptq_p", "format": "gptq_p"}, "E307", ("gptq_p", "gptq_v2")),
        ("gptq-4bit", {"bits": 5}, "E307", ("5", "8")),
        ("gptq-4bit", {"bits": "4"}, "E340", ("bits",)),
        ("gptq-4bit", {"group_size": 7}, "E341", ("scales",)),
        ("gptq-4bit", {"dynamic": {"-:.*q_proj": {}}}, "E340", ("q_proj", "leaves it out")),
        ("gptq-4bit", {"dynamic": {"+:(": {}}}, "E340", ("+:(",)),
        ("gptq-4bit", {"quant_method": "quip#"}, "E307", ("quip#", "gptq")),
        ("bnb-nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "E307", ("bfloat16", "uint8")),
        ("bnb-nf4", {"method": "bitsandbytes", "format": "nf4"}, "E307", ("format", "nf4", "none")),
        ("awq-autoawq", {"backend": "llm-awq"}, "E307", ("backend", "llm-awq", "autoawq")),
        ("awq-autoawq", {"version": "gemv_fast"}, "E307", ("gemv_fast", "gemm")),
        ("awq-autoawq", {"version": "gemv"}, "E341", ("qzeros",)),
        ("ar-4bit", {"packing_format": "auto_round:marlin"}, "E307", ("marlin",)),
        ("ct-w4a16-asym", {"transform_config": {"a": 1}}, "E307", ("transform_config",)),
        ("ct-w4a16-asym", {"config_groups": {}}, "E340", ("no target",)),
        ("hf-fp8-block", {"weight_block_size": [0, 128]}, "E340", ("block size",)),
        ("hf-fp8-block", {"fmt": "e5m2"}, "E307", ("e5m2", "e4m3")),
        ("hf-fp8-block", {"activation_scheme": "block"}, "E307", ("activation_scheme", "block", "static")),
        ("ct-w8a8", acts(num_bits=6), "E307", ("input_activations", "int of 6 bits", "int of 8 bits")),
        ("ct-w8a8", acts(type="posit"), "E307", ("input_activations", "posit")),
        ("ar-fp8-static", {"act_data_type": "fp8_e5m2"}, "E307", ("act_data_type", "fp8_e5m2", "fp8_e4m3")),
        ("ar-fp8-static", {"act_bits": 7}, "E307", ("act_bits", "7")),
    ],
)  # fmt: skip
def test_contradictory_and_unknown_configurations(
    source: str, config: dict[str, Any], code: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    fails(code, *words, do=changed(source, tmp_path, lambda t: None, **config))
