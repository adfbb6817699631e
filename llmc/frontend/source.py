"""What a Hugging Face folder says about itself, read as JSON; no model is built and no weight is read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic

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

# Architectures whose logits are compared with transformers' own in tests/models; others may work too.
TESTED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "phi3", "olmo2", "gpt_neox", "stablelm", "granite",
    "smollm3", "starcoder2", "cohere", "cohere2", "glm", "glm4", "gemma", "gemma3_text", "opt", "phi", "mixtral",
    "qwen3_moe", "olmo", "olmo3", "olmoe", "phimoe", "granitemoe", "nemotron", "persimmon", "ernie4_5", "exaone4",
    "hunyuan_v1_dense", "helium", "seed_oss", "arcee", "apertus", "ministral3", "gpt_bigcode", "biogpt",
    "afmoe", "gemma3", "gemma4_text", "diffllama", "minicpm3", "youtu", "deepseek_v3", "glm4_moe_lite",
)  # fmt: skip

KNOWN_TO_WORK = f"tested architectures: {', '.join(TESTED[:8])} and {len(TESTED) - 8} more, see docs/models.md"


@dataclass(frozen=True)
class Source:
    """A model folder: its config.json and generation_config.json (empty when absent) as parsed."""

    folder: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The files that an artifact carries verbatim, as far as they exist."""
        return tuple(p for name in TOKENIZER_FILES if (p := self.folder / name).is_file())


def open_source(path: str | Path) -> Source:
    """Read a local model folder. Diagnostic E301-E304, E307 where it is missing, unreadable or not ours to compile."""
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise Diagnostic(
            "E301",
            f"model folder {str(path)!r} {what}",
            "give a local Hugging Face folder (config.json, tokenizer.json, *.safetensors); llmc downloads nothing",
        )
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:4]) or "nothing"
        raise Diagnostic(
            "E302",
            f"{folder} has no config.json (it holds {found})",
            "copy config.json from the model's repository, or point at the folder that holds it",
        )
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    source = Source(
        folder,
        MappingProxyType(config),
        MappingProxyType(read_json(generation) if generation.is_file() else {}),
    )
    _check(source)
    return source


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; Diagnostic E302 where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise Diagnostic("E302", f"{path} cannot be read as JSON: {e}", "fetch the file again") from None
    if not isinstance(value, dict):
        raise Diagnostic("E302", f"{path} holds a {type(value).__name__}, not a JSON object", "fetch the file again")
    return value


def _check(source: Source) -> None:
    config = source.config
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise Diagnostic(
            "E303",
            f"{source.folder / 'config.json'} names no model_type",
            f"add the architecture's name, for example one of {', '.join(TESTED[:8])}",
        )
    if quant := config.get("quantization_config"):
        method = quant.get("quant_method", "unnamed") if isinstance(quant, dict) else quant
        raise Diagnostic(
            "E307",
            f"{source.folder} holds quantised weights ({method}); this version reads float checkpoints",
            "compile the original float32, bfloat16 or float16 checkpoint",
        )
