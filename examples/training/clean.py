"""Paragraph cleaning: what counts as readable English prose, and what is dropped.

The functions work on one paragraph at a time.  ``prose`` returns the cleaned
paragraph, or "" when it looks like code, a table, a list of options, a
fragment, or a language other than English.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

ASCII_FORMS = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " - ",
        "\u2026": "...",
        "\u00a0": " ",
        "\u200b": "",
        "\u00ad": "",
        "\u2010": "-",
        "\u2011": "-",
        "\u2212": "-",
        "\u2022": " ",
        "\u00b6": "",
        "\u202f": " ",
        "\u2009": " ",
        "\ufeff": "",
    }
)
COMMON_WORDS = frozenset(
    "the a an of to and in is it that for on with as be are this by or from at not can you if "
    "which was but has have will its when used use your all they their he his she her i we one "
    "may must should there then than so do does any other some no into out up only more also "
    "who what how my me our us them were had been would could these those each".split()
)
SYMBOLS = re.compile(r"[_{}<>\\|=*@#$~^\[\]&+%`]")
PLACEHOLDER = re.compile(r"https?:|www\.|%[sd0-9]|<[a-z]|\$\{?[a-z(]|\{[a-z]|\[\[|@[a-z]|\\n\\n")
OTHER_SCRIPT = re.compile(r"[^\x20-\x7e\u00a1-\u017f]")
UNSUITABLE = re.compile(
    r"\b(sex|sexual\w*|rap(e[sd]?|ist)|slurs?|obscen\w*|vulgar\w*|genital\w*|penis|vagina\w*|"
    r"prostitut\w*|whor\w*|nigg\w*|negro\w*|jew(ess)?|suicid\w*|nazi\w*|fuck\w*|shit\w*|"
    r"copulat\w*|intercourse|orgasm|masturbat\w*|bitch\w*|breasts?|naked|nude)\b",
    re.I,
)
ENDINGS = tuple(".!?\"')")
MAX_SYMBOLS = 0.014
MIN_LETTERS = 0.74
MIN_COMMON = 0.22
# A paragraph that opens like one of the last few is an item of a listing ("Returns the ...").
OPENING_WORDS, OPENINGS_KEPT = 2, 4


def plain(text: str) -> str:
    """Collapse white space and replace typographic signs by their ASCII forms."""
    text = re.sub(r"\s+", " ", text.translate(ASCII_FORMS)).strip()
    text = re.sub(r"\s+([,.;:!?)])(?=\s|$)", r"\1", text)
    text = re.sub(r"([.!?]) {2,}", r"\1 ", text)
    return re.sub(r"\( +", "(", text)


def without_lead_in(text: str) -> str:
    """Drop a last sentence that only introduces a dropped listing ("For example:")."""
    if not text.endswith(":"):
        return text
    end = max(text.rfind(stop) for stop in (". ", "! ", "? "))
    return text[: end + 1]


def common_share(text: str) -> float:
    """The share of very common English words among the words of ``text``."""
    words = re.findall(r"[A-Za-z']+", text.lower())
    return sum(word in COMMON_WORDS for word in words) / len(words) if words else 0.0


def prose(text: str, shortest: int = 40, longest: int = 4000) -> str:
    """Return the cleaned paragraph, or "" when it is not running English text."""
    text = without_lead_in(plain(text))
    if not shortest <= len(text) <= longest or not text.endswith(ENDINGS):
        return ""
    if not re.match(r"""["'(]?[A-Z]""", text) or PLACEHOLDER.search(text):
        return ""
    if OTHER_SCRIPT.search(text) or UNSUITABLE.search(text):
        return ""
    if len(SYMBOLS.findall(text)) > MAX_SYMBOLS * len(text):
        return ""
    letters = sum(char.isalpha() for char in text)
    if letters < MIN_LETTERS * len(text) or common_share(text) < MIN_COMMON:
        return ""
    return text


def heading(text: str) -> str:
    """Return a cleaned section heading, or "" when it is unusable as one."""
    text = re.sub(r"^[\dA-Z]{0,2}[\d.]+\s+", "", plain(text)).rstrip("#:. ")
    words = text.split()
    if not 1 <= len(words) <= 10 or not 4 <= len(text) <= 70:
        return ""
    if not re.fullmatch(r"[A-Z][A-Za-z0-9 ,'()/\-?!.:]+", text) or text.isupper():
        return ""
    return text


def fingerprint(text: str) -> bytes:
    """A case- and punctuation-blind digest used to drop repeated paragraphs."""
    letters = re.sub(r"[^a-z]", "", text.lower())
    return hashlib.blake2b(letters.encode(), digest_size=8).digest()


def cleaned(blocks: Iterable[tuple[str, str]], shortest: int = 40) -> list[tuple[str, str]]:
    """Clean ("h", text) and ("p", text) blocks, leaving the unusable ones out."""
    out = []
    for kind, text in blocks:
        text = heading(text) if kind == "h" else prose(text, shortest)
        if text:
            out.append((kind, text))
    return out


def document(blocks: list[tuple[str, str]], seen: set[bytes]) -> str:
    """Join cleaned blocks, dropping repeated paragraphs, lists in disguise and empty sections."""
    out: list[str] = []
    openings: list[tuple[str, ...]] = []
    pending = ""
    for kind, text in blocks:
        if kind == "h":
            pending = text
            continue
        key = fingerprint(text)
        opening = tuple(text.lower().split()[:OPENING_WORDS])
        if key in seen or opening in openings[-OPENINGS_KEPT:]:
            continue
        seen.add(key)
        openings.append(opening)
        if pending:
            out.append(pending)
            pending = ""
        out.append(text)
    return "\n\n".join(out)
