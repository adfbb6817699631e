"""Models that read images or audio: their language models are compiled from checkpoints as they are published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.cases import FURTHER, SMALL, UNLISTED
from models.kit import build, fails, ir_logits, prompts, relative_error, save
from models.recent_cases import RECENT
from safetensors.torch import load_file, save_file

from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.export import quiet
from llmc.frontend.trace_model import notes_of, trace
from llmc.ir.text import show

BY_NAME = {c.name: c for c in (*UNLISTED, *FURTHER, *RECENT)}

# Of each published layout, the prefixes of transformers 5 and what the files have in their place.
OLD = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""}
LAYOUTS = {
    "gemma3": OLD,
    "mistral3": OLD,
    "llava": OLD,
    "internvl": OLD,
    "llama4": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "qwen2_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "glm4v": {},
    "qwen3_vl": {},
    **dict.fromkeys(("qwen2_audio", "voxtral", "granite_speech", "vibevoice_asr"), OLD),
}
# Of each model that also speaks, the type of the part that writes, and the name of the part that makes sound.
SPEAKING = {
    "qwen2_5_omni": ("qwen2_5_omni_thinker", "token2wav"),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", "code2wav"),
}


def renamed(name: str, prefixes: dict[str, str]) -> str:
    for prefix, published in prefixes.items():
        if name.startswith(prefix):
            return published + name.removeprefix(prefix)
    return name


def write(name: str, folder: Path, prefixes: dict[str, str], seen: bool = True) -> Any:
    """A checkpoint under published names, with or without the weights of the vision tower; answers the model."""
    model = build(BY_NAME[name])
    model.config.save_pretrained(folder)
    known = {n: x.contiguous() for n, x in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", False):
        known.pop("lm_head.weight", None)
    text = re.compile(r"language_model|lm_head")
    stored = {renamed(n, prefixes): x.clone() for n, x in known.items() if seen or text.search(n)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def check(model: Any, folder: Path) -> None:
    """Every weight of the graph is the model's, and none is of the vision tower."""
    traced = trace(folder)
    assert [n for n in notes_of(traced) if re.search("reads (images|audio)", n)]
    own = model.state_dict()
    with Checkpoint(traced) as checkpoint:
        names = [n for n in checkpoint.names if n not in traced.buffers]
        assert len(names) > 10 and not [n for n in names if re.search("vis|image|multi_modal|audio|projector", n)]
        for name in names:
            np.testing.assert_array_equal(checkpoint.read(name), own[name].numpy(), err_msg=name)


@pytest.mark.drawn
@pytest.mark.parametrize("name", LAYOUTS)
def test_published_names(name: str, tmp_path: Path) -> None:
    check(write(name, tmp_path, LAYOUTS[name]), tmp_path)


@pytest.mark.parametrize("name", ["mistral3", pytest.param("qwen3_vl", marks=pytest.mark.drawn)])
def test_without_the_vision_tower(name: str, tmp_path: Path) -> None:
    check(write(name, tmp_path, LAYOUTS[name], seen=False), tmp_path)


