"""Readers of dictionaries, fortunes and package descriptions.

Each reader yields ``Entry`` records: the text of one entry as running prose,
and chats made from it: (ways to ask, answer) pairs.  ``Entry.key`` decides the held-out
split, so a headword's text and its questions are never on different sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clean import UNSUITABLE, fingerprint, plain, prose
from extract import read_text

PART_OF_SPEECH = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}


@dataclass
class Entry:
    """One dictionary entry: its headword, its text and its questions."""

    key: str
    text: str
    chats: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


def entries(path: Path) -> Iterator[tuple[str, str]]:
    """Split a dictd text into (headword line, body): headwords start in column 0."""
    head, body = "", []
    for line in read_text(path).splitlines():
        if line and not line[0].isspace():
            if head and any(body):
                yield head, "\n".join(body)
                body = []
            head = line
        else:
            body.append(line)
    if head:
        yield head, "\n".join(body)


def sentence(text: str) -> str:
    """Capitalise the first letter and end with a full stop."""
    text = plain(text).strip(" ;,:")
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def unlink(text: str) -> str:
    """Remove cross-reference braces."""
    return re.sub(r"\{+([^{}]*)\}+", r"\1", text)


@dataclass
class Sense:
    """One WordNet sense: part of speech, definition, examples, synonyms."""

    pos: str
    meaning: str
    examples: list[str]
    synonyms: list[str]


def wordnet_sense(pos: str, body: str, word: str) -> Sense:
    """Parse the text of one sense."""
    body = plain(body)
    names = re.findall(r"\{([^{}]+)\}", (re.search(r"\[syn:(.*?)\]", body) or [""])[0])
    body = re.sub(r"\s*\[(syn|ant|also):.*?\]", "", body)
    examples = re.findall(r'"([^"]{12,})"', body)
    meaning = re.sub(r'[;,]?\s*"[^"]*"(\s*-[^;]*)?', "", body)
    meaning = re.sub(r"^\([^()]*\)\s*", "", unlink(meaning)).strip(" ;:")
    others = [name for name in names if name.lower() != word.lower()]
    return Sense(pos, meaning, examples, others[:3])


def wordnet_senses(word: str, body: str) -> list[Sense]:
    """All senses of one WordNet entry, in order."""
    pos, senses = "n", []
    for match in re.finditer(
        r"(?:^|\n) +(?:(n|v|adj|adv) )?(\d+): (.*?)(?=\n +(?:(?:n|v|adj|adv) )"
        r"?\d+: |\Z)",
        "\n" + body,
        re.S,
    ):
        pos = match[1] or pos
        senses.append(wordnet_sense(pos, match[3], word))
    return [
        sense
        for sense in senses
        if 8 <= len(sense.meaning) <= 300
        and not re.search(r"\b(genus|family [A-Z]|taxonomic)", sense.meaning)
        and not UNSUITABLE.search(sense.meaning)
    ]


def article(word: str) -> str:
    """The indefinite article of a noun."""
    return "an" if word[0].lower() in "aeiou" else "a"


def statement(word: str, sense: Sense) -> str:
    """A definition as a sentence."""
    name, meaning = word[0].upper() + word[1:], sense.meaning
    if sense.pos == "v":
        return f"To {word} means to {meaning}."
    if sense.pos == "n" and word[0].isupper():
        return sentence(f"{name}: {meaning}")
    countable = re.match(r"(an?|any|one|someone|something|the part|the person)\b", meaning)
    if sense.pos == "n" and countable:
        return f"{article(word).capitalize()} {word} is {meaning}."
    if sense.pos == "n":
        return f"The word {word} means {meaning}."
    return f'"{name}" means {meaning}.'


def wordnet_text(word: str, senses: list[Sense]) -> str:
    """An entry as running prose."""
    out = []
    for sense in senses:
        line = statement(word, sense)
        if sense.examples:
            line += " For example: " + " ".join(f'"{sentence(e)}"' for e in sense.examples[:3])
        if sense.synonyms:
            line += f" Another word for it is {sense.synonyms[0]}."
        out.append(line)
    return "\n".join(out)


def wordnet_chats(word: str, senses: list[Sense]) -> list[tuple[tuple[str, ...], str]]:
    """Questions about the first senses of a word."""
    first = senses[0]
    answer = statement(word, first)
    if first.examples:
        answer += f' For example: "{sentence(first.examples[0])}"'
    if len(senses) > 1 and senses[1].pos == first.pos:
        answer += f" It can also mean {senses[1].meaning}."
    noun = f"{article(word)} {word}" if answer.startswith(("A ", "An ")) else word
    what = "Who or what is" if word[0].isupper() else "What is"
    asked = [
        f'What does "{word}" mean?',
        f"What does {word} mean?",
        f"Define {word}.",
        f'What is the meaning of "{word}"?',
        f"Explain the word {word}.",
    ]
    if first.pos == "n":
        asked += [f"{what} {noun}?"] * 5
    chats = [(tuple(asked), answer)]
    number = fingerprint(word)[0] % 4
    if first.synonyms and number == 0:
        chats.append(((f"Give me another word for {word}.",), f"Another word for {word} is {first.synonyms[0]}."))
    if first.examples and number == 1:
        chats.append(((f"Use the word {word} in a sentence.",), sentence(first.examples[0])))
    return chats


def read_wordnet(path: Path) -> Iterator[Entry]:
    """WordNet; in the texts each synonym set occurs once, under the first of its words."""
    seen: set[bytes] = set()
    for word, body in entries(path):
        if not re.fullmatch(r"[A-Za-z][A-Za-z' -]+", word) or len(word) > 30:
            continue
        if re.match(r"(genus|family|order|class|phylum|division|subfamily) ", word):
            continue
        senses = wordnet_senses(word, body)
        fresh = [sense for sense in senses if fingerprint(sense.meaning) not in seen]
        seen.update(fingerprint(sense.meaning) for sense in fresh)
        if senses:
            yield Entry(word.lower(), wordnet_text(word, fresh), wordnet_chats(word, senses))


GCIDE_TAG = re.compile(r"\[(1913 Webster|PJC|Century[^\]]*|\w+ \d[^\]]*|Webster[^\]]*)[^\]]*\]")
GCIDE_POS = {"n.": "noun", "a.": "adjective", "v. t.": "verb", "v. i.": "verb", "adv.": "adverb"}


def gcide_meanings(body: str) -> Iterator[str]:
    """Definitions of a GCIDE entry: no quotations, notes, etymologies or tags."""
    body = re.sub(r"\[(?![a-zA-Z^=\"'~.,*`-]{1,6}\])[^\]]*WordNet[^\]]*\]", "@@", body)
    for part in re.split(r"\n\s*\n", body):
        if re.match(r"\s{7,}", part) or "@@" in part:
            continue
        part = plain(unlink(GCIDE_TAG.sub("", part)))
        part = re.sub(r"\s*--\s?[A-Z][\w. ]*(\([^)]*\))?\.?$", "", part)
        part = re.sub(r"^(\d+\.|\([a-z]\))\s*", "", part)
        part = re.sub(r"^(\([A-Z][^)]*\)\s*)+", "", part)
        part = re.sub(r"\s*\[[^\]]*\]\.?", "", part).strip()
        if re.match(r"(Note|Syn|Cf|See|Usage)\b", part) or re.search(r"[\[\]\\^=~@*|]", part):
            continue
        if prose(part, shortest=24):
            yield part


def read_gcide(path: Path) -> Iterator[Entry]:
    """The 1913 Webster, definitions only."""
    seen: set[bytes] = set()
    for head, body in entries(path):
        match = re.match(r"([A-Z]?[a-z][a-z -]+) \\[^\\]*\\", head)
        if not match:
            continue
        pos = re.search(r"\b(n\.|a\.|v\. t\.|v\. i\.|adv\.)", head[match.end() :])
        body = re.sub(r"^[^\n]*\]\n", "", body) if "[" in head and "]" not in head else body
        kept = []
        for meaning in gcide_meanings(body):
            if fingerprint(meaning) not in seen:
                seen.add(fingerprint(meaning))
                kept.append(meaning)
        if kept:
            kind = f" ({GCIDE_POS[pos[1]]})" if pos else ""
            name = match[1][0].upper() + match[1][1:]
            yield Entry(match[1].lower(), f"{name}{kind}. " + " ".join(kept))


def read_foldoc(path: Path) -> Iterator[Entry]:
    """The Free On-line Dictionary of Computing."""
    for word, body in entries(path):
        body = re.sub(r"\(\d{4}-\d\d-\d\d\)|<[a-z, ]+>", "", unlink(body))
        body = re.sub(r"^\s*\((?:[A-Z][^)]{0,40})\)\s*", "", body.strip())
        kept = [text for part in re.split(r"\n\s*\n", body) if (text := prose(part))]
        if kept and re.fullmatch(r"[\w .+/'-]{2,40}", word):
            asked = (f"What is {word}?", f"What does {word} mean?", f"Tell me about {word}.")
            name = word[0].upper() + word[1:]
            answer = f"{name}: " + kept[0][0].lower() + kept[0][1:]
            if not re.match(r"(An?|The|One) ", kept[0]):
                answer = " ".join(kept[:2])
            chats = [(asked, answer)] if len(answer) < 600 else []
            yield Entry(word.lower(), f"{name}\n\n" + "\n\n".join(kept), chats)


def read_jargon(path: Path) -> Iterator[Entry]:
    """The Jargon File."""
    for word, body in entries(path):
        body = re.sub(
            r"\A[^\n]*/[^\n]*\n|\A\s*(n|vt?|adj|adv|vi|interj|prefix|suffix)\.[^\n]{0,60}\n"
            r"|\bA?\d\. ",
            "",
            unlink(body),
        )
        kept = [text for part in re.split(r"\n\s*\n", body) if (text := prose(part))]
        if kept and re.fullmatch(r"[\w .+/'-]{2,40}", word):
            chats = []
            if len(kept[0]) < 600:
                chats = [((f'What do hackers mean by "{word}"?',), kept[0])]
            yield Entry(word.lower(), f"{word[0].upper()}{word[1:]}\n\n" + "\n\n".join(kept), chats)


def read_devil(path: Path) -> Iterator[Entry]:
    """The Devil's Dictionary; its verses are indented and left out."""
    for part in re.split(r"\n\s*\n", read_text(path)):
        part = unlink(part)
        if re.match(r"[A-Z][A-Z'-]+, (n|adj|v|adv|v\.t|v\.i)\.", part):
            word = part.split(",")[0]
            if text := prose(word.capitalize() + part[len(word) :], shortest=20):
                yield Entry(word.lower(), text)


