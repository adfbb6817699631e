"""`llmc pack`: packs a checkpoint's weights into an artifact that was compiled without weights."""

from __future__ import annotations

from pathlib import Path

from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.pooling import GENERATE
from llmc_runtime.format.size_text import size_text

from llmc.artifact.hard_link import last_stage, pack_weights
from llmc.artifact.write import weight_bytes
from llmc.console import Console, Quiet
from llmc.diagnostics import Diagnostic
from llmc.driver import locate_model
from llmc.extension import load
from llmc.frontend.hub import PUBLIC, Hub
from llmc.frontend.tokenizer_files import TOKENIZER
from llmc.ir.text import parse
from llmc.kv_cache import WithKvScales
from llmc.next_command import run_command
from llmc.options import Options
from llmc.passes.lower.page_attention import KV_SCALES


def pack_model(artifact: Path, model: str | Path, console: Console | None = None, hub: Hub = PUBLIC) -> Manifest:
    """Pack the weights of `model` (a folder or hub id) into an artifact that was compiled without weights.

    Raises LlmcError E1xx if the artifact cannot be opened, and Diagnostic E3xx if the checkpoint does not match it.
    """
    from llmc.frontend.checkpoint import Checkpoint
    from llmc.frontend.trace_model import trace
    from llmc.quant.decoder import decoder_of

    console, registry = console or Quiet(), load()
    manifest, text = last_stage(artifact)
    limits = manifest.limits
    graph = parse(text, registry.opset()).graphs["weights"]
    dtypes = [v.type.dtype for v in graph.inputs if v.type.rank > 1]
    at = locate_model(model, Options(hub=hub), registry, console)
    pooling = manifest.pooling
    traced = trace(
        at.folder,
        max(set(dtypes), key=dtypes.count),
        limits.max_model_len,
        layers=manifest.source.layers or None,
        task=pooling.task if pooling else GENERATE,
        pooling=pooling.kind if pooling else "auto",
    )
    ours = {v.name: v.type for v in graph.inputs if not v.name.startswith(KV_SCALES)}
    theirs = {v.name: v.type for v in traced.module.graphs["main"].inputs if v.weight and v.uses}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            cause = f"{name} is {ours.get(name, 'absent')} in the artifact, {theirs.get(name, 'absent')} in {model}"
            raise Diagnostic("E328", cause, "use the checkpoint of the model that the artifact was compiled from")
    with Checkpoint(traced, decoder=decoder_of(traced.source.config, registry.schemes)) as checkpoint:
        done = pack_weights(
            artifact, graph, WithKvScales(checkpoint, graph), lambda n, of: console.part("weights", n, of, "B")
        )
        if text := checkpoint.not_finite.note:
            console.note(f"note: {text}")
    console.note(f"{artifact}: {size_text(weight_bytes(done))} packed and hashed")
    tokenizer = any(Path(name).name == TOKENIZER for name in done.tokenizer)
    if line := run_command(artifact, done.target.name, done.target.arch, tokenizer, pooling.task if pooling else ""):
        console.note(line)
    return done
