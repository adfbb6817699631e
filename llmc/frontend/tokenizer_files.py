"""Checks the tokenizer files of a model folder before anything is compiled, also against those of a draft model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc_runtime.format import tokenizer_files
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import TEMPLATE_DIR
from llmc_runtime.text.chat_template import TEMPLATE_FILE, ChatTemplate, read_templates

from llmc.diagnostics import Diagnostic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "tokenizer_config.json"
BESIDE = (CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.json")
TOKENIZER = "tokenizer.json"
# Tokenizer files that the runtime does not read; transformers reads them and saves most as tokenizer.json.
FORMS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "vocab.json",
         "vocab.txt")  # fmt: skip
SAVE = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"


def without_tokenizer(folder: Path) -> str:
    """Return a note about a folder without tokenizer.json, and its remedy; "" if the file exists."""
    if (folder / TOKENIZER).exists():
        return ""
    other = next((f"only {n}" for n in FORMS if (folder / n).exists()), "")
    remedy = f"; {SAVE} makes one" if other else "; copy it from the model's repository"
    return f"the folder has no {TOKENIZER}{other and ', ' + other}: requests must be token ids{remedy}"


def check_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the folder's tokenizer, None if it has none; raises Diagnostic E309 if it or a template is unreadable."""
    path, tokenizer = folder / TOKENIZER, None
    try:
        if path.exists():
            tokenizer = tokenizer_files.open_backend(path)
        for name in BESIDE:
            path = folder / name
            if path.exists():
                _check(tokenizer_files.document(path))
        for path in (folder / TEMPLATE_FILE, *sorted((folder / TEMPLATE_DIR).glob("*.jinja"))):
            if path.exists():
                tokenizer_files.plain_bytes(path, tokenizer_files.MAX_CONFIG).decode("utf-8")
    except BaseException as e:
        if not isinstance(e, Exception) and not tokenizer_files.is_panic(e):
            raise
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise Diagnostic("E309", f"{path} cannot be read: {why}", "fetch the file again, or remove it") from e
    return tokenizer


def unusable_templates(folder: Path) -> Iterator[str]:
    """Yield a note for each chat template that the runtime cannot use. The files are those of `check_tokenizer`."""
    path = folder / CONFIG
    templates = read_templates(folder, tokenizer_files.document(path) if path.exists() else {})
    for name, text in templates.items():
        try:
            ChatTemplate(text, {})
        except LlmcError as e:
            name_text = f" ({name})" if len(templates) > 1 else ""
            remedy = "correct it and compile again, or use --chat-template"
            yield f"{e.cause}{name_text}: chats with it are refused; {remedy}"


def without_embedding(tokenizer: Tokenizer | None, size: int) -> str:
    """Return a note about tokens whose ids a vocabulary of `size` lacks; "" if there are none."""
    ids = tokenizer.get_vocab(with_added_tokens=True) if tokenizer else {}
    lacking = sorted((i, token) for token, i in ids.items() if i >= size)
    if not lacking:
        return ""
    first, token = lacking[0]
    noun = "token" if len(lacking) == 1 else "tokens"
    count = f"{len(lacking)} {noun} of {TOKENIZER}"
    return f"{count} from id {first} ({token[:40]!r}) on: the model has no embedding; prompts with them are refused"


def _check(config: Any) -> None:
    if not isinstance(config, dict):
        raise ValueError(f"expected an object, found {type(config).__name__}")
    tokenizer_files.templates(config.get("chat_template"))


def check_same_tokens(model: Path, draft: Path, subject: str, remedy: str) -> None:
    """Raise Diagnostic E360 if both folders have a tokenizer.json with different tokens. `subject` names the second."""
    ours, theirs = _tokens(model), _tokens(draft)
    if ours and theirs and ours != theirs:
        differ = next((t for t in sorted(ours, key=ours.__getitem__) if theirs.get(t) != ours[t]), min(theirs))
        raise Diagnostic("E360", f"{subject} has another tokenizer: token {differ!r:.60} differs", remedy)


def _tokens(folder: Path) -> Mapping[str, int]:
    """Return the ids of all tokens by text; empty without a tokenizer.json."""
    path = folder / TOKENIZER
    return tokenizer_files.open_backend(path).get_vocab(with_added_tokens=True) if path.exists() else {}
