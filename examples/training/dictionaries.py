"""Readers of dictionaries.

Each reader yields ``Entry`` records: the text of one entry as running prose,
and chats made from it: (ways to ask, answer) pairs.  ``Entry.key`` decides the held-out
split, so a headword's text and its questions are never on different sides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clean import UNSUITABLE, fingerprint, plain, prose
from extract import read_text


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
    plain_word = re.fullmatch(r"[a-z]+", word)
    return [
        sense
        for number, sense in enumerate(senses)
        if 8 <= len(sense.meaning) <= 300
        and not (RANK_OF_BEINGS.search(sense.meaning) and not (plain_word and number == 0))
        and not UNSUITABLE.search(sense.meaning)
        and not UNKIND.search(sense.meaning)
    ]


RANK_OF_BEINGS = re.compile(r"\b(genus|family [A-Z]|taxonomic)")
UNKIND = re.compile(r"\b(disparag\w*|derogat\w*|offensive|unattractive|ugly|insult\w*)\b")
ABSTRACT = re.compile(
    r"an? ([a-z]+ ){0,2}(quality|feeling|state|trait|sense|attitude|emotion|substance|liquid|metal|fluid|food|"
    r"science|ability|freedom|lack|absence)\b"
)


def article(word: str) -> str:
    """The indefinite article of a noun."""
    return "an" if word[0].lower() in "aeiou" else "a"


def statement(word: str, sense: Sense) -> str:
    """A definition as a sentence."""
    name, meaning = word[0].upper() + word[1:], sense.meaning.rstrip(".")
    if sense.pos == "v":
        return f"To {word} means to {meaning}."
    if sense.pos == "n" and word[0].isupper():
        return sentence(f"{name}: {meaning}")
    countable = re.match(r"(an?|any|one|someone|something|the part|the person)\b", meaning)
    if sense.pos == "n" and ABSTRACT.match(meaning):
        return f"{name} is {meaning}."
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
    # The part of speech with the most senses is usually the commonest one; a noun comes first when in doubt.
    counts = Counter(sense.pos for sense in senses)
    counts["n"] += counts["n"] // 2
    senses = sorted(senses, key=lambda sense: (-counts[sense.pos], sense.pos != "n"))
    first = senses[0]
    answer = statement(word, first)
    if first.examples:
        answer += f' For example: "{sentence(first.examples[0])}"'
    if len(senses) > 1 and senses[1].pos == first.pos:
        answer += f" It can also mean {'to ' if first.pos == 'v' else ''}{senses[1].meaning}."
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


READERS = {
    "wordnet": read_wordnet,
    "jargon": read_jargon,
    "devil": read_devil,
}
