"""Reads the JSON files of a Hugging Face folder and checks that it can be compiled."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.json_fields import too_much
from llmc_runtime.format.names import TEMPLATE_DIR

from llmc.diagnostics import Diagnostic
from llmc.frontend import unsupported
from llmc.frontend.quantization_files import FILES, with_quantization
from llmc.frontend.weight_shards import numbered_shards

MAX_BYTES, MAX_VALUES = 32 << 20, 300_000  # limits of one JSON file; parsed, it takes about 100 MB
MAX_COPIED_BYTES = 256 << 20  # limit of a file that is copied into the artifact

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "config.json",
)

ADAPTER = "adapter_config.json"
MODULES = "modules.json"  # lists the modules of a sentence-transformers model
# Files that are read when a model pools, and that are not part of the artifact.
POOLING_FILES = (MODULES, "sentence_bert_config.json", "config_sentence_transformers.json")

DOWNLOAD_AGAIN = "correct the file, or download it again"
_POINTER = b"version https://git-lfs.github.com/spec/"

# Architectures whose logits tests/models compares with those of transformers; others may work, too.
TESTED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "phi3", "olmo2", "gpt_neox", "stablelm", "granite",
    "smollm3", "starcoder2", "cohere", "glm4", "gemma", "gemma3_text", "gemma3", "phi", "opt", "olmo", "glm",
    "nemotron", "persimmon", "ernie4_5", "hunyuan_v1_dense", "helium", "seed_oss", "arcee", "apertus", "ministral3",
    "cohere2", "exaone4", "olmo3", "gpt_bigcode", "biogpt", "mixtral", "granitemoe", "phimoe", "olmoe", "diffllama",
    "minicpm3", "youtu", "deepseek_v3", "glm4_moe_lite", "afmoe", "gemma4_text", "gpt_oss", "qwen3_moe", "cwm",
    "gemma4_unified_text", "granite_swa", "hrm_text", "hyperclovax", "jais2", "ministral", "modernbert-decoder",
    "nanochat", "vaultgemma", "cohere2_moe", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "laguna", "mellum", "mimo_v2_flash",
    "minimax_m2", "minimax_m3_vl_text", "qwen2_moe", "solar_open", "axk1", "dots1", "ctrl", "fuyu", "deepseek_v2",
    "falcon", "gptj", "granitemoehybrid", "gpt-sw3", "gpt_neo", "gpt_neox_japanese", "codegen", "bitnet",
    "mistral3", "internvl", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "llama4_text",
    "llama4", "dbrx", "gemma3n_text", "gemma3n", "bloom", "mpt", "xglm", "aria_text", "aria", "deepseek_v32",
    "glm_moe_dsa", "axk2", "glm4v_moe", "ernie4_5_vl_moe",
    "aya_vision", "cohere2_vision", "deepseek_vl", "exaone4_5", "fast_vlm", "gemma4_unified", "got_ocr2",
    "idefics2", "idefics3", "janus", "lighton_ocr", "llava_next", "llava_next_video", "llava_onevision",
    "muse_glimmer", "ovis2", "pp_chart2table", "qianfan_ocr", "smolvlm", "video_llava", "vipllava", "cosmos3_edge",
    "glm46v", "glm_ocr", "glmga", "paddleocr_vl", "cohere_compass_text", "deepseek_ocr2", "deepseek_vl_hybrid",
    "emu3", "gemma4", "hunyuan_vl", "hy_v4", "kimi_k25", "longcat_flash", "minimax_m3_vl", "mistral4", "mllama",
    "perception_lm", "phi4_multimodal", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "step3p7",
    "video_llama_3", "minicpmv4_6",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe",
    "lfm2_vl",
    "bamba", "falcon_h1", "nemotron_h", "zamba2", "minimax", "kimi_linear", "jamba",
    "audioflamingo3", "fun_asr_nano", "glmasr", "granite_speech", "granite_speech_plus",
    "musicflamingo", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral",
    "openai-gpt",
)  # fmt: skip

KNOWN_TO_WORK = f"use a tested architecture: {', '.join(TESTED[:8])} or {len(TESTED) - 8} more in docs/models.md"


@dataclass(frozen=True)
class Source:
    """A model folder with its parsed config.json and generation_config.json (empty if there is none).

    The config has the `quantization_config` of another file of the folder if config.json has none.
    """

    folder: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The model type in config.json."""
        return str(_type_of(self.config))

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The existing files that an artifact contains verbatim."""
        return tuple(p for name in small_files(self.folder) if (p := self.folder / name).is_file())


def open_source(path: str | Path) -> Source:
    """Read a local model folder; raises Diagnostic E301-E304, E307 or E340 if it is missing or not supported."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists():
            raise unsupported.refuse_file(folder)
        raise Diagnostic(
            "E301",
            f"model folder {str(path)!r} does not exist",
            "give a local Hugging Face folder (config.json, tokenizer.json, *.safetensors), or a hub id: owner/name",
        )
    names = {p.name for p in folder.iterdir()}
    if "config.json" not in names:
        raise unsupported.refuse_without_config(names, str(folder))
    check_files(folder)
    config = read_config(folder)
    if ADAPTER in names and not has_weights(names):
        base = read_json(folder / ADAPTER).get("base_model_name_or_path", "not named")
        raise unsupported.refuse_adapter(str(folder), base)
    generation = folder / "generation_config.json"
    source = Source(
        folder, MappingProxyType(config), MappingProxyType(read_json(generation) if generation.is_file() else {})
    )
    _check(source)
    return source


