"""`llmc compile --draft mtp`: the multi-token-prediction layer of the model's own checkpoint drafts tokens."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from llmc_runtime.format.program import DRAFT_PREFIX

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph
from llmc.ir.text import show
from llmc.options import Options
from llmc.passes.lower.page_attention import DRAFT

MTP = "mtp"  # the value of the option --draft


@dataclass(frozen=True)
class MtpLayer:
    """A head that reads the last hidden state of the model that verifies."""

    def aux_layers(self, total: int) -> tuple[int, ...]:
        """Return the number of the last hidden state, which the traced model returns (see trace_model.trace)."""
        return (total,)


def mtp_of(o: Options) -> MtpLayer:
    """Return the layer that the options name. Raises Diagnostic E360 if only a part of the model is compiled."""
    if o.layers:
        cause = f"--draft {MTP} with --layers: the layer reads the last hidden state of the whole model"
        raise Diagnostic("E360", cause, "compile all layers, or without --draft")
    return MtpLayer()


def add_mtp(job: Any, traced: Any, stack: ExitStack, packed: bool) -> Any:
    """Trace the layer of a Compilation's model into the graph @draft of the module of `traced`.

    Returns its checkpoint, which `stack` closes; None unless `packed`. Raises Diagnostic E360 if the model has no such
    layer, and the errors of `Compilation.checkpoint`.
    """
    from llmc.frontend.mtp_head import trace_mtp
    from llmc.frontend.mtp_names import MTP_NAMES, OTHER_DRAFTS, are_apart, tensors_of

    tensors = tensors_of(traced.model.config) or (MTP_NAMES if are_apart(traced.model) else None)
    if tensors is None or (packed and not _stores(traced, tensors)):
        raise Diagnostic("E360", _lacks(traced, tensors is None), OTHER_DRAFTS)
    head = trace_mtp(traced, job.tokens, job.rows)
    checkpoint = stack.enter_context(job.checkpoint(head.traced)) if packed else None
    graph: Graph = head.traced.module.graphs["main"]
    shared = {name: weight_of(traced, module) for name, module in head.shared}
    for v in graph.inputs:
        if v.weight:
            v.name = shared.get(v.name, DRAFT_PREFIX + v.name)
    add_graph(job, traced, graph, "multi-token-prediction layer")
    return checkpoint


def add_graph(job: Any, traced: Any, graph: Graph, description: str) -> None:
    """Add the graph of a head to the module of `traced`, as @draft."""
    graph.name = DRAFT
    traced.module.graphs[DRAFT] = graph
    job.ir.append(("with-draft", show(traced.module)))
    job.done("draft", f"{description}, {len(graph.nodes)} nodes, {traced.facts.dtype}")


def _lacks(traced: Any, undeclared: bool) -> str:
    """Return why a model has no layer that drafts."""
    kind = traced.facts.architecture
    if not undeclared:
        return f"the checkpoint stores no multi-token-prediction layer of {kind}"
    if getattr(traced.model.config.get_text_config(), "num_nextn_predict_layers", None):
        return f"the multi-token-prediction layers of {kind} are not supported: transformers does not define them"
    return f"config.json declares no multi-token-prediction layer of {kind}"


def _stores(traced: Any, tensors: Any) -> bool:
    from llmc.frontend.safetensors_reader import TensorFiles

    files = TensorFiles(traced.source.folder)
    try:
        return any(tensors.search(name) for name in files.tensors)
    finally:
        files.close()


def weight_of(traced: Any, module: Any) -> str:
    """Return the name in @main of the weight of a module of the model."""
    path = next((path for path, m in traced.model.named_modules() if m is module), "")
    return str(traced.tied.get(f"{path}.weight", f"{path}.weight"))
