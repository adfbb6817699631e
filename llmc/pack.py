"""`llmc pack`: packs a checkpoint's weights into an artifact that was compiled without weights."""

from __future__ import annotations

from pathlib import Path

from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.names import GENERATE
from llmc_runtime.format.size_text import size_text

from llmc.artifact.hard_link import last_stage, pack_weights
from llmc.console import Console, run_command
from llmc.diagnostics import Diagnostic
from llmc.driver import locate_model
from llmc.extension import load
from llmc.frontend.hub import Hub
from llmc.frontend.tokenizer_files import TOKENIZER
from llmc.ir.graph import Graph
from llmc.ir.text import parse
from llmc.kv_cache import WithKvScales
from llmc.options import Options
from llmc.passes.lower.page_attention import KV_SCALES


def pack_model(artifact: Path, model: str | Path, console: Console, hub: Hub) -> Manifest:
    """Pack the weights of `model` (a folder or hub id) into an artifact that was compiled without weights.

    Raises LlmcError E1xx if the artifact cannot be opened, and Diagnostic E3xx if the checkpoint does not match it.
    """
    registry = load()
    manifest, text = last_stage(artifact)
    graph = parse(text, registry.opset()).graphs["weights"]
    dtypes = [v.type.dtype for v in graph.inputs if v.type.rank > 1]
    located = locate_model(model, Options(hub=hub), registry, console)

    from llmc.frontend.checkpoint import Checkpoint  # imports torch, as tracing does
    from llmc.frontend.trace_model import trace
    from llmc.quant.decoder import decoder_of

    pooling = manifest.pooling
    traced = trace(
        located.folder,
        max(set(dtypes), key=dtypes.count),
        manifest.limits.max_model_len,
        layers=manifest.source.layers or None,
        task=pooling.task if pooling else GENERATE,
        pooling=pooling.kind if pooling else "auto",
    )
    _check_same_weights(graph, traced.module.graphs["main"], model)
    with Checkpoint(traced, decoder=decoder_of(traced.source.config, registry.schemes)) as checkpoint:
        packed = pack_weights(
            artifact, graph, WithKvScales(checkpoint, graph), lambda n, of: console.part("weights", n, of, "B")
        )
        if text := checkpoint.not_finite.note:
            console.note(f"note: {text}")
    console.note(f"{artifact}: {size_text(packed.weights.nbytes)} packed and hashed")
    target, task = packed.target, pooling.task if pooling else ""
    tokenizer = any(Path(name).name == TOKENIZER for name in packed.tokenizer)
    if line := run_command(artifact, target.name, target.arch, tokenizer, task):
        console.note(line)
    return packed


def _check_same_weights(compiled: Graph, traced: Graph, model: str | Path) -> None:
    """Raise Diagnostic E328 if a weight that the artifact reads has another type in the model, or one of them lacks it.

    compiled: the artifact's graph @weights. traced: @main of the model.
    """
    read = {v.name: v.type for v in compiled.inputs if not v.name.startswith(KV_SCALES)}
    offered = {v.name: v.type for v in traced.inputs if v.weight and v.uses}
    for name in sorted(read.keys() | offered.keys()):
        if read.get(name) != offered.get(name):
            cause = f"{name} is {read.get(name, 'absent')} in the artifact, {offered.get(name, 'absent')} in {model}"
            raise Diagnostic("E328", cause, "use the checkpoint of the model that the artifact was compiled from")
