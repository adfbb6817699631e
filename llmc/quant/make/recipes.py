"""The recipes of `llmc quantize --scheme`. This module does not import torch, so that listing the names is fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.ir.qformat import QFormat

GROUP, TILE = 128, 128


@dataclass(frozen=True)
class Recipe:
    """A format, and the method that chooses its codes.

    method: "rtn" (round to nearest), "gptq", "awq" or "autoround". layout: `format` of compressed-tensors. code: "int"
    or "float" (float8_e4m3). block: rows and columns that share a scale; 0 is the whole axis. symmetric: there are no
    zero points. activations: the code of activations ("int", "float"), which are quantised dynamically; "" for none.
    act_group: columns of activations that share a scale; 0 for one scale per token.
    """

    name: str
    summary: str
    method: str
    layout: str
    code: str
    bits: int
    block: tuple[int, int]
    symmetric: bool = True
    activations: str = ""
    act_group: int = 0

    @property
    def calibrated(self) -> bool:
        """Whether the method needs texts."""
        return self.method != "rtn"

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest code."""
        return (-448, 448) if self.code == "float" else (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1)

    @property
    def strategy(self) -> str:
        """The name of the block in compressed-tensors."""
        if self.block[0] > 1:
            return "block"
        return "group" if self.block[1] else "channel"

    def grouped(self, size: int) -> Recipe:
        """Return this recipe with groups of `size` columns."""
        return replace(self, block=(1, size))

    def weight_format(self, logical: str) -> QFormat:
        """Return the format of the weights, whose dequantised numbers have the dtype `logical`."""
        from llmc.ir.qformat import QFormat

        if self.code == "float":
            code = "f8e4m3"
        else:
            code = "i8" if self.bits == 8 else f"u{self.bits}"
        zero = str(1 << (self.bits - 1)) if code[0] == "u" else ""
        act = {"int": "i8", "float": "f8e4m3", "": ""}[self.activations]
        return QFormat.of(code, self.block, "bf16", zero, logical, act)

    def describe(self) -> str:
        """Describe the format in a line of the plan."""
        rows, columns = self.block
        if rows > 1:
            block = f"tiles of {rows} x {columns}"
        else:
            block = f"groups of {columns}" if columns else "rows"
        code = "float8_e4m3" if self.code == "float" else f"int{self.bits}"
        kind = "" if self.symmetric else ", with zero points"
        return f"{code}, scales for {block}{kind}, {self.layout}"


def _int4(name: str, summary: str, method: str, symmetric: bool = True) -> Recipe:
    return Recipe(name, summary, method, "pack-quantized", "int", 4, (1, GROUP), symmetric)


_RECIPES = (
    Recipe("int8", "8-bit weights, rounded to nearest", "rtn", "pack-quantized", "int", 8, (1, 0)),
    Recipe(
        "w8a8", "8-bit weights and activations; SmoothQuant with --calibrate", "rtn", "int-quantized", "int", 8,
        (1, 0), activations="int",
    ),
    Recipe(
        "fp8", "float8 weights and activations, a scale for each row and token", "rtn", "float-quantized", "float", 8,
        (1, 0), activations="float",
    ),
    Recipe(
        "fp8-block", "the same, a scale for each tile of 128 x 128", "rtn", "float-quantized", "float", 8,
        (TILE, TILE), activations="float", act_group=TILE,
    ),
    _int4("int4", "4-bit weights, rounded to nearest", "rtn"),
    _int4("gptq", "4-bit weights by GPTQ", "gptq"),
    _int4("awq", "4-bit weights with zero points by AWQ", "awq", symmetric=False),
    _int4("autoround", "4-bit weights by AutoRound", "autoround"),
)  # fmt: skip
RECIPES: Mapping[str, Recipe] = MappingProxyType({r.name: r for r in _RECIPES})
ROUNDED = tuple(r.name for r in _RECIPES if not r.calibrated)  # recipes that need no texts
NONE = "none"  # given in place of a recipe: weights are not quantised
UNCHANGED = Recipe(NONE, "weights stay as they are", "rtn", "dense", "float", 16, (1, 0))
SMOOTH = "smoothquant"  # the method of w8a8 with texts
KV_FP8 = ("fp8", "fp8_e4m3")  # values of --kv-cache-dtype
BY_LAYER, BY_HEAD = "layer", "head"  # values of --kv-scales
F8_LARGEST = 448.0


def config_group(recipe: Recipe, kv: str = "") -> dict[str, Any]:
    """Return the quantization_config of a recipe, without its list of modules to ignore.

    kv: which scales a KV cache of 8-bit floats has ("layer" or "head"), "" for none.
    """
    strategy = {BY_LAYER: "tensor", BY_HEAD: "attn_head", "": ""}[kv]
    return {
        "config_groups": {} if recipe.name == NONE else {"group_0": _group(recipe)},
        "format": recipe.layout,
        "global_compression_ratio": None,
        "kv_cache_scheme": _args("float", 8, strategy) if strategy else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": "0.19.0",  # version of compressed-tensors, which defines these fields
    }


def _group(recipe: Recipe) -> dict[str, Any]:
    weights = _args(recipe.code, recipe.bits, recipe.strategy, symmetric=recipe.symmetric)
    if recipe.strategy == "group":
        weights["group_size"] = recipe.block[1]
    if recipe.strategy == "block":
        weights["block_structure"] = list(recipe.block)
    if recipe.method == "gptq":
        weights["actorder"] = "static"
    acts = None
    if recipe.activations:
        acts = _args(recipe.activations, 8, "group" if recipe.act_group else "token", dynamic=True)
        acts["group_size"] = recipe.act_group or None
    return {
        "format": recipe.layout,
        "input_activations": acts,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }


def _args(code: str, bits: int, strategy: str, symmetric: bool = True, dynamic: bool = False) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": None,
        "num_bits": bits,
        "observer": None if dynamic else "memoryless_minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": symmetric,
        "type": code,
    }
