"""The calibrated methods: each computes the codes of the linear modules of one layer from its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn import Linear

from llmc.quant.make.channel_scales import awq_scales, smooth_scales
from llmc.quant.make.clipping import round_clipped
from llmc.quant.make.expert_weights import expert_inputs, too_few_tokens
from llmc.quant.make.folding import fold_all, fold_experts
from llmc.quant.make.gptq_codes import gptq
from llmc.quant.make.layer_runs import Layer
from llmc.quant.make.recipes import SMOOTH, Recipe
from llmc.quant.make.rounding import Quantised, round_to_nearest
from llmc.quant.make.sign_rounding import sign_rounding

Dtypes = Mapping[str, torch.dtype]  # of the stored weights, in which scales are stored
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
