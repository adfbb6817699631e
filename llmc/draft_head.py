"""`llmc compile --draft eagle:PATH|mtp`: a head that drafts from the hidden states of the model that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from llmc_runtime.format.program import DRAFT_PREFIX

from llmc.diagnostics import Diagnostic
from llmc.draft_mtp import MTP, MtpLayer, add_graph, add_mtp, mtp_of, weight_of
from llmc.frontend.eagle_config import EAGLE, MATCHING_HEAD, HeadConfig, read_head
from llmc.frontend.tokenizer_files import check_same_tokens
from llmc.ir.graph import Builder, Graph, Value
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.options import Options

_CONVERT = (
    'convert, in an environment you trust: python -c "import torch; from safetensors.torch import save_file; '
    "save_file(torch.load('{}', weights_only=True), 'model.safetensors')\""
)


def head_of(o: Options) -> HeadConfig | MtpLayer | None:
    """Return the head that the options name, None if they name none.

    An EAGLE-3 head of a hub id is downloaded. Raises Diagnostic E360 if the folder is not an EAGLE-3 head or only a
    part of the model is compiled, and the errors of `locate`.
    """
    if o.draft == MTP:
        return mtp_of(o)
    if o.draft is None or not o.draft.startswith(EAGLE):
        return None
    from llmc.frontend.hub import locate
    from llmc.frontend.unsupported import Pickled

    try:
        return read_head(locate(o.draft.removeprefix(EAGLE), o.hub, o.weights == "packed").folder)
    except Pickled as e:  # transformers, which the usual remedy uses, does not have the architecture
        raise Diagnostic(e.code, e.cause, _CONVERT.format(e.file)).about("head") from e
    except Diagnostic as e:
        raise (e if e.code == "E360" else e.about("head")) from e


def add_head(job: Any, traced: Any, stack: ExitStack, packed: bool) -> Any:
    """Trace the head of a Compilation into the graph @draft of the module of `traced`, whose @main has its input.

    With an EAGLE-3 head, @main returns, after the logits, the three hidden states side by side, normalized if the head
    does that, times the head's `fc`, plus its bias if it has one. Returns the head's weights, which `stack` closes;
    None unless `packed`. Raises Diagnostic E360 if the head does not fit the model.
    """
    if isinstance(job.head, MtpLayer):
        return add_mtp(job, traced, stack, packed)
    from llmc.frontend.eagle_head import EMBEDDING, HeadWeights, head_graph, trace_head

    head: HeadConfig = job.head
    facts, main = traced.facts, traced.module.graphs["main"]
    logits, *states = main.outputs
    check_same_tokens(job.model, head.folder, f"the head {head.folder}", MATCHING_HEAD)
    weights = HeadWeights(head, int(states[0].type.shape[-1]), facts.vocab_size) if packed else None
    if weights:
        stack.callback(weights.close)
    traced_head = trace_head(head, facts.dtype, facts.vocab_size, facts.max_positions, job.tokens, job.rows)
    graph: Graph = head_graph(traced_head, facts.vocab_size)
    shared = "" if weights and weights.embeds else _embedding(traced, graph, EMBEDDING)
    joined, joining = _joined(traced, head, states, bool(weights and weights.biased))
    head_inputs = [v for v in (*joining, *graph.inputs) if v.weight and v.name != shared]
    if weights:
        weights.serve({v.name: v.type for v in head_inputs}, traced_head.buffers)
    for v in head_inputs:
        v.name = DRAFT_PREFIX + v.name
    main.outputs = [logits, joined]
    add_graph(job, traced, graph, "EAGLE-3 head")
    return weights


def _joined(traced: Any, head: HeadConfig, states: Sequence[Value], biased: bool) -> tuple[Value, list[Value]]:
    """Return the three hidden states as one of the head's width, computed in @main, and the weights that this needs."""
    from llmc.frontend.eagle_head import FC, FC_BIAS, FC_NORM, INPUT_NORM

    main, dtype = traced.module.graphs["main"], traced.facts.dtype
    width, eps = int(states[0].type.shape[-1]), head.eps
    b, weights = Builder(main, OPS, loc="fc"), list[Value]()

    def weight(name: str, *shape: int) -> Value:
        weights.append(main.input(name, tensor(dtype, *shape), weight=True))
        return weights[-1]

    parts = [x if x.type.dtype == dtype else b.cast(x, dtype=dtype) for x in states]
    if head.fc_norm:
        parts = [b.rms_norm(x, weight(FC_NORM.format(i), width), eps=eps) for i, x in enumerate(parts)]
    whole = b.concat(*parts, axis=1)
    if head.norm_before_fc:
        whole = b.rms_norm(whole, weight(INPUT_NORM, 3 * width), eps=eps)
    head_width = int(head.decoder["hidden_size"])
    joined = b.linear(whole, weight(FC, head_width, 3 * width))
    if biased:
        joined = b.add(joined, b.broadcast(weight(FC_BIAS, head_width), shape=joined.type.shape))
    return joined, weights


def _embedding(traced: Any, graph: Graph, name: str) -> str:
    """Make the head's graph read the model's embedding instead of the weight `name`; return the embedding's name.

    Raises Diagnostic E360 if the model has none of the same shape.
    """
    model_name = weight_of(traced, traced.model.get_input_embeddings())
    model_type = next((v.type for v in traced.module.graphs["main"].inputs if v.name == model_name), None)
    (embedding,) = (v for v in graph.inputs if v.name == name)
    if model_type != embedding.type:
        cause = f"the head has no embedding of its own, and {traced.facts.architecture} has none of {embedding.type}"
        raise Diagnostic("E360", cause, "use a head with an embedding of its own")
    embedding.name = model_name
    return model_name
