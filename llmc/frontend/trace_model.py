"""Traces a Hugging Face folder: returns the IR graph and facts from its config. Weights are not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc_runtime.format.pooling import Pooling

from llmc.diagnostics import Diagnostic
from llmc.frontend.config_limits import check_layers, check_sizes, dense_limit
from llmc.frontend.generation_config import generation_notes, sampling_defaults
from llmc.frontend.model_folder import Source, adapter_note, open_source
from llmc.frontend.pooling_files import PooledModel, position_offset, read_pooled, returns_segments, segments_of
from llmc.frontend.truncate import first_layers
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Graph, Module
from llmc.ir.token_axes import mixing_of
from llmc.ir.types import Type

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Facts:
    """Facts about a model that the compiler needs after tracing.

    dtype: of the compiled weights and activations. stored_dtype: of the checkpoint. heads: (query heads, key heads, key
    width, value width) of each attention layer. generation: sampling defaults. layers: (compiled, total) if only the
    first layers were compiled. pooling: None if the model generates.
    """

    architecture: str
    dtype: str
    stored_dtype: str
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    generation: Mapping[str, Any]
    heads: tuple[tuple[int, int, int, int], ...]
    layers: tuple[int, int] | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True)
class WeightInfo:
    """A weight input of the graph, with the path of the module that owns it."""

    name: str
    type: Type
    module: str


@dataclass(frozen=True)
class Traced:
    """A traced model.

    weights: all weight inputs of @main by name. buffers: weights that are computed instead of stored (float32 arrays).
    tied: state-dict name -> the name used in its place. model: the transformers module on the meta device, kept for its
    loading rules.
    """

    source: Source
    module: Module
    facts: Facts
    weights: Mapping[str, WeightInfo]
    buffers: Mapping[str, np.ndarray]
    tied: Mapping[str, str]
    model: Any


def trace(
    path: str | Path,
    dtype: str | None = None,
    max_positions: int | None = None,
    max_tokens: int = 131072,
    max_rows: int = 1024,
    layers: int | None = None,
    substitutes: Mapping[str, str] = MappingProxyType({}),
    untied: Collection[str] = (),
    check: Callable[[Any], None] | None = None,
    aux_layers: Callable[[int], Sequence[int]] = lambda total: (),
    task: str = "auto",
    pooling: str = "auto",
) -> Traced:
    """Trace the model of a folder without reading weights. Raises Diagnostic E301-E313.

    dtype: "f32", "bf16" or "f16" (default: the checkpoint's, mapped through `substitutes`). max_positions: longest
    sequence in tokens (default: the config's limit); it selects the frequencies of a longrope model. max_tokens,
    max_rows: upper bounds of T and R. layers: trace only the first layers. untied: parameters that config.json ties to
    others although the checkpoint stores different ones. check: called with the transformers module before the trace;
    it may raise. aux_layers: returns, for the number of layers, the numbers of those whose inputs @main returns after
    the logits.
    """
    from llmc.frontend import convert, export

    source = open_source(path)
    pooled = read_pooled(source, task, pooling)
    config = export.load_config(source, pooled is not None)
    config, cut = _cut(config, layers)
    text = config.get_text_config()
    check_sizes(text)
    check_layers(source.folder, int(text.num_hidden_layers))
    stored = _stored_dtype(source, config)
    dtype = _checked_dtype(dtype or substitutes.get(stored, stored))
    longest = _longest(source, text, max_positions, pooled)
    eos = _checked_eos(source, text)
    numbers = aux_layers(int(text.num_hidden_layers))
    exported = export.export_model(
        config, dtype, longest, max_tokens, max_rows, untied, check or export.accept, numbers, pooled
    )
    converted = convert.convert(exported)
    main, architecture = converted.module.graphs["main"], type(exported.model).__name__
    check_tokens(main, architecture)
    facts = Facts(
        architecture=architecture,
        dtype=dtype,
        stored_dtype=stored,
        vocab_size=int(text.vocab_size),
        max_positions=longest,
        eos_token_ids=eos,
        generation=MappingProxyType(sampling_defaults(source.generation)),
        heads=tuple(_heads(converted.module)),
        layers=cut,
        pooling=_pooling(source, pooled, converted.module, text),
    )
    tied = MappingProxyType(dict(converted.tied))
    return Traced(source, converted.module, facts, _weights(main), exported.buffers, tied, exported.model)


def _checked_dtype(dtype: str) -> str:
    """Return the dtype if models can be compiled in it. Raises Diagnostic E302."""
    if dtype not in FLOATS:
        raise Diagnostic("E302", f"dtype {dtype!r} is not one of {', '.join(FLOATS)}", "choose one with --dtype")
    return dtype


def _weights(g: Graph) -> Mapping[str, WeightInfo]:
    """Return the weight inputs of a graph by name."""
    weights = {v.name: WeightInfo(v.name, v.type, v.name.rpartition(".")[0]) for v in g.inputs if v.weight}
    return MappingProxyType(weights)


def notes_of(traced: Traced) -> Iterator[str]:
    """Yield notes about a part that is left out, a shorter limit, an adapter, and a generation_config.json."""
    from llmc.frontend.model_class import other_modalities

    config = traced.model.config
    if read := other_modalities(config):
        name = traced.source.model_type
        yield f"{name} reads {read}: its language model is compiled, and requests with {read} are rejected"
    if (dense := dense_limit(config.get_text_config())) and dense[0] == traced.facts.max_positions:
        yield f"sequences have at most {dense[0]} tokens, {dense[1]}"
    if note := adapter_note(traced.source.folder):
        yield note
    if traced.facts.pooling is None:
        yield from generation_notes(traced.source.generation)


def _cut(config: Any, layers: int | None) -> tuple[Any, tuple[int, int] | None]:
    """Return the config of the first layers, and (compiled, total) layers; `config` and None for the whole model."""
    from llmc.frontend import export

    if layers is None:
        return config, None
    with export.quiet():
        config, total = first_layers(config, layers)
    return config, (layers, total)


def _stored_dtype(source: Source, config: Any) -> str:
    """Return the dtype named in config.json, else the most common dtype of the stored tensors, else f32."""
    names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    for part in (config, config.get_text_config()):
        if dtype := names.get(str(part.dtype).removeprefix("torch.")):
            return dtype
    from llmc.frontend.safetensors_reader import TensorFiles

    if not any(source.folder.glob("*.safetensors")):
        return "f32"
    files = TensorFiles(source.folder)
    counts = Counter(t.dtype for t in files.tensors.values() if t.dtype in FLOATS)
    files.close()
    return counts.most_common(1)[0][0] if counts else "f32"


def _rope(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _longest(source: Source, text: Any, requested: int | None, pooled: PooledModel | None = None) -> int:
    """Return the longest sequence to compile for; raises Diagnostic E305 if the config does not allow it."""
    limit = _limit(text)
    if pooled is not None:
        limit = min(limit - position_offset(text), pooled.max_length or limit)
    dense, reason = dense_limit(text) or (0, "")
    if requested is not None and requested > limit and (dense or _rope(text).get("rope_type") != "dynamic"):
        why = f", {reason}" if dense == limit else ""
        cause = f"{requested} positions were requested; {source.model_type}'s config allows {limit}{why}"
        raise Diagnostic("E305", cause, f"use at most {limit}")
    longest = requested or limit
    if longest < 2:
        raise Diagnostic("E305", f"a sequence of {longest} token leaves no room for an answer", "use at least 2")
    return longest


def _limit(config: Any) -> int:
    """Return the longest sequence that the config supports, including the stretch of a scaled rotary embedding.

    `dynamic` scaling is excluded: its frequencies would change while a sequence grows, see `rope.patch`. Attention in
    chunks and sparse attention limit it, see `dense_limit`.
    """
    from llmc.frontend import alibi

    limit = alibi.limit(config) or getattr(config, "max_position_embeddings", None)
    if not limit:
        raise Diagnostic("E302", "config.json has no max_position_embeddings", "add it: the maximum length in tokens")
    rope = _rope(config)
    stretch = rope.get("factor") or 1.0 if rope.get("rope_type") in ("linear", "yarn") else 1.0
    longest = max(int(limit), int((rope.get("original_max_position_embeddings") or limit) * stretch))
    dense, _ = dense_limit(config) or (longest, "")
    return min(longest, dense)


def limits_of(path: str | Path) -> tuple[int, int]:
    """Return the vocabulary size and the longest sequence of a model folder; only its config is read."""
    from llmc.frontend import export

    config = export.load_config(open_source(path))
    text = config.get_text_config()
    check_sizes(text)
    return int(text.vocab_size), _limit(text)


def _pooling(source: Source, pooled: PooledModel | None, module: Module, text: Any) -> Pooling | None:
    """Complete the pooling by its width and segments. Raises Diagnostic E313 if the labels do not fit."""
    if pooled is None:
        return None
    width = int(module.graphs["main"].outputs[0].type.shape[-1])
    if pooled.pooling.labels and len(pooled.pooling.labels) != width:
        cause = f"config.json names {len(pooled.pooling.labels)} labels, and the model has {width}"
        raise Diagnostic("E313", cause, "correct id2label")
    segments = segments_of(text) if returns_segments(source) else 1
    return replace(pooled.pooling, width=width, segments=segments)


def check_tokens(g: Graph, architecture: str) -> None:
    """Raise Diagnostic E305 for the first node of @main whose result for a token depends on other tokens.

    Prompts are packed into one axis. Depending on the token's index among the packed tokens is an error, too. The
    attention op and the selection of the `last` tokens are exempt.
    """
    for n in g.nodes:
        if why := mixing_of(n):
            raise Diagnostic(
                "E305",
                f"{architecture} joins tokens outside of transformers' AttentionInterface: {n.op.name} {why}",
                "only causal attention through that interface, with or without a sliding window, is supported",
                loc=n.loc,
            )


def _heads(module: Module) -> Iterator[tuple[int, int, int, int]]:
    """Yield (query heads, key heads, key width, value width) of each attention node, by layer."""
    from llmc.frontend.convert import ATTENTION

    nodes = (n for n in module.graphs["main"].nodes if n.op.name in ATTENTION)
    for n in sorted(nodes, key=lambda n: n.attrs["layer"]):
        q, k, v = (x.type.shape for x in n.operands[:3])
        yield int(q[1].const or 0), int(k[1].const or 0), int(k[2].const or 0), int(v[2].const or 0)


def _checked_eos(source: Source, config: Any) -> tuple[int, ...]:
    """Return the ids that end a sequence; raises Diagnostic E302 if they, or those of other roles, are not ids."""
    eos, _, _ = [_ids(source, config, f"{role}_token_id") for role in ("eos", "bos", "pad")]
    return eos


def _ids(source: Source, config: Any, key: str) -> tuple[int, ...]:
    """Return the token ids of a role, one, several or null, from generation_config.json, else config.json, else its
    text half.
    """
    candidates = (source.generation.get(key), source.config.get(key), getattr(config, key, None))
    value = next((x for x in candidates if x is not None and x != []), None)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise Diagnostic("E302", f"{source.folder}: {key} is {value!r}, not a token id", "correct the configuration")
    return tuple(i for i in ids if i >= 0)
