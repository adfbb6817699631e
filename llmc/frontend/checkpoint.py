"""Reads the weights of a traced model from its folder, by name and row range. Opening only checks them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.frontend.mtp_names import tensors_of
from llmc.frontend.not_finite import NotFinite
from llmc.frontend.quantization_files import FILES, MARKS
from llmc.frontend.safetensors_reader import Stored, TensorFiles, shortened
from llmc.frontend.trace_model import Traced, WeightInfo
from llmc.frontend.truncate import outside_layers
from llmc.frontend.weight_mapping import places_of, resolve
from llmc.frontend.weight_place import Place
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph, QuantisedWeight, Value, inputs_of
from llmc.ir.ops import OPS
from llmc.ir.qformat import QFormat
from llmc.ir.types import Type, tensor
from llmc.ir.weight_eval import Blocks, widen

# Tensors that old versions of transformers saved although they are computed: rotary frequencies, and causal masks with
# their fill value. The latter share names with biases and are recognized by their shapes.
HARMLESS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
MASK = re.compile(r"(^|\.)(attn|attention)\.((masked_)?bias|causal_mask)$")
# Weights that models that pool may lack; a model of several parts may store its head in its language model.
HEADS = re.compile(r"^((\w+\.)?lm_head|embed_out|cls|qa_outputs|score|classifier)\.|^decoder\.(bias|weight)$")
FLOATS = ("f64", "f32", "bf16", "f16")
_MAX_EARLY_TENSORS = 5000  # tensors up to which shapes are compared before the trace
_COMPARED_ROWS = 1024  # rows that are compared at a time
PARTS = ("codes", "scales", "zeros")  # parts of a quantised weight, in the order of the operands of `assemble`


class WeightDecoder(Protocol):
    """Decodes the tensors of a quantised checkpoint."""

    def decode(
        self,
        tensors: Mapping[str, Value],
        build: Builder,
        read: Callable[[str], np.ndarray],
        place: Callable[[str], Place],
        metadata: Callable[[], Mapping[str, str]],
    ) -> Mapping[str, Value]:
        """Return the float weights by the names that an unquantised checkpoint gives them.

        `tensors` are the stored tensors, `build` adds nodes to their graph, `read` returns a stored tensor. `place`
        returns where the model has a weight, by the weight's name in the checkpoint. `metadata` returns the
        `__metadata__` of the files' headers.
        """

    def kv_scales(
        self, names: Iterable[str], read: Callable[[str], np.ndarray]
    ) -> Mapping[int, tuple[np.ndarray, np.ndarray]]:
        """Return the scales of the KV cache, layer -> (of keys, of values), from the stored tensors of these names.

        They are float32, of shape () or [KV heads]; a code times its scale is the number.
        """

    def parts(self, weight: Value, build: Builder) -> QuantisedWeight | None:
        """Return the parts of a weight that `decode` returned, or of a stack or concatenation of such weights.

        None if it is not quantised, or if no format fits.
        """


class TiedWeightsDiffer(Diagnostic):
    """Diagnostic E327: config.json ties weights that differ in the checkpoint.

    `names` are the names that the traced model has replaced. transformers uses each weight as it is stored; a model
    that is traced with `untied=names` does, too.
    """

    def __init__(self, names: Sequence[str], owner: str):
        self.names = tuple(names)
        cause = f"config.json ties {names[0]} to {owner}, but the checkpoint stores two different tensors"
        super().__init__("E327", cause, "set tie_word_embeddings to false in config.json")


class Checkpoint:
    """Reads the weights of @main. Use it as a context manager, or call `close`.

    A graph over the stored tensors computes each weight; its rows are evaluated when they are read. Opening
    reads only headers (and scales of quantised weights) and raises Diagnostic E320-E327: missing or damaged files, a
    wrong index, tensors that are missing, unexpected, of the wrong shape or not floating point, and tied weights that
    differ.
    """

    def __init__(self, traced: Traced, folder: Path | None = None, decoder: WeightDecoder | None = None):
        """Open and check the weights; `folder` defaults to the folder of the traced model.

        Quantised checkpoints need a `decoder`, which raises E340-E349 for what it cannot decode.
        """
        if decoder is None and traced.source.config.get("quantization_config"):
            cause = f"{traced.source.folder} contains quantised weights, which need a decoder"
            raise Diagnostic("E307", cause, "compile it with llmc compile, which finds the decoder")
        self.traced = traced
        self.not_finite = NotFinite()  # non-finite numbers in the rows read so far
        self._tensors = TensorFiles(folder or traced.source.folder)
        if decoder is None:
            _check_not_quantised(self._tensors.tensors)
        stored = self._stored()
        graph = Graph("checkpoint")
        build = Builder(graph, OPS)

        def read(name: str) -> np.ndarray:
            return self._tensors.read(name, slice(None))

        values: Mapping[str, Value] = {name: graph.input(name, _type(t), weight=True) for name, t in stored.items()}
        if decoder:
            values = decoder.decode(values, build, read, places_of(traced.model), self._tensors.metadata)
        known = resolve(traced.model, values, build, traced.weights)
        self.kv_scales = decoder.kv_scales(stored, read) if decoder else {}
        self._blocks = Blocks(graph, self._tensors)
        located = self._located(known)
        self._check_extra(known, values)
        for name, value in located.items():
            _check_shape(traced.weights[name], value)
            self._check_dtype(name, value)
        self._check_tied(known)
        self._values = {name: _cast(build, v, traced.weights[name].type.dtype) for name, v in located.items()}
        self.formats: dict[str, QFormat] = {}  # formats of the weights that can be read as parts
        self.transposed: set[str] = set()  # names of `formats` whose parts are the weight's transpose
        self.counts: dict[str, int] = {}  # weight in `formats` -> number of stored weights that it consists of
        self.orders: dict[str, str] = {}  # the name under which the order of a weight's columns is read, if it has one
        if decoder:
            self._add_parts(located, decoder, build)

    def _stored(self) -> Mapping[str, Stored]:
        """Return the stored tensors of the traced model, without those of other heads, parts and left-out layers."""
        from llmc.frontend.model_class import weights_of_other_parts

        traced, stored = self.traced, self._tensors.tensors
        if outside := tuple(weights_of_other_parts(traced.source.model_type)):
            stored = MappingProxyType({n: t for n, t in stored.items() if not any(p.search(n) for p in outside)})
        if owns := getattr(traced.model, "owns", None):
            stored = MappingProxyType({name: t for name, t in stored.items() if owns(name)})
        if traced.facts.layers:
            is_outside = outside_layers(traced.model, traced.facts.layers[0])
            stored = MappingProxyType({name: t for name, t in stored.items() if not is_outside(name)})
        return stored

    def _add_parts(self, located: Mapping[str, Value], decoder: WeightDecoder, build: Builder) -> None:
        """Make the codes, scales and zeros of quantised weights readable as WEIGHT.PART, and the orders of columns."""
        names_of_orders: dict[Value, str] = {}  # weights may share an order
        for name, value in located.items():
            if (weight := decoder.parts(value, build)) is None:
                continue
            self.formats[name], self.counts[name] = weight.format, weight.count
            if weight.transposed:
                self.transposed.add(name)
            self._values |= {f"{name}.{part}": v for part, v in zip(PARTS, weight.parts, strict=False)}
            if weight.order:
                self.orders[name] = names_of_orders.setdefault(weight.order, f"{name}.order")
                self._values[self.orders[name]] = weight.order

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._tensors.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all weight inputs of @main, including computed buffers."""
        return tuple(self.traced.weights)

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files, for hashing."""
        return self._tensors.files

    def where(self, name: str) -> str:
        """Describe which stored tensors a weight comes from, as file:name."""
        if name in self.traced.buffers:
            return "computed"
        stored = [self._tensors.tensors[v.name] for v in inputs_of(self._values[name])]
        return f"{stored[0].file.name}:{stored[0].name}" + (f" and {len(stored) - 1} more" if len(stored) > 1 else "")

    def part_types(self, name: str) -> Mapping[str, Type]:
        """Return the types of the codes, scales and, if it has them, zeros of a weight of `formats`.

        Keys are the names under which `read` returns the parts.
        """
        parts = {part: self._values.get(part) for part in (f"{name}.{p}" for p in PARTS)}
        return {part: value.type for part, value in parts.items() if value is not None}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight in the graph."""
        return tuple(int(d.const or 0) for d in self._type(name).shape)

    def _type(self, name: str) -> Type:
        return self._values[name].type if name in self._values else self.traced.weights[name].type

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Return rows of the first axis (all by default) as a new array in the weight's dtype in the graph.

        Only these rows are read from disk, unless the weight is stored transposed. Raises KeyError for an unknown name
        and ValueError for a slice with a step.
        """
        dtype = DTYPES[self._type(name).dtype].np
        shape = self.shape(name)
        start, stop, step = (rows or slice(None)).indices(shape[0] if shape else 1)
        if step != 1:
            raise ValueError(f"rows of {name} with step {step}: only contiguous rows can be read")
        if name in self.traced.buffers:
            buffer = np.asarray(self.traced.buffers[name])
            return np.array(buffer[start:stop] if shape else buffer, dtype=dtype)
        value = self._values[name]
        rows_read = self._blocks.rows(value, start, max(start, stop)) if shape else self._blocks.whole(value)
        self.not_finite.count(name, rows_read, self._type(name).dtype)
        return rows_read.view(dtype)

    def _located(self, known: Mapping[str, Value]) -> Mapping[str, Value]:
        """Find the value of each stored weight, under its own name or the name of a weight tied to it."""
        aliases: dict[str, list[str]] = {}
        for other, owner in self.traced.tied.items():
            aliases.setdefault(owner, []).append(other)
        located: dict[str, Value] = {}
        missing = []
        for name in self.traced.weights:
            if name in self.traced.buffers:
                continue
            at = next((n for n in (name, *aliases.get(name, ())) if n in known), None)
            if at is None:
                missing.append(name)
            else:
                located[name] = known[at]
        if missing:
            raise self._lacks(missing, known)
        return MappingProxyType(located)

    def _lacks(self, missing: list[str], known: Mapping[str, Value]) -> Diagnostic:
        """Return the error for weights that the files lack; `known` is what they hold, by state-dict name."""
        stored, model = self._tensors.tensors, self.traced.model
        unknown = next((n for n in known if n not in model.state_dict()), "")
        have = f"{len(stored)} tensors" + (f", one named {unknown[:120]}" if unknown else "")
        remedy = "fetch the whole checkpoint; config.json and weights must be of one model"
        if prefix := _wrapper_prefix(missing, stored):
            remedy = f"the names begin with {prefix!r}, those of a wrapped model: save the model inside of the wrapper"
        elif missing == [f"{_head(model)}.weight"]:
            remedy += "; where the head is the embedding: set tie_word_embeddings to true"
        cause = (
            f"{self._tensors.folder} lacks tensors that {self.traced.facts.architecture} needs: "
            f"{shortened(missing)} (the files hold {have})"
        )
        return Diagnostic("E323", cause, remedy)

    def _check_extra(self, values: Mapping[str, Value], stored: Container[str]) -> None:
        """Raise Diagnostic E324 for stored tensors that the model does not use, except known harmless ones.

        Zeros as the bias of a product without one are harmless; old GPTQ checkpoints have them. `stored` are the names
        of the stored tensors, and of the weights that were decoded from them. Tensors that the index lacks are ignored.
        """
        from llmc.frontend.model_class import tower_weights

        model = self.traced.model
        ignored = [
            HARMLESS,
            *([HEADS] if self.traced.facts.pooling else []),
            *map(re.compile, model._keys_to_ignore_on_load_unexpected or ()),
            *filter(None, [tensors_of(model.config)]),
            *tower_weights(model),
        ]
        known = set(model.state_dict()) | set(self.traced.tied) | set(self._tensors.unlisted)

        def is_extra(name: str, value: Value) -> bool:
            if name in known or any(pattern.search(name) for pattern in ignored) or _mask(name, value):
                return False
            return not self._no_bias(value, stored)

        if extra := sorted(name for name, value in values.items() if is_extra(name, value)):
            raise Diagnostic(
                "E324",
                f"{self._tensors.folder} holds tensors that {self.traced.facts.architecture} does not use: "
                f"{shortened(extra)}",
                "config.json and weights must be of one model; check its sizes and options",
            )

    def _no_bias(self, value: Value, stored: Container[str]) -> bool:
        """Whether a stored tensor is a bias of zeros that belongs to a weight."""
        module, _, part = (value.name if value.node is None else "").rpartition(".")
        if part != "bias" or f"{module}.weight" not in stored or value.type.rank != 1 or value.type.dtype not in FLOATS:
            return False
        return not widen(self._blocks.whole(value), value.type.dtype).any()

    def _check_dtype(self, name: str, value: Value) -> None:
        if value.type.dtype not in FLOATS:
            stored = self._tensors.tensors[inputs_of(value)[0].name]
            raise Diagnostic(
                "E326",
                f"{name} is stored as {stored.dtype} in {stored.file.name}; float weights are required "
                f"({', '.join(FLOATS)})",
                "compile the original checkpoint, or one whose quantization_config says how it is quantised",
            )

    def _check_tied(self, known: Mapping[str, Value]) -> None:
        """Raise TiedWeightsDiffer if the checkpoint stores different tensors for weights that config.json ties.

        All elements are compared, in the dtype of the traced model, as transformers compares them.
        """
        stored = [(a, b) for a, b in self.traced.tied.items() if a in known and b in known]
        dtype = {b: self.traced.weights[b].type.dtype for _, b in stored}
        differing = [(a, b) for a, b in stored if not self._equal(known[a], known[b], dtype[b])]
        if differing:
            raise TiedWeightsDiffer([name for name, _ in differing], differing[0][1])

    def _equal(self, a: Value, b: Value, dtype: str) -> bool:
        """Whether two weights are equal once their elements are converted to `dtype`."""
        if a is b:
            return True
        if a.type.shape != b.type.shape:
            return False
        count = a.type.shape[0].const or 0

        def rows(v: Value, start: int) -> np.ndarray:
            stored = self._blocks.rows(v, start, min(start + _COMPARED_ROWS, count))
            return widen(stored, v.type.dtype).astype(DTYPES[dtype].np)

        return all(np.array_equal(rows(a, start), rows(b, start)) for start in range(0, count, _COMPARED_ROWS))


def check_shapes(model: Any, folder: Path) -> None:
    """Raise Diagnostic E325 if a stored tensor has another shape than the model's weight, before a long trace.

    Checkpoints of very many tensors are left to `Checkpoint`, which raises the same.
    """
    files = TensorFiles(folder)
    files.close()
    if len(files.tensors) > _MAX_EARLY_TENSORS:
        return
    graph, want = Graph("checkpoint"), model.state_dict()
    values = {name: graph.input(name, _type(t), weight=True) for name, t in files.tensors.items()}
    for name, value in resolve(model, values, Builder(graph, OPS)).items():
        if name in want:
            weight = WeightInfo(name, tensor(value.type.dtype, *want[name].shape), name.rpartition(".")[0])
            _check_shape(weight, value)


def _wrapper_prefix(missing: list[str], stored: Collection[str]) -> str:
    """Return what precedes each missing name in the files, such as torch.compile's `_orig_mod.`; "" if nothing does."""
    prefixes = (name.removesuffix(missing[0]) for name in stored if name.endswith(missing[0]))
    return next((prefix for prefix in prefixes if all(prefix + name in stored for name in missing)), "")


