"""Decides which weights of a model are quantised, before anything is read, and describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from llmc_runtime.format.size_text import size_text

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import DTYPES
from llmc.quant.make.model_source import ModelSource
from llmc.quant.make.recipes import BY_LAYER, KV_FP8, NONE, RECIPES, SMOOTH, UNCHANGED, Recipe


@dataclass(frozen=True)
class Settings:
    """The requested quantisation of a model: the options of `llmc quantize`.

    scheme: a recipe, or "none" to write scales of the KV cache only. group_size: columns that share a scale, instead of
    the scheme's. calibrate: file of texts. ignore: modules that are not quantised, by name or "re:" and a regular
    expression that matches the beginning of the name. kv_cache_dtype: "fp8" for scales of the KV cache, which texts
    decide. kv_scales: the unit that shares a scale, "layer" or "head".
    """

    scheme: str
    group_size: int | None = None
    calibrate: Path | None = None
    samples: int = 128
    length: int = 2048
    seed: int = 0
    ignore: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    kv_scales: str = BY_LAYER

    @property
    def kv(self) -> str:
        """The unit that shares a scale of the KV cache: "layer" or "head"; "" if the checkpoint gets no such scales."""
        return self.kv_scales if self.kv_cache_dtype in KV_FP8 else ""

    def recipe(self) -> Recipe:
        """Return the recipe; raises Diagnostic E351 for unknown schemes and options that do not fit together."""
        if self.kv and self.calibrate is None:
            raise Diagnostic("E351", "scales of the KV cache need texts", "add --calibrate FILE")
        if self.kv_scales != BY_LAYER and not self.kv:
            cause = f"--kv-scales {self.kv_scales} without scales of the KV cache"
            raise Diagnostic("E351", cause, "add --kv-cache-dtype fp8 --calibrate FILE, or omit --kv-scales")
        if self.length < 2:
            cause = f"--length {self.length}: in a window of one token, attention has nothing to attend to"
            raise Diagnostic("E351", cause, "use a --length of hundreds of tokens, as in the texts to be served")
        if self.scheme == NONE:
            if not self.kv or self.group_size is not None or self.ignore:
                cause = "--scheme none leaves the weights as they are; --group-size and --ignore have no effect"
                raise Diagnostic("E351", cause, "use it with --kv-cache-dtype fp8 --calibrate FILE only")
            return UNCHANGED
        if self.scheme not in RECIPES:
            raise Diagnostic("E351", f"there is no scheme {self.scheme!r}", f"use one of {', '.join(RECIPES)}")
        recipe = self._grouped(RECIPES[self.scheme])
        has_texts = self.calibrate is not None
        if recipe.calibrated and not has_texts:
            raise Diagnostic("E351", f"{self.scheme} needs texts", "add --calibrate FILE; int4 needs none")
        smooths = self.scheme == "w8a8" and has_texts
        if has_texts and not (recipe.calibrated or smooths or self.kv):
            raise Diagnostic("E351", f"{self.scheme} uses no texts", "omit --calibrate")
        return replace(recipe, method=SMOOTH) if smooths else recipe

    def _grouped(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the requested group size; raises Diagnostic E351 if it cannot have it."""
        if self.group_size is None:
            return recipe
        if recipe.layout != "pack-quantized":
            whole = ", ".join(r.name for r in RECIPES.values() if r.layout == "pack-quantized")
            raise Diagnostic("E351", f"{self.scheme} has no groups of columns", f"omit --group-size; {whole} do")
        if self.group_size < 1:
            raise Diagnostic("E351", f"--group-size {self.group_size} is not supported", "use 32, 64 or 128")
        return recipe.grouped(self.group_size)


