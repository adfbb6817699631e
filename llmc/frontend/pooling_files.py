"""Reads how a model folder pools: embedding models and classifiers, with sentence-transformers' files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.names import CLASSIFY, CLS, EMBED, GENERATE, LAST, MEAN
from llmc_runtime.format.pooling import Pooling

from llmc.diagnostics import Diagnostic
from llmc.frontend.model_folder import MODULES, Source, read_json, read_list

CLASSIFIER = "ForSequenceClassification"
ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra"})
# Model types that number positions from the one after the padding's on.
POSITIONS_AFTER_PADDING = frozenset({"roberta", "xlm-roberta", "camembert"})
# Pooling modes of sentence-transformers, by their flags in 1_Pooling/config.json, and by name.
_MODES = MappingProxyType(
    {
        "pooling_mode_cls_token": CLS, "pooling_mode_mean_tokens": MEAN, "pooling_mode_lasttoken": LAST,
        "cls": CLS, "mean": MEAN, "lasttoken": LAST,
    }
)  # fmt: skip
SETTINGS = "config_sentence_transformers.json"
_MIN_UNLIMITED = 1_000_000  # tokenizers without a limit say 10^30
_ACTIVATIONS = MappingProxyType({"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"})


@dataclass(frozen=True)
class PooledModel:
    """The pooling to trace, without its width, and the maximum length of a prompt (None: the config's)."""

    pooling: Pooling
    max_length: int | None = None


def read_pooled(source: Source, task: str = "auto", kind: str = "auto") -> PooledModel | None:
    """Return how the model of a folder pools; None if it generates.

    task: "generate", "embed", "classify", or "auto": derived from config.json and modules.json. kind: "last", "cls",
    "mean", or "auto": that of the folder, else the last token of a decoder, the first token of a classifying encoder,
    and the mean of other encoders. Raises Diagnostic E302 or E313.
    """
    named = _architecture(source)
    if task == "auto":
        task = _task(source, named)
    if task == GENERATE:
        if named.endswith(CLASSIFIER):
            cause = f"{source.folder} is a classifier of text ({named}), which does not generate"
            raise Diagnostic("E303", cause, "use --task classify, or give a causal language model")
        if kind != "auto":
            cause = f"--pooling {kind}: the model generates text, and does not pool"
            raise Diagnostic("E313", cause, "add --task embed, or leave --pooling out")
        return None
    if (task == CLASSIFY) != named.endswith(CLASSIFIER):
        cause = f"--task {task} does not fit the architecture {named or 'of config.json'}"
        remedy = f"a classifier's architecture ends in {CLASSIFIER}; use --task auto"
        raise Diagnostic("E313", cause, remedy)
    encoder = source.model_type in ENCODERS
    model = _embedding(source, encoder) if task == EMBED else _classifier(source, encoder)
    if kind not in ("auto", model.pooling.kind):
        if task == CLASSIFY:
            cause = f"--pooling {kind}: a classifier pools as it was trained, by {model.pooling.kind}"
            raise Diagnostic("E313", cause, "leave --pooling out")
        model = replace(model, pooling=replace(model.pooling, kind=kind))
    whole = encoder or model.pooling.kind != LAST
    return replace(model, pooling=replace(model.pooling, whole=whole))


def refuse_pooled(source: Source) -> None:
    """Raise Diagnostic E313 if the model of a folder, which is to be calibrated, pools."""
    if (pooled := read_pooled(source)) is not None:
        cause = f"{source.folder} is a model that pools ({pooled.pooling.task}): calibrating needs the logits of a "
        cause += "language model"
        raise Diagnostic("E313", cause, "compile it as it is, or with a --quant recipe that rounds weights")


def _architecture(source: Source) -> str:
    named = source.config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _task(source: Source, named: str) -> str:
    if named.endswith(CLASSIFIER):
        return CLASSIFY
    bare = named.endswith("Model") and not named.endswith("HeadModel")  # not GPT2LMHeadModel
    return EMBED if bare or (source.folder / MODULES).is_file() else GENERATE


def _embedding(source: Source, encoder: bool) -> PooledModel:
    """Read the modules of sentence-transformers. Without them, embeddings are normalised."""
    kind, normalize = MEAN if encoder else LAST, True
    if not (source.folder / MODULES).is_file():
        return PooledModel(Pooling(EMBED, kind, 1, normalize))
    modules, normalize = _modules(source.folder), False
    for name, folder in modules:
        if name == "Pooling":
            kind = _kind(read_json(folder / "config.json"), folder)
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            remedy = "supported modules: Transformer, Pooling, Normalize"
            raise Diagnostic("E313", f"{source.folder / MODULES} has a module {name}, which is not supported", remedy)
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"]:
        cause = f"{source.folder / MODULES} lists {', '.join(names) or 'no modules'}"
        raise Diagnostic("E313", cause, "supported: Transformer, Pooling and, optionally, Normalize")
    return PooledModel(Pooling(EMBED, kind, 1, normalize), _max_length(source.folder))


def _settings(folder: Path) -> dict[str, Any]:
    """Return the contents of config_sentence_transformers.json, {} without it."""
    path = folder / SETTINGS
    return read_json(path) if path.is_file() else {}


def pooling_notes(pooling: Pooling, source: Source) -> Iterator[str]:
    """Yield notes about the results of the artifact, and about what sentence-transformers does differently."""
    yield _describe(pooling)
    if pooling.task == EMBED:
        yield from _embedding_notes(source)


def _describe(pooling: Pooling) -> str:
    result = f"{pooling.width} logits" if pooling.task == CLASSIFY else f"an embedding of {pooling.width} numbers"
    tokens = {"last": "the last token", "cls": "the first token", "mean": "the mean of all tokens"}[pooling.kind]
    normalised = ", normalised" if pooling.normalize else ""
    steps = "; a prompt runs in one step, without the prefix cache" if pooling.whole else ""
    return f"the model returns {result} of {tokens}{normalised}{steps}"


def _embedding_notes(source: Source) -> Iterator[str]:
    """Yield the effects of sentence-transformers' settings on texts and embeddings that requests have to reproduce."""
    settings = _settings(source.folder)
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    text = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if text:
        yield (
            f"{SETTINGS}: sentence-transformers puts {str(text)[:200]!r} in front of texts; an artifact embeds texts "
            "as they are, so put it there"
        )
    if settings.get("truncate_dim"):
        size = str(settings["truncate_dim"])[:20]
        yield f"{SETTINGS}: sentence-transformers keeps {size} dimensions; ask for them with dimensions={size}"


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return (class, folder) of each module."""
    entries = read_list(folder / MODULES)
    out = []
    for entry in entries:
        kind, path = (entry.get(key) if isinstance(entry, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(path, str) or Path(path).name != path:
            raise Diagnostic("E302", f"{folder / MODULES}: {str(entry)[:80]} is not a module", "correct the file")
        out.append((kind.rpartition(".")[2], folder / path))
    return out


def _kind(config: Mapping[str, Any], folder: Path) -> str:
    mode = config.get("pooling_mode")
    modes = [mode] if mode else [key for key, value in config.items() if key.startswith("pooling_mode") and value]
    known = [_MODES.get(name) if isinstance(name, str) else None for name in modes]
    if len(known) != 1 or known[0] is None or config.get("include_prompt") is False:
        described = ", ".join(map(str, modes)) or "no mode"
        described += "" if config.get("include_prompt", True) else " without the prompt's tokens"
        cause = f"{folder / 'config.json'} pools by {described}, which is not supported"
        raise Diagnostic("E313", cause, "supported: cls, mean and lasttoken, each alone")
    return known[0]


def _max_length(folder: Path) -> int | None:
    """Return the maximum length of a prompt in sentence_bert_config.json, else the tokenizer's, or None."""
    path = folder / "sentence_bert_config.json"
    config = read_json(path) if path.is_file() else {}
    if config.get("do_lower_case"):
        remedy = "put a Lowercase normalizer into tokenizer.json"
        raise Diagnostic("E313", f"{path}: do_lower_case is not supported", remedy)
    length = config.get("max_seq_length")
    if length is None and (folder / "tokenizer_config.json").is_file():  # as transformers' tokenizers limit it
        length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return length if isinstance(length, int) and 0 < length < _MIN_UNLIMITED else None


def _classifier(source: Source, encoder: bool) -> PooledModel:
    """Read a classifier's labels, and the activation that sentence-transformers applies: by default a sigmoid of a
    single logit, a softmax of several.
    """
    config = source.config
    names = config.get("id2label")
    labels = tuple(map(str, names.values())) if isinstance(names, dict) else ()
    count = len(labels) or int(config.get("num_labels") or 2)
    library_settings = config.get("sentence_transformers")
    named = _settings(source.folder).get("activation_fn")
    named = named or (library_settings.get("activation_fn") if isinstance(library_settings, dict) else None)
    named = named or config.get("sbert_ce_default_activation_function")
    activation = "sigmoid" if count == 1 else "softmax"
    if named:
        known = _ACTIVATIONS.get(str(named).rpartition(".")[2])
        if known is None:
            cause = f"the activation {str(named)[:80]} is not supported"
            raise Diagnostic("E313", cause, f"supported: {', '.join(_ACTIVATIONS)}")
        activation = known
    kind = CLS if encoder else LAST
    return PooledModel(Pooling(CLASSIFY, kind, count, activation=activation, labels=labels))


def segments_of(config: Any) -> int:
    """Return the number of token types that a prompt can have."""
    return int(getattr(config, "type_vocab_size", 1) or 1) if config.model_type in ENCODERS else 1


def returns_segments(source: Source) -> bool:
    """Return whether transformers' tokenizer of the folder returns token types.

    If it does not, all tokens of a pair are of the first segment. tokenizer_config.json may list the tokenizer's
    outputs; otherwise they are those of the class that it names. If it names none, transformers uses the class of the
    model's type, which returns token types.
    """
    path = source.folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    names = config.get("model_input_names")
    if not isinstance(names, list):
        import transformers

        names = getattr(getattr(transformers, str(config.get("tokenizer_class")), None), "model_input_names", None)
    return names is None or "token_type_ids" in names


def position_offset(config: Any) -> int:
    """Return the position of a prompt's first token."""
    return int(config.pad_token_id) + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
