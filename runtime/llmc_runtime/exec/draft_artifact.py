"""Joins the artifact of a draft model (llmc compile --drafts-for) to that of the model for which it drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc_runtime.artifact import TOKENIZER, Artifact, has_tokenizer, open_artifact
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.hashing import sha256
from llmc_runtime.format.manifest import Manifest, kv_of
from llmc_runtime.format.names import DRAFT_MODEL, TOKENIZER_FILE
from llmc_runtime.format.program import method_of
from llmc_runtime.text.tokenizer import Tokenizer


def open_with_draft(
    path: str | Path,
    draft: str | Path | None = None,
    *,
    verify: bool = True,
    threads: int | None = None,
    rank: int = 0,
    on_manifest: Callable[[Manifest], None] = lambda manifest: None,
) -> Artifact:
    """Open the artifact of a model and, if given, join that of a draft model to it.

    The arguments are those of `open_artifact`. Raises its LlmcErrors, and E208 if the artifacts do not fit together.
    """

    def begin(manifest: Manifest) -> None:
        joint_digest(path, manifest, draft)
        on_manifest(manifest)

    artifact = open_artifact(path, verify=verify, threads=threads, rank=rank, on_manifest=begin)
    if draft is None:
        return artifact
    return _join(artifact, open_artifact(draft, verify=verify, threads=threads, rank=rank))


def joint_digest(path: str | Path, manifest: Manifest, draft: str | Path | None) -> str:
    """Return the digest of a model's artifact, or of it and that of its draft model.

    Raises LlmcError E208 if the first is not the artifact of a model, the second not that of a draft model, or their
    manifests do not agree, and E101 to E103 if the draft model's cannot be read.
    """
    if manifest.is_draft_model:
        cause = f"{path} is a draft model, which generates nothing by itself"
        raise LlmcError("E208", cause, f"open the artifact of the model, with --draft-model {path}")
    if draft is None:
        return manifest.digest
    other = Folder(draft).manifest()
    if not other.is_draft_model:
        cause = f"{draft} is the artifact of a model, not of a draft model"
        remedy = f"llmc compile SMALLER_MODEL --drafts-for {path} -o DRAFT.llmc, then --draft-model DRAFT.llmc"
        raise LlmcError("E208", cause, remedy)
    for name, ours, theirs in _compared(manifest, other):
        if ours != theirs:
            cause = f"the draft model {draft} was compiled for {name} {theirs}; {path} has {ours}"
            raise LlmcError("E208", cause, _remedy(path, draft, other))
    return _joint(manifest, other)


def _joint(model: Manifest, draft: Manifest) -> str:
    return sha256(f"{model.digest} {draft.digest}".encode())


def _remedy(path: str | Path, draft: str | Path, manifest: Manifest) -> str:
    source = manifest.source.name or "MODEL"
    return f"llmc compile {source} --drafts-for {path} -o {draft} --force, or start without --draft-model"


def _compared(model: Manifest, draft: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, of the model, of the draft model) for everything in which their artifacts must agree."""
    yield "the target", model.target.name, draft.target.name
    yield "a number of ranks of", model.ranks, draft.ranks
    yield "ranks that exchange results by", _collectives(model), _collectives(draft)
    yield "a vocabulary of", model.vocab_size, draft.vocab_size
    yield "pages of the size", model.kv.page_size, draft.kv.page_size
    for name, value in vars(draft.limits).items():
        yield name, getattr(model.limits, name), value
    known = {s.name: s for s in model.states}
    for s in draft.states:
        if not s.of_draft:
            ours = known.get(s.name)
            yield f"the state {s.name}", _shape(ours.dtype, ours.shape) if ours else "none", _shape(s.dtype, s.shape)


def _shape(dtype: str, shape: tuple[Any, ...]) -> str:
    return f"{dtype}[{', '.join(d.text for d in shape)}]"


def _collectives(manifest: Manifest) -> str:
    from llmc_runtime.format.nccl_call import uses_nccl  # only if there is a draft model

    return "NCCL" if uses_nccl(manifest) else "memory"


def _join(model: Artifact, draft: Artifact) -> Artifact:
    """Return one artifact of both, whose manifests agree. A draft model that the model's artifact has is left out.

    Raises LlmcError E208 if it has a head, or another tokenizer.
    """
    method = method_of(model.programs)
    if method not in ("", DRAFT_MODEL):
        cause = f"{model.root} drafts by {method}, and a draft model cannot be added to it"
        raise LlmcError("E208", cause, "start without --draft-model, or compile the model with --speculate K")
    _check_tokens(model, draft)
    own = replace(model, programs=tuple(p for p in model.programs if not p.role))
    states = (*(s for s in model.manifest.states if not s.of_draft), *draft.manifest.states)
    states = tuple({s.name: s for s in states}.values())
    kv, digest = kv_of(states, model.manifest.kv.page_size), _joint(model.manifest, draft.manifest)
    manifest = replace(model.manifest, states=states, kv=kv, digest=digest)
    return replace(own, manifest=manifest, programs=(*own.programs, *draft.programs), joined=(own, draft))


def _check_tokens(model: Artifact, draft: Artifact) -> None:
    """Raise LlmcError E208 if both have a tokenizer, and these have different tokens."""
    if not (has_tokenizer(model.manifest) and has_tokenizer(draft.manifest)):
        return
    name = f"{TOKENIZER}/{TOKENIZER_FILE}"
    if model.manifest.files[name].sha256 == draft.manifest.files[name].sha256:
        return
    ours, theirs = (Tokenizer.open(a.tokenizer_dir).backend.get_vocab(with_added_tokens=True) for a in (model, draft))
    if ours != theirs:
        differ = next((t for t in sorted(ours, key=ours.__getitem__) if theirs.get(t) != ours[t]), min(theirs))
        cause = f"the draft model {draft.root} was compiled for another tokenizer: token {differ!r:.60} differs"
        raise LlmcError("E208", cause, _remedy(model.root, draft.root, draft.manifest))
