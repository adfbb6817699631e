"""Diagnostics for unsupported inputs, derived from file names and config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.frontend.weight_shards import missing_shards

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

FLOAT = "compile the original checkpoint in float32, bfloat16 or float16 safetensors"
SAVE_AGAIN = "AutoModelForCausalLM.from_pretrained(FOLDER{}).save_pretrained(NEW) in an environment you trust"

# By file suffix: a description, and a remedy.
FILES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        ".gguf": ("a GGUF file", FLOAT),
        ".onnx": ("an ONNX file", FLOAT),
        ".safetensors": ("a weight file", "give the folder that contains it, config.json and the tokenizer"),
        ".json": ("a file", "give the folder that contains it"),
        ".msgpack": ("a Flax file", FLOAT),
        ".h5": ("a TensorFlow file", FLOAT),
        **dict.fromkeys(PICKLES, ("a pickle, which is never opened: loading it runs code", FLOAT)),
    }
)
# By the name of a characteristic file in a folder: a description, and a remedy.
FOLDERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "manifest.json": ("is an artifact already", "run it: llmc-run {where}, or look at it: llmc inspect {where}"),
        "adapter_config.json": (
            "contains an adapter (PEFT), not a model",
            "merge it into its base model first: PeftModel.merge_and_unload(), then save_pretrained(NEW)",
        ),
        "model_index.json": ("contains a diffusers pipeline, not a language model", "give a language model's folder"),
        "params.json": (
            "contains weights in the publisher's own layout (params.json)",
            "use the publisher's transformers version of the model, which has a config.json",
        ),
    }
)
# By the suffix of an architecture name in config.json: a description.
HEADS: Mapping[str, str] = MappingProxyType(
    {
        "ForMaskedLM": "an encoder for masked language modelling",
        "ForTokenClassification": "a classifier of tokens",
        "ForQuestionAnswering": "a model for extractive question answering",
        "ForMultipleChoice": "a model for multiple choice",
        "ForPreTraining": "an encoder with its training heads",
        "ForImageClassification": "a classifier of images",
        "ForAudioClassification": "a classifier of audio",
        "ForCTC": "a speech recognizer",
        "RewardModel": "a reward model",
    }
)
WEIGHED = "its attention adds a weight of each key, computed from its value"
RECURRENT = "it has recurrent layers only, and no attention, whose pages count the tokens of a sequence"
GATED = "its recurrence (RG-LRU) is written out in the model's code"
SHARED = "layers share its attention, which has no number of its own"
INDEXED = "an indexer of its own selects the keys of its attention, and layers mix several residual streams"
NGRAMS = (
    "its embeddings depend on the tokens before each one (n-grams), and its indexer selects blocks of averaged keys"
)
COMPRESSED = "its attention reads keys and values that are compressed over windows of tokens"
BIASED = "its attention adds a bias that it computes from each query and the distance of the key"
# Families of transformers that are known not to be supported, and why.
OUTSIDE: Mapping[str, str] = MappingProxyType(
    {
        "doge": WEIGHED,
        **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), RECURRENT),
        "recurrent_gemma": GATED,
        "zamba": SHARED,
        **dict.fromkeys(("glm5_next", "glm5_next_text"), INDEXED),
        **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), NGRAMS),
        "deepseek_v4": COMPRESSED,
        **dict.fromkeys(("inkling_mm_model", "inkling_text"), BIASED),
        "zaya": "its attention convolves queries and keys along the tokens, and delays values by one token",
        "jetmoe": "its attention routes tokens to experts, with sizes that depend on the data",
        "xlnet": "its attention follows a permutation of the tokens",
        "reformer": "its attention is over buckets of hashed keys",
        "cpmant": "its attention adds a learned bias of segments and distances",
    }
)


def lfs_pointer(path: Path) -> tuple[str, str]:
    """Return the cause and the remedy for a file that is only a pointer of Git LFS."""
    return f"{path} is a pointer of Git LFS, not the file", f"run `git lfs install && git lfs pull` in {path.parent}"


def outside(config: Mapping[str, Any]) -> str | None:
    """Return why a model family is not supported, or None if it may be."""
    inner = config.get("text_config")
    named = (config.get("model_type"), inner.get("model_type") if isinstance(inner, dict) else None)
    return next((OUTSIDE[n] for n in named if isinstance(n, str) and n in OUTSIDE), None)


def refuse_file(path: Path) -> Diagnostic:
    """Return the error for a path that is a file instead of a model folder."""
    description, remedy = FILES.get(
        path.suffix, ("a file", "give a Hugging Face folder: config.json, tokenizer.json, *.safetensors")
    )
    return Diagnostic("E301", f"model folder {str(path)!r} is {description}", remedy)


def refuse_code(request: str, remedy: str = "") -> Diagnostic:
    """Return the error for a model that needs Python code from its repository; `request` names the option or key."""
    return Diagnostic(
        "E304",
        f"{request}: Python code in a model's repository is never run",
        remedy or "use an architecture that is part of transformers",
    )


def refuse_without_config(names: Collection[str], where: str) -> Diagnostic:
    """Return the error for a folder or repository without a config.json."""
    for name, (description, remedy) in FOLDERS.items():
        if name in names:
            return Diagnostic("E302", f"{where} {description}", remedy.format(where=where))
    for ending in (".gguf", ".onnx", *PICKLES):
        if matching := sorted(n for n in names if n.endswith(ending)):
            description, remedy = FILES[ending]
            return Diagnostic("E302", f"{where} has no config.json; {matching[0]} is {description}", remedy)
    listed = ", ".join(sorted(names)[:4]) or "nothing"
    return Diagnostic(
        "E302",
        f"{where} has no config.json (it contains {listed})",
        "copy config.json from the model's repository, or give the folder that contains it",
    )


def refuse_adapter(where: str, base: object) -> Diagnostic:
    """Return the error for an adapter without its base model; `base` is the base model's name."""
    description, remedy = FOLDERS["adapter_config.json"]
    return Diagnostic("E302", f"{where} {description}; its base model is {base}", remedy)


