"""Checks that a draft model or head has the tokenizer of the model that verifies its drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmc.diagnostics import Diagnostic


def check_tokens(model: Path, draft: Path, subject: str, remedy: str) -> None:
    """Raise Diagnostic E360 if both folders have a tokenizer.json with different tokens. `subject` names the second."""
    ours, theirs = _tokens(model), _tokens(draft)
    if ours and theirs and ours != theirs:
        differ = next((t for t in sorted(ours, key=ours.__getitem__) if theirs.get(t) != ours[t]), min(theirs))
        raise Diagnostic("E360", f"{subject} has another tokenizer: token {differ!r:.60} differs", remedy)


def _tokens(folder: Path) -> Mapping[str, int]:
    """Return the ids of all tokens by text; empty without a tokenizer.json."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True) if path.exists() else {}
