"""Readers of documentation and story files: each yields (kind, text) blocks.

A block is ("h", heading) or ("p", paragraph).  Readers only find the text;
``clean.document`` decides what of it is kept.
"""

from __future__ import annotations

import gzip
import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

Block = tuple[str, str]

HIDDEN = re.compile(
    r"<!--.*?-->|<(script|style|pre|table|nav|footer|head|code-block|screen|programlisting|"
    r"synopsis|title|info|svg)\b[^>]*>.*?</\1>",
    re.S | re.I,
)
BLOCK_TAG = re.compile(
    r"</?(p|para|li|dd|dt|div|h[1-6]|title|ul|ol|dl|section|blockquote|br ?/?|hr ?/?|td|tr|item|"
    r"note|steps|listitem|body|center)\b[^>]*>",
    re.I,
)
HEADING_TAG = re.compile(r"<h[1-4]\b[^>]*>(.*?)</h[1-4]>", re.S | re.I)
HEADING_MARK = "\x01"


def read_text(path: Path) -> str:
    """Read a possibly compressed file as UTF-8, dropping undecodable bytes."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="ignore")


def paragraphs(text: str) -> Iterator[Block]:
    """Split plain text at blank lines; indented blocks are left out as listings."""
    for part in re.split(r"\n\s*\n", text):
        if part.strip() and not re.match(r"\s{4,}|\t", part.lstrip("\n")):
            yield "p", part


def read_html(path: Path) -> Iterator[Block]:
    """Headings and paragraphs of an HTML, DocBook or Mallard page."""
    text = HIDDEN.sub(" ", read_text(path))
    text = HEADING_TAG.sub(lambda match: f"<p>{HEADING_MARK}{match[1]}</p>", text)
    text = BLOCK_TAG.sub("\n\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    for part in re.split(r"\n\s*\n", text):
        part = part.strip()
        if part.startswith(HEADING_MARK):
            yield "h", part[1:]
        elif part:
            yield "p", part


def rdata_strings(data: bytes) -> Iterator[str]:
    """Character strings of a serialised R object: type word, length word, bytes."""
    position = 0
    while (position := data.find(b"\x00\x04\x00\x09", position)) >= 0:
        length = struct.unpack_from(">i", data, position + 4)[0]
        if 0 <= length < 10_000:
            yield data[position + 8 : position + 8 + length].decode("utf-8", errors="ignore")
            position += length
        position += 8


def read_rdata(path: Path) -> Iterator[Block]:
    """Paragraphs of the line vectors in an R lazy-load database."""
    data, position = path.read_bytes(), 0
    while position < len(data):
        stream = zlib.decompressobj()
        object_bytes = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        yield from paragraphs("\n".join(rdata_strings(object_bytes)).replace("_", ""))


def read_plain(path: Path) -> Iterator[Block]:
    """Paragraphs of a plain text file."""
    yield from paragraphs(read_text(path).replace("_", ""))


READERS = {
    "html": read_html,
    "text": read_plain,
    "rdata": read_rdata,
}