def _check_not_quantised(stored: Mapping[str, Stored]) -> None:
    """Raise Diagnostic E340 for parts of quantised weights in a checkpoint that does not say how to read them."""
    if marked := [name for name in stored if name.rpartition(".")[2] in MARKS]:
        cause = f"{shortened(marked)} are parts of quantised weights, and config.json has no quantization_config"
        raise Diagnostic("E340", cause, f"download config.json again, and {', '.join(FILES)} if the model has one")


def _type(stored: Stored) -> Type:
    """Return the type of a stored tensor; raises Diagnostic E326 if the IR has no such dtype."""
    if stored.dtype not in DTYPES:
        cause = f"{stored.name[:200]!r} is stored as {stored.dtype} in {stored.file.name}, which is not supported"
        raise Diagnostic("E326", cause, "compile the original checkpoint")
    return tensor(stored.dtype, *stored.shape)


def _cast(build: Builder, value: Value, dtype: str) -> Value:
    return value if value.type.dtype == dtype else build.cast(value, dtype=dtype)


def _head(model: Any) -> str:
    """Return the module path of the output projection, or "" if the model does not report one."""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), "")


def _mask(name: str, value: Value) -> bool:
    """Whether a tensor is a causal mask [1, 1, n, n], or a mask's fill value, of one element."""
    if MASK.search(name) is None:
        return False
    shape = value.type.shape
    return shape in ((), (1,)) or (len(shape) == 4 and shape[0] * shape[1] == 1 and shape[2] == shape[3])


def _check_shape(weight: WeightInfo, value: Value) -> None:
    expected = [d.const for d in weight.type.shape]
    stored = [d.const for d in value.type.shape]
    if stored != expected:
        raise Diagnostic(
            "E325",
            f"{weight.name} is {stored} in the checkpoint and {expected} by config.json",
            "config.json and weights must be of one model; check hidden_size, vocab_size and the head counts",
            loc=weight.module,
        )