class Pickled(Diagnostic):
    """Diagnostic E320: the only weights are pickles. `file` is the name of the first one."""

    def __init__(self, cause: str, file: str) -> None:
        super().__init__("E320", cause, "convert: " + SAVE_AGAIN.format(""))
        self.file = file


def refuse_weights(names: Collection[str], where: str) -> Diagnostic:
    """Return the error for a folder or repository without safetensors weights."""
    if "adapter_model.safetensors" in names:
        return refuse_adapter(where, "not named")
    lacks = f"{where} has neither {SINGLE} nor {INDEX}"
    if missing := missing_shards(names):
        cause = f"{lacks}; of the numbered files, {len(missing)} are missing: {', '.join(missing[:3])}"
        return Diagnostic("E320", cause, "download the missing files into the folder")
    old = sorted(n for n in names if n.endswith(PICKLES))
    if old:
        cause = f"{where} contains pickled weights only ({old[0]}), which are never opened: loading them runs code"
        return Pickled(cause, old[0])
    for ending in (".gguf", ".onnx", ".msgpack", ".h5"):
        if matching := sorted(n for n in names if n.endswith(ending)):
            description, remedy = FILES[ending]
            return Diagnostic("E320", f"{where} has no {SINGLE}; {matching[0]} is {description}", remedy)
    if matching := sorted(n for n in names if n.endswith(".safetensors")):
        remedy = f"also download {INDEX}" if len(matching) > 1 or "-of-" in matching[0] else f"rename it to {SINGLE}"
        if matching[0].startswith("consolidated"):
            remedy = "these are in the publisher's own layout; download the model's other safetensors"
        return Diagnostic("E320", f"{lacks}; it contains {matching[0]}", remedy)
    return Diagnostic("E320", lacks, "download the model's weights into the folder")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise Diagnostic E303 (not a text generation model) or E307 (quantised by an unknown method), by config.json."""
    if "quantization" in config and "quantization_config" not in config:
        cause = f"quantization in config.json of {where} has no bits and group_size, as that of MLX has"
        raise Diagnostic("E307", cause, FLOAT)
    named = config.get("architectures")
    for name in named if isinstance(named, list) else ():
        for end, description in HEADS.items():
            if str(name).endswith(end):
                raise Diagnostic("E303", f"{where} is {description} ({name}), not a causal language model", _WRITES)


_WRITES = "give a causal language model (its config.json names a ...ForCausalLM)"
