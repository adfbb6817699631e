"""Scales input channels of the second products of experts, and divides rows of their first products by these factors.

The input of an expert's second product is its up projection times an activation, so each row of the up projection
scales one input channel. The assignment of rows is found by trial: a fold is kept only if the output of the layer does
not change. Inputs of the first products are not scaled, because the router and all experts share them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmc.quant.make.expert_weights import expert_inputs, too_few_tokens
from llmc.quant.make.folding import Scales, same_output
from llmc.quant.make.layer_runs import Layer
from llmc.quant.make.model_source import ExpertWeight, Slice


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
            if len(rows) == len(second) and _fold(layer, rows, second, by_expert):
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


def _fold(
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
