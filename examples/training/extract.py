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


def pod_plain(text: str) -> str:
    """Remove POD formatting codes, innermost first."""
    for _ in range(3):
        text = re.sub(r"[XZ]<[^<>]*>", "", text)
        text = re.sub(r"L<(?:[^<>|]*\|)?([^<>|]*)>", r"\1", text)
        text = re.sub(r"[BCFISE]<+ ?([^<>]*?) ?>+", r"\1", text)
    return text


def read_pod(path: Path) -> Iterator[Block]:
    """Headings and ordinary paragraphs of a Perl POD file; verbatim ones are code."""
    for part in re.split(r"\n\s*\n", read_text(path)):
        if part.startswith("=head"):
            yield "h", pod_plain(part.partition(" ")[2]).capitalize()
        elif part and not part.startswith(("=", " ", "\t")):
            yield "p", pod_plain(part)


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


def unescape(text: str) -> str:
    """Undo the string escapes and in-game markup of game data files."""
    text = text.replace('\\"', '"').replace('""', '"').replace("\\'", "'").replace("\\n", "\n")
    text = text.replace("\\\n", "")
    text = re.sub(r"<first> <last>|<first>|<last>", "Captain", text)
    text = re.sub(r"\[\[(?:\w+ )?([A-Za-z ]+)\]\]", r"\1", text)
    text = re.sub(r"<(planet|destination)>", "New Boston", text)
    text = re.sub(r"<origin>", "Earth", text).replace("<system>", "Sol")
    return re.sub(r"</?(span|i|b|em|big|small|bold|italic|color|rgba?)\b[^>]*>", "", text)


# Short strings are matched too: a quote must never be taken for an opening one.
STRING = re.compile(r'`([^`]*)`|"((?:[^"\\]|\\.|"")*)"|\[\[(.*?)\]\]|>([^<>{}]{60,})<', re.S)
COMMENT = re.compile(r"^\s*(#|--(?!\[)).*$", re.M)


def read_strings(path: Path) -> Iterator[Block]:
    """Every long quoted string of a game data file, in file order."""
    text = read_text(path)
    if path.name == "en.txt":
        text = re.sub(r"^[A-Z0-9_]+\n", "\n", text, flags=re.M)
        yield from paragraphs(unescape(text.replace("'''", "\n\n")))
        return
    for match in STRING.finditer(COMMENT.sub("", text)):
        string = next(filter(None, match.groups()), "")
        for part in unescape(string).split("\n\n") if len(string) > 30 else ():
            yield "p", part.strip(" \t")


def read_entries(path: Path) -> Iterator[Block]:
    """Entries between %%%% lines: a name line, then the description."""
    for entry in read_text(path).split("%%%%"):
        name, _, body = entry.strip().partition("\n")
        if "{{" not in body:
            yield "h", name[:1].upper() + name[1:]
            yield from paragraphs(body)


READERS = {
    "html": read_html,
    "pod": read_pod,
    "text": read_plain,
    "rdata": read_rdata,
    "strings": read_strings,
    "entries": read_entries,
}
