"""Bad models and checkpoints: each gives one Diagnostic that names the cause and the remedy, in at most five lines."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from models.cases import EXPERTS, FURTHER, LISTED, ROPES, SEED, SMALL, TINY_VISION, UNLISTED, rope
from models.kit import save
from models.recent_cases import RECENT
from models.recurrent_cases import RECURRENT
from safetensors.numpy import load_file, save_file

from llmc.diagnostics import Diagnostic
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.model_folder import TESTED
from llmc.frontend.trace_model import Traced, notes_of, trace
from llmc.ir.ops.moe import SWIGLU

BY_NAME = {c.name: c for c in (*LISTED, *UNLISTED, *FURTHER, *RECENT)}
FILE = "model.safetensors"


def fails(code: str, *words: str, do: Callable[[], Any]) -> None:
    with pytest.raises(Diagnostic) as e:
        do()
    message = str(e.value)
    assert e.value.code == code, message
    assert "\n  Try: " in message
    assert len(message.splitlines()) <= 5
    for w in words:
        assert w in message, message


def config(folder: Path, **entries: Any) -> Path:
    """A folder with a llama config of our own making; None removes an entry."""
    folder.mkdir(exist_ok=True)
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL} | entries
    (folder / "config.json").write_text(json.dumps({k: v for k, v in known.items() if v is not None}))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("llama")
    save(BY_NAME["llama"], folder)
    return trace(folder)


@pytest.fixture
def folder(saved: Traced, tmp_path: Path) -> Path:
    """A copy that a test may harm."""
    return Path(shutil.copytree(saved.source.folder, tmp_path / "model"))


def read_all(traced: Traced, folder: Path | None = None) -> None:
    with Checkpoint(traced, folder) as checkpoint:
        for name in checkpoint.names:
            checkpoint.read(name)


# Folders and configs


def test_folder(tmp_path: Path) -> None:
    fails("E301", "nowhere", "does not exist", do=lambda: trace(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    fails("E301", "is a file", do=lambda: trace(tmp_path / "file"))


def test_config_file(tmp_path: Path) -> None:
    fails("E302", "no config.json", "nothing", do=lambda: trace(tmp_path))
    for text in ("{", "[1]", '{"a": 1}\x00'):
        (tmp_path / "config.json").write_text(text)
        fails("E302", "config.json", do=lambda: trace(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    fails("E302", "config.json", do=lambda: trace(tmp_path))


def test_architecture(tmp_path: Path) -> None:
    fails("E303", "no model_type", do=lambda: trace(config(tmp_path, model_type=None)))
    fails(
        "E303",
        "'llamma'",
        "did you mean 'llama'? use a tested architecture: llama, qwen2",
        do=lambda: trace(config(tmp_path, model_type="llamma", architectures=None)),
    )
    fails("E303", "'vit'", "no causal", do=lambda: trace(config(tmp_path, model_type="vit")))
    custom = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    (tmp_path / "configuration_x.py").write_text("raise SystemExit('this must not run')")
    unknown = {"model_type": "x", "architectures": ["X"], "auto_map": custom}
    fails("E304", "'x'", "auto_map", "part of transformers", do=lambda: trace(config(tmp_path, **unknown)))
    named = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    remedy = '"model_type": "deepseek_v3"'
    fails("E304", "'kimi_k2'", remedy, do=lambda: trace(config(tmp_path, auto_map=custom, **named)))
    fails("E303", "'kimi_k2'", remedy, do=lambda: trace(config(tmp_path, **named)))
    fails("E303", "an encoder", do=lambda: trace(config(tmp_path, architectures=["BertForMaskedLM"])))
    classifier = config(tmp_path, architectures=["LlamaForSequenceClassification"])
    fails("E303", "a classifier", "--task classify", do=lambda: trace(classifier, task="generate"))
    quantised = config(tmp_path / "quantised", quantization_config={"quant_method": "gptq"})
    fails("E307", "quantised", "decoder", do=lambda: Checkpoint(trace(quantised)))
    fails("E305", "'snarf'", "correct config.json", do=lambda: trace(config(tmp_path, hidden_act="snarf")))
    fails("E302", "num_hidden_layers", do=lambda: trace(config(tmp_path, num_hidden_layers="two")))
    fails("E302", "dtype", do=lambda: trace(config(tmp_path), dtype="f8e4m3"))
    fails("E302", "rms_norm_eps is nan", do=lambda: trace(config(tmp_path, rms_norm_eps=math.nan)))
    fails("E302", "'factor': inf", do=lambda: trace(config(tmp_path, **rope("linear", factor=math.inf))))


@pytest.mark.drawn
def test_generation_config(tmp_path: Path) -> None:
    config(tmp_path, eos_token_id=[2, 5])
    assert trace(tmp_path).facts.eos_token_ids == (2, 5)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 7, "temperature": 0.5, "num_beams": 4}))
    facts = trace(tmp_path).facts
    assert facts.eos_token_ids == (7,) and dict(facts.generation) == {"temperature": 0.5}
    generation.write_text(json.dumps({"eos_token_id": None, "temperature": None}))
    facts = trace(tmp_path).facts
    assert facts.eos_token_ids == (2, 5) and not facts.generation
    generation.write_text(json.dumps({"eos_token_id": []}))
    assert trace(tmp_path).facts.eos_token_ids == (2, 5)
    odd = ({"temperature": math.nan}, {"top_p": math.inf}, {"top_k": 10**400})
    for wrong in ({"eos_token_id": "</s>"}, {"eos_token_id": [1.5]}, {"temperature": "hot"}, *odd):
        generation.write_text(json.dumps(wrong))
        fails("E302", next(iter(wrong)), do=lambda: trace(tmp_path))


def test_dtype_of_a_config_that_names_none(tmp_path: Path) -> None:
    assert trace(config(tmp_path, num_hidden_layers=1)).facts.dtype == "f32"
    save_file({"a": np.ones(4, ml_dtypes.bfloat16), "b": np.ones(4, np.int8)}, tmp_path / FILE)
    assert trace(tmp_path).facts.dtype == "bf16"
    save_file({"a": np.ones(4, np.float16)}, tmp_path / FILE)
    narrow = trace(tmp_path, substitutes={"f16": "bf16"}).facts
    assert (narrow.stored_dtype, narrow.dtype, trace(tmp_path).facts.dtype) == ("f16", "bf16", "f16")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_torch_does_not_have(key: str, tmp_path: Path) -> None:
    for name in ("fp32", "auto", "torch.bfloat16", "nn"):
        fails("E302", f"{key} is {name!r}", '"bfloat16"', do=lambda name=name: trace(config(tmp_path, **{key: name})))


def test_a_vocabulary_per_layer_is_no_count_of_layers(tmp_path: Path) -> None:
    weights = trace(case_config("gemma4_text", tmp_path, vocab_size_per_layer_input=262144)).weights
    assert weights["model.embed_tokens_per_layer.weight"].type.shape[0] == 262144


def test_a_models_dtype_outranks_its_text_halfs(tmp_path: Path) -> None:
    inner = {"text_config": {**SMALL, "head_dim": 16, "dtype": "float32"}, **TINY_VISION}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "dtype": "bfloat16", **inner}))
    assert trace(tmp_path).facts.dtype == "bf16"


def test_code_of_a_known_architecture_is_ignored(tmp_path: Path) -> None:
    """If transformers has the model, its code is used, not that of auto_map."""
    custom = {"AutoModelForCausalLM": "modeling_x.X"}
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('this must not run')")
    assert trace(config(tmp_path, auto_map=custom, num_hidden_layers=1)).facts.architecture == "LlamaForCausalLM"


def case_config(name: str, folder: Path, **kw: Any) -> Path:
    case = BY_NAME[name]
    (folder / "config.json").write_text(json.dumps({"model_type": case.model_type, **case.config, **kw}))
    return folder


def test_positions_of_other_families(tmp_path: Path) -> None:
    gpt2 = case_config("gpt2", tmp_path)
    fails("E305", "256", "300", do=lambda: trace(gpt2, max_positions=300))
    fails("E305", "1 token", "at least 2", do=lambda: trace(gpt2, max_positions=1))
    for name, why in (("llama4_text", "chunk"), ("minimax_m3-sparse", "block_size"), ("deepseek_v32", "index_topk")):
        folder = case_config(name, tmp_path)
        fails("E305", why, "64", "65", do=lambda folder=folder: trace(folder, max_positions=65))
    assert trace(folder).facts.max_positions == 64 and any("index_topk" in x for x in notes_of(trace(folder)))
    assert trace(case_config("bloom", tmp_path, seq_length=128)).facts.max_positions == 128


VOCAB = {"vocab_size": 320}
ODD = {
    "mpt": ({**VOCAB, "d_model": 64, "n_layers": 1, "n_heads": 4, "attn_config": {"alibi": False}}, "MPT ignores"),
    "doge": (SMALL, "a weight of each key"),
    "zaya": (SMALL | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 1}, "convolves queries and keys"),
    "big_bird": (SMALL | {"is_decoder": True}, "bypasses"),
    "trocr": ({**VOCAB, "d_model": 64, "max_position_embeddings": 256}, "no logits_to_keep"),
    "roberta": (SMALL | {"is_decoder": True}, "RobertaEmbeddings derives positions"),
    "zamba": (SMALL, "layers share its attention"),
    "glm5_next": (SMALL, "an indexer of its own"),
    "qwen4_exp_text": (SMALL, "n-grams"),
    "moshi": (SMALL | {"head_dim": 16}, "returns 2 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_models_that_cannot_be_traced(name: str, tmp_path: Path) -> None:
    entries, words = ODD[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **entries}))
    with pytest.raises(Diagnostic, match=words) as e:
        trace(tmp_path)
    assert e.value.code in ("E305", "E306", "E310", "E311")


def test_a_forward_that_divides_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) if x.shape[1] % 16 else x)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    fails("E305", "every number of tokens", do=lambda: trace(tmp_path))


def test_experts_whose_activation_is_a_function(tmp_path: Path) -> None:
    layers = {"layer_types": ["full_attention"] * 2, "num_dense_layers": 1}
    entries = {"model_type": "lfm2_moe", **SMALL, **EXPERTS, **layers}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (moe,) = (n for n in trace(tmp_path).module.graphs["main"].nodes if n.op.name == "moe")
    assert moe.attrs["body"] == SWIGLU


def test_an_op_we_lack(tmp_path: Path) -> None:
    entries = {"model_type": "llama", **SMALL, "hidden_act": "mish"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    words = ("aten.mish.default", "model.layers.0.mlp.act_fn", "llmc/frontend/aten_math.py")
    fails("E310", *words, do=lambda: trace(tmp_path))


# Weight files


def test_no_weights(folder: Path, saved: Traced) -> None:
    (folder / FILE).unlink()
    fails("E320", "neither", FILE, do=lambda: read_all(saved, folder))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    fails("E320", "pytorch_model.bin", "save_pretrained", do=lambda: read_all(saved, folder))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 1000, -1, -1000])
def test_truncated(keep: int, folder: Path, saved: Traced) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:keep])
    fails("E321", FILE, "cut short or damaged", "bytes", do=lambda: read_all(saved, folder))


@pytest.mark.parametrize("at", [0, 3, 8, 40])
def test_corrupt_header(at: int, folder: Path, saved: Traced) -> None:
    data = bytearray((folder / FILE).read_bytes())
    data[at] ^= 0x81
    (folder / FILE).write_bytes(bytes(data))
    with pytest.raises(Diagnostic) as e:
        read_all(saved, folder)
    assert e.value.code in ("E321", "E323", "E324", "E325", "E326")


def test_random_damage(folder: Path, saved: Traced) -> None:
    """Whatever bytes of the header change: a Diagnostic, or weights of the right form."""
    print(f"seed {SEED}")
    rng = Random(SEED)
    data = (folder / FILE).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    for _ in range(100):
        harmed = bytearray(data)
        for _ in range(rng.choice((1, 2, 5))):
            harmed[rng.randrange(size)] = rng.randrange(256)
        (folder / FILE).write_bytes(harmed[: rng.choice((len(data), rng.randrange(len(data))))])
        try:
            read_all(saved, folder)
        except Diagnostic as e:
            assert e.code.startswith("E32") and len(str(e).splitlines()) <= 5


def test_index(folder: Path, saved: Traced) -> None:
    tensors = load_file(folder / FILE)
    index = folder / f"{FILE}.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    read_all(saved, folder)  # the one file outranks an index of others, as in transformers
    (folder / FILE).rename(folder / "b.safetensors")
    fails("E322", "a.safetensors", do=lambda: read_all(saved, folder))
    (folder / "b.safetensors").rename(folder / "a.safetensors")
    read_all(saved, folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, "model.ghost"], "a.safetensors")}))
    fails("E322", "'model.ghost'", do=lambda: read_all(saved, folder))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../model/a.safetensors")}))
    fails("E322", "plain file names", do=lambda: read_all(saved, folder))
    index.write_text("{")
    fails("E302", "index.json", do=lambda: read_all(saved, folder))


def change(folder: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> Path:
    tensors = dict(load_file(folder / FILE))
    edit(tensors)
    save_file(tensors, folder / FILE)
    return folder


def test_missing_tensors(folder: Path, saved: Traced) -> None:
    change(folder, lambda t: [t.pop(n) for n in list(t) if "layers.1.mlp" in n or "lm_head" in n] and None)
    fails(
        "E323",
        "model.layers.1.mlp.gate_proj.weight",
        "4 in all",
        "LlamaForCausalLM",
        do=lambda: read_all(saved, folder),
    )


def test_a_missing_head_may_be_a_tied_one(folder: Path, saved: Traced) -> None:
    change(folder, lambda t: t.pop("lm_head.weight") is None)
    fails("E323", "lm_head.weight", "set tie_word_embeddings to true", do=lambda: read_all(saved, folder))


def test_unexpected_tensors(folder: Path, saved: Traced) -> None:
    change(folder, lambda t: t.update({f"model.layers.{i}.adapter.weight": np.ones(2) for i in range(5)}))
    fails("E324", "model.layers.0.adapter.weight", "5 in all", do=lambda: read_all(saved, folder))


def test_masks_and_biases_are_distinguished_by_their_shapes(folder: Path, saved: Traced) -> None:
    names = ("attn.masked_bias", "attn.attention.bias", "attention.bias", "attn.causal_mask")
    shapes = ((), (1, 1, 4, 4), (1, 1, 3, 3), (1, 1, 4, 4))
    masks = {f"model.layers.0.{n}": np.ones(s, np.float32) for n, s in zip(names, shapes, strict=True)}
    change(folder, lambda t: t.update(masks))
    read_all(saved, folder)
    change(folder, lambda t: t.update({"model.layers.1.attention.bias": np.ones(64, np.float32)}))
    fails("E324", "model.layers.1.attention.bias", "1 in all", do=lambda: read_all(saved, folder))


def test_wrong_shape(folder: Path, saved: Traced) -> None:
    change(folder, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((90, 64), np.float32)}))
    fails("E325", "model.layers.0.mlp.up_proj", "[90, 64]", "[96, 64]", do=lambda: read_all(saved, folder))


def test_wrong_dtype(folder: Path, saved: Traced) -> None:
    change(folder, lambda t: t.update({"model.norm.weight": np.ones(64, np.int8)}))
    fails("E326", "model.norm.weight", "i8", do=lambda: read_all(saved, folder))


def test_embeddings_tied_only_in_the_config(folder: Path, saved: Traced) -> None:
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"tie_word_embeddings": True}))
    fails("E327", "lm_head.weight", "tie_word_embeddings", do=lambda: read_all(trace(folder)))
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    read_all(trace(folder))


def test_an_expert_is_missing(tmp_path: Path) -> None:
    save(BY_NAME["mixtral"], tmp_path)
    traced = trace(tmp_path)

    def drop(*words: str) -> None:
        change(tmp_path, lambda t: [t.pop(n) for n in list(t) if all(w in n for w in words)] and None)

    drop("layers.1.", "experts.2.w1")
    fails("E325", "layers.1.mlp.experts.gate_up_proj", "[3, 96, 64]", do=lambda: read_all(traced))
    drop("layers.1.", ".w1.")
    fails("E323", "layers.1.mlp.experts.gate_up_proj", "w1", do=lambda: read_all(traced))


# The front end as a library


@pytest.mark.drawn
def test_nothing_is_printed(saved: Traced) -> None:
    code = (
        "import sys\nfrom llmc.frontend.trace_model import trace\nfrom llmc.frontend.checkpoint import Checkpoint\n"
        "c = Checkpoint(trace(sys.argv[1]))\nfor n in c.names: c.read(n)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(saved.source.folder)], capture_output=True, text=True, check=True
    )
    assert (out.stdout, out.stderr) == ("", "")


@pytest.mark.drawn
def test_a_failed_trace_prints_nothing_either(tmp_path: Path) -> None:
    """torch logs the whole graph when a size depends on data, as in these experts."""
    entries = {"model_type": "aria_text", **SMALL, "head_dim": 16, "moe_num_experts": 4, "moe_topk": 2}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    code = (
        "import sys\nfrom llmc.diagnostics import Diagnostic\nfrom llmc.frontend import legacy_experts\n"
        "from llmc.frontend.trace_model import trace\nlegacy_experts.TABLE = {}\n"
        "try: trace(sys.argv[1])\nexcept Diagnostic as e: assert 'experts' in str(e), e\nelse: raise SystemExit(1)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")


def test_every_tested_architecture_has_a_case_and_a_line_in_the_docs() -> None:
    assert set(TESTED) == {c.model_type for c in (*LISTED, *UNLISTED, *FURTHER, *RECENT, *RECURRENT)}
    page = (Path(__file__).resolve().parents[2] / "docs" / "parity.md").read_text()
    names = [c.name for c in (*LISTED, *UNLISTED, *ROPES, *FURTHER, *RECENT, *RECURRENT)]
    assert len(set(names)) == len(names) and all(f"| {n} |" in page for n in names), "run: python tests/models/table.py"
