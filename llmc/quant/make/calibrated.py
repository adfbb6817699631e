"""Quantises a model layer by layer, with calibration texts: a method computes the codes of the linear modules of a
layer from their inputs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Linear

from llmc.diagnostics import Diagnostic
from llmc.quant.make.channel_scales import awq_scales, smooth_scales
from llmc.quant.make.clipping import round_clipped
from llmc.quant.make.expert_weights import expert_inputs, too_few_tokens
from llmc.quant.make.folder_writer import ShardWriter
from llmc.quant.make.folding import fold_all, fold_experts
from llmc.quant.make.gptq_codes import gptq
from llmc.quant.make.kv_ranges import KvRanges
from llmc.quant.make.layer_runs import Layer, LayerRuns
from llmc.quant.make.model_source import ModelSource
from llmc.quant.make.plan import Plan, first_names
from llmc.quant.make.recipes import SMOOTH, Recipe
from llmc.quant.make.rounding import Quantised, finite, round_to_nearest
from llmc.quant.make.sign_rounding import sign_rounding

ACTIVATIONS_FOLDER = "activations"  # folder of the hidden states, removed at the end
Dtypes = Mapping[str, torch.dtype]  # dtypes of the stored weights; scales are stored in the same dtype
# (layer, its linear modules by name, recipe, dtypes) -> their quantised weights and those of `Layer.experts`; may scale
# other weights of the layer.
Method = Callable[[Layer, Mapping[str, Linear], Recipe, Dtypes], dict[str, Quantised]]


def by_gptq(layer: Layer, linears: Mapping[str, Linear], recipe: Recipe, dtypes: Dtypes) -> dict[str, Quantised]:
    """Quantise by GPTQ."""
    layer.observe(linears)
    return _observed(layer, linears, recipe, dtypes, gptq)


def by_awq(layer: Layer, linears: Mapping[str, Linear], recipe: Recipe, dtypes: Dtypes) -> dict[str, Quantised]:
    """Scale input channels by AWQ, and round to nearest in clipped ranges."""
    layer.observe(linears)
    fold_all(layer, linears, dtypes, lambda group, weights: awq_scales(group, weights, recipe))
    fold_experts(layer, lambda group, weights: awq_scales(group, weights, recipe))
    clipped = _observed(layer, linears, recipe, dtypes, lambda w, gram, r, dtype, _: round_clipped(w, gram, r, dtype))
    return _rounded(layer, linears, recipe, dtypes) | clipped


def by_smoothing(layer: Layer, linears: Mapping[str, Linear], recipe: Recipe, dtypes: Dtypes) -> dict[str, Quantised]:
    """Move outliers of activations into weights by SmoothQuant, and round to nearest."""
    layer.observe(linears)
    fold_all(layer, linears, dtypes, smooth_scales)
    layer.rounded |= layer.experts.keys()
    return _rounded(layer, linears, recipe, dtypes)


def by_rounding(layer: Layer, linears: Mapping[str, Linear], recipe: Recipe, dtypes: Dtypes) -> dict[str, Quantised]:
    """Round to nearest."""
    layer.rounded |= layer.experts.keys()
    return _rounded(layer, linears, recipe, dtypes)


def _observed(
    layer: Layer, linears: Mapping[str, Linear], recipe: Recipe, dtypes: Dtypes, quantise: Callable[..., Quantised]
) -> dict[str, Quantised]:
    """Quantise the observed linear modules, and experts, by quantise(weight, sum of x xT, recipe, dtype, name).

    Experts with too few tokens are rounded to nearest.
    """
    quantised = {}
    for group in layer.inputs:
        for name in group.linears:
            path, w = f"{layer.path}.{name}", linears[name].weight.data
            quantised[name] = quantise(w, group.gram, recipe, dtypes[name], path)
    for _, group in expert_inputs(layer):
        for name in group.linears:
            w = layer.experts[name].of(layer.module)
            if too_few_tokens(group.tokens, w):
                layer.rounded.add(name)
                quantised[name] = round_to_nearest(w, recipe, dtypes[name])
            else:
                quantised[name] = quantise(w, group.gram, recipe, dtypes[name], name)
    return quantised


def _rounded(layer: Layer, linears: Mapping[str, Linear], recipe: Recipe, dtypes: Dtypes) -> dict[str, Quantised]:
    weights = {name: m.weight.data for name, m in linears.items()}
    weights |= {name: e.of(layer.module) for name, e in layer.experts.items()}
    return {name: round_to_nearest(w, recipe, dtypes[name]) for name, w in weights.items()}


# By `Recipe.method`
METHODS: Mapping[str, Method] = MappingProxyType(
    {"gptq": by_gptq, "awq": by_awq, "autoround": sign_rounding, SMOOTH: by_smoothing, "rtn": by_rounding}
)
REFERENCE = ("autoround",)  # methods that compare with the outputs of the unquantised model


class Progress(Protocol):
    """The display of the plan and of progress."""

    def note(self, text: str) -> None:
        """Print one line."""

    def part(self, name: str, done: int, of: int, unit: str = "") -> None:
        """Show progress `done` of `of`."""


def quantise_layers(
    source: ModelSource, plan: Plan, tokens: Tensor, seed: int, folder: Path, out: ShardWriter, progress: Progress
) -> None:
    """Quantise the planned weights with samples [samples, T], and write all tensors; raises Diagnostic E350-E355."""
    runs = LayerRuns(source, tokens, folder / ACTIVATIONS_FOLDER, plan.recipe.method in REFERENCE, seed)
    done: set[str] = set()
    rounded: set[str] = set()
    scaled = False
    for i in range(len(runs.layers)):
        progress.part("calibrate", i, len(runs.layers), " layers")
        layer = runs.load(i)
        done |= _layer(source, plan, layer, out)
        rounded |= layer.rounded
        scaled |= _kv_scales(source, plan, layer, out)
        runs.drop(i)
    progress.part("calibrate", len(runs.layers), len(runs.layers), " layers")
    if plan.kv and not scaled:
        raise Diagnostic("E354", "no layer stores keys and values", "omit --kv-cache-dtype fp8")
    for name in source.files.tensors:
        if name not in done:
            _outside(source, plan, name, out)
    shutil.rmtree(folder / ACTIVATIONS_FOLDER)
    if plan.experts and plan.recipe.calibrated:
        rounded |= plan.experts - done
        progress.note(
            f"experts: {len(plan.experts) - len(rounded)} weights calibrated with the tokens that are routed to them, "
            f"{len(rounded)} rounded to nearest"
        )


def _outside(source: ModelSource, plan: Plan, name: str, out: ShardWriter) -> None:
    """Write a tensor outside of the layers unchanged."""
    x = source.read(name)
    if name in plan.experts:
        out.add_weight(plan.weights[name], round_to_nearest(finite(name, x.float()), plan.recipe, x.dtype))
    elif name in plan.weights:
        raise Diagnostic("E354", f"{name} is not in a decoder layer", f"leave it out: --ignore {plan.weights[name]}")
    else:
        out.add(name, x)


def _kv_scales(source: ModelSource, plan: Plan, layer: Layer, out: ShardWriter) -> bool:
    """Write the scales of a layer's keys and values; return whether it has any."""
    if layer.kv is None or not (kv_scales := layer.kv.scales(layer.path, plan.kv)):
        return False
    within = f"{layer.path}.{layer.kv.path}".removesuffix(".") + "."
    leaves = ((n.removeprefix(within), s) for n, s in source.plain_names().items() if n.startswith(within))
    at = next((s.removesuffix(leaf) for leaf, s in leaves if s.endswith(f".{leaf}")), within)
    for name, x in kv_scales.items():
        out.add(f"{at}{name}", x)
    return True


