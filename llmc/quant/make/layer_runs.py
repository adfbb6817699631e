"""Runs a model one decoder layer at a time over calibration samples.

Only one layer has weights in memory. The hidden states of the samples between layers are in a memory-mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Linear, Module, Parameter

from llmc.diagnostics import Diagnostic
from llmc.frontend.export import quiet, recompute
from llmc.frontend.truncate import layer_lists
from llmc.quant.make.kv_ranges import KvRanges
from llmc.quant.make.model_source import ExpertWeight, ModelSource

OLD_CACHE = "layer_past"  # the argument of some models' layers, such as GPT-NeoX's, for the KV cache
NO_WEIGHTS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass
class Inputs:
    """Statistics of one tensor that linear modules of a layer read: sums over all tokens of all samples.

    linears: their names in the layer. producer: the name of the module that computes the tensor, or "". gram: the sum
    of x xT. largest, total: the largest and the sum of |x| of each column. tokens: their number.
    """

    linears: list[str]
    producer: str
    gram: Tensor
    largest: Tensor
    total: Tensor
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """Add the rows of `x`."""
        rows = x.reshape(-1, x.shape[-1])
        self.gram.addmm_(rows.T, rows)
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self.total += rows.abs().sum(0)
        self.tokens += len(rows)


@dataclass
class Layer:
    """A decoder layer with its weights in float32.

    `call` runs it on hidden states [samples, T, H], with other weights for those that a mapping names, and with `cache`
    as its KV cache. kv: what `advance` observes of keys and values, or None. experts: the weights of experts that are
    quantised, by their stored names. rounded: those that were rounded to nearest instead of calibrated.
    """

    path: str
    module: Module
    call: Callable[..., Tensor]
    hidden: np.ndarray
    reference: np.ndarray | None
    seed: int = 0
    inputs: list[Inputs] = field(default_factory=list)
    kv: KvRanges | None = None
    experts: dict[str, ExpertWeight] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)

    def state(self, i: int) -> Tensor:
        """Return the input of sample `i`, [1, T, H]."""
        return torch.from_numpy(self.hidden[i : i + 1])

    @torch.no_grad()
    def observe(self, linears: Mapping[str, Linear]) -> list[Inputs]:
        """Run all samples and return the statistics of each group of linear modules with a common input."""
        self.inputs = []
        for i in range(len(self.hidden)):
            with _Watch(self, linears):
                self.call(self.state(i))
        return self.inputs

    @torch.no_grad()
    def advance(self) -> None:
        """Replace the hidden states by the outputs of the layer; `kv` gets the keys and values."""
        hooks = self.kv.watch(self.module) if self.kv is not None else []
        for i in range(len(self.hidden)):
            self.hidden[i : i + 1] = self.call(self.state(i), cache=self.kv).numpy()
        for hook in hooks:
            hook.remove()

    @torch.no_grad()
    def advance_reference(self) -> None:
        """Replace the hidden states of the unquantised model by the outputs of the layer, not yet quantised."""
        assert self.reference is not None
        for i in range(len(self.reference)):
            self.reference[i : i + 1] = self.call(torch.from_numpy(self.reference[i : i + 1])).numpy()


class _Watch:
    """Hooks on a layer's modules during one call: which tensors they read and return."""

    def __init__(self, layer: Layer, linears: Mapping[str, Linear]) -> None:
        self.layer = layer
        self.read: list[tuple[Tensor, Inputs]] = []
        self.outputs: list[tuple[Tensor, str]] = []
        self.hooks = [m.register_forward_pre_hook(self._reader(n)) for n, m in linears.items()]
        others = [(n, m) for n, m in layer.module.named_modules() if n and not list(m.children())]
        self.hooks += [m.register_forward_hook(self._maker(n)) for n, m in others if n not in linears]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _maker(self, name: str) -> Callable[..., None]:
        return lambda module, args, out: self.outputs.append((out, name))

    def _reader(self, name: str) -> Callable[..., None]:
        def hook(module: Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            same = next((group for tensor, group in self.read if tensor is x), None)
            if same is not None:
                if name not in same.linears:
                    same.linears.append(name)
                return
            group = next((g for g in self.layer.inputs if name in g.linears), None)
            if group is None:
                producer = next((module_name for tensor, module_name in self.outputs if tensor is x), "")
                width = x.shape[-1]
                group = Inputs([name], producer, torch.zeros(width, width), torch.zeros(width), torch.zeros(width))
                self.layer.inputs.append(group)
            group.add(x.float())
            self.read.append((x, group))

        return hook


class LayerRuns:
    """The layers of a model in order, and the hidden states of the samples."""

    def __init__(self, source: ModelSource, tokens: Tensor, spill: Path, reference: bool, seed: int) -> None:
        """Compute the inputs of the first layer for tokens [samples, T]; files are written to the folder `spill`.

        reference: whether the hidden states of the unquantised model are kept, too. Raises Diagnostic E354 if the
        model cannot be run layer by layer.
        """
        self.source = source
        self.seed = seed
        self.model = source.model
        self.layers = _layers(self.model)
        self.paths = {id(m): n for n, m in self.model.named_modules()}
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        for path, module in self.model.named_modules():
            if id(module) not in inside and module is not self.model.get_output_embeddings():
                self._fill(path, module)
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}) for _ in self.layers]
        spill.mkdir()
        first = self._capture(tokens[:1])
        shape = (len(tokens), *first.shape[1:])
        self.hidden = np.memmap(spill / "hidden", np.float32, "w+", shape=shape)
        for i in range(len(tokens)):
            self.hidden[i : i + 1] = self._capture(tokens[i : i + 1]).numpy()
        self.reference = None
        if reference:
            self.reference = np.memmap(spill / "reference", np.float32, "w+", shape=shape)
            self.reference[:] = self.hidden

    def load(self, i: int) -> Layer:
        """Return layer `i` with its weights; `drop` frees them."""
        module = self.layers[i]
        path = self.paths[id(module)]
        for name, part in module.named_modules():
            self._fill(".".join(filter(None, (path, name))), part)
        args, kwargs = self.arguments[i]
        takes = signature(module.forward).parameters
        cached = OLD_CACHE if OLD_CACHE in takes else "past_key_values"

        def call(hidden: Tensor, weights: Mapping[str, Tensor] = NO_WEIGHTS, cache: KvRanges | None = None) -> Tensor:
            keywords = kwargs if cache is None else {**kwargs, cached: cache}
            out = functional_call(module, dict(weights), (hidden, *args), keywords)
            return out[0] if isinstance(out, tuple) else out

        return Layer(path, module, call, self.hidden, self.reference, self.seed)

    def drop(self, i: int) -> None:
        """Free the weights of layer `i`."""
        self.layers[i].to("meta")

    def _fill(self, path: str, module: Module) -> None:
        """Give a module's own parameters and buffers their values."""
        for names, values in ((module._parameters, False), (module._buffers, True)):
            for leaf, old in list(names.items()):
                if old is None:
                    continue
                name = f"{path}.{leaf}"
                weight = self.source.weight(name)
                if weight is None:
                    weight = recompute(self.model, name) if values else self._tied(name)
                names[leaf] = weight if values else Parameter(weight, requires_grad=False)

    def _tied(self, name: str) -> Tensor:
        raise Diagnostic("E323", f"the checkpoint lacks {name}", "download the checkpoint again")

    @torch.no_grad()
    def _capture(self, tokens: Tensor) -> Tensor:
        """Run the model with layers that return their input; return the input of the first."""
        captured: list[Tensor] = []

        def passing(i: int) -> Callable[..., Tensor]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                captured.append(hidden)
                self.arguments[i] = args, kwargs
                return hidden

            return forward

        try:
            for i, layer in enumerate(self.layers):
                layer.forward = passing(i)
            with quiet():
                self.model.base_model(input_ids=tokens, use_cache=False)
        except Exception as e:
            why = " ".join(str(e).split())[:200]
            cause = f"{type(self.model).__name__} cannot be run layer by layer: {why}"
            raise Diagnostic("E354", cause, "use int8, fp8 or int4, which need no texts") from e
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)
        return captured[0].float()


def _layers(model: Any) -> list[Any]:
    """Return the decoder layers of a model; raises Diagnostic E354 if it has no list of them."""
    count = model.config.get_text_config().num_hidden_layers
    for _, layers in layer_lists(model.base_model, count):
        return list(layers)
    cause = f"{type(model).__name__} has no list of {count} decoder layers"
    raise Diagnostic("E354", cause, "use int8, fp8 or int4, which need no texts")
