"""Predicts the quantised types that weights would have after a calibrated recipe, for dry runs of compiles."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.frontend.checkpoint import PARTS
from llmc.frontend.model_folder import Source
from llmc.frontend.trace_model import Traced
from llmc.ir.graph import inputs_of
from llmc.ir.qformat import QFormat
from llmc.ir.types import Type
from llmc.quant.make.model_source import FLOATS, ModelSource
from llmc.quant.make.plan import make_plan
from llmc.quant.make.recipes import Recipe


class PlannedWeights:
    """The part of `QuantisedSource` that `use_codes` needs, for a checkpoint that does not exist yet."""

    def __init__(self, source: Source, recipe: Recipe, traced: Traced):
        """Plan to quantise `source`; raises Diagnostic E350 and E352, and the errors of unreadable checkpoints."""
        self.formats: dict[str, QFormat] = {}
        self.counts: dict[str, int] = {}
        self.orders: dict[str, str] = {}
        self.transposed: set[str] = set()
        self._shapes = {name: weight.type.shape for name, weight in traced.weights.items()}
        with ModelSource(source) as opened:
            chosen = make_plan(opened, recipe, ()).weights
            for name in self._shapes:
                stored = [v.name for v in inputs_of(opened.values[name])] if name in opened.values else []
                if stored and chosen.keys() >= set(stored):
                    scale = next(dtype for dtype, t in FLOATS.items() if t == opened.dtype(stored[0]))
                    self.formats[name], self.counts[name] = stored_format(recipe, scale), len(stored)

    def part_types(self, name: str) -> Mapping[str, Type]:
        """See `QuantisedSource.part_types`."""
        f = self.formats[name]
        parts = f.parts(self._shapes[name]).values()
        return {
            f"{name}.{part}": Type(f.storage if part == PARTS[0] else dtype, shape)
            for part, (dtype, shape) in zip(PARTS, parts, strict=False)
        }


def stored_format(recipe: Recipe, scale: str) -> QFormat:
    """Return the format in which a checkpoint of a recipe is read, with scales of the dtype `scale`."""
    f = recipe.weight_format("bf16")
    return QFormat.of(f.code, f.block, scale, f.zero if recipe.symmetric else "u8", act=f.act)
