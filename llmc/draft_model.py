"""`llmc compile --draft`: a smaller model that drafts tokens, compiled into the artifact of the model that verifies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from llmc_runtime.format.names import MANIFEST_FILE as MANIFEST
from llmc_runtime.format.program import DRAFT_PREFIX
from llmc_runtime.format.row_abi import MAX_DRAFTS
from llmc_runtime.speculate_option import DEFAULT_DRAFTS, KEYS, NGRAM, REFUSED_METHODS, SHORT, drafts_on_host

from llmc.console import Quiet
from llmc.diagnostics import Diagnostic
from llmc.draft_artifact import read_verifier, with_verifier
from llmc.draft_head import add_head
from llmc.draft_mtp import MTP
from llmc.frontend.eagle_config import EAGLE, is_head
from llmc.frontend.tokenizer_files import check_same_tokens
from llmc.ir.graph import Graph, Module
from llmc.ir.text import show
from llmc.ir.weight_eval import WeightSource
from llmc.options import Options
from llmc.passes.lower.page_attention import DRAFT

_KINDS = f"use the folder or hub id of a smaller model, {EAGLE}PATH with that of an EAGLE-3 head, or {MTP}"
_MATCHING_DRAFT = "use a smaller model of the same family, with the same tokenizer"


@dataclass(frozen=True)
class DraftSource:
    """The weights of a model, unless it is None, and of its draft model, whose names begin with DRAFT_PREFIX."""

    model: WeightSource | None
    draft: WeightSource

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of a weight of either model."""
        if name.startswith(DRAFT_PREFIX):
            return self.draft.read(name.removeprefix(DRAFT_PREFIX), rows)
        assert self.model is not None
        return self.model.read(name, rows)


def with_draft(o: Options) -> Options:
    """Return the options with a number of drafted tokens if there is a draft model, and for the artifact of a draft
    model with those that --drafts-for determines.

    Raises Diagnostic E421 for a number that is not supported, and E360 if the draft is not the name of a model, or if
    the weights are packed later, which is supported for one model only; and the errors of `with_verifier`.
    """
    if o.drafts_for is not None:
        return with_verifier(o, read_verifier(o.drafts_for))
    if not 0 <= o.speculate <= MAX_DRAFTS:
        cause = f"--speculate {o.speculate} is not a number of drafted tokens"
        raise Diagnostic("E421", cause, f"use 0 to {MAX_DRAFTS}")
    if o.draft is None:
        return o
    _check_source(o.draft)
    if o.weights == "none":
        cause = "--draft with --weights none: weights can be packed later for one model only"
        raise Diagnostic("E360", cause, "compile with the weights of both models")
    return replace(o, speculate=o.speculate or DEFAULT_DRAFTS, reuse=False)


def _check_source(draft: str) -> None:
    """Raise Diagnostic E360 if the option --draft is empty or names a method of --speculate instead of a model."""
    if not draft.strip():
        raise Diagnostic("E360", "--draft names no model", "leave it out to compile without a draft model")
    if (Path(draft) / MANIFEST).is_file():
        cause = f"--draft {draft} is an artifact; this option compiles a draft model into that of the model"
        remedy = (
            "use the folder or hub id of the model that it was compiled from; or compile that with --drafts-for "
            "MODEL.llmc -o DRAFT.llmc, and start with --draft-model DRAFT.llmc"
        )
        raise Diagnostic("E360", cause, remedy)
    method, colon, path = draft.partition(":")
    if draft == MTP or (colon and path.strip() and f"{method}:" == EAGLE) or Path(draft).exists():
        return
    if method == NGRAM or drafts_on_host(method):
        cause = f"--draft {draft}: the method {method} needs no draft model"
        raise Diagnostic("E360", cause, "compile with --speculate K, and start with --speculate " + method)
    if method in (*KEYS, *SHORT):
        raise Diagnostic("E360", f"--draft {draft} does not name what drafts", _KINDS)
    if reason := REFUSED_METHODS.get(method):
        raise Diagnostic("E360", f"--draft {draft}: the method {method} is not supported: {reason}", _KINDS)


def add_draft(job: Any, traced: Any, stack: ExitStack, packed: bool) -> Any:
    """Trace the draft model of a Compilation's options into the graph @draft of the module of `traced`.

    The same for an EAGLE-3 head. With --drafts-for, @draft is the traced model itself. Returns the checkpoint of a
    further model, which `stack` closes; None without one, or if the weights are not `packed`. Raises Diagnostic E360
    if it does not fit the model, and the errors of `Compilation.trace`.
    """
    o = job.options
    if job.verifier is not None:
        _take_draft(traced.module, traced.module)
        job.ir.append(("as-draft", show(traced.module)))
    if o.draft is None:
        return None
    if job.head:
        return add_head(job, traced, stack, packed)
    from llmc.frontend.hub import locate
    from llmc.quant.decoder import decoder_of

    with _names_the_draft():
        located = locate(o.draft, o.hub, packed, check=lambda config: decoder_of(config, job.registry.schemes))
    check_draft(job.model, located.folder, traced.facts.vocab_size, traced.facts.max_positions)
    draft_options = replace(o, draft=None, speculate=0, layers=None, max_model_len=traced.facts.max_positions)
    draft_job = type(job)(located, job.output, draft_options, job.registry, job.target, job.force, Quiet())
    with _names_the_draft():
        drafts, checkpoint = draft_job.opened(stack) if packed else (draft_job.trace(), None)
    for note in draft_job.summary.notes:
        if not note.startswith("sampling defaults"):  # requests are sampled with those of the model
            job.note(f"draft model: {note}")
    graph = _take_draft(drafts.module, traced.module)
    job.ir.append(("with-draft", show(traced.module)))
    job.done("draft", f"{drafts.facts.architecture}, {len(graph.nodes)} nodes, {drafts.facts.dtype}")
    return checkpoint


def _take_draft(source: Module, target: Module) -> Graph:
    """Move @main of a module to another one, or the same, as the graph @draft of a draft model; return the graph."""
    graph = target.graphs[DRAFT] = source.graphs.pop("main")
    graph.name = DRAFT
    for v in graph.inputs:
        if v.weight:
            v.name = DRAFT_PREFIX + v.name
    return graph


@contextmanager
def _names_the_draft() -> Iterator[None]:
    """Prepend to the cause of a Diagnostic that it is about the draft model."""
    try:
        yield
    except Diagnostic as e:
        raise e.about("draft model") from e


def check_draft(model: Path, draft: Path, vocab_size: int, max_positions: int) -> None:
    """Raise Diagnostic E360 if the folder `draft` has a head, another vocabulary or tokenizer, or a shorter context.

    The model's tokenizer is in the folder `model`; it has `vocab_size` tokens, and is compiled for `max_positions`.
    """
    from llmc.frontend.tokenizer_files import check_tokenizer
    from llmc.frontend.trace_model import limits_of

    if is_head(draft):
        raise Diagnostic("E360", f"{draft} is an EAGLE-3 head, not a model", f"use --draft {EAGLE}{draft}")
    vocab, positions = limits_of(draft)
    if vocab != vocab_size:
        cause = f"the draft model {draft} has a vocabulary of {vocab} tokens, the model one of {vocab_size}"
        raise Diagnostic("E360", cause, _MATCHING_DRAFT)
    if positions < max_positions:
        cause = f"the draft model {draft} allows {positions} positions; {max_positions} are compiled"
        raise Diagnostic("E360", cause, f"use --max-model-len {positions}, or a draft model with a longer context")
    check_tokenizer(draft)
    check_same_tokens(model, draft, f"the draft model {draft}", _MATCHING_DRAFT)