def read_fortunes(path: Path) -> Iterator[Entry]:
    """Fortune cookies whose every line is prose; attributions are kept."""
    for text in re.split(r"\n%\n", read_text(path)):
        body, _, author = text.replace("\b", "").partition("\n\t\t-- ")
        kept = prose(body.replace("\t", "  "), shortest=30)
        if kept and "\n\t\t" not in body:
            name = plain(author).strip(" -")
            yield Entry(kept[:60], kept + (f"\n- {name}" if re.match(r"[A-Z]", name) else ""))


def description_paragraphs(lines: list[str]) -> list[str]:
    """The prose paragraphs of one package description; bullet lists are left out."""
    parts = "\n".join(lines).split("\n.\n")
    return [
        text
        for part in parts
        if not re.search(r"^\s*[*+o-] |^  |^This package (contains|provides|includes|is a)", part, re.M)
        and (text := prose(part))
    ]


def read_descriptions(path: Path) -> Iterator[Entry]:
    """Debian's package descriptions, each distinct paragraph once."""
    seen: set[bytes] = set()
    for record in read_text(path).split("\n\n"):
        name = (re.search(r"^Package: (.*)$", record, re.M) or ["", ""])[1]
        short = (re.search(r"^Description-en: (.*)$", record, re.M) or ["", ""])[1]
        lines = [line[1:] for line in record.split("\n") if line.startswith(" ")]
        kept = []
        for text in description_paragraphs(lines):
            if fingerprint(text) not in seen:
                seen.add(fingerprint(text))
                kept.append(text)
        if not kept or re.search(r"-(dev|dbg|common|data)\b|^lib.*\d", name):
            continue
        chats = []
        if len(kept[0]) < 500 and name in kept[0].lower():
            asked = (f"What is the package {name}?", f"What is {name}?", f"Tell me about {name}.")
            chats = [(asked, kept[0])]
        title = plain(short)
        yield Entry(re.sub(r"[\d.]+", "", name), f"{title[:1].upper()}{title[1:]}\n\n" + "\n\n".join(kept), chats)


READERS = {
    "wordnet": read_wordnet,
    "gcide": read_gcide,
    "foldoc": read_foldoc,
    "jargon": read_jargon,
    "devil": read_devil,
    "fortunes": read_fortunes,
    "descriptions": read_descriptions,
}
