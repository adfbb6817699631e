"""Validation of a tokenizer's files before the tokenizers library loads them.

The library aborts the process if memory runs out, so inputs that can grow without bound are rejected beforehand.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from llmc_runtime.format.json_fields import check_unicode, too_much

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BYTES = 256 << 20  # size of a tokenizer.json; the largest known one has 40 MB
MAX_CONFIG, MAX_VALUES = 32 << 20, 300_000  # size and number of JSON values of the other files
MAX_GROWTH = 1000  # characters that one character may expand to
MAX_SPECIAL = 1024  # special tokens added to a text
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')


def plain_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a regular file, following links. Raises OSError, or ValueError if it is larger than `max_bytes` bytes."""
    info = path.stat()
    if not S_ISREG(info.st_mode):
        raise ValueError("it is not a regular file")
    if info.st_size > max_bytes:
        raise ValueError(f"it has {info.st_size} bytes; at most {max_bytes} are allowed")
    return path.read_bytes()


def document(path: Path) -> Any:
    """Read and parse a JSON file. Raises OSError, ValueError or RecursionError if it is unreadable or invalid."""
    data = plain_bytes(path, MAX_CONFIG)
    if (reason := too_much(data, MAX_CONFIG, MAX_VALUES)) is not None:
        raise ValueError(reason)
    value = json.loads(data.decode("utf-8"))
    check_unicode(data, value)
    return value


def templates(value: Any) -> dict[str, str]:
    """Return chat templates by name from the `chat_template` of a tokenizer_config.json, whose usual name is "default".

    It is a text, an object of texts by name, or a list of objects with "name" and "template". Raises ValueError if it
    is something else.
    """
    if not value:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, dict | list):
        raise ValueError(f"its chat_template is a {type(value).__name__}, not a text")
    rows = value if isinstance(value, list) else [{"name": name, "template": text} for name, text in value.items()]
    by_name: dict[str, str] = {}
    for row in rows:
        name, text = (row.get("name"), row.get("template")) if isinstance(row, dict) else (row, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"its chat_template has an entry {str(name)[:60]!r} that is not a text with a name")
        by_name[name] = text
    return by_name


def open_backend(path: Path) -> Tokenizer:
    """Load a tokenizer.json, without the truncation and padding that it may request.

    Raises OSError or ValueError for a file refused beforehand, and the library's own exceptions for the others.
    """
    from tokenizers import Tokenizer

    data = plain_bytes(path, MAX_BYTES)  # the library's own open rejects paths that are not UTF-8
    check_charsmaps(data)
    backend = Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    check_growth(backend)
    return backend


def check_charsmaps(data: bytes) -> None:
    """Raise ValueError if a SentencePiece charsmap in a tokenizer.json claims a table larger than its data.

    A charsmap consists of the table's size in 4 bytes and the table.
    """
    for match in _CHARSMAP.finditer(data):
        try:
            raw = binascii.a2b_base64(match[1], strict_mode=True)
        except binascii.Error as e:
            raise ValueError(f"its charsmap is not base64: {e}") from None
        size = int.from_bytes(raw[:4], "little")
        if len(raw) < 4 or size > len(raw) - 4 or size % 4:
            raise ValueError(f"its charsmap of {len(raw)} bytes claims a table of {size}")


def check_growth(backend: Any) -> None:
    """Raise ValueError if a `tokenizers.Tokenizer` may expand a character to more than `MAX_GROWTH` characters, or
    adds more than `MAX_SPECIAL` special tokens to a text.
    """
    for part in (backend.normalizer, backend.decoder):
        growth = 1.0
        for step in _steps(json.loads(part.__getstate__())) if part is not None else ():
            content, pattern = str(step.get("content", "")), step.get("pattern")
            length = len(pattern.get("String", "x")) if isinstance(pattern, dict) else len(str(pattern))
            growth *= max(1.0, len(content) / length if length else len(content) + 1)
        if growth > MAX_GROWTH:
            raise ValueError(
                f"it expands a character to up to {growth:.3g} characters; at most {MAX_GROWTH} are allowed"
            )
    special = backend.num_special_tokens_to_add(False)
    if special > MAX_SPECIAL:
        raise ValueError(f"it adds {special} special tokens to a text; at most {MAX_SPECIAL} are allowed")


def _steps(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the replacement steps of a normalizer or decoder, including those in nested sequences."""
    if isinstance(state, dict):
        if state.get("type") == "Replace":
            yield state
        for inner in (*state.get("normalizers", ()), *state.get("decoders", ())):
            yield from _steps(inner)


def is_panic(error: BaseException) -> bool:
    """Return whether the exception is a panic of a Rust library, which does not derive from Exception."""
    return type(error).__name__ == "PanicException"