def _layer(source: ModelSource, plan: Plan, layer: Layer, out: ShardWriter) -> set[str]:
    """Quantise a layer and write its tensors; return their names."""
    prefix = f"{layer.path}."
    stored = {n.removeprefix(prefix): s for n, s in source.plain_names().items() if n.startswith(prefix)}
    linears, dtypes = _targets(source, plan, layer, stored)
    dtypes |= _experts(source, plan, layer)
    quantised = METHODS[plan.recipe.method](layer, linears, plan.recipe, dtypes) if dtypes else {}
    # The layers after this one are calibrated with the results of its quantised weights.
    if unused := sorted(linears.keys() - quantised.keys()):
        cause = f"{first_names(unused)} in {layer.path} are not used while the layer runs"
        raise Diagnostic("E354", cause, f"leave it out: --ignore {plan.weights[stored[f'{unused[0]}.weight']]}")
    for name in layer.experts:
        layer.experts[name].of(layer.module).copy_(quantised[name].values())
    for name in linears:
        linears[name].weight.data = quantised[name].values()
    written: set[str] = set()  # names in the checkpoint
    for name, weight in quantised.items():
        stored_name = name if name in layer.experts else stored[f"{name}.weight"]
        out.add_weight(plan.weights[stored_name], weight)
        written.add(stored_name)
    layer.kv = KvRanges() if plan.kv else None
    layer.advance()
    return written | _plain(source, layer, {name: s for name, s in stored.items() if s not in written}, out)


def _plain(source: ModelSource, layer: Layer, stored: Mapping[str, str], out: ShardWriter) -> set[str]:
    """Write a layer's parameters that are not quantised, which the method may have changed; return their names.

    `stored`: parameter -> its name in the checkpoint.
    """
    written: set[str] = set()
    for name, parameter in layer.module.named_parameters():
        if not (stored_name := stored.get(name, "")) or stored_name in written:
            continue
        before = source.weight(f"{layer.path}.{name}")
        unchanged = before is not None and torch.equal(before, parameter.data)
        out.add(stored_name, source.read(stored_name) if unchanged else parameter.data.to(source.dtype(stored_name)))
        written.add(stored_name)
    return written


def _experts(source: ModelSource, plan: Plan, layer: Layer) -> dict[str, torch.dtype]:
    """Name the weights of experts that the layer is to quantise, and return the dtypes in which they are stored."""
    layer.experts = {e.stored: e for e in source.experts_of(layer.path) if e.stored in plan.experts}
    for name, expert in layer.experts.items():
        finite(name, expert.of(layer.module))
    return {name: source.dtype(name) for name in layer.experts}


def _targets(
    source: ModelSource, plan: Plan, layer: Layer, stored: Mapping[str, str]
) -> tuple[dict[str, Linear], dict[str, torch.dtype]]:
    """Return the linear modules of a layer that are quantised, and the dtypes of their stored weights."""
    linears = {
        name: module
        for name, module in layer.module.named_modules()
        if isinstance(module, Linear) and stored.get(f"{name}.weight") in plan.weights
    }
    for name, module in linears.items():
        finite(stored[f"{name}.weight"], module.weight)
    return linears, {name: source.dtype(stored[f"{name}.weight"]) for name in linears}
