"""Quantises a model layer by layer, with calibration texts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Linear

from llmc.diagnostics import Diagnostic
from llmc.quant.make.folder_writer import ShardWriter
from llmc.quant.make.kv_ranges import KvRanges
from llmc.quant.make.layer_runs import Layer, LayerRuns
from llmc.quant.make.methods import METHODS, REFERENCE
from llmc.quant.make.model_source import ModelSource
from llmc.quant.make.plan import Plan, first_names
from llmc.quant.make.rounding import finite, round_to_nearest

ACTIVATIONS_FOLDER = "activations"  # folder of the hidden states, removed at the end


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
        raise Diagnostic("E354", f"{name} is in none of the layers", f"--ignore {plan.weights[name]}")
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
        raise Diagnostic("E354", cause, f"--ignore {plan.weights[stored[f'{unused[0]}.weight']]}")
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
