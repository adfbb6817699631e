"""The weights of experts that a checkpoint stores one by one and a model holds in stacks, and the inputs of each.

The inputs of an expert are the tokens that are routed to it. They are observed where the expert's slice of the stack is
multiplied, so the modules of mixtures need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from llmc.quant.make.layer_runs import Inputs, Layer
from llmc.quant.make.model_source import Slice

MIN_TOKENS_PER_COLUMN = 1  # tokens for each column of an expert's weight below which it is rounded to nearest


def too_few_tokens(tokens: int, weight: Tensor) -> bool:
    """Whether this number of tokens is too small to calibrate an expert's weight [n, k]."""
    return tokens < MIN_TOKENS_PER_COLUMN * weight.shape[1]


@torch.no_grad()
def expert_inputs(layer: Layer, limit: int = 0) -> Iterator[tuple[Slice, Inputs]]:
    """Yield each slice of the layer's stacks with the inputs of its products over all samples.

    The sums x xT of the slices that are observed in one run of the samples have at most `limit` elements; 0: as many as
    the layer's weights. Further slices are observed in further runs.
    """
    limit = limit or sum(p.numel() for p in layer.module.parameters())
    waiting = sorted({e.slice for e in layer.experts.values()})
    while waiting:
        run: dict[Slice, Inputs] = {}
        size = 0
        while waiting and (not run or size + _columns(layer, waiting[0]) ** 2 <= limit):
            k = _columns(layer, waiting[0])
            names = [name for name, e in layer.experts.items() if e.slice == waiting[0]]
            run[waiting.pop(0)] = Inputs(names, "", torch.zeros(k, k), torch.zeros(k), torch.zeros(k))
            size += k * k
        _run(layer, {at: inputs.add for at, inputs in run.items()})
        yield from run.items()


@torch.no_grad()
def expert_tokens(layer: Layer) -> Mapping[Slice, int]:
    """Return how many tokens each slice of the layer's stacks reads in all samples."""
    counts = {e.slice: 0 for e in layer.experts.values()}

    def counting(at: Slice) -> Callable[[Tensor], None]:
        def count(x: Tensor) -> None:
            counts[at] += x.numel() // x.shape[-1]

        return count

    _run(layer, {at: counting(at) for at in counts})
    return counts


def _columns(layer: Layer, at: Slice) -> int:
    return int(layer.module.get_parameter(at[0]).shape[2])


def _run(layer: Layer, readers: Mapping[Slice, Callable[[Tensor], None]]) -> None:
    """Run all samples; each reader gets the inputs of the products with its slice."""
    by_address = {layer.module.get_parameter(stack).data[e].data_ptr(): f for (stack, e), f in readers.items()}
    with _Products(by_address):
        for i in range(len(layer.hidden)):
            layer.call(layer.state(i))


class _Products(TorchFunctionMode):
    """Calls a reader with the left factor of each product whose weight is at its address."""

    def __init__(self, readers: Mapping[int, Callable[[Tensor], None]]) -> None:
        super().__init__()
        self.readers = readers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and len(args) > 1 and (reader := self.readers.get(args[1].data_ptr())):
            reader(args[0].float())
        return func(*args, **(kwargs or {}))
