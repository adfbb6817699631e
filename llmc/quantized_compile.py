"""`llmc compile --quant`: recipes that only round are a pass; others quantise the checkpoint first."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmc.console import Console
from llmc.diagnostics import Diagnostic
from llmc.options import Options
from llmc.passes.base import Pass
from llmc.passes.pipeline import override, require
from llmc.quant.make.recipes import BY_HEAD, KV_FP8, NONE, RECIPES, ROUNDED, Recipe


def with_quantize(passes: Sequence[Pass], o: Options) -> list[Pass]:
    """Set the options of the pass `quantize`; raises Diagnostic E421 if it is needed and missing."""
    weights = NONE if quantises_first(o) else o.quant
    if weights == o.quant_head == NONE:
        return list(passes)
    require(passes, "quantize", "--quant", ", for example after fold")
    return override(passes, "quantize", weights=weights, group=o.group_size or 0, head=o.quant_head)


def unread_codes(weights: str, traced: Any) -> str | None:
    """Return the note that a compile with the option `weights` does not use the codes of a quantised checkpoint."""
    if weights == "packed" or not traced.source.config.get("quantization_config"):
        return None
    return (
        f"the checkpoint is quantised, but with --weights {weights} it is not read: kernels and weights are "
        f"{traced.facts.dtype}; compile without --weights for kernels that read the codes"
    )


def quantises_first(o: Options) -> bool:
    """Whether a compile makes a quantised checkpoint of the model first, instead of rounding weights by a pass."""
    return o.quant != NONE and not _rounds(o)


def planned_recipe(o: Options) -> Recipe:
    """Return the recipe of `--quant` with its groups."""
    recipe = RECIPES[o.quant]
    return recipe.grouped(o.group_size) if o.group_size else recipe


def rounding_like(recipe: str) -> str:
    """Return the name of the recipe that rounds to nearest, to codes of as many bits."""
    return next(name for name in ROUNDED if RECIPES[name].bits == RECIPES[recipe].bits)


def _rounds(o: Options) -> bool:
    return not (RECIPES[o.quant].calibrated or o.calibrate)


@contextmanager
def quantised_first(model: str | Path, output: Path, o: Options, console: Console) -> Iterator[str | Path]:
    """Yield the folder to compile: `model`, or a quantised copy of it next to `output` while the context lasts.

    Only recipes that use texts make a copy; the pass `quantize` applies the others. Raises Diagnostic E351 if recipe
    and texts do not fit together, and the errors of `quantize_model`.
    """
    kv = o.kv_cache_dtype in KV_FP8 and o.calibrate is not None
    if o.quant == NONE and o.calibrate and not kv:
        remedy = "add --quant gptq, awq, autoround or w8a8, or --kv-cache-dtype fp8"
        raise Diagnostic("E351", "--calibrate without --quant", remedy)
    if not kv and (o.quant == NONE or _rounds(o)):
        yield model
        return
    console.begin("quantize", f"{model} (imports torch and transformers)")
    from llmc.quant.make.plan import Settings
    from llmc.quant.make.quantize_model import quantize_model

    cache = o.kv_cache_dtype if kv else "auto"
    settings = Settings(o.quant, o.group_size, o.calibrate, kv_cache_dtype=cache, kv_scales=BY_HEAD)
    settings.recipe()  # report options that do not fit together before anything is written
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".quantised-", dir=parent) as scratch:
        folder = Path(scratch) / (Path(model).resolve().name or "model")
        console.note(quantize_model(model, folder, settings, console, o.hub).text())
        yield folder
