"""Embedding models and cross-encoders of published sizes with random weights, and the texts of bench.embeddings."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo-model"
Texts = list[str] | list[tuple[str, str]]


@dataclass(frozen=True)
class Model:
    """A model of a published one's sizes. `task`: embed, or score for pairs; `pooling`: sentence-transformers' name."""

    name: str
    task: str
    owner: str
    config: dict[str, Any]
    pooling: str = ""
    length: int = 512


_BERT = {"vocab_size": 30522, "max_position_embeddings": 512, "num_attention_heads": 12}
MODELS = {
    m.name: m
    for m in (
        Model(
            "bge-base", "embed", "BertModel",
            {**_BERT, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}, "cls_token",
        ),
        Model(
            "e5-small", "embed", "BertModel",
            {**_BERT, "hidden_size": 384, "num_hidden_layers": 12, "intermediate_size": 1536}, "mean_tokens",
        ),
        Model(
            "qwen3-embedding-0.6b", "embed", "Qwen3Model",
            {"vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 32768},
            "lasttoken", 4096,
        ),
        Model(
            "minilm-l6-cross", "score", "BertForSequenceClassification",
            {**_BERT, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536, "num_labels": 1},
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Texts of one measurement: how many, and the median and the spread (of the logarithm) of their tokens."""

    name: str
    texts: int
    tokens: int
    spread: float
    times: int = 1  # how many such calls one measurement has


LOADS = {
    load.name: load
    for load in (Load("queries", 128, 12, 0.4), Load("passages", 64, 120, 0.6), Load("one query", 1, 12, 0.0, 20))
}


def tokenizer(encoder: bool) -> Any:
    """The demonstration model's tokenizer with the special tokens of an encoder, or with a final end token."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    names = ("<|bos|>", "<|eos|>")
    special = [(name, tokenizer.token_to_id(name)) for name in names]
    single, pair = (
        ("<|bos|> $A <|eos|>", "<|bos|> $A <|eos|> $B:1 <|eos|>:1") if encoder else ("$A <|eos|>", "$A $B:1 <|eos|>:1")
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return tokenizer


def checkpoint(model: Model, folder: Path, dtype: str) -> Path:
    """A folder with the model, random weights, its tokenizer and sentence-transformers' files."""
    import torch
    import transformers

    out = folder / f"{model.name}-{dtype}"
    if (out / "done").exists():
        return out
    torch.manual_seed(0)
    kind = "bert" if model.owner.startswith("Bert") else "qwen3"
    config = transformers.AutoConfig.for_model(kind, **model.config, pad_token_id=2)
    drawn = getattr(transformers, model.owner)._from_config(config)  # drawn in float32, so that all dtypes agree
    drawn.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer(kind == "bert").save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|pad|>", "model_max_length": model.length}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    if model.task == "embed":
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(kinds)
        ]
        (out / "modules.json").write_text(json.dumps(modules))
        (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": model.length}))
        (out / "1_Pooling").mkdir(exist_ok=True)
        (out / "2_Normalize").mkdir(exist_ok=True)
        modes = {f"pooling_mode_{name}": name == model.pooling for name in ("cls_token", "mean_tokens", "lasttoken")}
        sizes = {"word_embedding_dimension": model.config["hidden_size"]}
        (out / "1_Pooling" / "config.json").write_text(json.dumps(sizes | modes))
    (out / "done").touch()
    return out


def texts(model: Model, load: Load, seed: int) -> Texts:
    """Random sentences of words in the tokenizer's vocabulary; pairs for models that score."""
    draw = random.Random(seed)
    words = [w for w in (DEMO / "README.md").read_text().split() if w.isalpha()]

    def text(tokens: float) -> str:
        return " ".join(draw.choice(words) for _ in range(max(1, round(tokens / 1.6))))

    sizes = [min(model.length * 0.6, load.tokens * math.exp(draw.gauss(0, load.spread))) for _ in range(load.texts)]
    if model.task == "score":
        return [(text(12), text(size)) for size in sizes]
    return [text(size) for size in sizes]