@pytest.mark.parametrize("name", ["qwen2_5_omni", pytest.param("qwen3_omni_moe", marks=pytest.mark.drawn)])
def test_a_part_that_writes_beside_parts_that_speak(name: str, tmp_path: Path) -> None:
    """Only the thinker is compiled; the weights of the others are not read."""
    thinker, sound = SPEAKING[name]
    model = write(thinker, tmp_path, {})
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "thinker_config": own}))
    tensors = {f"thinker.{n}": x for n, x in load_file(tmp_path / "model.safetensors").items()}
    others = {f"{part}.model.layers.0.mlp.up_proj.weight": torch.ones(2, 3) for part in ("talker", sound)}
    save_file(tensors | others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(model, tmp_path)
    assert f"{name} reads images and audio" in " ".join(notes_of(trace(tmp_path)))
    save_file(tensors | {"singer.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fails("E324", "singer", do=lambda: Checkpoint(trace(tmp_path)))


@pytest.mark.parametrize(("name", "why"), [("csm", "generates audio"), ("kyutai_speech_to_text", "recognizes speech")])
def test_models_that_only_read_or_make_sound_are_refused(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    fails("E303", name, why, do=lambda: trace(tmp_path))


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.drawn)])
def test_a_config_without_a_text_config(name: str, tmp_path: Path) -> None:
    """As published: entries of the language model next to those of the vision tower, and older names."""
    model = write(name, tmp_path, LAYOUTS[name])
    path = tmp_path / "config.json"
    own = json.loads(path.read_text())
    text = own["text_config"]
    rope = text["rope_parameters"]
    flat = {k: x for k, x in text.items() if k in SMALL}
    flat |= {"model_type": name, "vision_config": own["vision_config"], "torch_dtype": "float32", "hidden_act": "silu"}
    flat |= {"rope_theta": rope["rope_theta"], "tie_word_embeddings": False}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    want = show(trace(tmp_path).module)
    path.write_text(json.dumps(flat))
    assert show(trace(tmp_path).module) == want
    check(model, tmp_path)


def test_first_layers_are_the_decoders(tmp_path: Path) -> None:
    """`--layers` leaves out the decoder's later layers, although a vision tower has as many layers as are left."""
    case = BY_NAME["mistral3"]
    assert case.config["vision_config"]["num_hidden_layers"] == 1
    model = write("mistral3", tmp_path, OLD)
    with Checkpoint(traced := trace(tmp_path, layers=1)) as checkpoint:
        names = [n for n in checkpoint.names if n not in traced.buffers]
        assert {n.split(".")[3] for n in names if ".layers." in n} == {"0"}
        for name in names:
            np.testing.assert_array_equal(checkpoint.read(name), model.state_dict()[name].numpy(), err_msg=name)


@pytest.mark.slow
def test_a_tower_that_needs_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's vision tower needs timm. It is left out, and its weights are not read."""
    build = transformers.AutoModel.from_config

    def without_timm(config: Any, **options: Any) -> Any:
        if config.model_type == "gemma3n_vision":
            raise ImportError("no timm")
        return build(config, **options)

    monkeypatch.setattr(transformers.AutoModel, "from_config", without_timm)
    model = write("gemma3n", tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(traced := trace(tmp_path)) as checkpoint:
        names = [n for n in checkpoint.names if n not in traced.buffers]
        assert len(names) > 10 and not [n for n in names if "tower" in n]
        for name in names:
            np.testing.assert_array_equal(checkpoint.read(name), model.state_dict()[name].numpy(), err_msg=name)
    tensors["model.another_tower.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fails("E324", "another_tower", do=lambda: Checkpoint(trace(tmp_path)))


def test_a_lost_weight_is_reported(tmp_path: Path) -> None:
    write("mistral3", tmp_path, OLD)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fails("E323", "layers.1.mlp.up_proj", do=lambda: Checkpoint(trace(tmp_path)))


def test_experts_of_text_and_of_images_in_one_list(tmp_path: Path) -> None:
    """A layer stores those of text first, and those of images, which are smaller, under the next numbers."""
    model = save(BY_NAME["ernie4_5_vl_moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.mlp.experts"
    assert tensors[f"{layer}.3.up_proj.weight"].shape == (24, 64)
    assert tensors[f"{layer}.7.up_proj.weight"].shape == (12, 64)
    check(model, tmp_path)
    del tensors[f"{layer}.7.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fails("E325", "one of 2 equal parts of 7, 8 experts", do=lambda: Checkpoint(trace(tmp_path)))


@pytest.mark.parametrize(
    "name", ["qwen3_vl", *(pytest.param(n, marks=pytest.mark.drawn) for n in ("mllama", "modernbert-decoder"))]
)
def test_a_checkpoint_with_a_head_embeds(name: str, tmp_path: Path) -> None:
    """Hidden states of texts equal those of transformers' base model; the output projection is not read."""
    base = save(BY_NAME[name], tmp_path).base_model
    traced = trace(tmp_path, task="embed")
    assert traced.facts.pooling is not None
    tokens, positions = prompts((9, 17), 320)
    with Checkpoint(traced) as checkpoint:
        found = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(9, 26))
    with torch.no_grad():
        (expected,) = base(input_ids=torch.from_numpy(tokens[9:].astype(np.int64))[None]).last_hidden_state
    assert relative_error(found, expected.numpy()) <= 1e-4


@pytest.mark.parametrize("name", ["mistral4", pytest.param("gemma3", marks=pytest.mark.drawn)])
def test_a_classifier_that_reads_images(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    config.num_labels = config.get_text_config().num_labels = 3
    with quiet():
        model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    model.eval().save_pretrained(tmp_path)
    traced = trace(tmp_path)
    tokens, positions = prompts((9,), 320)
    with Checkpoint(traced) as checkpoint:
        found = ir_logits(traced.module, traced, checkpoint, tokens, positions, np.array([8]))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits
    assert relative_error(found, expected.numpy()) <= 1e-4
