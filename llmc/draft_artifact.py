"""`llmc compile --drafts-for`: a draft model as an artifact of its own, for those of models that verify drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.names import TOKENIZER_FILE
from llmc_runtime.format.nccl_call import uses_nccl
from llmc_runtime.format.program import Program

from llmc.artifact.integrity import open_undamaged
from llmc.diagnostics import Diagnostic
from llmc.draft_mtp import MTP
from llmc.frontend.eagle_config import EAGLE
from llmc.options import Options


@dataclass(frozen=True)
class Verifier:
    """The artifact at `folder` of a model that verifies up to `drafts` drafted tokens per row."""

    folder: Path
    manifest: Manifest
    drafts: int

    @property
    def tokenizer_dir(self) -> Path:
        """The folder with the model's tokenizer."""
        return self.folder / "tokenizer"

    @property
    def tokenizer_files(self) -> list[Path]:
        """The model's tokenizer.json, by which the runtime recognises that its tokens are those of the draft model."""
        path = self.tokenizer_dir / TOKENIZER_FILE
        return [path] if path.exists() else []

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of a compile that the artifact determines, by name."""
        m = self.manifest
        return {
            **vars(m.limits),
            "target": m.target.name,
            "tensor_parallel_size": m.ranks,
            "collectives": "nccl" if uses_nccl(m) else "peer",
            "speculate": self.drafts,
        }


def read_verifier(path: Path) -> Verifier:
    """Read the artifact for which a draft model is compiled.

    Raises Diagnostic E360 if it verifies no drafts, and LlmcError E101 to E107 if it cannot be read.
    """
    folder = Folder(path)
    manifest = open_undamaged(folder)
    programs = (Program.load(folder.read(p, manifest.files[p].bytes), p, True) for p in manifest.programs)
    drafts = max((program.drafts for program in programs), default=0)
    if manifest.is_draft_model:
        raise Diagnostic("E360", f"--drafts-for {path}: it is a draft model itself", "name the artifact of the model")
    if not drafts:
        cause = f"--drafts-for {path}: it was compiled without --speculate, and verifies no drafted tokens"
        raise Diagnostic("E360", cause, "compile the model again with --speculate K")
    return Verifier(path, manifest, drafts)


def with_verifier(o: Options, verifier: Verifier) -> Options:
    """Return the options with those that the artifact of the model determines.

    Raises Diagnostic E360 for options with other values, for a draft model of the draft model, and for weights that
    are packed later.
    """
    path, defaults = verifier.folder, Options()
    for name, value in verifier.options.items():
        option, flag = getattr(o, name), "--" + name.replace("_", "-")
        if option not in (getattr(defaults, name), value):
            cause = f"{flag} {option} with --drafts-for {path}, which has {value}"
            raise Diagnostic("E360", cause, f"leave {flag} out")
    if o.draft is not None:
        cause = "--draft with --drafts-for: a draft model has no draft model of its own"
        raise Diagnostic("E360", cause, "leave one of them out")
    if o.weights == "none":
        cause = "--drafts-for with --weights none: the weights of a draft model cannot be packed later"
        raise Diagnostic("E360", cause, "compile with the weights")
    return replace(o, reuse=False, **verifier.options)


def check_source(model: str | Path) -> None:
    """Raise Diagnostic E360 if `model`, which is compiled with --drafts-for, is `mtp` or `eagle:PATH`."""
    if str(model) == MTP or str(model).startswith(EAGLE):
        raise reads_hidden_states(str(model))


def reads_hidden_states(head: str) -> Diagnostic:
    """Return the error for a head or layer, which cannot be compiled without its model."""
    source = head if head == MTP or head.startswith(EAGLE) else f"{EAGLE}{head}"
    cause = f"{head} with --drafts-for: it reads the model's hidden states, and has to be in the model's artifact"
    return Diagnostic("E360", cause, f"use llmc compile MODEL --draft {source}")
