"""The text that `llmc eval` scores: read in pieces, checked, tokenized and cut into windows of equal length."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from llmc_runtime.format.errors import LlmcError

from llmc.text_lines import SUFFIX, document

Encode = Callable[[str], list[int]]

PIECE_CHARACTERS = 2 << 20  # characters that are tokenized at once; longer texts are cut after an end of line
MAX_LINE_CHARACTERS = 64 << 20  # characters of a line of JSON
_CUT = re.compile(r"\n(?=\S)")


@dataclass(frozen=True)
class Survey:
    """A checked text: the sha256 and size of the file, and tokens and UTF-8 bytes of the part that was tokenized."""

    sha256: str
    file_bytes: int
    tokens: int
    text_bytes: int


def survey(path: Path, encode: Encode, maximum: int | None, piece: int = PIECE_CHARACTERS) -> Survey:
    """Read the whole file and count its tokens, up to the piece in which `maximum` is reached (None: all of them).

    Raises LlmcError E130 if the file cannot be read, is empty or is not UTF-8 text.
    """
    digest, read = hashlib.sha256(), 0
    tokens = text_bytes = 0

    def observe(data: bytes) -> None:
        nonlocal read
        digest.update(data)
        read += len(data)

    for text in read_pieces(path, piece, observe):
        if maximum is None or tokens < maximum:
            tokens += len(encode(text))
            text_bytes += len(text.encode())
    if not text_bytes:
        raise _unusable(path, "is empty")
    return Survey(digest.hexdigest(), read, tokens, text_bytes)


def read_pieces(
    path: Path, piece: int = PIECE_CHARACTERS, observe: Callable[[bytes], None] | None = None
) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of about `piece` characters, without a byte order mark.

    Of NAME.jsonl these are the documents of its lines (`llmc.text_lines`), each in pieces of its own. `observe` is
    called with the bytes that are read. Raises LlmcError E130 if they are not text.
    """
    if path.exists() and not path.is_file():
        raise _unusable(path, "is not a regular file")
    blocks = _decoded_blocks(path, piece, observe)
    for texts in _documents(path, blocks) if path.suffix == SUFFIX else (blocks,):
        yield from _pieces(texts, piece)


def _pieces(texts: Iterable[str], piece: int) -> Iterator[str]:
    """Yield joined texts in pieces of about `piece` characters."""
    rest = ""
    for text in texts:
        rest += text
        while len(rest) > piece:
            cut = max((m.end() for m in _CUT.finditer(rest, 0, piece)), default=piece)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _documents(path: Path, blocks: Iterable[str]) -> Iterator[Sequence[str]]:
    """Yield the document of each line."""
    rest, numbers = "", count(1)
    for text in chain(blocks, ("\n",)):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            number = next(numbers)
            try:
                yield [document(line, number)] if line.strip() else []
            except ValueError as e:
                raise _unusable(path, f"cannot be read: {e}") from None
        if len(rest) > MAX_LINE_CHARACTERS:
            raise _unusable(path, f"has a line {next(numbers)} of more than {MAX_LINE_CHARACTERS} characters")


def _decoded_blocks(path: Path, size: int, observe: Callable[[bytes], None] | None) -> Iterator[str]:
    """Yield the text of blocks of `size` bytes; the last one is empty, so that an incomplete character is found."""
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with path.open("rb") as file:
            data = b"-"
            while data:
                data = file.read(size)
                if observe is not None:
                    observe(data)
                text = _decoded(path, decoder, data, at)
                yield text.removeprefix("\ufeff") if at == 0 else text
                at += len(data)
    except OSError as e:
        raise _unusable(path, f"cannot be read: {e.strerror}") from None


def _decoded(path: Path, decoder: codecs.IncrementalDecoder, data: bytes, at: int) -> str:
    begun = len(decoder.getstate()[0])  # bytes of a character that the previous block ended in
    try:
        text = decoder.decode(data, final=not data)
    except UnicodeDecodeError as e:
        raise _unusable(path, f"is not UTF-8 text: {e.reason} at byte {at - begun + e.start}") from None
    if "\0" in text:
        raise _unusable(path, "is not text: it contains NUL bytes")
    return text


def windows(
    texts: Iterator[str], encode: Encode, prefix: Sequence[int], context: int, count: int
) -> Iterator[list[int]]:
    """Yield the first `count` windows of `context` tokens; each begins with the ids `prefix`. What does not fill a
    window is left out.
    """
    pending: list[int] = []
    size = context - len(prefix)
    for text in texts:
        pending += encode(text)
        at = 0
        while count and len(pending) - at >= size:
            yield [*prefix, *pending[at : at + size]]
            at, count = at + size, count - 1
        if not count:
            return
        del pending[:at]


def _unusable(path: Path, why: str) -> LlmcError:
    return LlmcError("E130", f"{path} {why}", "give a file with UTF-8 text, for example the test split of a data set")


def changed(path: Path) -> LlmcError:
    """Return the error for a text that has fewer windows when it is scored than when it was checked."""
    return LlmcError("E130", f"{path} changed while it was scored", "run the command again")


def too_short(path: Path, tokens: int, needed: int) -> LlmcError:
    """Return the error for a text that does not fill a window."""
    cause = f"{path} has {tokens} tokens; a window needs {needed}"
    return LlmcError("E130", cause, "use a longer text, or a smaller --context")
