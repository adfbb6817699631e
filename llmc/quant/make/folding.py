"""Scales the input channels of linear modules, and divides the outputs of the preceding module by the same factors.

The preceding module is the norm whose output the linear modules read, or a linear module with as many rows as they
have columns. A fold is kept only if the output of the layer does not change.

The input of an expert's second product is its up projection times an activation, so each row of the up projection
scales one input channel; the assignment of rows is found by trial. Inputs of the first products are not scaled, because
the router and all experts share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmc.quant.make.expert_weights import expert_inputs, too_few_tokens
from llmc.quant.make.layer_runs import Inputs, Layer
from llmc.quant.make.model_source import ExpertWeight, Slice

TOLERANCE = 2e-3  # relative change of the layer's output that rounding may cause
Scales = Callable[[Inputs, Sequence[Tensor]], Tensor]


@torch.no_grad()
def fold_all(layer: Layer, linears: Mapping[str, Linear], dtypes: Mapping[str, torch.dtype], scales: Scales) -> None:
    """Scale the inputs of each group of linear modules by `scales(group, their weights)`, where this can be folded.

    Weights of the layer change in place. dtypes: of the stored weights.
    """
    dtype = next(iter(dtypes.values()))
    for group in layer.inputs:
        scale = scales(group, [linears[n].weight.data for n in group.linears])
        for name in before(layer, group, linears):
            if _fold(layer, group, linears, name, scale, dtype):
                break


def before(layer: Layer, group: Inputs, linears: Mapping[str, Linear]) -> list[str]:
    """Return the names of the modules into which the inverse of a group's scales may be folded, the likeliest first."""
    if group.producer:
        return [group.producer]
    size = len(group.largest)
    order = [n for g in layer.inputs for n in g.linears]
    earlier = order[: order.index(group.linears[0])]
    return [n for n in reversed(earlier) if linears[n].out_features == size]


def _fold(
    layer: Layer, group: Inputs, linears: Mapping[str, Linear], name: str, scales: Tensor, dtype: torch.dtype
) -> bool:
    """Fold scales into the module `name`; restore everything and return False if the layer's output changes."""
    producer = layer.module.get_submodule(name)
    weight = getattr(producer, "weight", None)
    if weight is None or len(weight) != len(scales):
        return False
    expected = layer.call(layer.state(0))
    changed: list[Module] = [producer, *(linears[n] for n in group.linears)]
    saved = [{k: p.data.clone() for k, p in m.named_parameters(recurse=False)} for m in changed]
    scale = _divide(producer, scales, dtype)
    for n in group.linears:
        linears[n].weight.data *= scale
    if same_output(layer.call(layer.state(0)), expected):
        group.gram /= scale[:, None] * scale
        group.largest /= scale
        group.total /= scale
        return True
    for module, values in zip(changed, saved, strict=True):
        for k, value in values.items():
            module._parameters[k].data.copy_(value)
    return False


def same_output(actual: Tensor, expected: Tensor) -> bool:
    """Whether two outputs of a layer differ only by rounding."""
    return float((actual - expected).norm()) <= TOLERANCE * float(expected.norm())


def _divide(producer: Module, requested: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide the outputs of a module by `requested`; return the effective scales, after the stored values are rounded.

    The weight of a norm is stored in `dtype`, so the scale that undoes the division exactly is that of rounded weights.
    """
    weight = producer.weight.data
    scale = requested
    if weight.ndim == 1:
        divided = (weight / requested).to(dtype).float()
        scale = torch.where((divided != 0) & (weight != 0), weight / divided, torch.ones_like(weight))
        producer.weight.data = torch.where(scale == 1, weight, divided)
    else:
        producer.weight.data = weight / requested[:, None]
    bias = getattr(producer, "bias", None)
    if bias is not None:
        bias.data = (bias.data / scale).to(dtype).float()
    return scale


@torch.no_grad()
def fold_experts(layer: Layer, scales: Scales) -> set[str]:
    """Scale the inputs of the second products by `scales(inputs, their weights)`, in the layer.

    Returns the names of the weights that were scaled. Experts with too few tokens stay unchanged.
    """
    by_stack: dict[str, dict[int, Tensor]] = {}  # scales by expert, for each stack of second products
    for (stack, expert), scale in _input_scales(layer, scales).items():
        by_stack.setdefault(stack, {})[expert] = scale
    scaled: set[str] = set()
    for stack, by_expert in by_stack.items():
        size = len(next(iter(by_expert.values())))
        experts = [e for e in layer.experts.values() if e.expert in by_expert]
        second = [e for e in experts if e.stack == stack]
        first = [e for e in experts if e.stack != stack and e.rows == size]
        for place in sorted({(e.stack, e.row) for e in first}, reverse=True):  # up usually follows the gate
            rows = [e for e in first if (e.stack, e.row) == place]
            if len(rows) == len(second) and _fold_stacks(layer, rows, second, by_expert):
                scaled |= {e.stored for e in (*rows, *second)}
                break
    return scaled


def _input_scales(layer: Layer, scales: Scales) -> dict[Slice, Tensor]:
    """Return the input channels' scales of each slice that has enough tokens and reads what another stack computes."""
    rows = {(e.expert, e.rows) for e in layer.experts.values()}
    factors = {}
    for at, inputs in expert_inputs(layer):
        weights = [layer.experts[name].of(layer.module) for name in inputs.linears]
        alone = len(weights) == 1 and (at[1], weights[0].shape[1]) in rows
        if alone and not too_few_tokens(inputs.tokens, weights[0]):
            factors[at] = scales(inputs, weights)
    return factors


def _fold_stacks(
    layer: Layer, first: list[ExpertWeight], second: list[ExpertWeight], by_expert: Mapping[int, Tensor]
) -> bool:  # fmt: skip
    """Fold the scales into rows of the first products; restore everything and return False if the output changes."""
    expected = layer.call(layer.state(0))
    changed = [e.of(layer.module) for e in (*first, *second)]
    saved = [w.clone() for w in changed]
    for e in first:
        e.of(layer.module).div_(by_expert[e.expert][:, None])
    for e in second:
        e.of(layer.module).mul_(by_expert[e.expert])
    if same_output(layer.call(layer.state(0)), expected):
        return True
    for w, before in zip(changed, saved, strict=True):
        w.copy_(before)
    return False