def adapter_note(folder: Path) -> str:
    """Return a note about an adapter next to a model's weights, which is not applied; "" if there is none."""
    if not (folder / ADAPTER).exists():
        return ""
    return f"{ADAPTER}: the adapter in the folder is not applied; its weights are compiled as they are"


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read config.json, with the quantisation that other files of the folder describe."""
    other_files = {name: read_json(folder / name) for name in FILES if (folder / name).is_file()}
    return with_quantization(read_json(folder / "config.json"), other_files)


def small_files(folder: Path) -> tuple[str, ...]:
    """Return the possible names of small files: a fixed list, and the folder's additional chat templates."""
    return (*TOKENIZER_FILES, *sorted(f"{TEMPLATE_DIR}/{p.name}" for p in (folder / TEMPLATE_DIR).glob("*.jinja")))


def check_files(folder: Path) -> None:
    """Raise Diagnostic E308 if a small file is not a regular file, is too large, or links out of the folder.

    A pointer of Git LFS is refused, too.

    Small files are copied into the artifact, so a link must not expose other files. A hub cache keeps files next to its
    snapshots, in blobs/, which is allowed. Weights may be anywhere: only bytes of their tensors are copied.
    """
    inside = tuple(Path(os.path.realpath(p)) for p in (folder, folder.resolve().parent.parent / "blobs"))
    for name in small_files(folder):
        path = folder / name
        if not os.path.lexists(path):
            continue
        target = Path(os.path.realpath(path))
        if not is_regular(path):
            raise Diagnostic("E308", f"{path} is not a regular file ({target})", DOWNLOAD_AGAIN)
        if (size := path.stat().st_size) > MAX_COPIED_BYTES:
            raise Diagnostic("E308", f"{path} has {size} bytes, over the limit of {MAX_COPIED_BYTES}", DOWNLOAD_AGAIN)
        if is_pointer(path):
            cause, remedy = unsupported.lfs_pointer(path)
            raise Diagnostic("E308", cause, remedy)
        if not any(target.is_relative_to(root) for root in inside):
            cause = f"{path} is a link to {target}, outside of the folder"
            raise Diagnostic("E308", cause, "copy the folder with its links followed: cp -rL")


def has_weights(names: Collection[str]) -> bool:
    """Whether the files of a folder include a model's weights: one file, an index, or all numbered shards."""
    return unsupported.SINGLE in names or unsupported.INDEX in names or bool(numbered_shards(names))


def check_weights(folder: Path) -> None:
    """Raise Diagnostic E320 if a folder has no safetensors weights, or only pointers of Git LFS.

    Called before anything is traced.
    """
    names = {p.name for p in folder.iterdir()}
    if not has_weights(names):
        raise unsupported.refuse_weights(names, str(folder))
    for path in sorted(folder.glob("*.safetensors")):
        if is_pointer(path):
            cause, remedy = unsupported.lfs_pointer(path)
            raise Diagnostic("E320", cause, remedy)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises Diagnostic E302 if it is not one or is too large."""
    value = _read(path)
    if not isinstance(value, dict):
        raise Diagnostic("E302", f"{path} contains a {type(value).__name__}, not a JSON object", DOWNLOAD_AGAIN)
    return value


def read_list(path: Path) -> list[Any]:
    """Read a JSON list from a file; raises Diagnostic E302 if it is not one or is too large."""
    value = _read(path)
    if not isinstance(value, list):
        raise Diagnostic("E302", f"{path} contains a {type(value).__name__}, not a JSON list", DOWNLOAD_AGAIN)
    return value


def _read(path: Path) -> Any:
    if not is_regular(path):
        problem = "is a link to nothing" if path.is_symlink() and not path.exists() else "is not a regular file"
        raise Diagnostic("E302", f"{path} {problem}", DOWNLOAD_AGAIN)
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, over the limit of {MAX_BYTES}")
        data = path.read_bytes()
        if (why := too_much(data, MAX_BYTES, MAX_VALUES)) is not None:
            raise ValueError(why)
        return json.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise Diagnostic("E302", f"{path} cannot be read as JSON: {e}", DOWNLOAD_AGAIN) from None


def is_regular(path: Path) -> bool:
    """Whether a path leads to a regular file; reading from a pipe or a device might block forever."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS, which `git clone` writes if Git LFS is not installed."""
    if not is_regular(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False  # reading the file later reports the cause


def _type_of(config: Mapping[str, Any]) -> Any:
    """Return the type of the model; None without one. Heads of the library speculators have a key of their own."""
    return config.get("model_type", config.get("speculators_model_type"))


def _check(source: Source) -> None:
    config = source.config
    name = _type_of(config)
    if not isinstance(name, str) or not name:
        raise Diagnostic(
            "E303",
            f"{source.folder / 'config.json'} has no model_type",
            f"add the architecture's name, for example one of {', '.join(TESTED[:8])}",
        )
    unsupported.check_config(config, str(source.folder))