@dataclass(frozen=True)
class Plan:
    """The weights to quantise.

    weights: stored name -> module, as the checkpoint names it. ignored: linear modules that are not quantised. experts:
    names among `weights` that are experts of a mixture. stacks: stored names of stacks of experts, which stay as they
    are. kv: see `Settings.kv`.
    """

    recipe: Recipe
    weights: dict[str, str]
    ignored: tuple[str, ...]
    experts: frozenset[str]
    bytes_before: int
    bytes_after: int
    kv: str = ""
    stacks: tuple[str, ...] = ()

    def lines(self, source: ModelSource) -> list[str]:
        """Describe the plan."""
        count = sum(prod(source.shape(name)) for name in self.weights)
        tensors = source.files.tensors
        unchanged = len(tensors) - len(self.weights)
        linears = f" (of these, linear: {first_names(self.ignored)})" if self.ignored else ""
        before, after = size_text(self.bytes_before), size_text(self.bytes_after)
        lines = [
            f"{source.source.model_type}: {len(self.weights)} weights ({count / 1e6:.1f} million parameters) "
            f"to {self.recipe.describe()}",
            f"unchanged: {unchanged} tensors{linears}",
            f"tensors take {before} before and {after} after",
        ]
        if self.experts and self.recipe.method == SMOOTH:
            lines.append(f"rounded to nearest, because SmoothQuant leaves experts: {len(self.experts)} weights")
        elif self.experts and self.recipe.calibrated:
            lines.append(f"experts: {len(self.experts)} weights, each calibrated with the tokens that are routed to it")
        if self.stacks:
            size = sum(prod(source.shape(name)) * DTYPES[tensors[name].dtype].bits // 8 for name in self.stacks)
            stacks = f"{len(self.stacks)} tensors ({size_text(size)}), such as {self.stacks[0]}"
            lines.append(f"not quantised, because they are stacks of experts: {stacks}")
        tiles = self.recipe.block[1] if self.recipe.strategy == "block" else 0
        if tiles and (ragged := [name for name in self.weights if source.shape(name)[1] % tiles]):
            lines.append(
                f"columns that are not a multiple of {tiles}: {len(ragged)} weights, which transformers cannot "
                f"multiply; --scheme fp8 has no such limit"
            )
        if self.kv:
            lines.append(f"KV cache: scales of 8-bit floats for keys and values of each {self.kv}")
        return lines


def make_plan(source: ModelSource, recipe: Recipe, ignore: Sequence[str], kv: str = "") -> Plan:
    """Choose the weights; raises Diagnostic E350-E352 and E326."""
    linears = {stored: path_of(stored) for stored in source.linears().values()}
    experts = frozenset(source.experts())
    candidates = linears | {stored: path_of(stored) for stored in sorted(experts)}
    dropped = _dropped(candidates, ignore)
    unchanged = recipe.name == NONE
    chosen = {stored: m for stored, m in candidates.items() if m not in dropped and not unchanged}
    if not chosen and not unchanged:
        cause = f"{source.source.folder} has no linear modules to quantise{' besides those ignored' if dropped else ''}"
        raise Diagnostic("E350", cause, "see docs/quantization.md for what is quantised")
    _check_groups({name: source.shape(name) for name in chosen}, recipe)
    before = after = 0
    for name, t in source.files.tensors.items():
        size = prod(t.shape) * DTYPES[t.dtype].bits // 8
        before += size
        after += _size(t.shape, recipe, source.dtype(name).itemsize) if name in chosen else size
    head = {path for path, m in source.model.named_modules() if m is source.model.get_output_embeddings()}
    ignored = () if unchanged else tuple(sorted({*dropped, *head, *_routers(source, candidates)}))
    stacks = () if unchanged else tuple(source.stacks())
    return Plan(recipe, chosen, ignored, experts & chosen.keys(), before, after, kv, stacks)


def path_of(stored: str) -> str:
    """Return the module of a stored weight."""
    return stored.removesuffix(".weight")


def _dropped(candidates: dict[str, str], ignore: Sequence[str]) -> set[str]:
    """Return the modules that patterns name; raises Diagnostic E351 for a pattern that is wrong or matches nothing."""
    dropped = set()
    for pattern in ignore:
        try:
            regex = re.compile(pattern[3:] if pattern.startswith("re:") else f"{re.escape(pattern)}$")
        except re.error as e:
            raise Diagnostic("E351", f"--ignore {pattern!r}: {e}", "correct the regular expression") from None
        matches = {m for m in candidates.values() if regex.match(m)}
        if not matches and pattern != "lm_head":
            example = next(iter(candidates.values()), "none")
            remedy = f"use a module's name, such as {example}, or re: and a regular expression"
            raise Diagnostic("E351", f"--ignore {pattern!r} matches no linear module", remedy)
        dropped |= matches
    return dropped


def _routers(source: ModelSource, candidates: dict[str, str]) -> set[str]:
    """Return the routers and gates: the matrices of a mixture besides its experts, which other loaders keep in linear
    modules.
    """
    parents = {stored.partition(".experts.")[0] for stored in source.experts()}
    return {
        path_of(name)
        for name, t in source.files.tensors.items()
        if len(t.shape) == 2 and name not in candidates and name.endswith(".weight")
        if any(name.startswith(f"{p}.") for p in parents)
    }


def _check_groups(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> None:
    """Raise Diagnostic E352 if the columns of a weight are not whole groups.

    The remedy is a size that fits all weights, or to leave out those of the module's name, if all of them do not fit.
    """
    group = recipe.block[1]
    wrong = sorted(name for name, (_, k) in shapes.items() if recipe.strategy == "group" and k % group)
    if not wrong:
        return
    n, k = shapes[wrong[0]]
    sizes = [g for g in (128, 64, 32, 16) if not any(columns % g for _, columns in shapes.values())]
    kinds = {path_of(name).rpartition(".")[2] for name in wrong}
    same = [name for name in shapes if path_of(name).rpartition(".")[2] in kinds]
    only = (
        f"'re:.*\\.({'|'.join(sorted(kinds))})$'" if len(wrong) > 1 and len(same) == len(wrong) else path_of(wrong[0])
    )
    more = f" ({len(wrong)} weights have such columns)" if len(wrong) > 1 else ""
    cause = f"{wrong[0]} is [{n}, {k}]: its {k} columns are not groups of {group}{more}"
    raise Diagnostic("E352", cause, (f"use --group-size {sizes[0]}, or " if sizes else "use ") + f"--ignore {only}")


def _size(shape: tuple[int, ...], recipe: Recipe, scale: int) -> int:
    """Return the bytes of a quantised weight."""
    n, k = shape
    blocks = -(-n // (recipe.block[0] or n)) * -(-k // (recipe.block[1] or k))
    return n * k * recipe.bits // 8 + blocks * scale + (0 if recipe.symmetric else blocks * recipe.bits // 8)


def first_names(names: Sequence[str]) -> str:
    """Return the first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
