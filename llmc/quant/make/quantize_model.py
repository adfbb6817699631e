"""`llmc quantize`: reads a model folder and writes a quantised one, a tensor or a layer at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.format.size_text import size_text
from torch import Tensor

from llmc.frontend.hub import PUBLIC, Hub, locate
from llmc.frontend.model_folder import open_source
from llmc.frontend.pooling_files import refuse_pooled
from llmc.quant.make.calibrated import Progress, quantise_layers
from llmc.quant.make.folder_writer import ShardWriter, check_free, copy_files, new_folder, write_json
from llmc.quant.make.model_source import ModelSource
from llmc.quant.make.plan import Plan, Settings, make_plan
from llmc.quant.make.recipes import config_group
from llmc.quant.make.rounding import finite, round_to_nearest
from llmc.quant.make.texts import read_texts, windows


@dataclass(frozen=True)
class QuantizedModel:
    """The outcome: the folder, its files of weights, bytes of tensors before and after, and seconds."""

    output: Path
    shards: int
    weights: int
    bytes_before: int
    bytes_after: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as JSON-compatible data."""
        return {**vars(self), "output": str(self.output)}

    def text(self) -> str:
        """Return the outcome as a line."""
        before, after = size_text(self.bytes_before), size_text(self.bytes_after)
        return f"{self.output} in {self.seconds:.1f} s: {self.weights} weights, {before} to {after}"


def quantize_model(
    model: str | Path, out: Path, settings: Settings, progress: Progress, hub: Hub = PUBLIC
) -> QuantizedModel:
    """Quantise a model folder or hub id into the new folder `out`.

    Raises Diagnostic E350-E352 (see docs/errors.md), E120 if `out` exists, E123 if it cannot be written, and the errors
    of checkpoints that cannot be read.
    """
    started = time.monotonic()
    recipe = settings.recipe()
    check_free(out)
    at = locate(model, hub, progress=lambda done, of: progress.part("fetch", done, of, "B"))
    opened = open_source(at.folder)
    refuse_pooled(opened)
    with ModelSource(opened) as source:
        plan = make_plan(source, recipe, settings.ignore, settings.kv)
        for line in plan.lines(source):
            progress.note(line)
        tokens = _samples(source, settings, progress) if settings.calibrate else None
        with new_folder(out) as folder:
            writer = ShardWriter(folder)
            if tokens is None:
                _round(source, plan, writer, progress)
            else:
                quantise_layers(source, plan, tokens, settings.seed, folder, writer, progress)
            shards = writer.finish()
            copy_files(source.source.tokenizer_files, source.source.folder, folder)
            write_json(folder / "config.json", new_config(source, plan))
        seconds = time.monotonic() - started
        return QuantizedModel(out, shards, len(plan.weights), plan.bytes_before, writer.total, seconds)


def _samples(source: ModelSource, settings: Settings, progress: Progress) -> Tensor:
    """Return the windows of tokens, and print a line about them."""
    assert settings.calibrate is not None
    texts = read_texts(settings.calibrate)
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None) or settings.length
    length = min(settings.length, limit)
    tokens = windows(texts, source.source.folder, settings.samples, length, settings.seed)
    size = tokens.numel() * source.config.get_text_config().hidden_size * 4
    progress.note(
        f"calibration: {settings.calibrate}, {len(tokens)} windows of {length} tokens, seed {settings.seed}; "
        f"their hidden states take {size_text(size)} of disk next to the output"
    )
    return tokens


def new_config(source: ModelSource, plan: Plan) -> dict[str, Any]:
    """Return config.json of the quantised model."""
    quantisation = config_group(plan.recipe, plan.kv) | {"ignore": list(plan.ignored)}
    return {**source.source.config, "quantization_config": quantisation}


def _round(source: ModelSource, plan: Plan, writer: ShardWriter, progress: Progress) -> None:
    """Round every planned weight to nearest, and write all tensors in the order of the files."""
    names = list(source.files.tensors)
    for i, name in enumerate(names):
        progress.part("quantise", i, len(names), " tensors")
        x = source.read(name)
        if name not in plan.weights:
            writer.add(name, x)
            continue
        writer.add_weight(plan.weights[name], round_to_nearest(finite(name, x.float()), plan.recipe, x.dtype))
